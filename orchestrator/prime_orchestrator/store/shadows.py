"""Deletes what nodes without a seat leave behind, so that strangers do not grow the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.verdict import SignedOpinion
from prime_orchestrator.store import meta, schema

MOST = 256
"""Most leases that one call deletes."""

_GIVEN = "shadow_leases/"
"""Key in `meta`, before an address: the times of its shadow leases, a JSON list of Unix seconds."""
_nodes, _leases, _submissions = schema.nodes.c, schema.leases.c, schema.submissions.c


@dataclass(frozen=True)
class DeletableLease:
    """A shadow lease that may be deleted. `submission` is that of its file, if it has one;
    `objects` are what validators and the manager stored about that file."""

    lease: Digest
    submission: Digest | None
    objects: frozenset[Digest]


def take(connection: Connection, place: str, now: float, *, most: int, within: float) -> bool:
    """Records a shadow lease for the address `place`, for all processes of the pool. Returns False,
    and records nothing, if it was given `most` within the last `within` seconds. The caller holds
    the lock on leases."""
    given: list[float] = json.loads(meta.get(connection, _GIVEN + place) or "[]")
    times = [at for at in given if at >= now - within]
    if len(times) >= most:
        return False
    meta.put(connection, _GIVEN + place, json.dumps([*times, now]))
    return True


def forget_places(connection: Connection, *, before: float) -> None:
    """Deletes what `take` recorded of addresses without a lease since `before` (Unix seconds)."""
    for key, value in meta.under(connection, _GIVEN):
        if json.loads(value)[-1] < before:
            meta.drop(connection, key)


def forget_nodes(connection: Connection, *, silent_since: float) -> None:
    """Deletes shadow nodes without a heartbeat since `silent_since` (Unix seconds)."""
    _delete(connection, _nodes.last_heartbeat < silent_since)


def _delete(connection: Connection, which: sa.ColumnElement[bool]) -> None:
    """Deletes those shadow nodes, and their passports."""
    gone = sa.and_(_nodes.status == "shadow", which)
    theirs = schema.passports.c.node.in_(sa.select(_nodes.address).where(gone))
    connection.execute(sa.delete(schema.passports).where(theirs))
    connection.execute(sa.delete(schema.nodes).where(gone))


def idle_longest(connection: Connection, *, held_since: float) -> Address | None:
    """Returns the shadow node that holds its place for the least: without an open lease or an
    accepted file, admitted before `held_since` (Unix seconds); those without any file first, then
    the oldest. None if there is none."""
    filed = sa.exists().where(_submissions.node == _nodes.address, _submissions.shadow.is_(True))
    open_lease = sa.exists().where(
        _leases.node == _nodes.address, _leases.shadow.is_(True), _leases.status == "open"
    )
    query = (
        sa.select(_nodes.address)
        .where(
            _nodes.status == "shadow",
            _nodes.created_at < held_since,
            ~filed.where(_submissions.status == "accepted"),
            ~open_lease,
        )
        .order_by(filed, _nodes.created_at, _nodes.address)
        .limit(1)
    )
    found = connection.execute(query).scalar()
    return None if found is None else Address(found)


def forget_node(connection: Connection, node: Address) -> None:
    """Deletes one shadow node. What it left goes like that of silent ones (`find`)."""
    _delete(connection, _nodes.address == node)


def find(connection: Connection, *, given_before: float) -> list[DeletableLease]:
    """Returns at most MOST shadow leases given before `given_before` (Unix seconds) whose nodes are
    gone.

    Not returned are leases whose file still waits for a verdict or is under review, and the highest
    lease index of each step: `leases.next_index` must not give an index twice, since it seeds the
    rows.
    """
    later = schema.leases.alias("later")
    busy = (
        sa.select(_submissions.digest)
        .outerjoin(schema.jobs, schema.jobs.c.submission_digest == _submissions.digest)
        .where(
            _submissions.lease_digest == _leases.digest,
            sa.or_(
                _submissions.status == "submitted",
                _submissions.root_id.is_not(None),
                schema.jobs.c.status == "quarantined",
            ),
        )
    )
    query = (
        sa.select(
            _leases.digest,
            _submissions.digest,
            _submissions.verdict,
            _submissions.verdict_table,
            _submissions.evidence,
        )
        .outerjoin(schema.submissions, _submissions.lease_digest == _leases.digest)
        .where(
            _leases.shadow.is_(True),
            _leases.created_at < given_before,
            _leases.node.not_in(sa.select(_nodes.address).where(_nodes.status == "shadow")),
            ~busy.exists(),
            sa.select(later.c.digest)
            .where(later.c.step == _leases.step, later.c.lease_index > _leases.lease_index)
            .exists(),
        )
        .limit(MOST)
    )
    found = connection.execute(query).all()
    opinions = schema.opinions.c
    bodies = sa.select(opinions.submission_digest, opinions.body).where(
        opinions.submission_digest.in_([row[1] for row in found if row[1] is not None])
    )
    stored: dict[str, set[str]] = {row[1]: {name for name in row[2:] if name} for row in found}
    for submission, body in connection.execute(bodies):
        opinion = SignedOpinion.model_validate_json(body).opinion
        stored[submission] |= {opinion.table, opinion.evidence}
    return [
        DeletableLease(
            lease, submission, frozenset(map(Digest, stored[submission] - {ZERO_DIGEST}))
        )
        for lease, submission, *_ in found
    ]


def forget(connection: Connection, gone: Sequence[DeletableLease]) -> None:
    """Deletes these leases with their submissions, jobs, assignments and opinions, and counts the
    submissions no more. Marks of rows expire on their own."""
    files = [one.submission for one in gone if one.submission is not None]
    tallies = schema.tallies.c
    counted = (
        sa.select(
            *(_submissions.node, _submissions.shadow, _submissions.status),
            *(sa.func.count().label("files"), sa.func.sum(_submissions.units).label("units")),
        )
        .where(_submissions.digest.in_(files), _submissions.status != "submitted")
        .group_by(_submissions.node, _submissions.shadow, _submissions.status)
        .order_by(_submissions.node, _submissions.shadow, _submissions.status)
    )
    for row in connection.execute(counted).all():
        mine = (tallies.node == row.node, tallies.shadow == row.shadow)
        connection.execute(
            sa.update(schema.tallies)
            .where(*mine, tallies.status == row.status)
            .values(files=tallies.files - row.files, units=tallies.units - row.units)
        )
    for table in (schema.opinions, schema.assignments, schema.jobs):
        connection.execute(sa.delete(table).where(table.c.submission_digest.in_(files)))
    connection.execute(sa.delete(schema.submissions).where(_submissions.digest.in_(files)))
    connection.execute(
        sa.delete(schema.leases).where(_leases.digest.in_([one.lease for one in gone]))
    )
