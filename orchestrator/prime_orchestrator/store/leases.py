"""Leases: issued, fulfilled, ended."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_core.task import LeaseOutcome, LeaseStatus, SignedLease
from prime_orchestrator.store import schema, totals
from prime_orchestrator.store.nodes import owner_column
from prime_orchestrator.store.rows import one_of, record, records, update_each

_leases = schema.leases.c
_nodes = schema.nodes.c
_submissions = schema.submissions.c
_parsed = lru_cache(maxsize=1024)(SignedLease.model_validate_json)
"""A file's lease is asked for several times while the file is judged."""
_INDICES = "lease_indices"
"""Name in store/totals.py, by step: lease indices that archived leases used, as the next one."""


@dataclass(frozen=True)
class LeaseRow:
    """One row of `leases`; `body` is JSON of SignedLease, `deadline` in Unix seconds."""

    digest: Digest
    node: Address
    step: int
    lease_index: int
    policy_version: int
    status: LeaseStatus
    deadline: int
    created_at: float
    upload_sha256: Digest | None
    upload_size: int | None
    uploads: int
    body: str
    shadow: bool
    target: int
    tries: int
    issued_again: int
    excused: int
    evaluation: int | None = None
    heldout: int | None = None

    def signed(self) -> SignedLease:
        """Returns the lease as it was issued."""
        return _parsed(self.body)


def new_row(
    digest: Digest,
    signed: SignedLease,
    *,
    now: float,
    tries: int = 0,
    evaluation: int | None = None,
) -> LeaseRow:
    """Returns the row of a new open lease. `tries`: how many leases of its groups expired before;
    `evaluation`: the one that it belongs to."""
    lease = signed.lease
    return LeaseRow(
        digest=digest,
        node=lease.node,
        step=lease.step,
        lease_index=lease.index,
        policy_version=signed.policy_version,
        status="open",
        deadline=lease.deadline,
        created_at=now,
        upload_sha256=None,
        upload_size=None,
        uploads=0,
        body=signed.model_dump_json(),
        shadow=lease.shadow,
        target=lease.target,
        tries=tries,
        issued_again=0,
        excused=0,
        evaluation=evaluation,
        heldout=signed.heldout,
    )


def add(connection: Connection, rows: Sequence[LeaseRow]) -> None:
    """Writes new leases before they are issued."""
    if rows:
        connection.execute(sa.insert(schema.leases), [vars(row) for row in rows])


def get(connection: Connection, digest: Digest) -> LeaseRow | None:
    """Returns the lease, or None."""
    query = sa.select(schema.leases).where(_leases.digest == digest)
    return record(LeaseRow, connection.execute(query).mappings().first())


def those(connection: Connection, digests: Collection[Digest]) -> dict[Digest, LeaseRow]:
    """Returns the given leases that exist."""
    query = sa.select(schema.leases).where(one_of(connection, _leases.digest, digests))
    rows = records(LeaseRow, connection.execute(query).mappings().all())
    return {row.digest: row for row in rows}


def of_files(connection: Connection, submissions: Collection[Digest]) -> dict[Digest, SignedLease]:
    """Returns the leases by submission, without submissions that are not stored."""
    query = (
        sa.select(_submissions.digest, _leases.body)
        .join(schema.leases, _leases.digest == _submissions.lease_digest)
        .where(one_of(connection, _submissions.digest, submissions))
    )
    return {Digest(name): _parsed(body) for name, body in connection.execute(query)}


def lock_rows(connection: Connection, digests: Collection[Digest]) -> dict[Digest, LeaseRow]:
    """Like `those`; the rows cannot change until the transaction ends. They are locked in order, so
    that two processes cannot deadlock."""
    query = (
        sa.select(schema.leases)
        .where(one_of(connection, _leases.digest, digests))
        .order_by(_leases.digest)
        .with_for_update()
    )
    rows = records(LeaseRow, connection.execute(query).mappings().all())
    return {row.digest: row for row in rows}


def lock_open(connection: Connection, node: Address) -> list[LeaseRow]:
    """Returns the open leases of `node`, locked as by `lock_rows`."""
    query = (
        sa.select(schema.leases)
        .where(_leases.node == node, _leases.status == "open")
        .order_by(_leases.digest)
        .with_for_update()
    )
    return records(LeaseRow, connection.execute(query).mappings().all())


def excused_since(connection: Connection, node: Address, since: float) -> bool:
    """Whether a lease that `node` got from `since` (Unix seconds) on ended without its fault."""
    query = sa.select(_leases.digest).where(
        _leases.node == node, _leases.excused == 1, _leases.created_at >= since
    )
    return connection.execute(query.limit(1)).first() is not None


