"""Submissions: files that nodes submitted, and their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_core.logs import FileFields
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import SignedSubmission
from prime_core.task import SubmissionStatus
from prime_core.verdict import POOLS_FAULT, Reason
from prime_orchestrator.store import schema, totals
from prime_orchestrator.store.rows import (
    built_once,
    one_of,
    one_of_bound,
    record,
    records,
    update_each,
)

_submissions = schema.submissions.c
_tallies = schema.tallies.c
COMPUTE_FILES = 500
"""Newest files of which status and metrics show the replay's share of compute."""
_POOLS_FAULT = _submissions.reason.in_(sorted(POOLS_FAULT))
_UNJUDGED = {False: "unjudged", True: "planted_unjudged"}
_PLANTED, _REPEATING = "planted_accepted", "repeating"
"""Names in store/totals.py, by node, node and status: void through the pool's fault (by
`shadow`), accepted planted files, files with rows of earlier files."""


@dataclass(frozen=True)
class SubmissionRow:
    """One row of `submissions`; `body` is JSON of SignedSubmission, `receipt` of ReceiptAnswer."""

    digest: Digest
    lease_digest: Digest
    node: Address
    step: int
    policy_version: int
    sha256: Digest
    size: int
    body: str
    receipt: str
    received_at: float
    status: SubmissionStatus
    reason: int
    units: int
    prompt_units: int
    verdict: Digest | None
    verdict_table: Digest | None
    evidence: Digest | None
    validator: Address | None
    judged_at: float | None
    root_id: int | None
    leaf_index: int | None
    shadow: bool
    compute_share: float | None
    repeated_rows: int | None

    def signed(self) -> SignedSubmission:
        """Returns the submission as the node signed it."""
        return SignedSubmission.model_validate_json(self.body)

    def about(self) -> FileFields:
        """Returns the fields of log events about the file."""
        return FileFields(
            node=self.node, lease=self.lease_digest, submission=self.digest, step=self.step,
            policy=self.policy_version,
        )  # fmt: skip

    def receipt_answer(self) -> ReceiptAnswer:
        """Returns the receipt as it was issued."""
        return ReceiptAnswer.model_validate_json(self.receipt)


def new_row(
    digest: Digest,
    signed: SignedSubmission,
    *,
    policy_version: int,
    receipt: ReceiptAnswer,
    received_at: float,
    shadow: bool = False,
) -> SubmissionRow:
    """Returns the row of a new submission."""
    body = signed.submission
    return SubmissionRow(
        digest=digest,
        lease_digest=body.lease_digest,
        node=signed.node,
        step=body.step,
        policy_version=policy_version,
        sha256=body.sha256,
        size=body.size,
        body=signed.model_dump_json(),
        receipt=receipt.model_dump_json(),
        received_at=received_at,
        status="submitted",
        reason=0,
        units=0,
        prompt_units=0,
        verdict=None,
        verdict_table=None,
        evidence=None,
        validator=None,
        judged_at=None,
        root_id=None,
        leaf_index=None,
        shadow=shadow,
        compute_share=None,
        repeated_rows=None,
    )


def add(connection: Connection, rows: Sequence[SubmissionRow]) -> None:
    """Writes new submissions."""
    if rows:
        connection.execute(sa.insert(schema.submissions), [vars(row) for row in rows])


def get(connection: Connection, digest: Digest) -> SubmissionRow | None:
    """Returns the submission, or None."""
    query = sa.select(schema.submissions).where(_submissions.digest == digest)
    return record(SubmissionRow, connection.execute(query).mappings().first())


def those(connection: Connection, digests: Collection[Digest]) -> dict[Digest, SubmissionRow]:
    """Returns the given submissions that exist."""
    query = sa.select(schema.submissions).where(one_of(connection, _submissions.digest, digests))
    rows = records(SubmissionRow, connection.execute(query).mappings().all())
    return {row.digest: row for row in rows}


def lock_row(connection: Connection, digest: Digest) -> SubmissionRow | None:
    """Like `get`; the row cannot change until the transaction ends."""
    query = sa.select(schema.submissions).where(_submissions.digest == digest).with_for_update()
    return record(SubmissionRow, connection.execute(query).mappings().first())


