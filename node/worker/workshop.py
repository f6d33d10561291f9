"""One lease, one file: engine for its policy, prompts and noise from its seed, proofs, Parquet.

`Workshop` is the honest worker. The development setting `worker_command` may start another program
that serves its own subclass; nothing of that kind lives in this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.core.ids import Digest
from protocol.core.run import RunDefinition
from protocol.core.task import SignedLease


@dataclass(frozen=True)
class Options:
    """The worker's command line. `throttle` N (development): take N times as long."""

    socket: Path
    policies: Path
    outbox: Path
    threads: int = 1
    generation_batch: int = 0
    throttle: float = 1.0


@dataclass(frozen=True)
class Job:
    """One lease to fulfil. `policy` is the folder of the lease's policy version."""

    signed: SignedLease
    lease_digest: Digest
    policy: Path


@dataclass(frozen=True)
class Built:
    """A finished file of the outbox. `tokens` generated."""

    path: Path
    tokens: int


class Workshop:
    """Holds one engine and makes rollout files with it."""

    def __init__(
        self,
        run: RunDefinition,
        options: Options,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self.options = options
        self._clock = clock
        self._sleep = sleep
