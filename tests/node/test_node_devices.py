"""The device that is measured is the device that generates: a class is paid for what it does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from node_world import run_definition
from pydantic import ValidationError

from prime_core.errors import UserError
from prime_core.node import Gpu, Hardware
from prime_core.run import RunDefinition
from prime_core.task import Task
from prime_engine.sizing import Cards
from prime_node import doctor, fingerprint, join
from prime_node.config import Settings
from prime_node.doctor import _gpu
from prime_node.join import admit, challenge_device
from prime_node.runtime import make_runtime, process
from prime_node.runtime.base import Device, Mounts, NoCardsError, WorkerOptions
from prime_node.runtime.docker import DockerRuntime, cards, shared_memory
from prime_node.state import DataFolder
from prime_node.worker.__main__ import parse
from prime_node.worker.rollout_builder import Options, RolloutBuilder, engine_sizes

GPU = Gpu(model="NVIDIA RTX 4090", memory_mb=24_000)


def run_of(*, gpus: bool) -> RunDefinition:
    run = run_definition()
    return run.model_copy(update={"task": run.task.model_copy(update={"gpus": gpus})})


def machine(*gpus: Gpu) -> Hardware:
    return Hardware(cpu_model="x", cpu_count=2, memory_mb=1000, disk_mb=50, gpus=gpus)


@pytest.mark.parametrize(
    ("asks", "gpus", "seen", "device"),
    [
        (True, (GPU,), 1, "cuda"),
        (True, (), 0, "cpu"),  # as with gpus = none
        (False, (GPU,), 0, "cpu"),  # the task gets no GPU, so none is measured
    ],
)
def test_gpu_is_measured_exactly_where_the_task_gets_it(
    asks: bool, gpus: tuple[Gpu, ...], seen: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_sees(seen, monkeypatch)
    assert challenge_device(machine(*gpus), Task(image="process", gpus=asks)) == device


def torch_sees(cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)


@pytest.mark.parametrize("seen", [0, 1])
def test_cards_that_torch_does_not_see_are_named_and_never_replaced_by_the_cpu(
    seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_sees(seen, monkeypatch)
    monkeypatch.setattr(fingerprint, "_all_gpus", lambda: (GPU, GPU))
    said = f"the driver shows 2 cards to this node, and torch sees {seen} \\(torch "
    with pytest.raises(UserError, match=said) as raised:
        challenge_device(machine(GPU, GPU), Task(image="process", gpus=True))
    check = _gpu(Settings(), run_of(gpus=True))
    assert (check.outcome, check.found) == ("failed", str(raised.value))
    assert check.fix.endswith("work without cards: --gpus none")
    assert _gpu(Settings(), run_of(gpus=False)).outcome == "warning"
    assert _gpu(Settings(gpus="none"), run_of(gpus=True)).outcome == "ok"
    torch_sees(2, monkeypatch)
    assert _gpu(Settings(), None).found == "NVIDIA RTX 4090 24000 MiB, NVIDIA RTX 4090 24000 MiB"


def test_doctor_names_torch_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_all_gpus", lambda: (GPU,))
    monkeypatch.setattr(fingerprint, "find_spec", lambda name: None)
    check = _gpu(Settings(), run_of(gpus=True))
    assert check.outcome == "failed"
    assert _gpu(Settings(), None).outcome == "warning"
    assert check.fix.startswith("pip install 'prime-open[rollout]'")


def test_doctor_finds_cards_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030000"), ("0x10de", "0x030200"), ("0x10de", "0x040300"),
         ("0x1002", "0x030000")]
    ):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "class").write_text(f"{kind}\n")
    found = fingerprint.cards_on_bus(tmp_path)
    assert found == 2, "neither a card's sound nor another maker's card"
    monkeypatch.setattr(fingerprint, "_all_gpus", tuple)
    monkeypatch.setattr(doctor, "cards_on_bus", lambda: found)
    check = _gpu(Settings(), run_of(gpus=True))
    assert _gpu(Settings(), run_of(gpus=False)).outcome == "warning"
    assert _gpu(Settings(), None).outcome == "warning"
    assert (check.outcome, check.found) == (
        "failed", "2 NVIDIA cards are in this machine, and its driver shows none",
    )  # fmt: skip
    assert _gpu(Settings(gpus="none"), run_of(gpus=True)).outcome == "ok"


def test_doctor_asks_for_the_toolkit_before_it_knows_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, info = DockerRuntime("test"), {"Runtimes": {"runc": {}}}
    monkeypatch.setattr(runtime, "_engine", lambda: SimpleNamespace(info=lambda: info))
    assert runtime.check(None).startswith("Docker")
    monkeypatch.setattr(fingerprint, "_all_gpus", lambda: (GPU,))
    with pytest.raises(UserError, match="this machine has GPUs and the Docker engine") as raised:
        runtime.check(None)
    assert "nvidia-container-toolkit" in raised.value.hint
    monkeypatch.setattr(doctor, "make_runtime", lambda *_given: runtime)
    assert doctor._runtime(Settings(), None).outcome == "warning"
    monkeypatch.setattr(runtime, "_image", lambda task: task.image)
    assert doctor._runtime(Settings(), run_of(gpus=True)).outcome == "failed"
    assert doctor._runtime(Settings(), run_of(gpus=False)).outcome == "ok"
    info["Runtimes"]["nvidia"] = {}
    assert runtime.check(None).startswith("Docker")


@pytest.mark.parametrize("kind", ["docker", "process"])
def test_a_node_without_cards_takes_a_task_that_asks_for_gpus(
    kind: Literal["docker", "process"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(fingerprint, "_all_gpus", lambda: (GPU,))
    info = SimpleNamespace(info=lambda: {"Runtimes": {"runc": {}}})
    monkeypatch.setattr(DockerRuntime, "_engine", lambda runtime: info)
    monkeypatch.setattr(DockerRuntime, "_image", lambda runtime, task: task.image)
    task = Task(image="process", gpus=True)
    for gpus, refused in (("none", False), ("all", True)):
        settings = Settings(gpus=gpus, runtime=kind, data=tmp_path)
        runtime = make_runtime(settings, DataFolder(tmp_path), "test")
        with pytest.raises(NoCardsError) if refused else nullcontext():
            runtime.check(task)
    if kind == "docker":
        DockerRuntime("test", gpus="none").check(None)


def test_a_worker_that_sees_no_card_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_sees(0, monkeypatch)
    with pytest.raises(UserError, match=r"is to generate on cuda, and its torch .* sees no card"):
        RolloutBuilder(run_definition(), Options(tmp_path, tmp_path, tmp_path, device="cuda"))


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_worker_generates_on_the_device_that_solved_the_challenge(
    device: Device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved_on: list[str] = []

    def solve(challenge: object, device: str) -> bytes:
        solved_on.append(device)
        return b""

    monkeypatch.setattr(join, "solve", solve)
    api: Any = SimpleNamespace(
        challenge=lambda request: SimpleNamespace(challenge=SimpleNamespace(id="1")),
        solution=lambda number, products: SimpleNamespace(mmacs_per_second=1),
    )
    admit(api, machine(GPU), "process", device=device)
    folder = Path("/nowhere")
    words = WorkerOptions(device=device).arguments(Mounts(folder, folder, folder))
    options = parse(words)
    assert (options.device, options.dtype) == (device, dtype)
    assert solved_on == [device]


L4, L40 = Gpu(model="NVIDIA L4", memory_mb=23_034), Gpu(model="NVIDIA L40S", memory_mb=46_068)


def test_sizes_that_the_owner_sets_reach_the_engine_and_no_others() -> None:
    folder = Path("/nowhere")
    mounts = Mounts(folder, folder, folder)
    plain = WorkerOptions().arguments(mounts)
    assert not {"--tensor-parallel", "--memory-share", "--max-length"} & set(plain)  # older images
    asked = WorkerOptions(tensor_parallel=4, memory_share=0.9, max_length=8192)
    options = parse([*asked.arguments(mounts), "--engine", "vllm"])
    assert engine_sizes(options) == {"cards": Cards(4, 0.9, 8192)}
    assert engine_sizes(parse([*plain, "--engine", "vllm"])) == {"cards": Cards()}
    assert engine_sizes(parse(plain)) == {}
    assert engine_sizes(parse(asked.arguments(mounts))) == {}  # the plain engine has no such sizes


def test_a_node_uses_the_cards_of_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_all_gpus", lambda: (L4, L40, L4))
    assert fingerprint.read_gpus() == (L4, L40, L4)
    assert fingerprint.read_gpus("1") == (L40,)
    assert fingerprint.read_gpus("none") == ()
    assert fingerprint.read_gpus("2,0") == (L4, L4)
    with pytest.raises(UserError, match="names card 3, and this machine shows 3 cards"):
        fingerprint.read_gpus("0,3")
    with pytest.raises(UserError, match="names card 1 twice"):
        fingerprint.read_gpus("1,1")


HOLDER = """
import sys
from prime_core.node import Gpu
from prime_node import fingerprint
gpu = Gpu(model="NVIDIA L4", memory_mb=23_034)
fingerprint._cards = lambda: [(gpu, uuid) for uuid in sys.argv[2:]]
with fingerprint.held_cards(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_agents_never_take_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(3)]
    monkeypatch.setattr(fingerprint, "_cards", lambda: [(L4, one) for one in uuids])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, "1", *uuids],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = rf"card 1 \(NVIDIA L4\) is used by another agent .* \(process {other.pid}\)"
        for gpus in ("1", "2,1", "all"):
            with pytest.raises(UserError, match=said), fingerprint.held_cards(gpus):
                pytest.fail("it took the card")
        with fingerprint.held_cards("0,2"), fingerprint.held_cards("none"):
            pass  # what was held when another card was refused is free again
        other.kill()  # as by the kernel: it cleans nothing up
        other.wait()
        with fingerprint.held_cards("all"):
            pass


