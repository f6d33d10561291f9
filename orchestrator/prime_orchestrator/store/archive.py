"""The archive: rows of files that are over, in objects of up to FILES files.

    tables     a file's submission, lease, opinions, credit, groups, job and assignments
    page       the same rows, one line of JSON for each file, in one compressed object
    index      `archive_pages` names the object, `archived` says in which line a file is

The object is written first; then one transaction writes the index and deletes the rows. A crash in
between leaves an object that nothing names, and the next attempt writes the same one. Which files
are over is said by `over` and manager/archiving.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, UnavailableError, UntrustedError
from prime_core.ids import Address, Digest, to_bytes
from prime_core.storage.base import ObjectStore, digest_key
from prime_orchestrator.store import leases, schema, slashes, submissions
from prime_orchestrator.store.groups import HELD_OUT, GroupRow
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.submissions import SubmissionRow, Wanted

FILES = 1000
"""Files of a page."""
MAX_PAGE_BYTES = 64 << 20
_PAGES_KEPT = 4
"""Pages kept in memory once they are read."""
_S, _L = schema.submissions.c, schema.leases.c
_pages, _index = schema.archive_pages.c, schema.archived.c
_TABLES = {
    table.name: (table, key)
    for table, key in (
        (schema.submissions, _S.digest),
        (schema.opinions, schema.opinions.c.submission_digest),
        (schema.credits, schema.credits.c.submission_digest),
        (schema.groups, schema.groups.c.submission_digest),
        (schema.jobs, schema.jobs.c.submission_digest),
        (schema.assignments, schema.assignments.c.submission_digest),
    )
}
"""Tables with rows of a file, besides its lease, and the column that names it."""


# ── which files are over ──


@dataclass(frozen=True)
class Bounds:
    """What is over: work of epochs up to `epoch`, leased for batches before `next_step`; groups of
    policies before `oldest_version` train no batch. Rows from the four times on (Unix seconds) are
    among the newest ones, which stay."""

    epoch: int
    next_step: int
    oldest_version: int
    received: float
    leased: float
    judged: float
    accepted: float


def newest_times(connection: Connection, count: int) -> tuple[float, float, float, float]:
    """Returns when the oldest of the newest `count` submissions was received, of the paid leases
    given, of the opinions given, of the groups accepted (Unix seconds); −1 if there are fewer."""

    def of(column: sa.ColumnElement[float], *conditions: sa.ColumnElement[bool]) -> float:
        query = sa.select(column).where(*conditions).order_by(column.desc())
        found = connection.execute(query.offset(count - 1).limit(1)).scalar()
        return -1.0 if found is None else float(found)

    paid = _L.shadow.is_(False), _L.evaluation.is_(None)
    return (
        of(_S.received_at),
        of(_L.created_at, *paid),
        of(schema.opinions.c.at),
        of(schema.groups.c.accepted_at),
    )


@dataclass(frozen=True)
class Candidate:
    """A file that `over` returned. Whether it is among its node's newest is not checked yet."""

    digest: Digest
    node: Address
    sha256: Digest
    received_at: float
    judged_at: float


def following(
    connection: Connection, after: tuple[float, str], bounds: Bounds, limit: int
) -> list[tuple[float, Digest]]:
    """Returns (received at, digest) of the oldest submissions later than `after` that are not among
    the pool's newest, at most `limit`."""
    query = (
        sa.select(_S.received_at, _S.digest)
        .where(
            _S.received_at.between(after[0], bounds.received),  # uses the index
            sa.tuple_(_S.received_at, _S.digest) > sa.tuple_(*after),
        )
        .order_by(_S.received_at, _S.digest)
        .limit(limit)
    )
    return [(float(at), Digest(digest)) for at, digest in connection.execute(query)]


