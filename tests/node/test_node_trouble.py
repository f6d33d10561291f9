"""A full disk, an engine that restarts, a defect: the agent waits for what mends itself, and ends,
saying so, for what does not."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import random
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import docker
import pytest
from bridge_kit import Kit, hand_in, heartbeat_loop, policy_keeper
from node_world import NODE, node_world, run_definition, until
from served import served_folder

from devnet.ports import free_port
from prime_broadcast.pool import PoolNames
from prime_core.errors import FatalError, UnavailableError
from prime_core.task import Task
from prime_envs.registry import environment_ref
from prime_envs.sources import DATASETS_FOLDER, file_digest
from prime_node.api import NodeApi
from prime_node.policies import PolicyKeeper
from prime_node.runtime.base import Mounts, WorkerOptions
from prime_node.runtime.docker import DockerRuntime
from prime_node.uploader import Uploader
from prime_node.worker.rollout_builder import put_file


def test_status_that_cannot_be_written_is_said_and_work_goes_on(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    loop, data = heartbeat_loop(kit, threading.Event.set)
    (data.root / ".status.json.new").mkdir()
    assert loop.run() == 0
    assert "`prime-node status` is not up to date" in caplog.text


def test_agent_ends_when_one_of_its_threads_died(kit: Kit) -> None:
    def defect() -> NodeApi:
        raise KeyError("a defect")

    uploader = Uploader(kit.spool, defect, rng=random.Random(0))
    uploader.start()
    uploader.thread.join(20)
    loop, _ = heartbeat_loop(kit, lambda stop: None, threads=(uploader.thread,))
    with pytest.raises(FatalError, match="thread 'uploader' died of KeyError: 'a defect'"):
        loop.run()


def test_uploader_goes_on_once_the_full_disk_has_room(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = hand_in(kit)
    real, times = sqlite3.connect, itertools.count()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        if threading.current_thread().name == "uploader" and next(times) in (0, 2):
            raise sqlite3.OperationalError("database or disk is full")
        return real(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    uploader = Uploader(kit.spool, lambda: NodeApi(kit.world.url, NODE), rng=random.Random(0))
    uploader.start()
    uploader.drain(20, time.monotonic)
    assert uploader.stop(10) == 0
    assert kit.spool.find(lease).state == "receipted"  # type: ignore[union-attr]
    assert "database or disk is full" in caplog.text


def test_policies_arrive_once_the_full_disk_has_room(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, times = PolicyKeeper._record, itertools.count()

    def record(*arguments: Any) -> None:
        if next(times) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(PolicyKeeper, "_record", record)
    keeper = policy_keeper(kit)
    keeper.start()
    relays = tuple(PoolNames(NodeApi(kit.world.url, None).client).relays())
    with caplog.at_level(logging.WARNING):
        keeper.note_answer(0, relays)
        until(lambda: keeper.newest() == 0, "the policy arrives after all")
    keeper.stop(10)
    assert "No space left on device" in caplog.text


def test_engine_that_restarts_is_asked_again(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    times = itertools.count()

    def keep_running(stop: threading.Event) -> None:
        if next(times) == 0:
            raise UnavailableError("the Docker engine does not answer: restarting")
        stop.set()

    loop, _ = heartbeat_loop(kit, keep_running)
    assert loop.run() == 0
    assert "restarting; trying again in 1 s" in caplog.text


def test_engine_that_went_away_is_unavailable(tmp_path: Path) -> None:
    runtime = DockerRuntime("test")
    runtime._connected = docker.DockerClient(f"unix://{tmp_path}/gone.sock", version="1.41")
    with pytest.raises(UnavailableError):
        runtime.clean()
    with pytest.raises(UnavailableError):  # of a later revision: the owner declines nothing
        runtime.check(None)
    with pytest.raises(UnavailableError):
        runtime.start(
            Task(image="sha256:" + "0" * 64), Mounts(tmp_path, tmp_path, tmp_path), WorkerOptions()
        )


def test_full_disk_leaves_no_half_file_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UnavailableError, match="No space left on device"):
        put_file(tmp_path, "f.parquet", b"rows")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_agent_asks_again_for_a_dataset_whose_server_is_away(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    file = site / "tasks.jsonl"
    row = {"problem_id": "1", "task_type": "verifiable_math", "prompt": "1 + 1?",
           "verification_info": {"ground_truth": "2"}}  # fmt: skip
    file.write_text(json.dumps(row) + "\n")
    port = free_port()
    digest = file_digest(file)
    budgets = run_definition().budgets
    here = {"sha256": digest, "path": str(file)}
    reference = environment_ref("tasks", here, budgets, train_size=1, heldout_size=0)
    away = {"sha256": digest, "url": f"http://127.0.0.1:{port}/tasks.jsonl"}
    environment = reference.model_copy(update={"arguments": away})
    with node_world(tmp_path, environment=environment, groups_per_lease=1) as world:
        agent = world.join()
        until(lambda: "cannot be fetched" in world.log(), "it says what it waits for")
        with served_folder(site, port):
            kept = world.folder / "node" / "policies" / DATASETS_FOLDER / f"{digest[2:]}.jsonl"
            until(kept.exists, "the dataset is brought once the server is there")
            until(lambda: world.node_status() == "admitted", "the agent goes on to join")
        assert agent.poll() is None