def lock_free(connection: Connection, digests: Collection[Digest]) -> dict[Digest, SubmissionRow]:
    """Like `those`; the rows cannot change until the transaction ends. Only rows that no other
    transaction holds; never waits."""
    query = (
        sa.select(schema.submissions)
        .where(one_of(connection, _submissions.digest, digests))
        .with_for_update(skip_locked=True)
    )
    rows = records(SubmissionRow, connection.execute(query).mappings().all())
    return {row.digest: row for row in rows}


@dataclass(frozen=True)
class Wanted:
    """Filter for submissions; None matches all. `since` is the earliest arrival in Unix seconds."""

    since: float | None = None
    status: SubmissionStatus | None = None
    node: Address | None = None

    def _conditions(self) -> list[sa.ColumnElement[bool]]:
        found = []
        if self.since is not None:
            found.append(_submissions.received_at >= self.since)
        if self.status is not None:
            found.append(_submissions.status == self.status)
        if self.node is not None:
            found.append(_submissions.node == self.node)
        return found

    def fits(self, row: SubmissionRow) -> bool:
        """Whether the filter matches `row`."""
        return (
            (self.since is None or row.received_at >= self.since)
            and self.status in (None, row.status)
            and self.node in (None, row.node)
        )


def newest(
    connection: Connection, wanted: Wanted, limit: int, *, before: SubmissionRow | None = None
) -> list[SubmissionRow]:
    """Returns at most `limit` submissions, newest first; only those older than `before` if
    given."""
    query = sa.select(schema.submissions).where(*wanted._conditions())
    if before is not None:
        place = sa.tuple_(_submissions.received_at, _submissions.digest)
        query = query.where(
            _submissions.received_at <= before.received_at,  # uses the index
            place < sa.tuple_(before.received_at, before.digest),
        )
    query = query.order_by(_submissions.received_at.desc(), _submissions.digest.desc())
    return records(SubmissionRow, connection.execute(query.limit(limit)).mappings().all())


def count(connection: Connection, wanted: Wanted) -> int:
    """Returns the number of matching submissions."""
    query = sa.select(sa.func.count()).select_from(schema.submissions)
    return int(connection.execute(query.where(*wanted._conditions())).scalar_one())


def every(connection: Connection, wanted: Wanted, at_once: int) -> Iterator[list[SubmissionRow]]:
    """Yields all matching submissions, oldest first, `at_once` at a time to limit memory use."""
    query = (
        sa.select(schema.submissions)
        .where(*wanted._conditions())
        .order_by(_submissions.received_at, _submissions.digest)
        .execution_options(yield_per=at_once)
    )
    for part in connection.execute(query).mappings().partitions():
        yield records(SubmissionRow, part)


def beginning(connection: Connection, digits: str, limit: int) -> list[SubmissionRow]:
    """Returns at most `limit` submissions whose digest begins with `digits`."""
    query = sa.select(schema.submissions).where(
        _submissions.digest.startswith(digits, autoescape=True)
    )
    return records(SubmissionRow, connection.execute(query.limit(limit)).mappings().all())


def of_lease(connection: Connection, lease_digest: Digest) -> SubmissionRow | None:
    """Returns the one submission of a lease, or None."""
    query = sa.select(schema.submissions).where(_submissions.lease_digest == lease_digest)
    return record(SubmissionRow, connection.execute(query).mappings().first())


def of_leases(
    connection: Connection, lease_digests: Collection[Digest]
) -> dict[Digest, SubmissionRow]:
    """Returns the submissions by lease, without leases that have none."""
    query = sa.select(schema.submissions).where(
        one_of(connection, _submissions.lease_digest, lease_digests)
    )
    rows = records(SubmissionRow, connection.execute(query).mappings().all())
    return {row.lease_digest: row for row in rows}


def latest_accepted(
    connection: Connection, node: Address, limit: int
) -> list[tuple[int, float, float]]:
    """Returns (tokens, when its lease was given, when it was received) of the node's latest
    accepted files, newest first. Times in Unix seconds."""
    leases = schema.leases.c
    query = (
        sa.select(_submissions.units, leases.created_at, _submissions.received_at)
        .join(schema.leases, leases.digest == _submissions.lease_digest)
        .where(_submissions.node == node, _submissions.status == "accepted", _submissions.units > 0)
        .order_by(_submissions.received_at.desc())
        .limit(limit)
    )
    return [(int(units), given, received) for units, given, received in connection.execute(query)]


