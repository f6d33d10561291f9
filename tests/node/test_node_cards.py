"""A node proves its cards to the real orchestrator, and doctor shows the passport."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from bridge_kit import bridge_kit, hand_in, heartbeat_loop
from command import prime_node
from node_world import MANAGER, NODE, POOL, NodeWorld, node_world, until

from prime_core.errors import UnavailableError, UntrustedError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.known_cards import CPU, KNOWN
from prime_core.messages import (
    CardsAnswer,
    CardsRequest,
    CardsWork,
    Heartbeat,
    HeartbeatAnswer,
    MemoryWork,
    SignedPassport,
)
from prime_core.node import Gpu, Hardware
from prime_core.run import Cards
from prime_node import cards, fingerprint, join
from prime_node.api import NodeApi
from prime_node.cards import claimed, passport, proved_memory
from prime_node.state import DataFolder
from prime_orchestrator.api import cards as cards_service
from prime_orchestrator.api.cards import memory_of, passport_of
from prime_orchestrator.store import measurements
from prime_orchestrator.store.measurements import MeasurementRow

TRIAL = Cards(kinds=("cpu",), counts=(1,), work_ms=20)
H200 = Gpu(model="NVIDIA H200", memory_mb=143_771)


def machine(*gpus: Gpu) -> Hardware:
    return Hardware(cpu_model="x", cpu_count=2, memory_mb=1000, disk_mb=50, gpus=gpus)


def doctor(world: NodeWorld) -> dict[str, Any]:
    done = prime_node(
        "doctor", "--orchestrator", world.url, "--wallet", str(world.keystore), "--json",
        "--data", str(world.folder / "d"), "--runtime", "process",
    )  # fmt: skip
    return {check["name"]: check for check in json.loads(done.stdout)}


def again(world: NodeWorld, row: MeasurementRow) -> None:
    """The node is drawn."""
    with world.store.begin() as connection:
        measurements.put(connection, replace(row, asked_at=world.backend.now()))


def measured(world: NodeWorld) -> MeasurementRow:
    with world.store.read() as connection:
        found = measurements.get(connection, NODE.address)
    assert found is not None
    return found


@pytest.mark.slow
def test_a_node_proves_its_cards_works_and_doctor_shows_the_passport(tmp_path: Path) -> None:
    with node_world(tmp_path, cards=TRIAL) as world:
        assert doctor(world)["passport"]["outcome"] == "warning"
        world.join()
        until(lambda: world.node_status() == "admitted", "the node proved its cards")
        said = passport_of(world.backend, NODE.address).passport
        assert (said.kind, said.cards, said.pool) == ("cpu", 1, POOL)
        assert said.measured_ms > 0
        shown = doctor(world)["passport"]
        assert shown["outcome"] == "ok"
        assert said.sentence in shown["found"]
        assert f"{said.claimed_memory_mb} MiB of memory a card claimed, 1 MiB proved" in " ".join(
            shown["found"].split()
        )
        memory = memory_of(world.backend, NODE.address).memory
        assert (memory.cards, memory.proved_memory_mb, memory.kind) == (1, 1, "cpu")
        assert "proved 1 MiB of memory on each card" in world.log()
        world.admit()
        until(world.submissions, "a file is handed in")
        assert "proved 1 x CPU" in world.log()


@pytest.mark.slow
def test_a_node_joins_an_orchestrator_that_asks_for_no_proof_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older release, whose answers lack the field."""
    monkeypatch.setattr(cards_service, "_memory", lambda *_: None)
    with node_world(tmp_path, cards=TRIAL) as world:
        world.join()
        until(lambda: world.node_status() == "admitted", "the node proved its cards")
        assert "of memory on each card" not in world.log()
        said = " ".join(doctor(world)["passport"]["found"].split())
        assert "MiB of memory a card claimed, none proved" in said


