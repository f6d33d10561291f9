"""The archive: rows of finished files, in objects of up to FILES files.

    tables     rows of a file, its lease, opinions, credit, groups, job, assignments, planted kind
    page       the same rows, one line of JSON for each file, in one compressed object
    index      `archive_pages` names the object, `archived` the line of each file
    totals     sums over these rows that are needed forever (`keep_…` of their modules)

The object is written first. Then one transaction writes the index and the totals and deletes the
rows. A crash in between leaves an object that nothing names, and the next attempt writes the same
one. `over` and manager/archiving.py decide which files are finished.

Leases that ended without a file have their own pages, a line for each lease. Nothing looks them up,
so they have no index.
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
from prime_core.task import LeaseOutcome
from prime_core.verdict import Reason
from prime_orchestrator.store import (
    evaluations,
    leases,
    opinions,
    schema,
    slashes,
    submissions,
)
from prime_orchestrator.store.groups import GroupRow
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.rows import one_of, upsert_all
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
        (schema.planted, schema.planted.c.submission_digest),
    )
}
"""Tables with rows of a file, besides its lease, and the column that names it."""


# ── which files are over ──


@dataclass(frozen=True)
class Bounds:
    """Bounds of finished work. Times in Unix seconds.

    Work is finished if it is of an epoch up to `epoch` and was leased for a batch before
    `next_step`. Groups of policies before `oldest_version` train no batch. `settled` is the end of
    `epoch`. No appeal is open for a file whose root was posted before `appealed`. Rows from
    `received`, `leased`, `judged` or `accepted` on are among the newest ones, which stay.
    """

    epoch: int
    next_step: int
    oldest_version: int
    settled: float
    appealed: float
    received: float
    leased: float
    judged: float
    accepted: float


def newest_times(connection: Connection, count: int) -> tuple[float, float, float, float]:
    """Returns the time of the oldest among the newest `count` submissions, paid leases, opinions
    and groups (Unix seconds); −1 where there are fewer than `count`."""

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
    """A file that `over` returned. Whether it is among its node's newest is not checked yet.
    `paid`: it is accepted; `planted`: it counts as a shadow file. Times in Unix seconds."""

    digest: Digest
    node: Address
    sha256: Digest
    received_at: float
    judged_at: float
    leased_at: float
    paid: bool
    planted: bool


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
    """Returns the given submissions whose files are finished, oldest first. A file is finished
    if it has a verdict or is void, and

    - it is in a confirmed root of an epoch that `bounds` includes, and no appeal for it is open
      unless it is accepted; or it can get no root any more: it is planted and revealed, or void as
      unrooted, was received in such an epoch, and its node has not posted it either
    - the batch that its lease was for is sealed; its lease's evaluation, if it has one, has ended
    - no slash for it or of its node is open
    - its job is done, its credit neither held nor forfeited, and no batch may take its groups
    - none of its rows is among the pool's newest
    """
    said, credits, event = schema.opinions.c, schema.credits.c, schema.chain_events.c
    group, slash, job = schema.groups.c, schema.slashes.c, schema.jobs.c
    accepted = sa.func.coalesce(_S.status, "") == "accepted"
    planted = sa.and_(_S.shadow.is_(True), _L.shadow.is_(False))
    rooted = sa.and_(
        _S.shadow.is_(False),
        schema.roots.c.chain_seq.is_not(None),
        schema.roots.c.epoch <= bounds.epoch,
        sa.or_(accepted, schema.roots.c.posted_at < bounds.appealed),
    )
    never_rooted = sa.and_(
        _S.root_id.is_(None),
        sa.or_(planted, _S.reason == int(Reason.UNROOTED)),
        _S.received_at < bounds.settled,
        ~sa.exists().where(event.name == "RootPosted", event.subject == _S.digest),
    )
    blocking = (
        sa.exists().where(said.submission_digest == _S.digest, said.at >= bounds.judged),
        sa.exists().where(credits.submission_digest == _S.digest, credits.status != "earned"),
        sa.exists().where(job.submission_digest == _S.digest, job.status != "done"),
        sa.exists().where(slash.submission_digest == _S.digest, slash.status.in_(slashes.OPEN)),
        sa.exists().where(slash.node == _S.node, slash.status.in_(slashes.OPEN)),
        sa.exists().where(
            group.submission_digest == _S.digest,
            sa.or_(
                group.accepted_at >= bounds.accepted,
                sa.and_(
                    group.batch_step.is_(None),
                    group.informative.is_(True),
                    group.policy_version >= bounds.oldest_version,
                ),
            ),
        ),
    )
    query = (
        sa.select(
            *(_S.digest, _S.node, _S.sha256, _S.received_at, _S.judged_at, _L.created_at),
            *(accepted, planted),
        )
        .join(schema.leases, _L.digest == _S.lease_digest)
        .outerjoin(schema.roots, schema.roots.c.id == _S.root_id)
        .where(
            one_of(connection, _S.digest, among),
            # SQLite would take the index of statuses
            sa.func.coalesce(_S.status, "").in_(("accepted", "rejected", "void")),
            _S.judged_at.is_not(None),
            sa.or_(rooted, never_rooted),
            _S.step < bounds.next_step,
            _S.received_at < bounds.received,
            _ended_evaluation(),
            _L.created_at < bounds.leased,
            *(~one for one in blocking),
        )
        .order_by(_S.received_at, _S.digest)
    )
    return [Candidate(*row) for row in connection.execute(query)]


def _ended_evaluation() -> sa.ColumnElement[bool]:
    """Whether a lease belongs to no evaluation or to one that has ended."""
    running = sa.select(schema.evaluations.c.id).where(schema.evaluations.c.ended_at.is_(None))
    return sa.or_(_L.evaluation.is_(None), _L.evaluation.not_in(running))


def ended_leases(
    connection: Connection, after: tuple[int, str], bounds: Bounds, limit: int
) -> list[tuple[int, Digest, Address, float]]:
    """Returns (deadline, digest, node, given at) of the oldest finished leases later than `after`
    (deadline, digest) that ended without a file, at most `limit`. Leases of shadow nodes, and of an
    evaluation that goes on, are never finished. Whether one is among its node's newest is not
    checked yet."""
    file = sa.select(_S.digest).where(_S.lease_digest == _L.digest)
    query = (
        sa.select(_L.deadline, _L.digest, _L.node, _L.created_at)
        .where(
            _L.status == "expired",
            _L.deadline >= after[0],  # uses the index
            sa.tuple_(_L.deadline, _L.digest) > sa.tuple_(*after),
            _L.created_at < bounds.leased,
            _L.shadow.is_(False),
            _ended_evaluation(),
            ~file.exists(),
        )
        .order_by(_L.deadline, _L.digest)
        .limit(limit)
    )
    return [
        (int(deadline), Digest(digest), Address(node), float(at))
        for deadline, digest, node, at in connection.execute(query)
    ]


@dataclass(frozen=True)
class Newest:
    """From when on a node's files and leases stay in the tables because they are among its newest,
    in Unix seconds; −1: all stay. `received`: of paid files; `judged`: of judged ones;
    `judged_planted`: of those that count as shadow files; `leased`: of leases."""

    received: float
    judged: float
    judged_planted: float
    leased: float

    def may_go(self, one: Candidate) -> bool:
        """Whether a file of the node is older than all of these that it counts among."""
        judged = self.judged_planted if one.planted else self.judged
        return (
            one.leased_at < self.leased
            and one.judged_at < judged
            and (not one.paid or one.received_at < self.received)
        )


def newest_of_node(connection: Connection, node: Address, count: int) -> Newest:
    """Returns the bounds of the node's newest `count` files and leases of each kind."""

    def of(column: sa.ColumnElement[float | None], *which: sa.ColumnElement[bool]) -> float:
        query = sa.select(column).where(*which).order_by(column.desc())
        found = connection.execute(query.offset(count - 1).limit(1)).scalar()
        return -1.0 if found is None else float(found)

    ended = _S.node == node, _S.judged_at.is_not(None)
    return Newest(
        of(_S.received_at, _S.node == node, _S.status == "accepted", _S.units > 0),
        of(_S.judged_at, *ended, _S.shadow.is_(False)),
        of(_S.judged_at, *ended, _S.shadow.is_(True)),
        of(_L.created_at, _L.node == node, _L.shadow.is_(False)),
    )


