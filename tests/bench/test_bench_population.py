"""The simulated population: rates come from recorded results; a small pool works and catches."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import population, population_world
from prime_core.verdict import Reason


def test_rates_of_lies_are_the_recorded_ones() -> None:
    kinds = population_world.lies()
    assert kinds["greedy"] == population_world.Lie(1.0, Reason.WRONG_SAMPLING, 1.0)
    assert kinds["old1_1e6"].rate == 0.0
    assert kinds["other_prompts"].row is None


@pytest.mark.soak
def test_a_small_population_trains_and_catches_no_honest_node(tmp_path: Path) -> None:
    world = population_world.simulate(tmp_path, 60, 4.0)
    assert world.published[1:]
    assert not any(one.caught_at for one in world.people if not one.kind)
    assert any(one.caught_at for one in world.people if one.kind)
    paid = population.pay(world)
    assert paid.slashed
    assert not any(paid.amounts.get(node) for node in paid.slashed)
    world.pool.backend.store.close()