def upload_is_paid(connection: Connection, deadline: int, sha256: Digest) -> bool | None:
    """Whether a paid file with this SHA-256 was submitted for a lease with this deadline (Unix
    seconds): False if only shadow files were, None if no file was."""
    leases = schema.leases.c
    query = (
        sa.select(_submissions.shadow)
        .join(schema.leases, leases.digest == _submissions.lease_digest)
        .where(
            leases.status == "submitted",  # uses the index
            leases.deadline == deadline,
            _submissions.sha256 == sha256,
        )
    )
    shadow = connection.execute(query).scalars().all()
    return not all(shadow) if shadow else None


_VERDICT = (
    *("status", "reason", "units", "prompt_units", "verdict", "verdict_table", "evidence"),
    *("validator", "compute_share", "repeated_rows", "judged_at"),
)


def set_verdicts(connection: Connection, rows: Sequence[SubmissionRow]) -> None:
    """Writes the verdicts of submissions. The caller has locked the rows."""
    update_each(connection, schema.submissions, rows, _VERDICT)


def void(
    connection: Connection,
    digest: Digest,
    reason: int,
    *,
    of: Collection[SubmissionStatus],
    judged_at: float,
) -> bool:
    """Voids a submission whose status is one of `of`. Returns False if it is not."""
    done = connection.execute(
        sa.update(schema.submissions)
        .where(_submissions.digest == digest, _submissions.status.in_(of))
        .values(status="void", reason=reason, judged_at=judged_at)
    )
    return done.rowcount == 1


def change(connection: Connection, digest: Digest, **values: object) -> None:
    """Sets columns of a submission."""
    mine = _submissions.digest == digest
    connection.execute(sa.update(schema.submissions).where(mine).values(**values))


def withdraw(connection: Connection, digest: Digest) -> None:
    """Reverts a submission's verdict; it counts as one with repeated rows."""
    verdict = ("verdict", "verdict_table", "evidence", "validator", "judged_at", "compute_share")
    empty = {"status": "submitted", "units": 0, "prompt_units": 0, "repeated_rows": 1}
    change(connection, digest, **empty, **dict.fromkeys(verdict))


def unjudged(
    connection: Connection,
    *,
    rooted_before: float,
    shadow_before: float,
    given_up: Collection[Digest] = (),
) -> list[Digest]:
    """Returns the submissions without a verdict whose root was put on chain before `rooted_before`,
    and shadow ones received before `shadow_before` (Unix seconds). Leaves out those whose opinions
    are complete, unless `given_up` has them."""
    shadow = sa.and_(_submissions.shadow.is_(True), _submissions.received_at < shadow_before)
    query = (
        sa.select(_submissions.digest)
        .outerjoin(schema.roots, schema.roots.c.id == _submissions.root_id)
        .where(
            _submissions.status == "submitted",
            sa.or_(schema.roots.c.posted_at < rooted_before, shadow),
            sa.or_(~_undecided(), _submissions.digest.in_(list(given_up))),
        )
    )
    return [Digest(digest) for digest in connection.execute(query).scalars()]


def any_undecided(connection: Connection, rooted_before: float) -> bool:
    """Whether a submission whose opinions are complete has no verdict, although its root was put on
    chain before then (Unix seconds)."""
    query = (
        sa.select(_submissions.digest)
        .join(schema.roots, schema.roots.c.id == _submissions.root_id)
        .where(
            _submissions.status == "submitted",
            schema.roots.c.posted_at < rooted_before,
            _undecided(),
        )
        .limit(1)
    )
    return connection.execute(query).first() is not None


def _undecided() -> sa.ColumnElement[bool]:
    """Whether a submission's job has all opinions and waits for the verdict."""
    job = schema.jobs.c
    return sa.exists().where(job.submission_digest == _submissions.digest, job.status == "full")