@pytest.mark.slow
def test_a_node_measured_again_delivers_its_lease_proves_its_cards_and_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node_world(tmp_path, cards=TRIAL) as world:
        agent = world.join()
        until(lambda: world.node_status() == "admitted", "the node proved its cards")
        world.admit()
        until(world.leases, "it works")
        first = passport_of(world.backend, NODE.address)
        again(world, MeasurementRow(NODE.address))
        until(lambda: passport_of(world.backend, NODE.address) != first, "a new passport")
        before = {row["digest"]: row["status"] for row in world.leases()}
        assert {*before.values()} == {"submitted"}, "its leases came first, and it took no other"
        until(lambda: len(world.submissions()) > len(before), "it works on")
        assert world.log().count("proved 1 x CPU") == 2
        row = measured(world)
        assert (row.passed, row.asked_at, row.trouble) == (1, None, "")

        judged = replace(KNOWN["cpu"], memory_mb=1, judged=True)  # not what it claims to be
        monkeypatch.setitem(KNOWN, "cpu", judged)
        again(world, row)
        until(lambda: measured(world).trouble, "the claim is refused")
        words = "measured again: a card CPU has 1 MiB of memory, and this one claims"
        shown = doctor(world)["passport"]
        assert shown["outcome"] == "failed"
        assert words in shown["found"]
        data = DataFolder(world.folder / "node")
        until(lambda: words in getattr(data.read_status(), "reason", ""), "status says so")
        assert agent.poll() is None, "it goes on, for a later measurement"
        assert "expired" not in {row["status"] for row in world.leases()}


def test_the_proof_waits_for_what_is_not_delivered_and_the_task_for_the_proof(
    world: NodeWorld, tmp_path: Path
) -> None:
    with bridge_kit(world, tmp_path / "k") as kit:
        loop, _ = heartbeat_loop(kit, lambda stop: None)
        api, join, task = loop._api, loop._join, loop._task
        done: list[str] = []
        proves: list[bool] = []
        by: int | None = None
        silent, refused = False, [UnavailableError("the container engine does not answer")]

        def stop(grace: float) -> None:
            if refused:
                raise refused.pop()
            done.append("stopped")

        def heartbeat(body: Heartbeat) -> HeartbeatAnswer:
            proves.append(body.proves)
            if silent:
                raise UnavailableError("an older orchestrator refuses what it does not know")
            asked = {"prove_cards_by": by, "measure": False}
            return NodeApi.heartbeat(api, body).model_copy(update=asked)

        with (
            patch.object(api, "heartbeat", heartbeat),
            patch.object(join, "measure", lambda: done.append("proven")),
            patch.object(task, "stop", stop, create=True),
        ):
            loop._beat()
            hand_in(kit)
            by = 2_000_000_000
            loop._beat()
            loop._beat()
            assert (proves, done) == ([False, False, True], []), "a file is on its way"
            kit.uploader.start()
            kit.uploader.drain(20, time.monotonic)
            loop._beat()
            assert done == [], "the task runs on its cards"
            loop._beat()
            loop._beat()
            assert done == ["stopped", "proven"], "the next try comes after a pause"
            assert not kit.broker._working
            assert loop._drained, "the task stays away"
            silent = True
            loop._beat()
            silent = False
            loop._beat()
            assert proves[-2:] == [True, False]
            by = None
            loop._beat()
            assert kit.broker._working
            assert not loop._drained
        assert kit.uploader.stop(10) == 0


@pytest.mark.slow
def test_a_machine_without_the_cards_ends_with_what_the_pool_asks_for(tmp_path: Path) -> None:
    asked = Cards(kinds=("h100-sxm", "h200"), counts=(4, 8))
    with node_world(tmp_path, cards=asked) as world:
        agent = world.join()
        assert agent.wait(120) == 77
        said = " ".join(world.log().split())
        assert "4 or 8 x h100-sxm or h200, and this machine claims 1 x cpu" in said
        assert "Traceback" not in said


