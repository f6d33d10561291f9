"""A node at work while its pool's run is revised may decline the revision. The node of
tests/e2e/test_docs.py accepts one and loses no file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_world import NodeWorld, node_world, run_definition, until

from prime_core.errors import PolicyError, UnavailableError
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_node.revisions import Revisions
from prime_orchestrator.store import leases as store_leases
from prime_orchestrator.store import lock, runs
from prime_orchestrator.store.runs import RunRow


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NodeWorld]:
    """A served pool of short batches: nine leases reach over three steps."""
    with node_world(tmp_path, groups_per_batch=4, groups_per_lease=2) as served:
        yield served


def revise(world: NodeWorld) -> tuple[int, RunDefinition]:
    """A revision of price and task, final on chain at once, from the first step that is not leased
    yet; that step and the revision."""
    first = world.backend.context.run
    task = first.task.model_copy(update={"memory_mb": first.task.memory_mb + 1})
    later = first.model_copy(update={"price_per_unit": 5, "task": task})
    with world.store.begin() as connection:
        lock(connection, "leases")
        leased = store_leases.highest_step(connection)
        assert leased is not None
        step = leased + 1
        row = RunRow(step, later.digest(), later.raw(), final=True, announced_at=time.time())
        runs.add(connection, row)
    return step, later


def leases(world: NodeWorld) -> list[tuple[SignedLease, str]]:
    """Every lease that was given and what became of it."""
    return [(SignedLease.model_validate_json(row["body"]), row["status"]) for row in world.leases()]


def working(world: NodeWorld, *flags: str) -> None:
    """Starts the agent and waits until it works on its first lease."""
    world.join("--throttle", "20", *flags)
    until(lambda: world.node_status() == "admitted", "the node solved its challenge")
    world.admit()
    until(world.leases, "a lease is taken")


def test_a_revision_that_never_becomes_ready_holds_up_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A manager corrects the image of a revision by another revision."""
    monkeypatch.setattr("prime_node.revisions.FIRST_PAUSE", 0.01)
    first, wrong, right = (run_definition(name=name) for name in ("first", "wrong", "right"))
    runs = {run.digest(): run for run in (wrong, right)}

    def prepare(run: RunDefinition) -> None:
        if run is wrong:
            raise UnavailableError("the registry has no such image")

    revisions = Revisions(first, fetch=runs.__getitem__, check=lambda run: None, prepare=prepare)
    revisions.received(wrong.digest())
    revisions.received(right.digest())
    revisions.start()
    until(lambda: revisions.get(right.digest()), "the later revision is taken")
    assert revisions.get(wrong.digest()) is None
    revisions.stop(10)
    assert not revisions.thread.is_alive()


@pytest.mark.slow
def test_a_node_whose_owner_declines_a_revision_drains_and_ends_without_penalty(
    world: NodeWorld,
) -> None:
    working(world, "--min-price", str(world.backend.context.run.price_per_unit))
    _, later = revise(world)
    agent = world.agents[-1]
    assert until(lambda: agent.poll() is not None, "it drains and ends")
    assert agent.returncode == PolicyError.exit_code
    assert "less than --min-price" in world.log()
    assert "prime-node leave" in world.log()
    given = leases(world)
    assert given
    assert {status for _, status in given} == {"submitted"}
    assert later.digest() not in {signed.lease.run_digest for signed, _ in given}
    assert world.node_status() != "quarantined"
