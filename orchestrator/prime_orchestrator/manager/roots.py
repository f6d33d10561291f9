"""Posts work roots: every submission becomes a leaf on chain, every N submissions or T seconds.

    received ──► root   while the node is still accountable for it (core.settlement.answered_for)
             └──► void   afterwards: it could not be paid, so no transaction is sent for it

The list of leaves is published as an object first. One transaction then writes the root, marks its
submissions and queues the intent. The indexer records the chain's confirmation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, select, update
from sqlalchemy.engine import Connection, Row

from prime_core import encoding
from prime_core.errors import FatalError
from prime_core.ids import Address, Digest
from prime_core.rollout import SignedSubmission, encode_leaves
from prime_core.settlement import answered_for
from prime_core.storage.base import ObjectStore, put_object
from prime_core.task import LeaseStatus
from prime_core.verdict import Reason
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.settlement import CHAIN_LOCK, chain_clock
from prime_orchestrator.manager.voids import void
from prime_orchestrator.store.engine import Store, lock
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.schema import roots, submissions

log = logging.getLogger(__name__)

_UNPUNISHED: tuple[LeaseStatus, ...] = ("submitted", "accepted")


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
        unrooted = connection.execute(
            select(submissions.c.digest, submissions.c.body, submissions.c.received_at)
            .where(_unrooted(without))
            .order_by(submissions.c.received_at, submissions.c.digest)
            .limit(len(late) + run.root_submissions)
        ).all()
    waiting = [row for row in unrooted if row.digest not in late][: run.root_submissions]
    due = root_is_due(
        [row.received_at for row in waiting],
        now,
        root_submissions=run.root_submissions,
        root_seconds=run.root_seconds,
    )
    if not due:
        return None
    leaves = [SignedSubmission.model_validate_json(row.body) for row in waiting]
    digests = [Digest(row.digest) for row in waiting]
    root = encoding.merkle_root(digests)
    leaves_object = put_object(objects, encode_leaves(leaves))
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)  # the indexer assigns roots to leaves posted by nodes
        free = select(func.count()).where(
            submissions.c.digest.in_(digests), submissions.c.root_id.is_(None)
        )
        if connection.execute(free).scalar_one() != len(digests):
            return None  # the next round takes those still waiting
        _write(connection, context, root, leaves_object, digests, now)
    log.info("work root %s over %d submissions is queued", root, len(digests))
    return root


def _unrooted(without: Collection[Address]) -> ColumnElement[bool]:
    return and_(
        submissions.c.root_id.is_(None),
        submissions.c.shadow.is_(False),
        submissions.c.node.not_in(without),
        submissions.c.reason != int(Reason.UNROOTED),
    )


def _too_late(
    connection: Connection, context: PoolContext, at: float, without: Collection[Address]
) -> list[Row[Any]]:
    """Returns the unrooted submissions that no stake would be accountable for if rooted at `at`."""
    accountable = context.deployment.periods.accountable
    old = connection.execute(  # submissions are still valid when received
        select(submissions).where(_unrooted(without), submissions.c.received_at < at - accountable)
    )
    return [
        row
        for row in old
        if not answered_for(
            rooted_at=int(at),
            valid_until=SignedSubmission.model_validate_json(row.body).submission.valid_until,
            accountable=accountable,
        )
    ]


def never_rooted(
    connection: Connection, context: PoolContext, chain_time: int, without: Collection[Address]
) -> list[Row[Any]]:
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
        ended = 0
        for row in never_rooted(connection, context, clock.time, without):
            if row.status in _UNPUNISHED:
                void(connection, row.digest, Reason.UNROOTED, now(), of=_UNPUNISHED)
                ended += 1
        return ended


def _write(
    connection: Connection,
    context: PoolContext,
    root: Digest,
    leaves_object: Digest,
    digests: Sequence[Digest],
    now: float,
) -> None:
    inserted = connection.execute(
        insert(roots).values(
            root=root, leaves_object=leaves_object, count=len(digests), created_at=now
        )
    )
    key = inserted.inserted_primary_key
    assert key is not None
    for index, digest in enumerate(digests):
        taken = connection.execute(
            update(submissions)
            .where(and_(submissions.c.digest == digest, submissions.c.root_id.is_(None)))
            .values(root_id=key[0], leaf_index=index)
        )
        if taken.rowcount != 1:
            raise FatalError(f"submission {digest} was taken into another root meanwhile")
    queue_intent(
        connection,
        kind="root",
        key=root,
        payload={"root": root, "count": len(digests), "leaves_object": leaves_object},
        now=now,
    )


def proof_of(connection: Connection, submission: Digest) -> tuple[int, list[Digest]] | None:
    """Returns the sequence number of the confirmed root that holds `submission`, and its Merkle
    proof; None while no such root is confirmed."""
    row = connection.execute(
        select(roots.c.id, roots.c.chain_seq, submissions.c.leaf_index)
        .join(submissions, submissions.c.root_id == roots.c.id)
        .where(submissions.c.digest == submission, roots.c.chain_seq.is_not(None))
    ).first()
    if row is None:
        return None
    leaves = connection.execute(
        select(submissions.c.digest)
        .where(submissions.c.root_id == row.id)
        .order_by(submissions.c.leaf_index)
    ).scalars()
    proof = encoding.merkle_proof([Digest(leaf) for leaf in leaves], row.leaf_index)
    return int(row.chain_seq), proof