def unrooted(
    connection: Connection,
    without: Collection[Address],
    *,
    received_before: float | None = None,
    limit: int | None = None,
) -> list[SubmissionRow]:
    """Returns the submissions that no root lists and that may still get one, oldest first, except
    shadow ones and those of the nodes in `without`. Those received before a time (Unix seconds)
    only, and at most `limit`, if given."""
    query = sa.select(schema.submissions).where(
        _submissions.root_id.is_(None),
        _submissions.shadow.is_(False),
        _submissions.node.not_in(without),
        _submissions.reason != int(Reason.UNROOTED),
    )
    if received_before is not None:
        query = query.where(_submissions.received_at < received_before)
    query = query.order_by(_submissions.received_at, _submissions.digest).limit(limit)
    return records(SubmissionRow, connection.execute(query).mappings().all())


def unrooted_of(
    connection: Connection, nodes: Collection[Address], received_before: float
) -> list[SubmissionRow]:
    """Returns those of the nodes' submissions that no root lists and that are judged or were
    received before a time (Unix seconds), without shadow ones."""
    query = sa.select(schema.submissions).where(
        _submissions.node.in_(nodes),
        _submissions.shadow.is_(False),
        _submissions.root_id.is_(None),
        sa.or_(_submissions.status != "submitted", _submissions.received_at < received_before),
    )
    return records(SubmissionRow, connection.execute(query).mappings().all())


def at_risk(
    connection: Connection, among: Collection[Address], valid_since: float
) -> dict[Address, tuple[int, int, int]]:
    """Of files of each of these nodes that may still be rejected: how many have no verdict, and
    units and prompt units of the accepted ones, whose root is not on chain or was put there at
    `valid_since` or later. No shadow files."""
    roots = schema.roots.c
    young = sa.or_(roots.posted_at.is_(None), roots.posted_at >= valid_since)
    waiting, accepted = _submissions.status == "submitted", _submissions.status == "accepted"
    query = (
        sa.select(
            _submissions.node,
            sa.func.sum(sa.case((waiting, 1), else_=0)),
            sa.func.sum(sa.case((accepted, _submissions.units), else_=0)),
            sa.func.sum(sa.case((accepted, _submissions.prompt_units), else_=0)),
        )
        .outerjoin(schema.roots, roots.id == _submissions.root_id)
        .where(
            one_of(connection, _submissions.node, among),
            _submissions.shadow.is_(False),
            sa.or_(waiting, sa.and_(accepted, young)),
        )
        .group_by(_submissions.node)
    )
    return {
        Address(node): (int(unjudged), int(units), int(prompts))
        for node, unjudged, units, prompts in connection.execute(query)
    }


@dataclass(frozen=True)
class UnsettledFiles:
    """Files of one step, status and target length: how many, their paid tokens and prompt tokens
    (0 without a verdict), and the opinions on them."""

    step: int
    status: str
    target: int
    files: int
    units: int
    prompt_units: int
    opinions: int


def unsettled(
    connection: Connection, since: float, without: Collection[Address]
) -> list[UnsettledFiles]:
    """Returns the files received at `since` or later that the pool may owe for, or owes validators
    for. No shadow files, no unrooted files of the nodes `without`."""
    opinions, leases = schema.opinions.c, schema.leases.c
    judged = (
        sa.select(sa.func.count())
        .where(opinions.submission_digest == _submissions.digest)
        .scalar_subquery()
    )
    files = (
        sa.select(
            *(_submissions.step, _submissions.units, _submissions.prompt_units, leases.target),
            _submissions.status,
            judged.label("opinions"),
        )
        .join(schema.leases, leases.digest == _submissions.lease_digest)
        .where(
            _submissions.received_at >= since,
            _submissions.shadow.is_(False),
            sa.or_(_submissions.node.not_in(without), _submissions.root_id.is_not(None)),
        )
        .subquery()
    ).c
    query = sa.select(
        *(files.step, files.status, files.target, sa.func.count().label("files")),
        *(
            sa.func.sum(column).label(column.name)
            for column in (files.units, files.prompt_units, files.opinions)
        ),
    ).group_by(files.step, files.status, files.target)
    return [
        UnsettledFiles(
            *(row.step, row.status, row.target, row.files),
            *(int(value) for value in (row.units, row.prompt_units, row.opinions)),
        )
        for row in connection.execute(query)
    ]


