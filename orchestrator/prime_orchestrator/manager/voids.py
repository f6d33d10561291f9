"""Voids submissions that cannot be paid through the pool's fault."""

from __future__ import annotations

from collections.abc import Sequence

from prime_core.ids import Digest
from prime_core.task import SubmissionStatus
from prime_core.verdict import Reason
from prime_orchestrator.store import Connection, groups, jobs, rewards, submissions


def void(
    connection: Connection,
    submission: Digest,
    reason: Reason,
    now: float,
    *,
    of: Sequence[SubmissionStatus] = ("submitted",),
) -> None:
    """Ends a submission whose status is one of `of`, with its job. If it was
    accepted, also deletes its credit and its groups that no batch has taken; otherwise the
    scheduler would wait for a batch that is never sealed."""
    # Lock the job first, as recording a verdict does; another order could deadlock.
    jobs.lock_row(connection, submission)
    if not submissions.void(connection, submission, int(reason), of=of, judged_at=now):
        return
    jobs.change(connection, submission, status="done")
    rewards.drop_credits(connection, [submission])
    groups.drop_free(connection, submission)
