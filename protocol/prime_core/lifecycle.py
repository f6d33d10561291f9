"""Lifecycles as pure functions: `step(state, event, now) -> (state, effects)`.

    Nodes:   admitted → active ⇄ silent;  any → quarantined → ejected | active;  any → left
             shadow, without a seat: heartbeats only, until it is admitted
    Leases:  open → submitted;  open → expired

An event that does not apply to the state is ignored, so events may be delivered twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from prime_core.node import NodeStatus
from prime_core.task import LeaseStatus

NodeEventKind = Literal[
    "joined", "heartbeat", "tick", "rejected", "slash_confirmed", "slash_cancelled", "left"
]
LeaseEventKind = Literal["submitted", "tick"]
NodeEffect = Literal["release_leases", "stop_node"]


@dataclass(frozen=True)
class NodeState:
    """`last_heartbeat` is in seconds, by the orchestrator's clock."""

    status: NodeStatus
    last_heartbeat: float


def step_node(
    state: NodeState,
    event: NodeEventKind,
    now: float,
    *,
    death_seconds: float,
    orchestrator_up_since: float,
) -> tuple[NodeState, tuple[NodeEffect, ...]]:
    """Applies one event to a node. Silence counts only while the orchestrator itself was up."""
    if state.status in ("ejected", "left"):
        return state, ()
    match event:
        case "joined":
            if state.status == "admitted":
                return NodeState("active", now), ()
        case "heartbeat":
            status: NodeStatus = "active" if state.status == "silent" else state.status
            return NodeState(status, now), ()
        case "tick":
            last_seen = max(state.last_heartbeat, orchestrator_up_since)
            if state.status == "active" and now - last_seen > death_seconds:
                return replace(state, status="silent"), ("release_leases",)
        case "rejected":
            if state.status != "quarantined":
                return replace(state, status="quarantined"), ("release_leases",)
        case "slash_confirmed":
            return replace(state, status="ejected"), ("release_leases", "stop_node")
        case "slash_cancelled":
            if state.status == "quarantined":
                return replace(state, status="active"), ()
        case "left":
            return replace(state, status="left"), ("release_leases",)
    return state, ()


@dataclass(frozen=True)
class LeaseState:
    """`deadline` in Unix seconds."""

    status: LeaseStatus
    deadline: float


def step_lease(state: LeaseState, event: LeaseEventKind, now: float) -> LeaseState:
    """Applies one event to a lease. What becomes of a submitted file is the submission's status."""
    if state.status == "open":
        if event == "submitted" and now <= state.deadline:
            return replace(state, status="submitted")
        if event == "tick" and now > state.deadline:
            return replace(state, status="expired")
    return state
