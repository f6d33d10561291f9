"""Voids submissions.

    void           one submission, with its job, credit and free groups
    void_unjudged  all submissions whose validity ended without a verdict (the pool's fault)

`judging` records verdicts. `roots` voids submissions that missed their root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from prime_core.ids import Digest
from prime_core.task import SubmissionStatus
from prime_core.verdict import Reason
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.settlement import CHAIN_LOCK, chain_clock
from prime_orchestrator.store import Connection, groups, jobs, nodes, rewards, submissions
from prime_orchestrator.store.engine import Store, lock


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


def lock_files(connection: Connection, digests: Collection[Digest]) -> list[Digest]:
    """Locks what `void` writes of several submissions, in the order that `lock` states; returns
    them by node, the order in which their nodes' `tallies` are written."""
    lock(connection, "assignments")
    for digest in digests:  # one at a time: they may be more than the values a statement takes
        jobs.lock_row(connection, digest)
    lock(connection, CHAIN_LOCK)  # the indexer writes several submissions
    found = [submissions.get(connection, digest) for digest in digests]
    rows = [row for row in found if row is not None]
    nodes.lock_rows(connection, {row.node for row in rows})
    return [row.digest for row in sorted(rows, key=lambda row: row.node)]


def void_unjudged(
    store: Store,
    context: PoolContext,
    now: Callable[[], float],
    given_up: Collection[Digest] = (),
) -> int:
    """Voids submissions that have no verdict by the end of their root's validity, and returns how
    many. Shadow submissions have no root; their validity starts on receipt. Those whose opinions
    are complete are decided first, as after a long outage of the orchestrator, unless `given_up`
    has them.

    This is the pool's fault: the node is neither paid nor punished. Their jobs end.
    """
    with store.begin() as connection:
        clock = chain_clock(connection)
        if clock is None:
            return 0
        validity = context.run.validity_seconds
        late = submissions.unjudged(
            connection, rooted_before=clock.time - validity, shadow_before=now() - validity,
            given_up=given_up,
        )  # fmt: skip
        for digest in lock_files(connection, late) if late else ():
            void(connection, digest, Reason.UNAVAILABLE, now())
        return len(late)
