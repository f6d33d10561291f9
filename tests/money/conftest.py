"""Fixtures of the money tests that run on a real chain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chain_kit import World, make_world
from judging_kit import panel as panel
from judging_kit import panel_run as panel_run
from judging_kit import policy_folder as policy_folder
from judging_kit import store_url as store_url
from walk_kit import HONEST, LIAR, OTHER, OWNER


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """The pool of money_kit on a chain of its own."""
    made = make_world(tmp_path)
    yield made
    made.close()


@pytest.fixture
def members(world: World) -> World:
    """A pool with an honest node and a liar, and policy 0."""
    world.join(HONEST, OWNER)
    world.join(LIAR, OTHER)
    world.mgr.publish(0)
    world.ticks(2)
    assert world.mgr.node_status(HONEST.address) == "active"
    assert world.mgr.node_status(LIAR.address) == "active"
    return world