def ended_badly(
    connection: Connection, node: Address, *, since: float, limit: int
) -> list[SubmissionRow]:
    """Returns the submissions of `node` judged rejected or void at `since` or later, newest
    first."""
    query = (
        sa.select(schema.submissions)
        .where(
            _submissions.node == node,
            _submissions.judged_at >= since,
            _submissions.status.in_(("rejected", "void")),
        )
        .order_by(_submissions.judged_at.desc(), _submissions.digest)
        .limit(limit)
    )
    return records(SubmissionRow, connection.execute(query).mappings().all())


def with_bad_endings(
    connection: Connection, nodes: Collection[Address], *, since: float
) -> frozenset[Address]:
    """Returns the given nodes for which `ended_badly` finds a submission."""
    found = connection.execute(_bad_endings(connection), {"nodes": list(nodes), "since": since})
    return frozenset(Address(node) for node in found.scalars())


@built_once
def _bad_endings(postgresql: bool) -> sa.Select[Any]:
    return (
        sa.select(_submissions.node)
        .distinct()
        .where(
            one_of_bound(postgresql, _submissions.node, "nodes"),
            _submissions.judged_at >= sa.bindparam("since"),
            _submissions.status.in_(("rejected", "void")),
        )
    )


def newest_endings(
    connection: Connection, node: Address, limit: int
) -> list[tuple[str, int, float]]:
    """Returns (status, reason, judged at) of the node's judged submissions, newest first, without
    shadow ones."""
    query = (
        sa.select(_submissions.status, _submissions.reason, _submissions.judged_at)
        .where(
            _submissions.node == node,
            _submissions.judged_at.is_not(None),
            _submissions.shadow.is_(False),
        )
        .order_by(_submissions.judged_at.desc(), _submissions.digest)
        .limit(limit)
    )
    return [(row.status, row.reason, row.judged_at) for row in connection.execute(query)]


def waits(connection: Connection, node: Address) -> bool:
    """Whether a submission of `node`, not counting shadow ones, is still to be judged."""
    query = sa.select(_submissions.digest).where(
        _submissions.node == node,
        _submissions.status == "submitted",
        _submissions.shadow.is_(False),
    )
    return connection.execute(query.limit(1)).first() is not None


def accepted_of(connection: Connection, node: Address) -> int:
    """Returns the number of accepted submissions of `node`, without shadow ones. Planted ones
    count, so that they are treated like any other."""
    return accepted_among(connection, [node]).get(node, 0)


def accepted_among(connection: Connection, nodes: Collection[Address]) -> dict[Address, int]:
    """Returns `accepted_of` for the given nodes that have any."""
    paid = sa.select(_tallies.node, _tallies.files).where(
        one_of(connection, _tallies.node, nodes),
        _tallies.status == "accepted",
        _tallies.shadow.is_(False),
        _tallies.files > 0,
    )
    found = {Address(node): int(count) for node, count in connection.execute(paid)}
    planted = _planted(connection, one_of(connection, _submissions.node, nodes))
    older = totals.of(connection, _PLANTED, nodes)
    for node in {*planted, *older}:
        found[Address(node)] = (
            found.get(Address(node), 0) + planted.get(node, 0) + older.get(node, 0)
        )
    return found


def _planted(connection: Connection, which: sa.ColumnElement[bool]) -> dict[str, int]:
    """Returns the number of accepted planted files by node."""
    query = (
        sa.select(_submissions.node, sa.func.count())
        .join(schema.planted, schema.planted.c.submission_digest == _submissions.digest)
        .where(which, _submissions.status == "accepted", _submissions.shadow.is_(True))
        .group_by(_submissions.node)
    )
    return {node: int(number) for node, number in connection.execute(query)}


def received_since(connection: Connection, since: float) -> int:
    """Returns the number of submissions received since a time of the last day; older ones may be
    in the archive."""
    query = sa.select(sa.func.count()).where(_submissions.received_at >= since)
    return int(connection.execute(query).scalar_one())


def counts(connection: Connection, *, shadow: bool = False) -> dict[str, int]:
    """Returns the number of submissions by status, either of regular or of shadow ones."""
    judged = (
        sa.select(_tallies.status, sa.func.sum(_tallies.files))
        .where(_tallies.shadow.is_(shadow))
        .group_by(_tallies.status)
    )
    waiting = (
        sa.select(_submissions.status, sa.func.count())
        .where(_submissions.shadow.is_(shadow), _submissions.status == "submitted")
        .group_by(_submissions.status)
    )
    found = [*connection.execute(judged), *connection.execute(waiting)]
    return {status: int(n) for status, n in found if n}


