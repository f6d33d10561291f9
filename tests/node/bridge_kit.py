"""A broker and its bridge over the served pool, in this process, without any worker."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from node_world import NODE, POOL, TRAINER, NodeWorld

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_core.ids import Digest
from prime_core.messages import PolicyList
from prime_core.node import Hardware
from prime_node.api import NodeApi
from prime_node.bridge import Bridge
from prime_node.bridge_messages import HandIn, LeaseWish
from prime_node.heartbeat import HeartbeatLoop, Parts
from prime_node.lease_broker import Connections, Deliveries, LeaseBroker, OpenLeases
from prime_node.policies import PolicyKeeper
from prime_node.revisions import Revisions
from prime_node.runtime.base import WorkerOptions
from prime_node.spool import Spool, TaskUploads
from prime_node.state import DataFolder
from prime_node.uploader import Uploader
from prime_node.watched import WatchedThread
from prime_node.worker.client import BridgeClient
from prime_node.worker.loop import StopFlag
from prime_node.worker.rollout_builder import Built, Job
from prime_orchestrator.store import nodes


@dataclass
class FakePolicies:
    """Policies as the lease broker sees them, set by the test."""

    on_disk: dict[int, Digest] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)

    def newest(self) -> int | None:
        return max(self.on_disk, default=None)

    def digest(self, version: int) -> Digest | None:
        return self.on_disk.get(version)

    def want(self, version: int) -> None:
        self.wanted.append(version)


@dataclass
class Kit:
    """Everything around one bridge. `client` is what a worker has."""

    world: NodeWorld
    broker: LeaseBroker
    open_leases: OpenLeases
    policies: FakePolicies
    spool: Spool
    uploader: Uploader
    client: BridgeClient
    revisions: Revisions
    folder: Path
    """Where the agent puts what the worker sent."""
    socket_path: Path

    def raw(self, request: bytes) -> bytes:
        """Sends bytes as they are; everything that comes back."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.socket_path))
            connection.sendall(request)
            answer = b""
            while block := connection.recv(65536):
                answer += block
            return answer


@contextmanager
def bridge_kit(
    world: NodeWorld, folder: Path, task_uid: int = 0, revisions: Revisions | None = None
) -> Iterator[Kit]:
    """The node is an active member; the lease broker is open; the uploader is not started."""
    with world.store.begin() as connection:
        nodes.admit(
            connection,
            NODE.address,
            speed_class=1,
            hardware=Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=()),
            runtime="process",
            now=time.time(),
        )
    world.admit()
    api, gateway_api = NodeApi(world.url, NODE), NodeApi(world.url, NODE)
    listed = api.client.get("/v1/policies", PolicyList).policies
    policies = FakePolicies({p.manifest.version: p.manifest.digest() for p in listed})
    task_uploads = TaskUploads(folder / "task_uploads")
    spool = Spool(folder / "spool", now=time.time)
    revisions = revisions or Revisions(
        api.run(),
        fetch=lambda digest: NodeApi(world.url, None).run(digest),
        check=lambda run: None,
        prepare=lambda run: None,
    )
    open_leases = OpenLeases()
    connections = Connections(api, gateway_api, NODE, api.client.domain("work"))
    broker = LeaseBroker(
        connections,
        revisions,
        policies,
        Deliveries(task_uploads, spool),
        open_leases,
        now=time.time,
    )
    broker.set_working(True)
    bridge = Bridge(folder / "b", broker, task_uid=task_uid)
    bridge.start()
    revisions.start()
    uploader = Uploader(
        spool, lambda: NodeApi(world.url, NODE), rng=random.Random(0), on_settled=open_leases.nudge
    )
    client = BridgeClient(bridge.path, timeout=40)
    try:
        yield Kit(
            world,
            broker,
            open_leases,
            policies,
            spool,
            uploader,
            client,
            revisions,
            task_uploads.folder,
            bridge.path,
        )
    finally:
        broker.close()
        bridge.close()
        revisions.stop(5)
        api.close()
        gateway_api.close()


def hand_in(kit: Kit, content: bytes = b"file", tokens: int = 0) -> Digest:
    """Hands a file in without waiting for its receipt; the lease's digest."""
    offer = kit.client.lease(LeaseWish(wait_seconds=10))
    assert offer.lease is not None
    assert offer.domain is not None
    digest = offer.lease.lease.digest(offer.domain)
    (kit.folder / "f").write_bytes(content)
    kit.broker._closed = True  # answers at once instead of waiting for the receipt
    answer = kit.broker.submit(HandIn(lease_digest=digest, file="f", tokens=tokens))
    kit.broker._closed = False
    assert answer.receipt is None
    return digest


def policy_keeper(kit: Kit) -> PolicyKeeper:
    backend = kit.world.backend
    trust = Trust(TRAINER.address, backend.context.deployment.domain("pools"), POOL)
    return PolicyKeeper(
        PolicyFolder(kit.folder.parent / "policies", trust),
        lambda: NodeApi(kit.world.url, NODE),
        keep=2,
        on_arrival=lambda: None,
        pinned=lambda: (),
    )


def heartbeat_loop(
    kit: Kit,
    keep_running: Callable[[threading.Event], None],
    threads: tuple[WatchedThread, ...] = (),
) -> tuple[HeartbeatLoop, DataFolder]:
    """The agent's main loop as a member of the served pool; `keep_running` is its task's."""
    data = DataFolder(kit.folder.parent / "data")
    data.make()
    stop = threading.Event()
    task: Any = SimpleNamespace(keep_running=lambda: keep_running(stop), description="a test")
    join: Any = SimpleNamespace(measure=lambda: None, measuring=False)
    parts = Parts(
        kit.broker, policy_keeper(kit), kit.spool, join, task, kit.revisions,
        options=lambda run: WorkerOptions(1, 0, 1.0), threads=threads,
    )  # fmt: skip
    loop = HeartbeatLoop(
        NodeApi(kit.world.url, NODE), parts, data=data, runtime="process", now=time.time, stop=stop
    )
    return loop, data


class Bench:
    """A builder that makes a file of a lease at once, and has the loop end after `files`."""

    def __init__(self, kit: Kit, stop: StopFlag, files: int = 1) -> None:
        self._changed = threading.Condition()
        self._folder, self._stop, self._left = kit.world.folder, stop, files
        self.built: list[str] = []

    def announce(self, bridge: BridgeClient) -> None:
        """It has no engine."""

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """A file is made at once."""

    def has_room(self) -> bool:
        return True

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def nudge(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def build(self, job: Job) -> Built:
        self.built.append(job.lease_digest)
        path = self._folder / f"{job.lease_digest[2:]}.parquet"
        path.write_bytes(b"y" * 50_000)
        if len(self.built) == self._left:
            self._stop.set()
        return Built(path, tokens=1, seconds=1.0)


class Flag(StopFlag):
    """Asked to stop before the file is handed in, but for the waiting in between."""

    def __enter__(self) -> StopFlag:
        return self


def take_lease(kit: Kit) -> Digest:
    """Digest of the lease that the task holds: without one no file is received at all."""
    offer = kit.client.lease(LeaseWish(wait_seconds=10))
    assert offer.lease is not None, offer.reason
    assert offer.domain is not None
    return offer.lease.lease.digest(offer.domain)
