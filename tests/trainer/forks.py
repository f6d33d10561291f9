"""Processes that are forks of one that has imported torch and the trainer: the imports take longer
than a small model's run.

That the program starts by itself, and under torchrun, is what test_trainer_ranks.py shows.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from torch.multiprocessing import start_processes

from devnet.ports import free_port

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "prime_trainer.cli", "prime_trainer.dryrun", "prime_trainer.evaluate", "prime_trainer.follow",
    "prime_trainer.observe", "prime_trainer.train", "prime_trainer.run",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
])  # fmt: skip


def run_ranks(size: int, work: Callable[..., None], *arguments: object) -> None:
    """Calls `work` in `size` processes with the environment that torchrun gives its ranks. Raises
    the first rank's error, and ends the other ranks."""
    start_processes(
        _rank, (size, free_port(), work, arguments), size, daemon=True, start_method="forkserver"
    )


def _rank(
    rank: int, size: int, port: int, work: Callable[..., None], arguments: Sequence[object]
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    work(*arguments)


class Forked:
    """`trainer` with the arguments `words`, in a session of its own. Has the part of
    subprocess.Popen that the tests use; standard output and standard error are one stream."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        reading, writing = FORKS.Pipe(duplex=False)
        self._words = words
        self._process = FORKS.Process(target=_trainer, args=(words, environment, writing))
        self._process.start()
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()
        self._said: list[str] = []
        self._reading = threading.Thread(
            target=lambda: self._said.append(self.stdout.read()), daemon=True
        )

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        if self._reading.ident is None:
            self._reading.start()
        self._reading.join(timeout)
        if self._reading.is_alive():
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        self.wait(timeout)
        return self._said[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _trainer(words: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    os.setsid()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["trainer", *words]
    from prime_trainer.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them
