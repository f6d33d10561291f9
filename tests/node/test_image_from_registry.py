"""A revision's image comes from a registry, by digest, while the task of the old one works on."""

from __future__ import annotations

import uuid
from pathlib import Path

import docker
import pytest
from bridge_kit import bridge_kit, take_lease
from docker.errors import ImageNotFound
from docker_images import build, import_root
from docker_registry import registry
from node_world import NODE, node_world, until

from prime_core.node import Hardware
from prime_core.task import Task
from prime_node.agent import Agent
from prime_node.config import load
from prime_node.runtime import make_runtime
from prime_node.runtime.base import Mounts, WorkerOptions
from prime_node.state import DataFolder
from prime_orchestrator.store import leases as store_leases
from prime_orchestrator.store import lock, runs
from prime_orchestrator.store.runs import RunRow

pytestmark = pytest.mark.docker
WORK = ("/bin/busybox", "sh", "-c", "exec /bin/busybox sleep 600")
HARDWARE = Hardware(cpu_model="x", cpu_count=64, memory_mb=1 << 20, disk_mb=1 << 20, gpus=())


def push(engine: docker.DockerClient, image: str, repository: str) -> str:
    """Moves an image to a registry; returns its name by digest. It is no longer at the engine."""
    engine.images.get(image).tag(repository, "made")
    for event in engine.images.push(repository, "made", stream=True, decode=True):
        assert "error" not in event, event
    [name] = [
        one for one in engine.images.get(image).attrs["RepoDigests"] if one.startswith(repository)
    ]
    engine.images.remove(image, force=True)
    with pytest.raises(ImageNotFound):
        engine.images.get(name)
    return str(name)


def test_a_revisions_image_is_pulled_by_digest_while_a_lease_of_the_old_one_is_open(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    data = DataFolder(tmp_path / "node")
    with registry(tmp_path) as where:
        base = import_root(engine)
        first, second = (
            push(engine, build(engine, base, f"LABEL revision={n}"), f"{where}/worker{n}")
            for n in (1, 2)
        )
        engine.images.remove(base, force=True)
        with node_world(tmp_path, task=Task(image=first, command=WORK, memory_mb=64)) as world:
            settings = load({"orchestrator": world.url, "data": data.root, "allow_private": True})
            run = world.backend.context.run
            runtime = make_runtime(settings, data, f"test-{uuid.uuid4().hex[:8]}")
            runtime.check(run.task)
            revisions = Agent(settings, NODE, None)._revisions(run, HARDWARE, runtime, chain=False)
            data.make()
            mounts = Mounts(data.policies, data.task_outbox, data.bridge)
            try:
                with bridge_kit(world, tmp_path / "kit", revisions=revisions) as kit:
                    old = runtime.start(run.task, mounts, WorkerOptions())
                    take_lease(kit)
                    later = run.model_copy(
                        update={"task": run.task.model_copy(update={"image": second})}
                    )
                    with world.store.begin() as connection:
                        lock(connection, "leases")
                        step = (store_leases.highest_step(connection) or 0) + 1
                        row = RunRow(step, later.digest(), later.raw(), True, announced_at=0.0)
                        runs.add(connection, row)
                    revisions.received(later.digest())  # as a heartbeat's answer names it
                    until(lambda: later.digest() in revisions.taken(), "it is prepared", 30)
                    assert engine.images.get(second).labels == {"revision": "2"}
                    assert old.wait(0.0) is None, "the old task works on"
                    (held,) = kit.open_leases.all().values()
                    assert held.signed.lease.run_digest == run.digest()
                    old.stop(1.0)
                    new = runtime.start(later.task, mounts, WorkerOptions())
                    assert new.wait(0.0) is None
            finally:
                runtime.clean()
                for image in (first, second):
                    engine.images.remove(image, force=True)
