"""Deletes what nodes without a seat leave behind, so that strangers do not grow the tables."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema

MOST = 256
"""Most leases that one call deletes."""

_nodes, _leases, _submissions = schema.nodes.c, schema.leases.c, schema.submissions.c


def forget(connection: Connection, *, silent_since: float, given_before: float) -> int:
    """Deletes shadow nodes without a heartbeat since `silent_since`, and shadow leases given before
    `given_before` whose nodes are gone, with their submissions, jobs, assignments and opinions.

    Kept are leases whose file still waits for a verdict or is under review, and the highest lease
    index of each step: `leases.next_index` must not give an index twice, since it seeds the rows.
    Marks of rows expire on their own. Times in Unix seconds. Returns the number of leases deleted.
    """
    connection.execute(
        sa.delete(schema.nodes).where(
            _nodes.status == "shadow", _nodes.last_heartbeat < silent_since
        )
    )
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
        sa.select(_leases.digest)
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
    gone = connection.execute(query).scalars().all()
    if not gone:
        return 0
    files = (
        connection.execute(
            sa.select(_submissions.digest).where(_submissions.lease_digest.in_(gone))
        )
        .scalars()
        .all()
    )
    for table in (schema.opinions, schema.assignments, schema.jobs):
        connection.execute(sa.delete(table).where(table.c.submission_digest.in_(files)))
    connection.execute(sa.delete(schema.submissions).where(_submissions.digest.in_(files)))
    connection.execute(sa.delete(schema.leases).where(_leases.digest.in_(gone)))
    return len(gone)
