"""The agent as a user runs it: joins, works, survives, stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from command import prime_node
from node_world import NODE, NodeWorld, until

from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.node import Gpu
from prime_core.storage.base import digest_key
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason
from prime_node import agent, fingerprint
from prime_node.agent import Agent
from prime_node.config import Settings
from prime_node.state import DataFolder
from prime_orchestrator.store import submissions
from prime_verify.rollout_file import read_rollout_file


def admitted(world: NodeWorld) -> None:
    until(lambda: world.node_status() == "admitted", "the node solved its challenge")
    world.admit()


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_node_joins_works_and_stops_cleanly(world: NodeWorld) -> None:
    # a data folder whose path is longer than a Unix socket's may be
    name = "a-rather-long-name/" * 5 + "node"
    (world.folder / name).parent.mkdir(parents=True)
    agent = world.join("--throttle", "1.5", name=name)
    admitted(world)
    until(lambda: len(world.submissions()) >= 2, "two files are handed in")
    workers = children(agent.pid)
    assert workers, "the worker is a child of the agent"

    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 0
    assert not [worker for worker in workers if worker.is_running()]

    first = world.submissions()[0]
    assert first["node"] == NODE.address
    data = world.backend.objects.get(digest_key(Digest(first["sha256"])), 1 << 20)
    assert len(read_rollout_file(data).rows) == world.backend.context.run.rows_per_lease
    log = world.log(name)
    assert "ISOLATES NOTHING" in log
    assert "PLAYS ONE 1.5 TIMES SLOWER" in log
    assert "correct horse" not in log + world.worker_log(name)
    assert not list((world.folder / name).rglob("*.sock"))


@pytest.mark.slow
def test_agent_killed_while_the_orchestrator_is_down_loses_no_file(world: NodeWorld) -> None:
    agent = world.join("--throttle", "20")
    admitted(world)
    until(lambda: world.leases(), "a lease is taken")
    world.stop_api()
    spool = world.folder / "node" / "spool"
    until(lambda: list(spool.glob("*.parquet")), "the file is finished and kept")
    workers = children(agent.pid)
    agent.kill()
    agent.wait()
    until(lambda: not any(w.is_running() for w in workers), "the worker died with its agent")
    assert not world.submissions()

    world.start_api()
    second = world.join("--throttle", "20")
    (submission,) = until(world.submissions, "the file is handed in after the restart")
    assert submission["lease_digest"] == world.leases()[0]["digest"]
    until(lambda: not list(spool.glob("*.parquet")), "the receipted file is removed")
    second.send_signal(signal.SIGINT)
    assert second.wait(120) == 0


@pytest.mark.slow
def test_stop_while_generating_gives_the_lease_back_to_the_same_node(world: NodeWorld) -> None:
    agent = world.join("--throttle", "300")
    admitted(world)
    until(lambda: world.leases(), "a lease is taken")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 0
    assert "given back: " in world.log()
    (lease,) = world.leases()
    assert lease["status"] == "open"

    world.join()
    until(world.submissions, "the same lease is fulfilled after all")
    assert world.submissions()[0]["lease_digest"] == lease["digest"]


@pytest.mark.slow
def test_the_agent_reports_a_void_file_and_its_reason(world: NodeWorld) -> None:
    agent = world.join()
    admitted(world)
    until(world.submissions, "it works")
    digest = Digest(world.submissions()[0]["digest"])
    with world.backend.store.begin() as connection:
        submissions.change(
            connection, digest, status="void", reason=int(Reason.MALFORMED),
            judged_at=world.backend.now(),
        )  # fmt: skip
    sentence = f"{digest} is void (MALFORMED): {Reason.MALFORMED.sentence}"
    until(lambda: sentence in world.log(), "the log says why")

    def status() -> dict[str, Any]:
        found = prime_node("status", "--json", "--data", str(world.folder / "node"))
        shown: dict[str, Any] = json.loads(found.stdout)
        return shown

    until(lambda: sentence in status().get("not_accepted", []), "the status says why")
    assert status()["files"]["void"] == 1
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 0
    assert world.log().count(sentence) == 1, "said once"
    shown = subprocess.run(
        [sys.executable, "-m", "prime_node.cli", "status", "--data", str(world.folder / "node")],
        capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "400"},
    ).stdout  # fmt: skip
    assert sentence in shown, "and a person sees it after the agent has ended"


@pytest.mark.slow
def test_quarantined_node_waits_and_ejected_node_stops_and_says_why(world: NodeWorld) -> None:
    agent = world.join()
    admitted(world)
    until(world.submissions, "it works")
    world.set_status("quarantined")
    until(lambda: "directive wait" in world.log(), "it received the order to wait")
    assert agent.poll() is None
    world.set_status("ejected")
    assert agent.wait(120) == 77
    last = world.log().strip().splitlines()[-1]
    assert last == "prime-node: the orchestrator says stop: the node was ejected from the pool"


@pytest.mark.slow
def test_orchestrator_that_is_down_is_waited_for(world: NodeWorld) -> None:
    world.stop_api()
    agent = world.join()
    until(lambda: "does not answer" in world.log(), "it says what it waits for")
    assert agent.poll() is None
    world.start_api()
    until(lambda: world.node_status() == "admitted", "it joins once the orchestrator is there")


@pytest.mark.slow
def test_two_agents_share_neither_a_data_folder_nor_a_key(world: NodeWorld) -> None:
    first = world.join()
    admitted(world)
    second = world.join()
    assert second.wait(120) == 64
    assert f"another agent (process {first.pid}) works in" in world.log()
    elsewhere = world.join(name="elsewhere")
    assert elsewhere.wait(120) == 77
    assert "another machine works with this node's key" in world.log("elsewhere")
    assert first.poll() is None


def test_a_data_folder_serves_one_pool(world: NodeWorld) -> None:
    settings = Settings(
        orchestrator=world.url, data=world.folder / "node", shadow=True, runtime="process"
    )
    runtime: Any = SimpleNamespace(check=lambda task: pytest.fail("the agent went on"))
    with OrchestratorClient(world.url) as client:
        pool = client.pool()
    data = DataFolder(settings.data)
    data.make()
    data.bind(pool.model_copy(update={"pool": pool.pool + 1}))
    with pytest.raises(UserError, match=f"belongs to pool {pool.pool + 1} on chain") as caught:
        Agent(settings, NODE, None, runtime=runtime).run()
    assert "--data DIR" in caught.value.hint
    (settings.data / "pool").unlink()
    for _ in range(2):
        data.bind(pool)


def test_an_agent_starts_no_task_on_cards_of_another_agent(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu(model="NVIDIA L4", memory_mb=23_034)
    cards = [(card, f"GPU-{uuid.uuid4()}")]
    monkeypatch.setattr(fingerprint, "_cards", lambda: cards)
    task = world.backend.context.run.task.model_copy(update={"gpus": True})
    run = world.backend.context.run.model_copy(update={"task": task})
    monkeypatch.setattr(agent, "newest_run", lambda api: run)
    settings = Settings(
        orchestrator=world.url, data=world.folder / "node", shadow=True, runtime="process"
    )
    runtime: Any = SimpleNamespace(check=lambda task: pytest.fail("the agent went on"))
    with fingerprint.held_cards("0"), pytest.raises(UserError, match=f"process {os.getpid()}"):
        Agent(settings, NODE, None, runtime=runtime).run()


@pytest.mark.slow
def test_worker_that_dies_is_started_again(world: NodeWorld) -> None:
    agent = world.join()
    admitted(world)
    until(world.submissions, "it works")
    handed_in = len(world.submissions())
    for worker in children(agent.pid):
        worker.kill()
    until(lambda: "ended with status -9; again in" in world.log(), "the death is noticed")
    until(lambda: len(world.submissions()) > handed_in, "it works again")
