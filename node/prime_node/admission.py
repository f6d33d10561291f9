"""The hardware challenge: this machine's speed is measured, not declared."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec

from prime_core.messages import AdmissionAnswer, AdmissionRequest, Challenge
from prime_core.node import Hardware
from prime_core.task import Task
from prime_node.api import NodeApi
from prime_node.config import RuntimeName
from prime_node.runtime.base import Device

log = logging.getLogger("prime.node.admission")


def challenge_device(hardware: Hardware, task: Task) -> Device:
    """Returns where this machine's speed is measured, which is where its worker generates: the GPU
    if the pool's task gets one, this machine has one and torch can use it; otherwise the CPU."""
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
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AdmissionAnswer | None:
    """Requests a challenge, waits for its turn, solves it and submits the products.

    Returns None if `stop` was set before the turn came. Raises PolicyError if the pool refuses this
    machine. `throttle` N makes it N times slower (development); `shadow` requests no seat.
    """
    stop = stop or threading.Event()
    wish = AdmissionRequest(hardware=hardware, task_runtime=runtime, shadow=shadow)
    while (answered := api.challenge(wish)).challenge is None:
        if stop.wait(max(50, answered.retry_after_ms) / 1000):
            return None
    challenge = answered.challenge
    started = clock()
    products = solve(challenge, device)
    if throttle > 1.0:
        sleep((clock() - started) * (throttle - 1.0))
    answer = api.solution(challenge.id, products)
    log.info("measured %d million multiply-adds a second", answer.mmacs_per_second)
    return answer


def solve(challenge: Challenge, device: str) -> bytes:
    """Returns the products in wire format (int64 little-endian)."""
    from prime_verify.proofs import hardware as challenges

    return challenges.encode_solution(
        challenges.solve(challenge.seed, challenge.size, challenge.rounds, device)
    )
