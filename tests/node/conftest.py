"""Fixtures of the node's tests."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from bridge_kit import Kit, bridge_kit
from docker_engine import docker_engine
from node_world import NodeWorld, node_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NodeWorld]:
    """A served pool with one tiny policy."""
    with node_world(tmp_path) as served:
        yield served


@pytest.fixture
def kit(world: NodeWorld, tmp_path: Path) -> Iterator[Kit]:
    """An agent's parts around a bridge in that pool."""
    with bridge_kit(world, tmp_path / "k") as made:
        yield made


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    with docker_engine() as client:
        yield client


@pytest.fixture
def docker_node(engine: docker.DockerClient) -> Iterator[docker.DockerClient]:
    """The engine for one test at a time, across processes: an agent removes all containers that
    carry its node's address, and every test of an agent has the same node."""
    with (Path(tempfile.gettempdir()) / "prime-tests-docker-node.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield engine