def open_among(connection: Connection, nodes: Collection[Address]) -> dict[Address, list[LeaseRow]]:
    """Returns the open leases of the `nodes` that have any, oldest first."""
    query = (
        sa.select(schema.leases)
        .where(one_of(connection, _leases.node, nodes), _leases.status == "open")
        .order_by(_leases.created_at, _leases.lease_index)
    )
    found: dict[Address, list[LeaseRow]] = {}
    for row in records(LeaseRow, connection.execute(query).mappings().all()):
        found.setdefault(row.node, []).append(row)
    return found


def with_failures(connection: Connection, nodes: Collection[Address]) -> frozenset[Address]:
    """Returns the `nodes` that have a lease that ended without an accepted or pending file and
    is not excused."""
    tallies = schema.tallies.c
    without_file = sa.select(_leases.node).where(
        one_of(connection, _leases.node, nodes),
        _leases.status == "expired",
        _leases.excused == 0,
    )
    ended_badly = sa.select(tallies.node).where(
        one_of(connection, tallies.node, nodes),
        tallies.status.in_(("rejected", "void")),
        tallies.files > 0,
    )
    found = connection.execute(without_file.union(ended_badly)).scalars()
    return frozenset(Address(node) for node in found)


def newest_of(
    connection: Connection,
    node: Address,
    limit: int,
    *,
    ended: bool = False,
    before: LeaseRow | None = None,
) -> list[tuple[LeaseRow, LeaseOutcome]]:
    """Returns the newest `limit` leases of `node`, newest last, each with what became of it.
    `ended`: without open ones; `before`: only those given earlier than this one."""
    query = (
        sa.select(schema.leases)
        .where(_leases.node == node)
        .order_by(_leases.created_at.desc(), _leases.step.desc(), _leases.lease_index.desc())
        .limit(limit)
    )
    if before is not None:
        place = sa.tuple_(_leases.created_at, _leases.step, _leases.lease_index)
        query = query.where(place < sa.tuple_(before.created_at, before.step, before.lease_index))
    if ended:
        query = query.where(_leases.status != "open")
    rows = records(LeaseRow, connection.execute(query).mappings().all())[::-1]
    # A join would read the files of all the node's leases before it leaves out the older ones.
    named = _submissions.lease_digest.in_([row.digest for row in rows])
    files = connection.execute(
        sa.select(_submissions.lease_digest, _submissions.status).where(named)
    )
    endings = {Digest(lease): status for lease, status in files}
    return [(row, endings.get(row.digest, row.status)) for row in rows]


def late_nodes(connection: Connection, now: float) -> frozenset[Address]:
    """Returns the nodes with open leases whose deadline has passed."""
    late = sa.and_(_leases.status == "open", _leases.deadline < now)
    found = connection.execute(sa.select(_leases.node).distinct().where(late)).scalars()
    return frozenset(Address(node) for node in found)


def overdue(connection: Connection, now: float) -> list[LeaseRow]:
    """Returns open leases whose deadline has passed, locked as by `lock_rows`."""
    query = (
        sa.select(schema.leases)
        .where(_leases.status == "open", _leases.deadline < now)
        .order_by(_leases.digest)
        .with_for_update()
    )
    return records(LeaseRow, connection.execute(query).mappings().all())


def to_issue_again(
    connection: Connection, others: Collection[Address], *, since: float, tries: int
) -> list[LeaseRow]:
    """Returns expired paid leases of nodes outside `others` whose groups were not issued again and
    have fewer than `tries` expired leases. Only deadlines at `since` or later count; oldest first,
    at most 8. Evaluation leases are not among them (api/evaluating.py issues theirs again)."""
    query = (
        sa.select(schema.leases)
        .where(
            _leases.status == "expired",
            _leases.deadline >= since,
            _leases.issued_again == 0,
            _leases.shadow.is_(False),
            _leases.evaluation.is_(None),
            _leases.tries + 1 < tries,
            _leases.node.not_in(others),
        )
        .order_by(_leases.deadline, _leases.digest)
        .limit(8)
    )
    return records(LeaseRow, connection.execute(query).mappings().all())


def mark_issued_again(connection: Connection, digest: Digest) -> None:
    """Records that a later lease has this one's groups."""
    connection.execute(
        sa.update(schema.leases).where(_leases.digest == digest).values(issued_again=1)
    )


def held_by(connection: Connection, nodes: Collection[Address], now: float) -> dict[Address, int]:
    """Returns how many open paid leases before their deadline those of `nodes` hold that hold
    any."""
    query = (
        sa.select(_leases.node, sa.func.count())
        .where(
            one_of(connection, _leases.node, nodes),
            _leases.status == "open",
            _leases.deadline >= now,
            _leases.shadow.is_(False),
        )
        .group_by(_leases.node)
    )
    return {Address(node): int(count) for node, count in connection.execute(query)}


