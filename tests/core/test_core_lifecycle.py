"""Lifecycles: downtime never burns stake, an ending is an ending, events may come twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prime_core.lifecycle import LeaseState, NodeState, step_lease, step_node

NODE_EVENTS = st.sampled_from(
    ["joined", "heartbeat", "tick", "rejected", "slash_confirmed", "slash_cancelled", "left"]
)
LEASE_EVENTS = st.sampled_from(["submitted", "tick"])


def _run(events: list[str], up_since: float = 0.0) -> NodeState:
    state = NodeState("admitted", 0.0)
    for now, event in enumerate(events):
        state, _ = step_node(
            state,
            event,  # type: ignore[arg-type]
            float(now * 20),
            death_seconds=60,
            orchestrator_up_since=up_since,
        )
    return state


@given(st.lists(NODE_EVENTS.filter(lambda e: e not in ("slash_confirmed", "left"))))
def test_only_a_confirmed_slash_ejects(events: list[str]) -> None:
    assert _run(events).status not in ("ejected", "left")


@given(st.lists(NODE_EVENTS), st.lists(NODE_EVENTS))
def test_an_ejected_node_stays_ejected(before: list[str], after: list[str]) -> None:
    events = [e for e in before if e != "left"]
    assert _run([*events, "slash_confirmed", *after]).status == "ejected"


@given(st.lists(st.sampled_from(["joined", "heartbeat", "tick"])))
def test_silence_alone_never_quarantines(events: list[str]) -> None:
    assert _run(events).status in ("admitted", "active", "silent")


def test_the_orchestrators_own_downtime_counts_against_no_node() -> None:
    state = NodeState("active", 0.0)
    kept, _ = step_node(state, "tick", 1000.0, death_seconds=60, orchestrator_up_since=990.0)
    dead, effects = step_node(state, "tick", 1000.0, death_seconds=60, orchestrator_up_since=0.0)
    assert kept.status == "active"
    assert (dead.status, effects) == ("silent", ("release_leases",))


@given(st.lists(LEASE_EVENTS), LEASE_EVENTS)
def test_a_lease_ends_once(events: list[str], last: str) -> None:
    state = LeaseState("open", 2.0)
    ended: set[str] = set()
    for now, event in enumerate([*events, last, last]):
        state = step_lease(state, event, float(now))  # type: ignore[arg-type]
        if state.status != "open":
            ended.add(state.status)
    assert len(ended) <= 1
    assert bool(ended) == (state.status != "open")


def test_a_late_submission_is_not_taken() -> None:
    assert step_lease(LeaseState("open", 50.0), "submitted", 51.0).status == "open"
