"""The development runtime: the worker as a child process. IT ISOLATES NOTHING.

Not protected: the worker can read every file of this user (the keystore too), use the network, all
memory and every CPU. What it does do: the child gets no key and almost no environment, dies with
the agent, and runs only our own worker (never the task's command, which a stranger wrote).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Literal

from node.runtime import guard
from node.runtime.base import LOG_TAIL_BYTES, Mounts, WorkerOptions
from protocol.core.errors import UnavailableError, UserError
from protocol.core.task import Task

WARNING = (
    "--runtime process ISOLATES NOTHING: the task can read this user's files and use the network. "
    "It is for development; use --runtime docker on a machine you care about."
)
_LOG_LIMIT = 8 << 20
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")


class ProcessHandle:
    """A child process whose output goes to one log file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace: float) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        status = self.wait(grace)
        if status is None:
            self._process.kill()
            status = self._process.wait()
        return status

    def logs(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")


class ProcessRuntime:
    """Starts workers as child processes of this virtual environment.

    `command` (development) replaces our own worker; its module must take the worker's arguments.
    """

    name: Literal["process"] = "process"

    def __init__(self, logs: Path, command: tuple[str, ...] = ()) -> None:
        self._logs = logs
        self._command = command or ("python", "-m", "node.worker")

    @property
    def task_uid(self) -> int:
        return os.getuid()

    def check(self, task: Task | None) -> str:
        if task is not None and task.gpus and not Path("/dev/nvidiactl").exists():
            raise UserError(
                "the task asks for GPUs and this machine shows none",
                hint="install the NVIDIA driver, or join a pool without GPUs",
            )
        return WARNING

    def clean(self) -> int:
        return 0  # children die with their agent (guard.py)

    def start(self, task: Task, mounts: Mounts, options: WorkerOptions) -> ProcessHandle:
        """Starts the worker. Call it from the main thread: Linux ties PR_SET_PDEATHSIG to the
        thread that forked."""
        program, *rest = self._command
        executable = sys.executable if program in ("python", "python3") else shutil.which(program)
        if executable is None:
            raise UserError(f"there is no program {program!r}", hint="check worker_command")
        log = self._logs / "worker.log"
        words = [
            *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid())),
            *(executable, *rest, *options.arguments(mounts)),
        ]
        try:
            with self._open_log(log) as output:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(options.threads),
                    cwd=mounts.outbox,
                    start_new_session=True,  # a Ctrl-C reaches the agent alone, which stops it
                )
        except OSError as error:
            raise UnavailableError(f"the worker cannot be started now: {error}") from error
        return ProcessHandle(process, log)

    def _open_log(self, log: Path) -> IO[bytes]:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > _LOG_LIMIT:
            log.replace(log.with_suffix(".log.1"))
        return log.open("ab")

    def _environment(self, threads: int) -> dict[str, str]:
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        env["PYTHONUNBUFFERED"] = "1"
        env["TOKENIZERS_PARALLELISM"] = "false"
        env["HF_HUB_OFFLINE"] = "1"
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        return env