def over(connection: Connection, bounds: Bounds, among: Collection[Digest]) -> list[Candidate]:
    """Returns those of the submissions whose files are over, oldest first. A file is over if

    - it is accepted, paid work in a confirmed root of an epoch that `bounds` includes, and its rows
      are not in other files
    - its lease belongs to no evaluation, and the batch that the lease was for is sealed
    - no slash was ever queued or proposed for it, and none of its node is open
    - its job is done, its credit neither held nor forfeited, and no batch may take its groups
    - it is not planted, and none of its rows is among the pool's newest
    """
    opinions, credits = schema.opinions.c, schema.credits.c
    group, slash, job = schema.groups.c, schema.slashes.c, schema.jobs.c
    blocking = (
        sa.exists().where(opinions.submission_digest == _S.digest, opinions.at >= bounds.judged),
        sa.exists().where(credits.submission_digest == _S.digest, credits.status != "earned"),
        sa.exists().where(job.submission_digest == _S.digest, job.status != "done"),
        sa.exists().where(schema.planted.c.submission_digest == _S.digest),
        sa.exists().where(slash.submission_digest == _S.digest),
        sa.exists().where(slash.node == _S.node, slash.status.in_(slashes.OPEN)),
        sa.exists().where(
            group.submission_digest == _S.digest,
            sa.or_(
                group.accepted_at >= bounds.accepted,
                group.batch_step == HELD_OUT,
                sa.and_(
                    group.batch_step.is_(None),
                    group.informative.is_(True),
                    group.policy_version >= bounds.oldest_version,
                ),
            ),
        ),
    )
    query = (
        sa.select(_S.digest, _S.node, _S.sha256, _S.received_at, _S.judged_at)
        .join(schema.roots, schema.roots.c.id == _S.root_id)
        .join(schema.leases, _L.digest == _S.lease_digest)
        .where(
            _S.digest.in_(list(among)),
            sa.func.coalesce(_S.status, "")
            == "accepted",  # SQLite would take the index of statuses
            _S.shadow.is_(False),
            sa.func.coalesce(_S.repeated_rows, 0) == 0,
            schema.roots.c.chain_seq.is_not(None),
            schema.roots.c.epoch <= bounds.epoch,
            _S.step < bounds.next_step,
            _S.received_at < bounds.received,
            sa.func.coalesce(_L.status, "") == "submitted",
            _L.evaluation.is_(None),
            _L.created_at < bounds.leased,
            *(~one for one in blocking),
        )
        .order_by(_S.received_at, _S.digest)
    )
    return [Candidate(*row) for row in connection.execute(query)]


def newest_of_node(connection: Connection, node: Address, count: int) -> tuple[float, float]:
    """Returns when the oldest of the node's newest `count` paid files was received, and of its
    newest judged ones judged (Unix seconds); −1 if it has fewer."""
    paid = _S.node == node, _S.status == "accepted", _S.units > 0
    received = sa.select(_S.received_at).where(*paid).order_by(_S.received_at.desc())
    ended = _S.node == node, _S.judged_at.is_not(None), _S.shadow.is_(False)
    judged = sa.select(_S.judged_at).where(*ended).order_by(_S.judged_at.desc())
    found = (
        connection.execute(query.offset(count - 1).limit(1)).scalar()
        for query in (received, judged)
    )
    first, second = (-1.0 if one is None else float(one) for one in found)
    return first, second


# ── writing ──


def lines(connection: Connection, names: Sequence[Digest]) -> list[str]:
    """Returns the line of each of these files, in order: all its rows as JSON, by table."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in names}
    for title, (table, key) in _TABLES.items():
        query = table.select().where(key.in_(list(names))).order_by(*table.primary_key.columns)
        for row in connection.execute(query).mappings():
            found[row[key.name]].setdefault(title, []).append(dict(row))
    files = {name: rows["submissions"][0] for name, rows in found.items()}
    given = leases.those(connection, {row["lease_digest"] for row in files.values()})
    for name, file in files.items():
        found[name]["leases"] = [vars(given[file["lease_digest"]])]
    return [json.dumps(found[name], separators=(",", ":")) for name in names]


def encode(files: Sequence[str]) -> bytes:
    """Returns the bytes of a page with these lines."""
    return zlib.compress("\n".join(files).encode(), 9)


def lock_jobs(connection: Connection, names: Collection[Digest]) -> bool:
    """Locks the jobs of these files until the transaction ends, without waiting. Returns False if
    another transaction holds one."""
    jobs = schema.jobs.c.submission_digest
    mine = jobs.in_(list(names))
    there = sa.select(sa.func.count()).select_from(schema.jobs).where(mine)
    held = sa.select(jobs).where(mine).with_for_update(skip_locked=True)
    return len(connection.execute(held).all()) == connection.execute(there).scalar_one()


def lock_files(connection: Connection, names: Collection[Digest]) -> bool:
    """Locks the submissions of these files like `lock_jobs`. Returns False if one is gone, too."""
    mine = sa.select(_S.digest).where(_S.digest.in_(list(names)))
    return len(connection.execute(mine.with_for_update(skip_locked=True)).all()) == len(names)


def move(connection: Connection, page: Digest, names: Sequence[Digest], epoch: int) -> None:
    """Deletes the rows of these files, which are the lines of `page` in this order, and writes
    where they are. The caller has locked the rows."""
    query = sa.select(_S.digest, _S.lease_digest, _S.received_at).where(_S.digest.in_(list(names)))
    files = {row.digest: row for row in connection.execute(query)}
    times = [row.received_at for row in files.values()]
    values = {"digest": page, "files": len(names), "epoch": epoch}
    values |= {"first_received": min(times), "last_received": max(times)}
    number = connection.execute(
        sa.insert(schema.archive_pages).values(**values).returning(_pages.id)
    ).scalar_one()
    connection.execute(
        sa.insert(schema.archived),
        [
            {
                "digest": to_bytes(name),
                "lease_digest": to_bytes(files[name].lease_digest),
                "page": number,
                "place": place,
            }
            for place, name in enumerate(names)
        ],
    )
    for table, key in reversed(_TABLES.values()):
        connection.execute(sa.delete(table).where(key.in_(list(names))))
    given = [row.lease_digest for row in files.values()]
    connection.execute(sa.delete(schema.leases).where(_L.digest.in_(given)))


# ── reading ──


@dataclass(frozen=True)
class ArchivedFile:
    """The rows of an archived file that are read; opinions as `opinions.of` orders them."""

    submission: SubmissionRow
    lease: LeaseRow
    opinions: tuple[OpinionRow, ...]
    groups: tuple[GroupRow, ...]


def find(connection: Connection, objects: ObjectStore, digest: Digest) -> ArchivedFile | None:
    """Returns the archived file with this submission; None if there is none.

    Raises UnavailableError if its page cannot be read.
    """
    return _one(connection, objects, _index.digest == to_bytes(digest))


def of_lease(connection: Connection, objects: ObjectStore, lease: Digest) -> ArchivedFile | None:
    """Like `find`, for the digest of the file's lease."""
    return _one(connection, objects, _index.lease_digest == to_bytes(lease))