def expired_unjudged(connection: Connection) -> int:
    """Returns the number of regular submissions that are void through the pool's fault."""
    found = _unjudged(connection, _submissions.shadow.is_(False))
    return sum(found.values()) + sum(totals.of(connection, _UNJUDGED[False]).values())


def _unjudged(connection: Connection, *which: sa.ColumnElement[bool]) -> dict[str, int]:
    """Returns the number of submissions that are void through the pool's fault, by node."""
    query = (
        sa.select(_submissions.node, sa.func.count())
        .where(_submissions.status == "void", _POOLS_FAULT, *which)
        .group_by(_submissions.node)
    )
    return {node: int(number) for node, number in connection.execute(query)}


def tallies_of(connection: Connection, among: Collection[Address]) -> dict[Address, dict[str, int]]:
    """Returns the number of judged submissions by status, with shadow ones, of each of these nodes
    that has any."""
    query = (
        sa.select(_tallies.node, _tallies.status, sa.func.sum(_tallies.files))
        .where(one_of(connection, _tallies.node, among))
        .group_by(_tallies.node, _tallies.status)
    )
    found: dict[Address, dict[str, int]] = {}
    for node, status, files in connection.execute(query):
        found.setdefault(Address(node), {})[status] = int(files)
    return found


def counts_by_node(
    connection: Connection, among: Sequence[Address] | None, *, shadow: bool = False
) -> dict[Address, dict[str, int]]:
    """Returns, for each node in `among` (None: for all), the number of judged submissions by
    status, the accepted units under "units", and the void ones of the pool's fault under
    "expired_unjudged". Counts either regular or shadow submissions."""
    query = sa.select(schema.tallies).where(_tallies.shadow.is_(shadow))
    which = [_submissions.shadow.is_(shadow)]
    if among is not None:
        query = query.where(_tallies.node.in_(among))
        which.append(_submissions.node.in_(among))
    found: dict[Address, dict[str, int]] = {}
    for row in connection.execute(query):
        entry = found.setdefault(Address(row.node), {"units": 0})
        entry[row.status] = int(row.files)
        if row.status == "accepted":
            entry["units"] += int(row.units)
    unjudged = _unjudged(connection, *which)
    older = totals.of(connection, _UNJUDGED[shadow], among)
    for node in {*unjudged, *older} & found.keys():
        number = unjudged.get(node, 0) + older.get(node, 0)
        found[Address(node)]["expired_unjudged"] = number
    return found


def repeating(connection: Connection) -> dict[str, int]:
    """Returns the number of files by status that contained rows of earlier files."""
    found = Counter(totals.of(connection, _REPEATING))
    # as the index says it, so that it is used
    return dict(found + _repeating(connection, sa.text("repeated_rows > 0")))


def _repeating(
    connection: Connection, *which: sa.ColumnElement[bool] | sa.TextClause
) -> Counter[str]:
    query = sa.select(_submissions.status, sa.func.count()).where(*which)
    query = query.group_by(_submissions.status)
    return Counter({status: int(n) for status, n in connection.execute(query)})


def keep_counts(connection: Connection, names: Collection[Digest]) -> None:
    """Adds these files, which are about to be archived, to what is counted forever. The number of
    files by node and status counts them anyway."""
    mine = one_of(connection, _submissions.digest, names)
    for shadow, name in _UNJUDGED.items():
        unjudged = _unjudged(connection, mine, _submissions.shadow.is_(shadow))
        totals.add(connection, name, unjudged)
    totals.add(connection, _PLANTED, _planted(connection, mine))
    repeating = _repeating(connection, mine, _submissions.repeated_rows > 0)
    totals.add(connection, _REPEATING, repeating)


def mean_compute_share(connection: Connection) -> float | None:
    """Returns the mean `compute_share` of the judged ones among the newest COMPUTE_FILES files;
    None if there are none."""
    newest = (
        sa.select(_submissions.compute_share)
        .order_by(_submissions.received_at.desc(), _submissions.digest.desc())
        .limit(COMPUTE_FILES)
        .subquery()
    )
    found = connection.execute(sa.select(sa.func.avg(newest.c.compute_share))).scalar()
    return None if found is None else float(found)
