"""Heartbeats and their answers, and the passing of time over nodes and leases."""

from __future__ import annotations

import logging

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.lifecycle import NodeState, step_node
from prime_core.messages import Directive, FileEnding, Heartbeat, HeartbeatAnswer
from prime_core.verdict import Reason
from prime_orchestrator.api import reach, shadow
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import revisions, speed, standing
from prime_orchestrator.store import (
    chain,
    challenges,
    leases,
    nodes,
    policies,
    row_marks,
    schema,
    sessions,
    submissions,
)
from prime_orchestrator.store.nodes import NodeRow

log = logging.getLogger(__name__)

MAX_ENDINGS = 16
ENDING_MARGIN_SECONDS = 60
"""A verdict's time is its validator's; told again within this margin, a node knows it already."""
GAP_SECONDS = 10.0
"""Ticks come every second; so long without one, and heartbeats may have been missed by us."""
RELAY_SECONDS = 120
"""A relay not heard of for so long is no longer named to nodes."""


def heartbeat(backend: Backend, account: Address, beat: Heartbeat) -> HeartbeatAnswer:
    """Notes that the node lives, and says what it should do next."""
    now, context = backend.now(), backend.context
    with backend.store.begin() as connection:
        node = nodes.lock_row(connection, account)
        if node is not None:
            state, _ = step_node(
                NodeState(node.status, node.last_heartbeat),
                "heartbeat",
                now,
                death_seconds=context.run.death_seconds,
                orchestrator_up_since=now,
            )
            nodes.set_status(connection, account, state.status, last_heartbeat=state.last_heartbeat)
            nodes.heard(
                connection,
                account,
                policy_version=beat.policy_version,
                tokens_per_second=beat.tokens_per_second,
                runtime=beat.runtime,
            )
            if state.status == "active":  # not a shadow's word: anyone may be one
                reach.note(connection, account, beat.policy_version, now=now)
            node = nodes.get(connection, account)
        directive, reason = _directive(connection, backend, account, node)
        relays = policies.relays(connection, since=now - RELAY_SECONDS)
        if beat.lied and node is not None:
            backend.lies.note(account, beat.lied, [relay.url for relay in relays])
        return HeartbeatAnswer(
            directive=directive,
            reason=reason,
            status=node.status if node is not None else "left",
            latest_version=policies.latest_version(connection),
            relays=tuple(relay.url for relay in relays),
            server_time=int(now),
            endings=_endings(connection, account, beat.heard_at),
            measure=node is not None and speed.wants_challenge(connection, node, now),
            run_digest=revisions.next_run(connection, backend.context).digest(),
        )


def _endings(connection: Connection, node: Address, heard_at: int) -> tuple[FileEnding, ...]:
    """The node's files that ended badly since it last heard, oldest first."""
    found = submissions.ended_badly(
        connection, node, since=heard_at - ENDING_MARGIN_SECONDS, limit=MAX_ENDINGS
    )
    return tuple(
        FileEnding(
            submission_digest=row.digest,
            lease_digest=row.lease_digest,
            status="rejected" if row.status == "rejected" else "void",
            reason=row.reason,
            detail=Reason(row.reason).sentence,
            judged_at=int(row.judged_at or 0),
        )
        for row in reversed(found)
    )


def _directive(
    connection: Connection, backend: Backend, account: Address, node: NodeRow | None
) -> tuple[Directive, str]:
    if chain.pool_ended(connection, backend.context.pool):
        return "stop", "the pool has ended"
    if node is None or node.status == "left":
        return "join", "the node is not admitted: ask for a challenge"
    match node.status:
        case "ejected":
            return "stop", "the node was ejected from the pool"
        case "quarantined":
            return "wait", "a file of this node was rejected and its slash is under way"
        case "admitted":
            return joining(connection, account)
        case _:
            return "work", ""


def joining(connection: Connection, account: Address) -> tuple[Directive, str]:
    """An admitted node waits for its membership, or joins anew if the attempt failed."""
    table = schema.intents.c
    newest = connection.execute(
        sa.select(table.status, table.error)
        .where(table.kind == "join", table.id.startswith(f"join:{account}:", autoescape=True))
        .order_by(table.created_at.desc())
        .limit(1)
    ).first()
    if newest is None or newest.status == "failed":
        why = newest.error if newest is not None else None
        return "join", f"joining on chain failed: {why}" if why else "the node is not admitted"
    return "wait", "the membership is not yet seen on chain"


class LifeTicks:
    """Silence and deadlines. A node's silence counts only from when this orchestrator came up, and
    anew after each gap between ticks (no database, a machine asleep, another orchestrator's turn):
    our downtime counts against nobody."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._up_since = self._ticked_at = backend.now()

    def tick(self) -> None:
        """Ends what has run out: silent nodes, overdue leases, old nonces and challenges."""
        backend, now = self._backend, self._backend.now()
        if now - self._ticked_at > GAP_SECONDS:
            self._up_since = now
        with backend.store.begin() as connection:
            for node in nodes.every(connection, ("active",)):
                state, _ = step_node(
                    NodeState(node.status, node.last_heartbeat),
                    "tick",
                    now,
                    death_seconds=backend.context.run.death_seconds,
                    orchestrator_up_since=self._up_since,
                )
                if state.status != node.status:
                    log.info("node %s is silent; its leases no longer count", node.address)
                    nodes.set_status(
                        connection, node.address, state.status, last_heartbeat=node.last_heartbeat
                    )
            for lease in leases.overdue(connection, now):
                standing.expire(
                    connection,
                    lease,
                    backend.context.run.lease_seconds,
                    excused=lease.created_at < self._up_since,
                )
            sessions.forget(connection, now)
            challenges.forget(connection, now)
            nodes.forget_shadows(connection, now - shadow.FORGOTTEN_AFTER)
            row_marks.forget(connection, now)
            policies.forget_relays(connection, now - 10 * RELAY_SECONDS)
        self._ticked_at = now