def idle_nodes(connection: Connection, now: float, refused: Sequence[Address] = ()) -> int:
    """Returns how many active nodes that do not rest, are not to prove their cards first and are
    not `refused`, have no open paid lease."""
    holds = sa.exists().where(
        _leases.node == _nodes.address, _leases.status == "open", _leases.shadow.is_(False)
    )
    proof = schema.measurements.c
    awaited = sa.and_(proof.asked_at.is_not(None), proof.knows == 1)
    unproven = sa.exists().where(proof.node == _nodes.address, sa.or_(awaited, proof.trouble != ""))
    query = sa.select(sa.func.count()).where(
        _nodes.status == "active", _nodes.rests_until <= now, ~holds, ~unproven
    )
    if refused:
        query = query.where(~one_of(connection, _nodes.address, refused))
    return int(connection.execute(query).scalar_one())


def set_status(
    connection: Connection, digest: Digest, status: LeaseStatus, *, excused: bool = False
) -> None:
    """Writes the outcome of `lifecycle.step_lease`; `excused`: not for the node's fault."""
    connection.execute(
        sa.update(schema.leases)
        .where(_leases.digest == digest)
        .values(status=status, excused=int(excused))
    )


def announce_uploads(connection: Connection, rows: Sequence[LeaseRow]) -> None:
    """Writes which files nodes are about to upload, and how many were announced for each lease. The
    caller has locked the rows."""
    update_each(connection, schema.leases, rows, ("upload_sha256", "upload_size", "uploads"))


def set_statuses(connection: Connection, rows: Sequence[LeaseRow]) -> None:
    """Writes the statuses of leases. The caller has locked the rows."""
    update_each(connection, schema.leases, rows, ("status", "excused"))


def next_index(connection: Connection, step: int) -> int:
    """Returns the first unused lease index of `step`."""
    query = sa.select(sa.func.max(_leases.lease_index)).where(_leases.step == step)
    highest = connection.execute(query).scalar()
    archived = totals.get(connection, _INDICES, str(step))  # after the table: none is missed
    return archived if highest is None else max(archived, int(highest) + 1)


def keep_indices(connection: Connection, names: Collection[Digest]) -> None:
    """Notes the indices of these leases, which are about to be archived, so that no later lease of
    their steps gets one. One caller at a time."""
    query = (
        sa.select(_leases.step, sa.func.max(_leases.lease_index))
        .where(one_of(connection, _leases.digest, names))
        .group_by(_leases.step)
    )
    found = {str(step): int(highest) + 1 for step, highest in connection.execute(query)}
    totals.raise_to(connection, _INDICES, found)


def highest_step(connection: Connection) -> int | None:
    """Returns the last step for which a paid lease was issued; None if there is none."""
    found = connection.execute(
        sa.select(sa.func.max(_leases.step)).where(_leases.shadow.is_(False))
    ).scalar()
    return None if found is None else int(found)


@dataclass(frozen=True)
class UnderWay:
    """What `under_way` returns. `groups`: (policy version, number of leases) that may still bring
    groups; `newcomers`: open paid leases of nodes whose provider kept fewer than `proven`
    leases."""

    groups: list[tuple[int, float]]
    newcomers: int


def under_way(
    connection: Connection, *, now: float, younger_than: float, proven: float
) -> UnderWay:
    """Returns what is under way in the pool. Reads the records of those providers alone whose nodes
    hold open leases.

    Groups may come of open leases before their deadline that were issued to active nodes after
    `younger_than`, and of submitted ones that a validator may still judge. Shadow and evaluation
    leases are excluded because their files bring no groups to train on. An open lease is weighted
    by the share of leases that its provider's nodes kept recently, and counts as 0 if the node's
    latest lease expired.
    """
    # deadlines are whole seconds, and so is what PostgreSQL compares them with
    given = {"now": math.ceil(now), "younger_than": younger_than, "proven": proven}
    held = connection.execute(_held(), given).all()
    groups = [(version, n) for version, n, _ in held if n is not None]
    groups += [(version, n) for version, n in connection.execute(_judged_soon())]
    return UnderWay(
        groups=sorted((int(version), float(n)) for version, n in groups),
        newcomers=sum(int(n) for _, _, n in held),
    )


