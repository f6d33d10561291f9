"""The device that is measured is the device that generates: a class is paid for what it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_core.node import Gpu, Hardware
from prime_core.task import Task
from prime_node import admission
from prime_node.admission import admit, challenge_device
from prime_node.runtime.base import Device, Mounts, WorkerOptions
from prime_node.worker.__main__ import parse

GPU = Gpu(model="NVIDIA RTX 4090", memory_mb=24_000)


def machine(*gpus: Gpu) -> Hardware:
    return Hardware(cpu_model="x", cpu_count=2, memory_mb=1000, disk_mb=50, gpus=gpus)


@pytest.mark.parametrize(
    ("asks", "gpus", "usable", "device"),
    [
        (True, (GPU,), True, "cuda"),
        (True, (GPU,), False, "cpu"),
        (True, (), True, "cpu"),
        (False, (GPU,), True, "cpu"),  # the task gets no GPU, so none is measured
    ],
)
def test_gpu_is_measured_exactly_where_the_task_gets_it(
    asks: bool, gpus: tuple[Gpu, ...], usable: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    assert challenge_device(machine(*gpus), Task(image="process", gpus=asks)) == device


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_worker_generates_on_the_device_that_solved_the_challenge(
    device: Device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved_on: list[str] = []

    def solve(challenge: object, device: str) -> bytes:
        solved_on.append(device)
        return b""

    monkeypatch.setattr(admission, "solve", solve)
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
