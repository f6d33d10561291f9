"""The runtime interface: start a task, wait for it, stop it, read its last output."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from prime_core.errors import UserError
from prime_core.task import Task

LOG_TAIL_BYTES = 8 << 10
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Mounts:
    """What a task may see of the host: policies (read-only) and the bridge's folder. `outbox` is
    where it writes; only a task without a container writes there on the host itself."""

    policies: Path
    outbox: Path
    bridge: Path
    """Folder that contains the socket `socket_name`."""
    socket_name: str = "agent.sock"


@dataclass(frozen=True)
class WorkerOptions:
    """Options that the agent passes on the worker's command line. `throttle` is for development.

    `device` is the one that the hardware challenge measured; on a GPU the model uses bfloat16.
    `gpus` are the cards that the task gets. The engine chooses what is 0.
    """

    threads: int = 1
    generation_batch: int = 0
    throttle: float = 1.0
    device: Device = "cpu"
    gpus: str = "all"
    tensor_parallel: int = 0
    memory_share: float = 0.0
    max_length: int = 0
    extra: tuple[str, ...] = field(default=())

    def arguments(self, mounts: Mounts) -> tuple[str, ...]:
        """Returns the worker's arguments, for paths as the worker sees them."""
        words = [
            "--socket", str(mounts.bridge / mounts.socket_name),
            "--policies", str(mounts.policies),
            "--outbox", str(mounts.outbox),
            "--threads", str(self.threads),
        ]  # fmt: skip
        if self.generation_batch:
            words += ["--generation-batch", str(self.generation_batch)]
        if self.device == "cuda":
            words += ["--device", "cuda", "--dtype", "bfloat16"]
        if self.tensor_parallel:
            words += ["--tensor-parallel", str(self.tensor_parallel)]
        if self.memory_share:
            words += ["--memory-share", repr(self.memory_share)]
        if self.max_length:
            words += ["--max-length", str(self.max_length)]
        if self.throttle != 1.0:
            words += ["--throttle", repr(self.throttle)]
        return (*words, *self.extra)


class TaskHandle(Protocol):
    """A started task."""

    @property
    def name(self) -> str:
        """Its name for the log: "process 123", "container 9f…"."""
        ...

    def wait(self, timeout: float) -> int | None:
        """Returns its exit status once it has ended, or None if it still runs after `timeout`
        seconds."""
        ...

    def stop(self, grace: float) -> int:
        """Sends SIGTERM, kills it after `grace` seconds, and returns its exit status."""
        ...

    def logs(self) -> str:
        """Returns the last LOG_TAIL_BYTES of its output."""
        ...


class NoCardsError(UserError):
    """Tasks that ask for GPUs cannot get the node's cards here."""


class Runtime(Protocol):
    """A way to run tasks."""

    @property
    def name(self) -> Literal["docker", "process"]: ...

    @property
    def task_uid(self) -> int:
        """User id with which tasks connect to the bridge."""
        ...

    def check(self, task: Task | None) -> str:
        """Returns one line on what is available. Raises UserError (what, why, what to do) if tasks
        cannot run here, NoCardsError if they cannot get the node's cards; with `task`, also checks
        its image, and the cards only if it asks for them."""
        ...

    def clean(self) -> int:
        """Ends what an earlier run of this agent left behind; returns how many tasks."""
        ...

    def start(self, task: Task, mounts: Mounts, options: WorkerOptions) -> TaskHandle:
        """Starts `task`. Raises UserError if the machine refuses, UnavailableError if the engine
        does not answer."""
        ...
