"""A node's membership in the pool, derived from the chain and applied to its lifecycle.

The chain owns membership and `lifecycle.step_node` decides transitions; this module collects the
facts and writes the result. Like everything the indexer derives, a node's row is recomputed from
the stored events.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from prime_core.ids import Address
from prime_core.lifecycle import NodeEventKind, NodeState, step_node
from prime_core.logs import fields
from prime_core.run import RunDefinition
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.settlement import chain_clock
from prime_orchestrator.manager.standing import expire
from prime_orchestrator.store import (
    Connection,
    chain,
    leases,
    nodes,
    on_commit,
    slashes,
    submissions,
)
from prime_orchestrator.store.chain import EventRow
from prime_orchestrator.store.nodes import NodeRow

log = logging.getLogger(__name__)

MEMBERSHIP_EVENTS = ("NodeJoined", "NodeLeft", "NodeEjected")


def derive_node(connection: Connection, context: PoolContext, node: Address, now: float) -> None:
    """Updates a node's status from its membership on chain and its open slashes.

    Changes go through `lifecycle.step_node`; only a retraction moves a node backwards.
    """
    row = nodes.lock_row(connection, node)
    if row is None:
        return
    standing, joined = membership(connection, node)
    if joined is not None:
        args = joined.arguments()
        nodes.set_member(connection, node, provider=Address(args["provider"]))
    open_slash = slashes.has_open(connection, node)
    if standing == "member" and row.status in ("ejected", "left"):  # rejoined, or exit retracted
        status = "quarantined" if open_slash else "active"
        log_change(connection, row, status, "member again")
        nodes.set_status(connection, node, status, last_heartbeat=now)  # type: ignore[arg-type]
        return
    if standing == "none":
        if row.status in ("active", "silent", "ejected", "left"):  # the join was retracted
            log_change(connection, row, "admitted", "the join was retracted")
            nodes.set_status(connection, node, "admitted", last_heartbeat=row.last_heartbeat)
        return
    event: NodeEventKind | None = None
    if standing == "ejected":
        event = "slash_confirmed"
    elif standing == "left" and row.status != "admitted":
        event = "left"
    elif standing == "member" and row.status == "admitted":
        event = "joined"
    elif standing == "member" and row.status == "quarantined" and not open_slash:
        event = "slash_cancelled"
    elif standing == "member" and row.status in ("active", "silent") and open_slash:
        event = "rejected"
    if event is not None:
        apply_node_event(connection, context, node, event, now)


def membership(connection: Connection, node: Address) -> tuple[str, EventRow | None]:
    """Returns `node`'s membership according to the stored events ("none", "member", "left" or
    "ejected"), and the NodeJoined event it is based on (None unless it is a member)."""
    found = [
        event
        for name in MEMBERSHIP_EVENTS
        for event in chain.events(connection, name, subject=node)
    ]
    if not found:
        return "none", None
    last = max(found, key=lambda e: (e.block, e.log_index))
    if last.name == "NodeJoined":
        return "member", last
    return ("left" if last.name == "NodeLeft" else "ejected"), None


def provider_of(connection: Connection, node: Address) -> Address | None:
    """Returns the node's provider in the registry as of the last block read, or None."""
    provider = chain.state(connection, "provider", node)
    return None if provider is None else Address(provider)


@dataclass(frozen=True)
class Coverage:
    """What bounds providers' slots: stake in wei by provider, and work that may still be rejected
    by node (submissions.at_risk)."""

    stakes: Mapping[Address, int]
    at_risk: Mapping[Address, tuple[int, int, int]]

    @classmethod
    def read(
        cls, connection: Connection, run: RunDefinition, among: Collection[NodeRow]
    ) -> Coverage | None:
        """Reads it for every provider of these nodes; None if the run sets no bound."""
        if not run.risk_factor_micro:
            return None
        clock = chain_clock(connection)
        valid_since = (clock.time if clock else 0) - run.validity_seconds
        providers = {node.provider for node in among if node.provider is not None}
        return cls(
            active_stakes(connection, providers),
            submissions.at_risk(connection, {node.address for node in among}, valid_since),
        )

    def slots(self, run: RunDefinition, own: Sequence[NodeRow]) -> int:
        """Returns how many leases the provider of these nodes may hold open."""
        stake = sum(self.stakes.get(one, 0) for one in {n.provider for n in own} if one is not None)
        risks = [self.at_risk.get(node.address, (0, 0, 0)) for node in own]
        unjudged, units, prompts = (sum(risk[at] for risk in risks) for at in range(3))
        left = run.covered(stake) - run.worth(units, prompts)
        return max(0, left // max(1, run.most_worth) - unjudged)


def active_stake(connection: Connection, provider: Address) -> int:
    """Returns the provider's `StakeVault.active` in wei as of the last block read: bonded stake
    minus stake held for slashes."""
    return active_stakes(connection, {provider}).get(provider, 0)


def active_stakes(connection: Connection, providers: Collection[Address]) -> dict[Address, int]:
    """Returns `active_stake` of the given providers that ever had stake."""
    found = {}
    for provider, value in chain.states(connection, "stake", providers).items():
        bonded, held = value.split()
        found[provider] = max(0, int(bonded) - int(held))
    return found


def slashed_sibling(connection: Connection, node: Address) -> Address | None:
    """Returns a node with an open slash whose provider, now or when it joined, is this node's;
    None if there is none. It prevents a provider that was caught from joining again under
    another key."""
    provider = provider_of(connection, node)
    return None if provider is None else slashes.open_of_provider(connection, provider)


def apply_node_event(
    connection: Connection, context: PoolContext, node: Address, event: NodeEventKind, now: float
) -> None:
    """Applies one lifecycle event to the node, with its effects on leases. Ignores unknown nodes.

    The effect `stop_node` needs no action here: the answer to the next heartbeat carries it.
    """
    row = nodes.lock_row(connection, node)
    if row is None:
        return
    state, effects = step_node(
        NodeState(row.status, row.last_heartbeat),
        event,
        now,
        death_seconds=context.run.death_seconds,
        orchestrator_up_since=0.0,
    )
    if state.status != row.status:
        log_change(connection, row, state.status, event)
    nodes.set_status(connection, node, state.status, last_heartbeat=row.last_heartbeat)
    if "release_leases" in effects:
        for lease in leases.lock_open(connection, node):
            expire(connection, lease, context.run.lease_seconds, excused=event != "left")


def log_change(connection: Connection, before: NodeRow, status: str, why: str) -> None:
    """Logs at the commit that a node's status changed from that of its row."""
    about = fields(kind="node", node=before.address, status=status, reason=why)
    on_commit(
        connection, log.info, "node %s: %s → %s (%s)",
        before.address, before.status, status, why, extra=about,
    )  # fmt: skip
