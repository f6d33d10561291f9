"""This machine's hardware, and which agent has its cards. Only informative: the challenge measures
what counts."""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from prime_core.errors import UserError
from prime_core.node import Gpu, Hardware

log = logging.getLogger("prime.node.cards")
MIB = 1 << 20
CPU_ONLY = "work without cards: --gpus none"


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
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if gpus == "none" else gpus


def require_seen(gpus: Sequence[Gpu]) -> None:
    """Raises UserError unless torch sees as many cards in this process as the driver shows."""
    if not gpus:
        return
    if find_spec("torch") is None:
        raise UserError(
            f"the driver shows {len(gpus)} cards to this node, and torch is not installed",
            hint=f"pip install 'prime-open[rollout]', or {CPU_ONLY}",
        )
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < len(gpus):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
        raise UserError(
            f"the driver shows {len(gpus)} cards to this node, and torch sees {seen} "
            f"(torch {torch.__version__}, {built})",
            hint=f"install a torch build for the driver that nvidia-smi names, or {CPU_ONLY}",
        )


def cards_on_bus(root: Path = Path("/sys/bus/pci/devices")) -> int:
    """Returns how many NVIDIA cards are in this machine, with or without a driver."""

    def read(path: Path) -> str:
        return path.read_text().strip() if path.is_file() else ""

    devices = root.iterdir() if root.is_dir() else ()
    return sum(
        read(one / "vendor") == "0x10de" and read(one / "class").startswith(("0x0300", "0x0302"))
        for one in devices
    )


def read_gpus(gpus: str = "all") -> tuple[Gpu, ...]:
    """Returns the node's GPUs (setting `gpus`) according to NVML, the NVIDIA driver's library; none
    without a driver for "all". Raises UserError for a card that is not there."""
    if gpus == "none":
        return ()
    found = _all_gpus()
    return tuple(found[number] for number in _numbers(gpus, found))


def _numbers(gpus: str, found: Sequence[Gpu]) -> list[int]:
    if gpus == "all":
        return list(range(len(found)))
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
    return numbers


def _all_gpus() -> tuple[Gpu, ...]:
    return tuple(gpu for gpu, _ in _cards())


def _cards() -> list[tuple[Gpu, str]]:
    """Returns all cards of this machine, in NVML's order, each with its UUID."""
    import pynvml

    def text(raw: bytes | str) -> str:
        return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(min(pynvml.nvmlDeviceGetCount(), 64)):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB
            gpu = Gpu(model=text(pynvml.nvmlDeviceGetName(handle))[:128], memory_mb=memory)
            found.append((gpu, text(pynvml.nvmlDeviceGetUUID(handle))))
        return found
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def held_cards(gpus: str) -> Iterator[None]:
    """Holds the node's cards against other agents of this machine, of any user, until the block or
    the process ends. Raises UserError, naming the other process, if one of them is held.

    A card is held by a socket whose name has its UUID, in Linux's abstract namespace: it needs no
    permissions, leaves nothing behind, and the kernel knows its process. Agents in containers with
    network namespaces of their own do not see it.
    """
    found = [] if gpus == "none" else _cards()
    with ExitStack() as stack:
        for number in _numbers(gpus, [gpu for gpu, _ in found]) if found else ():
            gpu, uuid = found[number]
            name = f"\0prime-node/{uuid}"
            holder = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                holder.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    log.warning("card %d is not held against other agents: %s", number, error)
                    continue
                raise UserError(
                    f"card {number} ({gpu.model}) is used by another agent of this machine "
                    f"(process {_process_of(name)})",
                    hint="end it first, or give each agent cards of its own, such as --gpus 0,1",
                ) from error
            holder.listen()
        yield


def _process_of(name: str) -> str:
    """Returns the process id of the socket `name`; "?" if it cannot be found."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(name)
            packed = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "?"
    return str(struct.unpack("3i", packed)[0])