@cache
def _held() -> sa.Select[Any]:
    """By policy version: the open paid leases before their deadline, weighted as in `under_way`,
    and those of newcomers. Binds `now`, `younger_than` and `proven`."""
    is_held = sa.and_(
        _leases.status == "open",
        _leases.deadline >= sa.bindparam("now"),
        _leases.shadow.is_(False),
    )
    of_node = _nodes.address == _leases.node
    holders = sa.select(owner_column().label("owner")).distinct().where(of_node, is_held).cte()
    among = sa.select(holders.c.owner)
    # Two parts, each by an index: together they are the nodes whose `owner_column` is a holder.
    # `provider IS NULL` would have SQLite read all such nodes, also by an index.
    own = sa.union_all(
        sa.select(_nodes.provider.label("owner"), _nodes.kept, _nodes.missed).where(
            _nodes.provider.in_(among)
        ),
        sa.select(_nodes.address, _nodes.kept, _nodes.missed).where(
            sa.func.coalesce(_nodes.provider, "") == "", _nodes.address.in_(among)
        ),
    ).subquery()
    kept, missed = sa.func.sum(own.c.kept), sa.func.sum(own.c.missed)
    owners = (
        sa.select(own.c.owner, kept.label("kept"), missed.label("missed"))
        .group_by(own.c.owner)
        .subquery()
    )
    share = (owners.c.kept + 1.0) / (owners.c.kept + owners.c.missed + 1.0)
    brings = sa.and_(
        _nodes.status == "active",
        _leases.created_at >= sa.bindparam("younger_than"),
        _leases.evaluation.is_(None),
    )
    return (
        sa.select(
            _leases.policy_version,
            sa.func.sum(sa.case((~brings, None), (_nodes.misses > 0, 0.0), else_=share)),
            sa.func.sum(sa.case((owners.c.kept < sa.bindparam("proven"), 1), else_=0)),
        )
        .join(schema.nodes, of_node)
        .join(owners, owners.c.owner == owner_column())
        .where(is_held)
        .group_by(_leases.policy_version)
    )


@cache
def _judged_soon() -> sa.Select[Any]:
    """By policy version: files to train on that a validator may still judge."""
    jobs = schema.jobs.c
    return (
        sa.select(_submissions.policy_version, sa.func.count())
        .join(schema.jobs, jobs.submission_digest == _submissions.digest)
        .join(schema.leases, _leases.digest == _submissions.lease_digest)
        .where(
            _submissions.status == "submitted",
            _submissions.shadow.is_(False),
            _leases.evaluation.is_(None),
            jobs.status.in_(("open", "full")),
        )
        .group_by(_submissions.policy_version)
    )


def latest_by_target(
    connection: Connection, limit: int, *, shadow: bool, now: float, younger_than: float
) -> dict[int, tuple[int, int, int, int]]:
    """(all, under way, accepted, expired) of the latest `limit` leases, by target length.

    Under way: open ones before their deadline that were given after `younger_than`, and submitted
    ones. Expired: without an excuse."""
    latest = (
        sa.select(
            *(_leases.digest, _leases.target, _leases.status),
            *(_leases.deadline, _leases.created_at, _leases.excused),
        )
        .where(_leases.shadow.is_(shadow), _leases.evaluation.is_(None))
        .order_by(_leases.created_at.desc(), _leases.digest)
        .limit(limit)
        .subquery()
    )
    held = sa.and_(
        latest.c.status == "open", latest.c.deadline >= now, latest.c.created_at >= younger_than
    )
    under_way = sa.or_(held, _submissions.status == "submitted")
    expired = sa.and_(latest.c.status == "expired", latest.c.excused == 0)
    counted = (
        sa.func.sum(sa.case((condition, 1), else_=0))
        for condition in (under_way, _submissions.status == "accepted", expired)
    )
    query = (
        sa.select(latest.c.target, sa.func.count(), *counted)
        .outerjoin(schema.submissions, _submissions.lease_digest == latest.c.digest)
        .group_by(latest.c.target)
    )
    return {
        int(target): (int(asked), int(waiting), int(accepted), int(late))
        for target, asked, waiting, accepted, late in connection.execute(query)
    }


def shadow_under_way(connection: Connection, *, now: float) -> int:
    """Returns the number of shadow leases in the pool that are open or whose files await a
    verdict."""
    held = sa.select(sa.func.count()).where(
        _leases.shadow.is_(True), _leases.status == "open", _leases.deadline >= now
    )
    waiting = sa.select(sa.func.count()).where(
        _submissions.shadow.is_(True), _submissions.status == "submitted"
    )
    return int(connection.execute(held).scalar_one() + connection.execute(waiting).scalar_one())


def given_since(connection: Connection, since: float) -> tuple[int, int]:
    """Returns how many leases were issued at `since` or later: (shadow ones, others)."""
    query = (
        sa.select(_leases.shadow, sa.func.count())
        .where(_leases.created_at >= since)
        .group_by(_leases.shadow)
    )
    found = {bool(shadow): int(n) for shadow, n in connection.execute(query)}
    return found.get(True, 0), found.get(False, 0)


def given_to(connection: Connection, nodes: Collection[Address], since: float) -> int:
    """Returns how many leases were issued to `nodes` in total at `since` or later."""
    query = sa.select(sa.func.count()).where(_leases.node.in_(nodes), _leases.created_at >= since)
    return int(connection.execute(query).scalar_one())
