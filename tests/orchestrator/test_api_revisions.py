"""A run is revised in a running pool: who may, from which step, and what leases say meanwhile."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from orchestrator_world import MakeWorld, Session, World, signer

from prime_chain.contracts import Contracts
from prime_chain.networks import LOCAL
from prime_core.messages import HeartbeatAnswer, LeaseAnswer, LeaseRequest, RevisionRequest
from prime_core.run import RunDefinition
from prime_orchestrator.manager import revisions, transactions
from prime_orchestrator.store import intents, runs


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    made = make_world()
    made.publish(0)
    return made


def revised(world: World, **changes: Any) -> RunDefinition:
    return world.backend.context.run.model_copy(update={"price_per_unit": 20, **changes})


def revise(world: World, run: RunDefinition, from_step: int, who: Session | None = None) -> Any:
    session = who or world.login(world.manager, "manager")
    body = RevisionRequest(run=run.raw().decode(), from_step=from_step)
    return world.post("/v1/revisions", body, session)


def final(world: World, run: RunDefinition, from_step: int, *, depth: int = 10**9) -> None:
    """The chain shows the revision; its final block is `depth`."""
    world.on_chain("RunRevised", pool=1, run_digest=run.digest(), from_step=from_step)
    block = SimpleNamespace(number=depth)
    client: Any = SimpleNamespace(agreed_block=lambda _: block, network=LOCAL)
    contracts: Any = SimpleNamespace(client=client)
    revisions.settle_revisions(world.backend.store, contracts)


def ask(world: World, session: Session, *taken: RunDefinition) -> LeaseAnswer:
    wish = LeaseRequest(policy_version=0, runs=tuple(run.digest() for run in taken))
    return LeaseAnswer.model_validate_json(world.post("/v1/leases", wish, session).content)


def test_leases_of_a_revised_step_wait_for_the_chain_and_then_name_the_revision(
    world: World,
) -> None:
    first, later = world.backend.context.run, revised(world)
    held = world.lease(world.member(1))
    assert held.lease.step == 0
    made = revise(world, later, 1)
    assert made.json() == {"run_digest": later.digest(), "from_step": 1, "final": False}
    assert revise(world, later, 1).json() == made.json(), "the same one may come twice"
    with world.backend.store.read() as connection:
        intent = intents.get(connection, f"revise:1:{later.digest()}")
        assert intent is not None
        contracts = SimpleNamespace(pools=SimpleNamespace(revise=lambda *call: call))
        call = transactions.build_call(
            connection,
            world.backend.context,
            contracts,
            intent.kind,
            intent.arguments(),  # type: ignore[arg-type]
        )
        assert call == (1, later.digest(), 1)  # type: ignore[comparison-overlap]
    leases = [ask(world, world.member(number)) for number in range(2, 6)]
    assert [one.lease.lease.run_digest for one in leases if one.lease] == [first.digest()] * 2
    assert "not final on chain" in leases[-1].reason
    final(world, later, 1, depth=0)
    assert ask(world, world.login(signer(5))).lease is None, "its block is not final"
    final(world, later, 1)
    given = ask(world, world.login(signer(5))).lease
    assert given is not None
    assert (given.lease.step, given.lease.run_digest) == (1, later.digest())
    again = world.lease(world.login(signer(1)))
    assert again == held, "a lease that was given keeps its revision"
    listed = world.http.get("/v1/runs").json()
    assert listed["first"] == first.digest()
    assert listed["revisions"] == [{"run_digest": later.digest(), "from_step": 1, "final": True}]
    assert world.http.get(f"/v1/runs/{later.digest()}").content == later.raw()
    assert world.http.get("/v1/run").content == first.raw()


def test_a_node_gets_no_lease_of_a_run_that_it_does_not_take(world: World) -> None:
    first, later = world.backend.context.run, revised(world)
    node = world.member(1)
    beat = world.post("/v1/heartbeat", b'{"policy_version":0}', node).content
    assert HeartbeatAnswer.model_validate_json(beat).run_digest == first.digest()
    assert revise(world, later, 1).status_code == 200
    beat = world.post("/v1/heartbeat", b'{"policy_version":0}', node).content
    assert HeartbeatAnswer.model_validate_json(beat).run_digest == later.digest(), "announced early"
    final(world, later, 1)
    for number in range(2, 5):
        assert ask(world, world.member(number), first).lease is not None
    declining = ask(world, node, first)
    assert (declining.lease, declining.run_digest) == (None, later.digest())
    taking = ask(world, node, first, later)
    assert taking.lease is not None
    assert taking.lease.lease.run_digest == later.digest()


def test_what_cannot_be_revised_and_who_cannot_revise(world: World) -> None:
    later = revised(world)
    stranger = world.login(world.trainer, "trainer")
    assert revise(world, later, 5, stranger).status_code == 403
    grant = world.grant(Session(world.trainer), "manager")
    assert world.post("/v1/sessions", grant).status_code == 403
    fixed = revise(world, revised(world, stake_per_seat=1, validity_seconds=5), 5)
    assert fixed.status_code == 403
    assert "stake_per_seat, validity_seconds" in fixed.json()["detail"]
    assert world.lease(world.member(1)).lease.step == 0
    leased = revise(world, later, 0)
    assert leased.status_code == 409
    text = json.loads(later.raw()) | {"prize": 1}
    odd = RevisionRequest(run=json.dumps(text), from_step=5)
    manager = world.login(world.manager, "manager")
    refused = world.post("/v1/revisions", odd, manager)
    assert refused.status_code == 400
    assert "prize" in refused.json()["detail"]
    assert revise(world, later, 5).status_code == 200
    before = revise(world, revised(world, price_per_unit=9), 4)
    assert before.status_code == 409
    assert "after step 5" in before.json()["detail"]


def test_a_revision_that_the_chain_refused_is_forgotten(world: World) -> None:
    later = revised(world)
    assert revise(world, later, 1).status_code == 200
    with world.backend.store.begin() as connection:
        intents.fail(connection, f"revise:1:{later.digest()}", "no", now=1.0)
    revisions.settle_revisions(world.backend.store, Contracts.__new__(Contracts))
    with world.backend.store.read() as connection:
        assert runs.every(connection) == []
        assert revisions.waits_for(connection, 9) == ""
    assert revise(world, later, 1).status_code == 200, "the cause may be gone"
    revisions.settle_revisions(
        world.backend.store,
        SimpleNamespace(client=None),  # type: ignore[arg-type]
    )
    with world.backend.store.read() as connection:
        assert [row.digest for row in runs.every(connection)] == [later.digest()]
        intent = intents.get(connection, f"revise:1:{later.digest()}")
        assert intent is not None
        assert intent.status == "waiting"


def test_no_lease_is_given_for_a_step_whose_run_is_not_here(world: World) -> None:
    later = revised(world)
    world.on_chain("RunRevised", pool=1, run_digest=later.digest(), from_step=1)
    answers = [ask(world, world.member(number)) for number in range(1, 5)]
    assert [one.lease is not None for one in answers] == [True, True, True, False]
    assert "orchestrator run revise" in answers[-1].reason
    assert revise(world, later, 1).status_code == 200, "the operator gives the file again"
    with world.backend.store.read() as connection:
        assert intents.get(connection, f"revise:1:{later.digest()}") is None, "it is on chain"
    final(world, later, 1)
    given = ask(world, world.login(signer(4))).lease
    assert given is not None
    assert given.lease.run_digest == later.digest()
