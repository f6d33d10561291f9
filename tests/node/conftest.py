"""Fixtures of the node's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from node_world import NodeWorld, node_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NodeWorld]:
    """A served pool with one tiny policy."""
    with node_world(tmp_path) as served:
        yield served
