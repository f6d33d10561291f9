"""Pools of the money tests, without a chain and on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chain_kit import World, make_world
from judging_kit import panel as panel
from judging_kit import panel_run as panel_run
from judging_kit import policy_folder as policy_folder
from judging_kit import store_url as store_url
from money_kit import NODE, ManagerSide, open_manager
from walk_kit import HONEST, LIAR, OTHER, OWNER


@pytest.fixture
def mgr(tmp_path: Path, store_url: str | None) -> Iterator[ManagerSide]:
    """The pool of money_kit without a chain: policy 0, and NODE as its only node."""
    made = open_manager(tmp_path, url=store_url)
    made.publish(0)
    made.admit(NODE)
    yield made
    made.store.close()


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
