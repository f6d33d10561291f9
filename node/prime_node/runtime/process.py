"""The development runtime: the worker as a child process. IT ISOLATES NOTHING.

Not protected: the worker can read every file of this user (including the keystore), use the
network, all memory and every CPU, and write anywhere this user may. Provided: the child gets no key
and almost no environment, dies with the agent, and runs only our own worker, never the task's
command, which is untrusted. A worker that fills its outbox or its log is killed once this is
noticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import IO, Literal

import prime_core
import prime_node
from prime_core.errors import UnavailableError, UserError
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.task import Task
from prime_node.fingerprint import CPU_ONLY
from prime_node.runtime import guard
from prime_node.runtime.base import LOG_TAIL_BYTES, Mounts, NoCardsError, WorkerOptions
from prime_node.state import empty_folder

log = logging.getLogger("prime.node.process")

WARNING = (
    "--runtime process ISOLATES NOTHING: the task can read this user's files and use the network. "
    "It is for development; use --runtime docker on a machine you care about."
)
DRIVER = Path("/dev/nvidiactl")
"""Exists where an NVIDIA driver runs."""
LARGEST_LOG = 16 << 20
OUTBOX_BYTES = 2 * MAX_FILE_BYTES
"""Room for one finished file and the next."""
OUTBOX_FILES = 1000
LOOK_SECONDS = 0.2
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
              "LD_LIBRARY_PATH")  # fmt: skip


class ProcessHandle:
    """A child process that logs to one file. A thread limits the size of the log and of the outbox
    until the process ends."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, outbox: Path) -> None:
        self._process = process
        self._log = log
        self._outbox = outbox
        self._ended_because = ""
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._limit_disk, name="task-room", daemon=True)
        self._watch.start()

    def _limit_disk(self) -> None:
        while not self._done.wait(LOOK_SECONDS) and self._process.poll() is None:
            if self._log.exists() and self._log.stat().st_size > LARGEST_LOG:
                self._end(f"its log {self._log} holds more than {LARGEST_LOG >> 20} MiB")
            elif holds_more_than(self._outbox, OUTBOX_BYTES, OUTBOX_FILES):
                self._end(
                    f"it wrote more than {OUTBOX_BYTES >> 20} MiB (or {OUTBOX_FILES} files) into "
                    f"its outbox {self._outbox}, which a rollout file never needs"
                )

    def _end(self, why: str) -> None:
        """Kills it with everything it started, and empties its outbox."""
        self._ended_because = f"the task was ended: {why}"
        log.error("%s", self._ended_because)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        empty_folder(self._outbox)

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
        self._done.set()
        self._watch.join()
        return status

    def logs(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
            words = file.read().decode(errors="replace")
        return f"{words}\n{self._ended_because}" if self._ended_because else words


class ProcessRuntime:
    """Starts workers as child processes in this virtual environment.

    `command` (development) replaces our own worker; its module must accept the worker's arguments.
    `gpus` are the node's cards (config.Settings).
    """

    name: Literal["process"] = "process"

    def __init__(self, logs: Path, command: tuple[str, ...] = (), gpus: str = "all") -> None:
        self._logs = logs
        self._gpus = gpus
        self._command = command or ("python", "-m", "prime_node.worker")

    @property
    def task_uid(self) -> int:
        return os.getuid()

    def check(self, task: Task | None) -> str:
        wanted = task is not None and task.gpus and self._gpus != "none"
        if wanted and not DRIVER.exists():
            raise NoCardsError(
                "the task asks for GPUs and this machine shows none",
                hint=f"install the NVIDIA driver, or {CPU_ONLY}",
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
        log_file = self._logs / "worker.log"
        empty_folder(mounts.outbox)
        words = [
            *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid())),
            *(executable, *rest, *options.arguments(mounts)),
        ]
        try:
            with self._open_log(log_file) as output:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(options.threads),
                    cwd=mounts.outbox,
                    start_new_session=True,  # only the agent gets Ctrl-C; it stops the worker
                )
        except OSError as error:
            raise UnavailableError(f"the worker cannot be started now: {error}") from error
        return ProcessHandle(process, log_file, mounts.outbox)

    def _open_log(self, path: Path) -> IO[bytes]:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_LOG // 2:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")

    def _environment(self, threads: int) -> dict[str, str]:
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        folders = dict.fromkeys(map(_folder_of, (prime_node, prime_core)))
        env["PYTHONPATH"] = os.pathsep.join(folders)
        env["PYTHONUNBUFFERED"] = "1"
        env["TOKENIZERS_PARALLELISM"] = "false"
        env["HF_HUB_OFFLINE"] = "1"
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        return env


def _folder_of(package: ModuleType) -> str:
    """Returns the folder on the search path that contains one of our packages."""
    return str(Path(package.__path__[0]).resolve().parent)


def holds_more_than(folder: Path, most_bytes: int, most_files: int) -> bool:
    """Whether the contents of `folder` use more disk space or entries than allowed. Links are not
    followed; entries that vanish or cannot be read count as nothing."""
    taken = entries = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entries += 1
            with contextlib.suppress(OSError):  # vanished, or in an unreadable folder
                taken += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118
            if taken > most_bytes or entries > most_files:
                return True
    return False