def test_a_system_that_refuses_the_socket_is_no_other_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fingerprint, "_cards", lambda: [(L4, "GPU-1")])
    refused = OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(fingerprint.socket.socket, "bind", Mock(side_effect=refused))
    with fingerprint.held_cards("all"):
        assert "card 0 is not held against other agents: " in caplog.text


def test_a_container_gets_the_node_s_cards_and_shared_memory_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (cards("all")["Count"], cards("all")["DeviceIDs"]) == (-1, [])
    assert (cards("0,2")["Count"], cards("0,2")["DeviceIDs"]) == (0, ["0", "2"])
    monkeypatch.setattr(fingerprint, "_all_gpus", lambda: (L4, L4))
    task = Task(image="process", gpus=True)
    assert [shared_memory(task, gpus) for gpus in ("all", "0", "0,1")] == [1024, 64, 1024]
    assert shared_memory(Task(image="process"), "all") == 64


def test_a_process_is_limited_to_the_node_s_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    fingerprint.use_gpus("all")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    fingerprint.use_gpus("none")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    fingerprint.use_gpus("1,0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("gpus", ["", "cpu", "0,", "0 1", "-1", "GPU-5f2"])
def test_a_wrong_list_of_cards_is_refused(gpus: str) -> None:
    with pytest.raises(ValidationError, match="gpus"):
        Settings(gpus=gpus)