def test_what_a_machine_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Cards(kinds=("h200",), counts=(2,))
    assert claimed(asked, machine()) == ((Gpu(model=CPU, memory_mb=1000),), ("numpy",))
    assert claimed(TRIAL, machine(H200))[1] == ("numpy",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert claimed(asked, machine(H200, H200)) == ((H200, H200), ("cuda:0", "cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="shows 2 cards to this node, and torch sees 1"):
        claimed(asked, machine(H200, H200))
    monkeypatch.setattr(fingerprint, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch is not installed"):
        claimed(asked, machine(H200, H200))


def test_a_pool_lets_a_node_wait_no_longer_than_a_minute() -> None:
    stop = threading.Event()
    stop.set()
    for milliseconds in (10**400, 10**12, 0, -(10**400)):
        answer = SimpleNamespace(challenge=None, work=None, retry_after_ms=milliseconds)
        api = Mock(**{"challenge.return_value": answer, "begin_cards.return_value": answer})
        assert join.admit(api, machine(), "process", stop=stop) is None
        assert cards.prove(api, TRIAL, machine(), "process", stop=stop) is None
        assert 0.05 <= cards.turn_seconds(milliseconds) <= 60


def test_a_node_fills_no_more_than_it_claims_and_says_what_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = {"operands": ZERO_DIGEST, "rows": 1024, "inner": 128, "columns": 8}
    begun = CardsAnswer(
        id="1",
        work=CardsWork(**work, cards=1, rounds=1),
        memory=MemoryWork(blocks=1 << 16, width=2048, columns=8, cards=1, rounds=1),
        token=ZERO_DIGEST,
    )
    for cards_, words in (
        ([Gpu(model="x", memory_mb=127)], "fill 1 cards with 128 MiB each"),
        ([H200, H200], "this machine claimed 2 with 143771 MiB"),
    ):
        wish = CardsRequest(hardware=machine(), task_runtime="process", cards=tuple(cards_))
        with pytest.raises(UntrustedError, match=words):
            cards._prove_memory(SimpleNamespace(), begun, wish, ("numpy",))  # type: ignore[arg-type]

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cards, "MemoryProver", full)
    wish = CardsRequest(hardware=machine(), task_runtime="process", cards=(H200,))
    with pytest.raises(UnavailableError, match=r"no room for the 128 MiB each .* out of memory"):
        cards._prove_memory(SimpleNamespace(), begun, wish, ("numpy",))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_passport_of_another_key_or_node_is_refused(tmp_path: Path) -> None:
    with node_world(tmp_path, cards=TRIAL) as world:
        world.join()
        until(lambda: world.node_status() == "admitted", "the node proved its cards")
        signed = passport_of(world.backend, NODE.address)
        domain = world.backend.context.domain(signed.passport)
        pool = SimpleNamespace(manager=MANAGER.address, pool=POOL)

        def api(given: SignedPassport) -> Any:
            client = SimpleNamespace(pool=lambda: pool, domain=lambda contract: domain)
            return SimpleNamespace(client=client, passport=lambda node: given)

        assert passport(api(signed), NODE.address) == signed.passport
        memory = memory_of(world.backend, NODE.address)
        more = memory.model_copy(
            update={"memory": memory.memory.model_copy(update={"proved_memory_mb": 9})}
        )
        for given, found in ((memory, memory.memory), (more, None)):
            answers = api(signed)
            answers.proved_memory = lambda node, given=given: given
            if found is not None:
                assert proved_memory(answers, NODE.address) == found
                continue
            with pytest.raises(UntrustedError, match="not the pool manager's"):
                proved_memory(answers, NODE.address)
        forged = signed.model_copy(update={"signature": NODE.sign(signed.passport, domain)})
        better = signed.passport.model_copy(update={"cards": 8})
        for wrong in (forged, signed.model_copy(update={"passport": better})):
            with pytest.raises(UntrustedError, match="not the pool manager's"):
                passport(api(wrong), NODE.address)
        with pytest.raises(UntrustedError, match="not the pool manager's"):
            passport(api(signed), MANAGER.address)