def submission(
    connection: Connection, objects: ObjectStore, digest: Digest
) -> SubmissionRow | None:
    """Returns the submission, archived or not; None if there is none. Raises as `find`."""
    row = submissions.get(connection, digest)
    if row is not None:
        return row
    found = find(connection, objects, digest)
    return None if found is None else found.submission


def beginning(connection: Connection, digits: str, limit: int) -> list[Digest]:
    """Returns at most `limit` archived submissions whose digest begins with `digits` (0x…)."""
    least, most = (bytes.fromhex(digits[2:].ljust(64, end)) for end in "0f")
    query = sa.select(_index.digest).where(_index.digest.between(least, most)).limit(limit)
    return [Digest(f"0x{bytes(name).hex()}") for name in connection.execute(query).scalars()]


@dataclass(frozen=True)
class Page:
    """One row of `archive_pages`. `epoch`: the newest settled one when it was written; times in
    Unix seconds."""

    id: int
    digest: Digest
    files: int
    epoch: int
    first_received: float
    last_received: float


def pages(connection: Connection, since: float | None = None) -> list[Page]:
    """Returns all pages, or those with files received at `since` (Unix seconds) or later, oldest
    first."""
    query = sa.select(schema.archive_pages).order_by(_pages.id)
    if since is not None:
        query = query.where(_pages.last_received >= since)
    return [Page(**row) for row in connection.execute(query).mappings()]


def every(connection: Connection, objects: ObjectStore, wanted: Wanted) -> Iterator[ArchivedFile]:
    """Yields all matching archived files, oldest page first. Raises as `read`."""
    for page in pages(connection, wanted.since):
        for line in read(objects, page.digest):
            one = _parse(line)
            if wanted.fits(one.submission):
                yield one


def read(objects: ObjectStore, page: Digest) -> list[str]:
    """Returns the lines of a page. Raises NotFoundError, UnavailableError, MalformedError (too
    large) or UntrustedError (other bytes)."""
    data = objects.get(digest_key(page), MAX_PAGE_BYTES)
    if sha256(data) != page:
        raise UntrustedError(f"archive page {page} does not hash to its name")
    return zlib.decompress(data).decode().split("\n")


def named(line: str) -> set[Digest]:
    """Returns the objects that the file of a line names."""
    (row,) = json.loads(line)["submissions"]
    names = (row[column] for column in ("sha256", "verdict", "verdict_table", "evidence"))
    return {Digest(name) for name in names if name is not None}


def _one(
    connection: Connection, objects: ObjectStore, condition: sa.ColumnElement[bool]
) -> ArchivedFile | None:
    query = sa.select(_pages.digest, _index.place).join(
        schema.archive_pages, _pages.id == _index.page
    )
    found = connection.execute(query.where(condition)).first()
    if found is None:
        return None
    try:
        return _parse(_kept(cast(Hashable, objects), Digest(found.digest))[found.place])
    except (NotFoundError, MalformedError, UntrustedError) as error:
        raise UnavailableError(f"an archived file cannot be read: {error}") from error


@lru_cache(maxsize=_PAGES_KEPT)
def _kept(objects: Any, page: Digest) -> list[str]:
    return read(objects, page)


def _parse(line: str) -> ArchivedFile:
    """Reads a line. Columns that tables got after it was written take their default."""
    rows: Mapping[str, list[dict[str, Any]]] = json.loads(line)
    said = [OpinionRow(**row) for row in rows.get("opinions", ())]
    return ArchivedFile(
        submission=SubmissionRow(**rows["submissions"][0]),
        lease=LeaseRow(**rows["leases"][0]),
        opinions=tuple(sorted(said, key=lambda one: (one.at, one.validator))),
        groups=tuple(GroupRow(**row) for row in rows.get("groups", ())),
    )