# ── writing ──


Rows = Mapping[str, Sequence[sa.Row[Any]]]
"""Rows of some files or leases, by table, in the order of their primary keys."""


def rows_of(connection: Connection, names: Collection[Digest]) -> Rows:
    """Returns all rows of these files."""
    found = {}
    for title, (table, key) in _TABLES.items():
        mine = one_of(connection, key, names)
        query = table.select().where(mine).order_by(*table.primary_key.columns)
        found[title] = connection.execute(query).all()
    given = [row.lease_digest for row in found["submissions"]]
    return {**found, **rows_of_leases(connection, given)}


def rows_of_leases(connection: Connection, names: Collection[Digest]) -> Rows:
    """Returns the rows of these leases."""
    query = schema.leases.select().where(one_of(connection, _L.digest, names)).order_by(_L.digest)
    return {"leases": connection.execute(query).all()}


def encode(names: Sequence[Digest], rows: Rows) -> bytes:
    """Returns the bytes of a page: a line for each of these files, or of leases without a file, in
    order, with all its rows as JSON, by table."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in names}
    files = {row.lease_digest: row.digest for row in rows.get("submissions", ())}
    for title, some in rows.items():
        columns = some[0]._fields if some else ()
        for row in some:
            values = dict(zip(columns, row, strict=True))
            name = values.get("submission_digest") or values["digest"]
            found[files.get(name, name)].setdefault(title, []).append(values)
    line = json.JSONEncoder(separators=(",", ":")).encode
    return zlib.compress("\n".join(line(found[name]) for name in names).encode(), 9)


def lock_jobs(connection: Connection, names: Collection[Digest]) -> int:
    """Locks the jobs of these files until the transaction ends, without waiting. Returns how many:
    those that another transaction holds are left out."""
    jobs = schema.jobs.c.submission_digest
    mine = sa.select(jobs).where(one_of(connection, jobs, names))
    return len(connection.execute(mine.with_for_update(skip_locked=True)).all())


def lock_files(connection: Connection, names: Collection[Digest]) -> int:
    """Locks the submissions of these files like `lock_jobs`."""
    mine = sa.select(_S.digest).where(one_of(connection, _S.digest, names))
    return len(connection.execute(mine.with_for_update(skip_locked=True)).all())


def move(
    connection: Connection, page: Digest, names: Sequence[Digest], rows: Rows, epoch: int
) -> None:
    """Deletes the rows of these files, which are the lines of `page` in this order, and writes
    where they are and what is counted forever of them. The caller has locked the rows."""
    files = rows["submissions"]
    number = _add_page(connection, page, len(names), epoch, [row.received_at for row in files])
    given = {row.digest: row.lease_digest for row in files}
    submissions.keep_counts(connection, names)
    opinions.keep_counts(connection, names)
    leases.keep_indices(connection, given.values())
    evaluations.keep_results(connection, names)
    slashes.keep_receipts(connection, names)
    places = [
        {
            "digest": to_bytes(name),
            "lease_digest": to_bytes(given[name]),
            "page": number,
            "place": place,
        }
        for place, name in enumerate(names)
    ]
    upsert_all(connection, schema.archived, places)
    for table, key in reversed(_TABLES.values()):
        connection.execute(sa.delete(table).where(one_of(connection, key, names)))
    connection.execute(
        sa.delete(schema.leases).where(one_of(connection, _L.digest, given.values()))
    )


def move_leases(
    connection: Connection, page: Digest, names: Sequence[Digest], rows: Rows, epoch: int
) -> None:
    """Like `move`, for leases without a file, the lines of `page`."""
    _add_page(connection, page, 0, epoch, [row.created_at for row in rows["leases"]])
    leases.keep_indices(connection, names)
    connection.execute(sa.delete(schema.leases).where(one_of(connection, _L.digest, names)))


def _add_page(
    connection: Connection, page: Digest, files: int, epoch: int, times: Sequence[float]
) -> int:
    """Writes the row of a page; returns its id."""
    values = {"digest": page, "files": files, "epoch": epoch}
    values |= {"first_received": min(times), "last_received": max(times)}
    made = sa.insert(schema.archive_pages).values(**values).returning(_pages.id)
    return int(connection.execute(made).scalar_one())


# ── reading ──


@dataclass(frozen=True)
class ArchivedFile:
    """The rows of an archived file that are read; opinions as `opinions.of` orders them.
    `planted`: it is one of the manager's own; on older pages, the table says so instead.
    `kept_days`: how long its rollout file was kept if that may be removed by now."""

    submission: SubmissionRow
    lease: LeaseRow
    opinions: tuple[OpinionRow, ...]
    groups: tuple[GroupRow, ...]
    planted: bool
    kept_days: int | None


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
    """One row of `archive_pages`. `files`: 0 if its lines are leases without a file. `epoch`: the
    newest settled one when it was written. Times in Unix seconds, of leases when they were
    given. `kept_days`: days for which its rollout files were kept; nothing expects them any more
    (`removable`). `removed`: they are removed."""

    id: int
    digest: Digest
    files: int
    epoch: int
    first_received: float
    last_received: float
    kept_days: int | None
    removed: bool


def pages(connection: Connection, since: float | None = None, after: int = 0) -> list[Page]:
    """Returns all pages with an id above `after`, or those of them with files received at `since`
    (Unix seconds) or later, oldest first."""
    query = sa.select(schema.archive_pages).where(_pages.id > after).order_by(_pages.id)
    if since is not None:
        query = query.where(_pages.last_received >= since)
    return [Page(**row) for row in connection.execute(query).mappings()]


def newest_page(connection: Connection, *, of_leases: bool = False) -> int | None:
    """Returns the id of the newest page of files, or with `of_leases` of any page; None if there is
    none."""
    found = [page.id for page in _newest(connection, None, 1, of_leases=of_leases)]
    return found[0] if found else None


def of_node(
    connection: Connection, objects: ObjectStore, node: Address, newest: int
) -> tuple[list[SubmissionRow], int | None]:
    """Returns the submissions of a node, newest first, in the newest page of files with an id up to
    `newest`, and the id of the next older page (None: there is none).

    Raises UnavailableError if the page cannot be read.
    """
    left = _newest(connection, newest, 2, of_leases=False)
    found = [_parse(line, None).submission for line in _lines_of(objects, left[:1], node)]
    mine = [row for row in found if row.node == node]
    mine.sort(key=lambda row: (row.received_at, row.digest), reverse=True)
    return mine, left[1].id if len(left) > 1 else None


def leases_of_node(
    connection: Connection, objects: ObjectStore, node: Address, newest: int
) -> tuple[list[tuple[LeaseRow, LeaseOutcome]], int | None]:
    """Like `of_node`, for the leases in the newest page of any kind, newest last, with what became
    of each."""
    left = _newest(connection, newest, 2, of_leases=True)
    found: list[tuple[LeaseRow, LeaseOutcome]] = []
    for line in _lines_of(objects, left[:1], node):
        rows = json.loads(line)
        lease = LeaseRow(**rows["leases"][0])
        if lease.node == node:
            file = rows.get("submissions")
            found.append((lease, file[0]["status"] if file else lease.status))
    found.sort(key=lambda one: (one[0].created_at, one[0].lease_index))
    return found, left[1].id if len(left) > 1 else None


def _newest(
    connection: Connection, newest: int | None, limit: int, *, of_leases: bool
) -> list[Page]:
    """Returns at most `limit` pages with an id up to `newest` (None: any), newest first; with
    `of_leases` also pages of leases without a file."""
    query = sa.select(schema.archive_pages).order_by(_pages.id.desc()).limit(limit)
    if newest is not None:
        query = query.where(_pages.id <= newest)
    if not of_leases:
        query = query.where(_pages.files > 0)
    return [Page(**row) for row in connection.execute(query).mappings()]


def _lines_of(objects: ObjectStore, pages: Sequence[Page], node: Address) -> list[str]:
    """Returns the lines of these pages that name the node. Raises UnavailableError if a page cannot
    be read."""
    try:
        found = [line for page in pages for line in read(objects, page.digest)]
    except (NotFoundError, MalformedError, UntrustedError) as error:
        raise UnavailableError(f"a page of the archive cannot be read: {error}") from error
    return [line for line in found if node in line]  # parsing costs most


def every(connection: Connection, objects: ObjectStore, wanted: Wanted) -> Iterator[ArchivedFile]:
    """Yields all matching archived files, oldest page first. Raises as `read`."""
    for page in pages(connection, wanted.since):
        yield from of_page(objects, page, wanted)


def of_page(objects: ObjectStore, page: Page, wanted: Wanted) -> Iterator[ArchivedFile]:
    """Yields the matching files of a page. Raises as `read`."""
    for line in read(objects, page.digest) if page.files else ():
        if wanted.node is not None and wanted.node not in line:
            continue  # parsing costs most
        one = _parse(line, page.kept_days)
        if wanted.fits(one.submission):
            yield one


def read(objects: ObjectStore, page: Digest) -> list[str]:
    """Returns the lines of a page. Raises NotFoundError, UnavailableError, MalformedError (too
    large) or UntrustedError (other bytes)."""
    data = objects.get(digest_key(page), MAX_PAGE_BYTES)
    if sha256(data) != page:
        raise UntrustedError(f"archive page {page} does not hash to its name")
    return zlib.decompress(data).decode().split("\n")


def named(line: str, *, marked: bool) -> set[Digest]:
    """Returns the objects that the file of a line depends on; none of a lease without a file.
    `marked`: its page has `kept_days`."""
    names: set[Any] = set()
    for row in json.loads(line).get("submissions", ()):
        names |= {row["verdict"], row["verdict_table"], row["evidence"]}
        if not (marked and removable(row)):
            names.add(row["sha256"])
    return {Digest(name) for name in names if name is not None}


# ── rollout files that are removed (store/removal.py) ──


def removable(file: Mapping[str, Any]) -> bool:
    """Whether an archived submission's rollout file may be removed once it is old: it is accepted,
    not planted, and there is no evidence against it."""
    return file["status"] == "accepted" and not file["shadow"] and file["evidence"] is None


def why_gone(days: int) -> str:
    """Says why a rollout file is not there, and what to do; `days`: `kept_days` of a page."""
    return (
        f"rollout files are removed {days} days after they were received, once nothing depends on "
        "them (docs/retention.md); a backup made before may hold it"
    )


def mark(connection: Connection, numbers: Sequence[int], days: int) -> None:
    """Sets `kept_days` of these pages, except where it is set already."""
    for start in range(0, len(numbers), FILES):
        mine = _pages.id.in_(numbers[start : start + FILES]), _pages.kept_days.is_(None)
        connection.execute(sa.update(schema.archive_pages).where(*mine).values(kept_days=days))


def set_removed(connection: Connection, number: int) -> None:
    """Records that the rollout files of this page are removed."""
    mine = _pages.id == number
    connection.execute(sa.update(schema.archive_pages).where(mine).values(removed=True))


def files_marked(connection: Connection) -> tuple[int, int]:
    """Returns how many pages have `kept_days`, and the largest of these numbers (0: none has)."""
    query = sa.select(sa.func.count(_pages.kept_days), sa.func.max(_pages.kept_days))
    count, days = connection.execute(query).one()
    return int(count), int(days or 0)


def marked_among(connection: Connection, names: Sequence[Digest]) -> dict[Digest, int]:
    """Returns `kept_days` by submission, without submissions whose page has none."""
    found: dict[Digest, int] = {}
    for start in range(0, len(names), FILES):
        mine = [to_bytes(name) for name in names[start : start + FILES]]
        query = (
            sa.select(_index.digest, _pages.kept_days)
            .join(schema.archive_pages, _pages.id == _index.page)
            .where(_index.digest.in_(mine), _pages.kept_days.is_not(None))
        )
        for name, days in connection.execute(query):
            found[Digest(f"0x{bytes(name).hex()}")] = int(days)
    return found


def _one(
    connection: Connection, objects: ObjectStore, condition: sa.ColumnElement[bool]
) -> ArchivedFile | None:
    query = sa.select(_pages.digest, _pages.kept_days, _index.place).join(
        schema.archive_pages, _pages.id == _index.page
    )
    found = connection.execute(query.where(condition)).first()
    if found is None:
        return None
    try:
        line = _kept(cast(Hashable, objects), Digest(found.digest))[found.place]
        return _parse(line, found.kept_days)
    except (NotFoundError, MalformedError, UntrustedError) as error:
        raise UnavailableError(f"an archived file cannot be read: {error}") from error


@lru_cache(maxsize=_PAGES_KEPT)
def _kept(objects: Any, page: Digest) -> list[str]:
    return read(objects, page)


def _parse(line: str, kept_days: int | None) -> ArchivedFile:
    """Reads a line of a page with these `kept_days`. Columns that tables got after it was written
    take their default."""
    rows: Mapping[str, list[dict[str, Any]]] = json.loads(line)
    said = [OpinionRow(**row) for row in rows.get("opinions", ())]
    return ArchivedFile(
        submission=SubmissionRow(**rows["submissions"][0]),
        lease=LeaseRow(**rows["leases"][0]),
        opinions=tuple(sorted(said, key=lambda one: (one.at, one.validator))),
        groups=tuple(GroupRow(**row) for row in rows.get("groups", ())),
        planted="planted" in rows,
        kept_days=kept_days if removable(rows["submissions"][0]) else None,
    )
