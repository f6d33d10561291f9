"""This machine's hardware. Only informative: the challenge measures what counts."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from prime_core.errors import UserError
from prime_core.node import Gpu, Hardware

MIB = 1 << 20


def read_hardware(data: Path, gpus: str = "all") -> Hardware:
    """Reads CPU, memory, free disk under `data`, and the node's GPUs (setting `gpus`) as shown by
    NVML. Memory and disk in MiB. Raises UserError for a card that is not there."""
    import psutil

    existing = data
    while not existing.exists():
        existing = existing.parent
    return Hardware(
        cpu_model=_cpu_model()[:128],
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cpus(),
        memory_mb=psutil.virtual_memory().total // MIB,
        disk_mb=shutil.disk_usage(existing).free // MIB,
        gpus=read_gpus(gpus),
    )


def _cpus() -> int:
    return os.cpu_count() or 1


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def use_gpus(gpus: str) -> None:
    """Limits this process, and workers without a container, to the node's cards, in NVML's order.
    Call it before torch looks for cards."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if gpus != "all":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus


def read_gpus(gpus: str = "all") -> tuple[Gpu, ...]:
    """Returns the node's GPUs (setting `gpus`) according to NVML, the NVIDIA driver's library; none
    without a driver for "all". Raises UserError for a card that is not there."""
    found = _all_gpus()
    if gpus == "all":
        return found
    numbers = [int(word) for word in gpus.split(",")]
    for number in numbers:
        if number >= len(found):
            raise UserError(
                f"the setting gpus = {gpus!r} names card {number}, and this machine shows "
                f"{len(found)} cards",
                hint="nvidia-smi -L lists them",
            )
        if numbers.count(number) > 1:
            raise UserError(f"the setting gpus = {gpus!r} names card {number} twice")
    return tuple(found[number] for number in numbers)


def _all_gpus() -> tuple[Gpu, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for index in range(min(pynvml.nvmlDeviceGetCount(), 64)):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            model = pynvml.nvmlDeviceGetName(handle)
            text = model.decode(errors="replace") if isinstance(model, bytes) else str(model)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB
            found.append(Gpu(model=text[:128], memory_mb=memory))
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()
