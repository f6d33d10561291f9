"""The whole agent with its task in a container, the image made from this machine's own Python."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from node_world import NODE, node_world, until

from prime_core.ids import Digest
from prime_core.storage.base import digest_key
from prime_core.task import Task
from prime_node.runtime.docker import LABEL
from prime_verify.rollout_file import read_rollout_file

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient) -> Iterator[str]:
    """Id of a freshly built worker image."""
    built = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "build_image.py"), "worker", "--tag", "prime-test"],
        capture_output=True,
        text=True,
        check=True,
    )
    yield built.stdout.strip()
    engine.images.remove("prime-test", force=True)


def test_task_in_a_container_makes_files_and_ends_with_its_agent(
    image: str, docker_node: docker.DockerClient, tmp_path: Path
) -> None:
    with node_world(tmp_path, task=Task(image=image, memory_mb=2048, pids=64)) as world:
        agent = world.join(runtime="docker")
        until(lambda: world.node_status() == "admitted", "the node solved its challenge")
        world.admit()
        until(world.submissions, "a file is handed in from the container", 120)
        (container,) = docker_node.containers.list(filters={"label": f"{LABEL}={NODE.address}"})
        configured = container.attrs["HostConfig"]
        assert configured["NetworkMode"] == "none"
        assert configured["ReadonlyRootfs"]
        assert configured["CapDrop"] == ["ALL"]
        assert container.attrs["Config"]["User"].split(":")[0] != "0"

        agent.send_signal(signal.SIGTERM)
        assert agent.wait(120) == 0
        assert not docker_node.containers.list(
            all=True, filters={"label": f"{LABEL}={NODE.address}"}
        )
        data = world.backend.objects.get(
            digest_key(Digest(world.submissions()[0]["sha256"])), 1 << 20
        )
        assert len(read_rollout_file(data).rows) == world.backend.context.run.rows_per_lease
