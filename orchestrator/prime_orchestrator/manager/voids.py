"""Voids submissions that cannot be paid through the pool's fault."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select, update

from prime_core.ids import Digest
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.task import LeaseStatus
from prime_core.verdict import Reason
from prime_orchestrator.store import Connection, groups
from prime_orchestrator.store.schema import credits, jobs, leases, submissions


def void(
    connection: Connection,
    submission: Digest,
    reason: Reason,
    now: float,
    *,
    of: Sequence[LeaseStatus] = ("submitted",),
) -> None:
    """Ends a submission whose status is one of `of`, with its lease and its job. If it was
    accepted, also deletes its credit and its groups that no batch has taken; otherwise the
    scheduler would wait for a batch that is never sealed."""
    state, _ = step_lease(LeaseState("submitted", 0.0), "void", now)
    this = submissions.c.digest == submission
    job = jobs.c.submission_digest == submission
    # Lock the job first, as recording a verdict does; another order could deadlock.
    connection.execute(select(jobs.c.status).where(job).with_for_update())
    done = connection.execute(
        update(submissions)
        .where(this, submissions.c.status.in_(of))
        .values(status=state.status, reason=int(reason), judged_at=now)
    )
    if done.rowcount == 0:
        return
    lease = select(submissions.c.lease_digest).where(this).scalar_subquery()
    connection.execute(update(leases).where(leases.c.digest == lease).values(status=state.status))
    connection.execute(update(jobs).where(job).values(status="done"))
    connection.execute(delete(credits).where(credits.c.submission_digest == submission))
    groups.drop_free(connection, submission)
