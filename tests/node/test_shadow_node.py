"""`prime-node join --shadow`: works for verdicts without a seat, and never risks one."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from command import prime_node
from node_world import NODE, NodeWorld, until

from prime_core.errors import UntrustedError
from prime_core.ids import Digest
from prime_core.node import Hardware
from prime_core.task import shadow_pool
from prime_node.api import NodeApi
from prime_node.config import Settings
from prime_node.overview import overview
from prime_orchestrator.store import nodes, submissions


def status(world: NodeWorld) -> dict[str, Any]:
    settings = Settings(data=world.folder / "node", orchestrator=world.url)
    return overview(settings)


@pytest.mark.slow
def test_a_shadow_node_works_without_chain_or_seat_and_shows_its_verdicts(
    world: NodeWorld,
) -> None:
    agent = world.join("--shadow")
    until(lambda: world.submissions(), "a file is handed in")
    assert world.node_status() == "shadow"
    submission = world.submissions()[0]
    assert submission["shadow"]
    assert json.loads(submission["body"])["submission"]["pool"] == shadow_pool(
        world.backend.context.pool
    )
    with world.backend.store.begin() as connection:
        submissions.change(
            connection, Digest(submission["digest"]), status="accepted", units=7,
            judged_at=world.backend.now(),
        )  # fmt: skip
    until(lambda: "1 accepted" in status(world).get("verdicts", ""), "its status shows the verdict")
    assert status(world)["seat"] == "none (shadow): nothing at stake, nothing paid"
    assert "no stake, no pay, no slash" in world.log()
    agent.terminate()
    assert agent.wait(120) == 0
    listed = prime_node("status", "--data", str(world.folder / "node"))
    assert "shadow" in listed.stdout


@pytest.mark.slow
def test_a_shadow_agent_whose_node_has_a_seat_ends_and_says_what_to_do(world: NodeWorld) -> None:
    first = world.join()
    until(lambda: world.node_status() == "admitted", "it solved its challenge")
    first.terminate()
    assert first.wait(120) == 0
    world.admit()
    agent = world.join("--shadow")
    assert agent.wait(120) == 77
    assert "would put its stake at risk" in world.log()
    assert not world.leases()


@pytest.mark.parametrize("in_shadow", [True, False])
def test_neither_agent_takes_the_others_lease(world: NodeWorld, in_shadow: bool) -> None:
    """A shadow node works for no pool and a paid one for its own, even if others are signed."""
    with world.backend.store.begin() as connection:
        nodes.admit(
            connection, NODE.address, speed_class=1,
            hardware=Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=()),
            runtime="process", now=world.backend.now(),
        )  # fmt: skip
        kind = "shadow" if in_shadow else "active"
        nodes.set_status(connection, NODE.address, kind, last_heartbeat=world.backend.now())
    right = NodeApi(world.url, NODE, shadow=in_shadow)
    wrong = NodeApi(world.url, NODE, shadow=not in_shadow)
    known = NodeApi(world.url, NODE, shadow=in_shadow, manager=NODE.address)
    try:
        given = right.lease(0).lease
        assert given is not None
        assert given.lease.shadow == in_shadow
        with pytest.raises(UntrustedError):
            wrong.lease(0)
        with closing(known.another()) as another, pytest.raises(UntrustedError):
            another.lease(0)  # the manager that the orchestrator names is not the one that it knows
    finally:
        for one in (right, wrong, known):
            one.close()
