"""The hardware challenge: what this machine can do is measured, not told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec

from node.api import NodeApi
from node.config import RuntimeName
from node.runtime.base import Device
from protocol.core.messages import AdmissionAnswer, AdmissionRequest, Challenge
from protocol.core.node import Hardware
from protocol.core.task import Task

log = logging.getLogger("prime.node.admission")


def challenge_device(hardware: Hardware, task: Task) -> Device:
    """Where this machine's speed is measured, which is where its worker will generate: the GPU if
    the pool's task gets one, this machine has one and torch can use it; otherwise the CPU."""
    if not (task.gpus and hardware.gpus and find_spec("torch")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def admit(
    api: NodeApi,
    hardware: Hardware,
    runtime: RuntimeName,
    *,
    device: Device = "cpu",
    throttle: float = 1.0,
    shadow: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AdmissionAnswer:
    """Asks for a challenge, solves it, hands the products in. Raises PolicyError if the pool
    refuses this machine. `throttle` N makes it N times slower (development); `shadow` asks for no
    seat."""
    challenge = api.challenge(
        AdmissionRequest(hardware=hardware, task_runtime=runtime, shadow=shadow)
    )
    started = clock()
    products = solve(challenge, device)
    if throttle > 1.0:
        sleep((clock() - started) * (throttle - 1.0))
    answer = api.solution(challenge.id, products)
    log.info(
        "measured %d million multiply-adds a second: speed class %d",
        answer.mmacs_per_second,
        answer.speed_class,
    )
    return answer


def solve(challenge: Challenge, device: str) -> bytes:
    """The products as they go over the wire (int64 little-endian)."""
    from protocol.proofs import hardware as challenges

    return challenges.encode_solution(
        challenges.solve(challenge.seed, challenge.size, challenge.rounds, device)
    )
