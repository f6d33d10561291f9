"""Posts work roots: every submission becomes a leaf on chain, every N submissions or T seconds.

    received ──► root   while the node is still accountable for it (core.settlement.answered_for)
             └──► void   afterwards: it could not be paid, so no transaction is sent for it

The list of leaves is published as an object first. One transaction then writes the root, marks its
submissions and queues the intent. The indexer records the chain's confirmation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from prime_core import encoding
from prime_core.ids import Address, Digest
from prime_core.rollout import encode_leaves
from prime_core.settlement import answered_for
from prime_core.storage.base import ObjectStore, put_object
from prime_core.task import SubmissionStatus
from prime_core.verdict import Reason
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.endings import lock_files, void
from prime_orchestrator.manager.settlement import CHAIN_LOCK, chain_clock
from prime_orchestrator.store import Connection, roots, submissions
from prime_orchestrator.store.engine import Store, lock
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.submissions import SubmissionRow

log = logging.getLogger(__name__)

_UNPUNISHED: tuple[SubmissionStatus, ...] = ("submitted", "accepted")


def root_is_due(
    received_at: Sequence[float], now: float, *, root_submissions: int, root_seconds: float
) -> bool:
    """Whether `root_submissions` leaves are waiting, or the oldest has waited `root_seconds`."""
    if not received_at:
        return False
    return len(received_at) >= root_submissions or now - min(received_at) >= root_seconds


def post_roots(
    store: Store,
    objects: ObjectStore,
    context: PoolContext,
    now: Callable[[], float],
    without: Collection[Address] = (),
) -> list[Digest]:
    """Collects waiting submissions into roots and queues `postRoot` for each; returns the roots.
    Files of the nodes in `without` are excluded (planted nodes, see planting.py)."""
    posted: list[Digest] = []
    while (root := _post_next(store, objects, context, now(), without)) is not None:
        posted.append(root)
    return posted


def _post_next(
    store: Store,
    objects: ObjectStore,
    context: PoolContext,
    now: float,
    without: Collection[Address],
) -> Digest | None:
    run = context.run
    with store.begin() as connection:
        late = {row.digest for row in _too_late(connection, context, now, without)}
        unrooted = submissions.unrooted(connection, without, limit=len(late) + run.root_submissions)
    waiting = [row for row in unrooted if row.digest not in late][: run.root_submissions]
    due = root_is_due(
        [row.received_at for row in waiting],
        now,
        root_submissions=run.root_submissions,
        root_seconds=run.root_seconds,
    )
    if not due:
        return None
    digests = [row.digest for row in waiting]
    root = encoding.merkle_root(digests)
    leaves_object = put_object(objects, encode_leaves([row.signed() for row in waiting]))
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)  # the indexer assigns roots to leaves posted by nodes
        if not _write(connection, root, leaves_object, digests, now):
            return None  # the next round takes those still waiting
    log.info("work root %s over %d submissions is queued", root, len(digests))
    return root


def _too_late(
    connection: Connection, context: PoolContext, at: float, without: Collection[Address]
) -> list[SubmissionRow]:
    """Returns the unrooted submissions that no stake would be accountable for if rooted at `at`."""
    accountable = context.deployment.periods.accountable
    # submissions are still valid when received
    old = submissions.unrooted(connection, without, received_before=at - accountable)
    return [
        row
        for row in old
        if not answered_for(
            rooted_at=int(at),
            valid_until=row.signed().submission.valid_until,
            accountable=accountable,
        )
    ]


def never_rooted(
    connection: Connection, context: PoolContext, chain_time: int, without: Collection[Address]
) -> list[SubmissionRow]:
    """Returns the unrooted submissions that will never get a root: one epoch has passed since the
    last block in which their nodes could have rooted them."""
    return _too_late(connection, context, chain_time - context.run.epoch_seconds, without)


def void_unrooted(
    store: Store,
    context: PoolContext,
    now: Callable[[], float],
    without: Collection[Address] = (),
) -> int:
    """Voids the accepted and pending submissions that are `never_rooted`; returns how many. This is
    the pool's fault: the node is neither paid nor punished, and is notified. Rejected ones stay
    rejected, and their slashes are dropped (slashing.drop_expired)."""
    with store.begin() as connection:
        clock = chain_clock(connection)
        if clock is None:
            return 0
        late = never_rooted(connection, context, clock.time, without)
        ending = [row.digest for row in late if row.status in _UNPUNISHED]
        for digest in lock_files(connection, ending) if ending else ():
            void(connection, digest, Reason.UNROOTED, now(), of=_UNPUNISHED)
        return len(ending)


def _write(
    connection: Connection,
    root: Digest,
    leaves_object: Digest,
    digests: Sequence[Digest],
    now: float,
) -> bool:
    """Writes a root and queues its intent. Returns False if a submission got a root meanwhile."""
    if not roots.add(connection, root, leaves_object, digests, now=now):
        return False
    queue_intent(
        connection,
        kind="root",
        key=root,
        payload={"root": root, "count": len(digests), "leaves_object": leaves_object},
        now=now,
    )
    return True
