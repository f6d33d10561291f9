"""Slashes for rejected files: what to propose and when to execute.

`decide` and `expired` are pure. `queue_slash` writes inside the verdict's transaction. The tick
queues proposals whose window is over. Only the chain's events confirm a slash (see indexer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prime_core.ids import Address, Digest
from prime_core.logs import fields
from prime_core.run import RunDefinition
from prime_core.verdict import Outcome, Reason
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import suspicion
from prime_orchestrator.manager.roots import never_rooted
from prime_orchestrator.manager.settlement import CHAIN_LOCK, chain_clock, refresh_credits
from prime_orchestrator.store import Connection, nodes, slashes
from prime_orchestrator.store.engine import Store, lock, on_commit
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.slashes import SlashRow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlashOrder:
    """A slash to propose. `amount` in wei; the contract caps it at the available stake."""

    reason: Reason
    amount: int


def decide(reason: Reason, run: RunDefinition) -> SlashOrder | None:
    """Returns the slash for a verdict, or None: only rejections are slashed, and only if the run
    slashes."""
    if reason.outcome is not Outcome.REJECTED or run.slash_amount == 0:
        return None
    return SlashOrder(reason, run.slash_amount)


def expired(posted_at: int, validity_seconds: int, chain_time: int) -> bool:
    """Whether a leaf of a root posted at `posted_at` can no longer be proposed for a slash."""
    return chain_time > posted_at + validity_seconds


def queue_slash(
    connection: Connection,
    *,
    submission: Digest,
    node: Address,
    validator: Address,
    evidence: Digest,
    order: SlashOrder,
    now: float,
) -> None:
    """Writes the slash and queues the manager's `propose` intent, once per submission.
    `validator` is the account that stated the evidence.

    The intent waits until the submission's root is confirmed and the pool's quorum agrees.
    """
    row = SlashRow(
        submission_digest=submission,
        node=node,
        validator=validator,
        evidence=evidence,
        reason=int(order.reason),
        amount=str(order.amount),
        status="queued",
        created_at=now,
    )
    slashes.add(connection, row)
    about = fields(kind="slash", status="queued", submission=submission, node=node,
                   reason=order.reason.name)  # fmt: skip
    on_commit(
        connection, log.warning, "the slash of %s for submission %s is queued", node, submission,
        extra=about,
    )  # fmt: skip
    queue_intent(
        connection,
        kind="propose",
        key=submission,
        payload={"submission_digest": submission},
        now=now,
    )


def queue_executions(store: Store, context: PoolContext, now: Callable[[], float]) -> list[Digest]:
    """Queues `execute` for every proposal whose window is over, but not for those that rest on a
    suspect class; returns the submissions. Anyone may execute a proposal."""
    with store.read() as connection:
        clock = chain_clock(connection)
        if clock is None:
            return []
        over = slashes.executable(connection, clock.time)
        due = [leaf for leaf in over if suspicion.may_execute(connection, context, leaf)]
    if not due:
        return []
    with store.begin() as connection:
        for leaf in due:
            queue_intent(
                connection,
                kind="execute",
                key=leaf,
                payload={"submission_digest": leaf},
                now=now(),
            )
    return due


def drop_expired(
    store: Store,
    context: PoolContext,
    now: Callable[[], float],
    without: Collection[Address] = (),
) -> list[Digest]:
    """Cancels slashes that were not proposed within their leaf's validity, or whose leaf is not on
    chain and never will be (except for the nodes in `without`). Returns the submissions.

    Held credits are released, because nothing was proven on chain. The manager ejects the node
    without touching its stake, because its file was still rejected.
    """
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)  # the indexer stores proposals
        clock = chain_clock(connection)
        if clock is None:
            return []
        validity = context.run.validity_seconds
        never = {row.digest for row in never_rooted(connection, context, clock.time, without)}
        late = [
            (submission, node)
            for submission, node, posted_at in slashes.queued(connection)
            if submission in never
            or (posted_at is not None and expired(posted_at, validity, clock.time))
        ]
        for submission, node in late:
            slash = slashes.get(connection, submission)
            about = fields(
                kind="slash", status="cancelled", submission=submission, node=node,
                reason=Reason(slash.reason if slash is not None else Reason.NONE).name,
            )  # fmt: skip
            on_commit(
                connection, log.error, "the slash for %s was not proposed in time; ejecting %s",
                submission, node, extra=about,
            )  # fmt: skip
            slashes.change(connection, submission, status="cancelled")
            refresh_credits(connection, node)
            row = nodes.get(connection, node)
            if row is None or row.status in ("ejected", "left"):
                continue
            queue_intent(
                connection,
                kind="eject",
                key=f"{node}:{submission}",
                payload={"node": node},
                now=now(),
            )
        return [submission for submission, _ in late]
