"""Child processes: started with a log each, ended together, never left behind.

On Linux the kernel ends them when this process dies, however it dies (PR_SET_PDEATHSIG); their
process ids are also written down, so that `make demo-stop` finds what another system left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from prime_core.errors import FatalError, UnavailableError

STOP_SECONDS = 20.0


@dataclass
class Child:
    """One running process and where its output goes."""

    name: str
    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path
    required: bool

    def tail(self) -> str:
        """The last 15 lines of its log, for error messages."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-15:])


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Supervisor:
    """Starts, watches and ends the processes of one network; newest ended first."""

    def __init__(self, logs: Path, pid_file: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self.pid_file = pid_file
        self.environment = dict(environment)
        self.children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, argv: Sequence[str], *, required: bool = True) -> Child:
        """Starts `argv` with its output in `<logs>/<name>.log` (appended on a restart).

        A `required` child that ends by itself fails the network (see `check`). Raises ValueError
        if a child of that name still runs: the supervisor would lose track of it.
        """
        running = self.children.get(name)
        if running is not None and running.process.poll() is None:
            raise ValueError(f"{name} is already running as process {running.process.pid}")
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        child = Child(name, argv, process, log, required)
        self.children[name] = child
        self._write_pids()
        return child

    def run(
        self, name: str, argv: Sequence[str], timeout: float = 300.0, *, codes: Sequence[int] = (0,)
    ) -> str:
        """Runs `argv` to its end and returns its standard output.

        Raises FatalError with its last words unless it ends with one of `codes`.
        """
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment,
            timeout=timeout,
            check=False,
        )
        with (self.logs / f"{name}.log").open("ab") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode not in codes:
            words = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise FatalError(f"{name} ended with exit code {done.returncode}: {words[-1500:]}")
        return done.stdout.decode()

    def check(self) -> None:
        """Raises FatalError if a required child has ended by itself."""
        for child in self.children.values():
            code = child.process.poll()
            if child.required and code is not None:
                raise FatalError(
                    f"{child.name} ended with exit code {code}; its log ({child.log}) ends:\n"
                    f"{child.tail()}"
                )

    def wait_for(
        self, what: str, ready: Callable[[], bool], timeout: float, interval: float = 0.25
    ) -> None:
        """Polls `ready` until true. Raises UnavailableError at the deadline, FatalError if a
        required child dies meanwhile."""
        deadline = time.monotonic() + timeout
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise UnavailableError(f"{what} did not happen within {timeout:.0f} s")
            time.sleep(interval)

    def stop(self, name: str, *, how: signal.Signals = signal.SIGTERM) -> int | None:
        """Ends one child, waits for it, and returns its exit code."""
        child = self.children.pop(name, None)
        if child is None:
            return None
        _end([child], how)
        self._write_pids()
        return child.process.returncode

    def stop_all(self) -> None:
        """Ends every child, those started last first; harmless when called twice."""
        _end(list(reversed(self.children.values())), signal.SIGTERM)
        self.children.clear()
        self.pid_file.unlink(missing_ok=True)

    def _write_pids(self) -> None:
        pids = {name: _identity(child.process.pid) for name, child in self.children.items()}
        self.pid_file.write_text(
            json.dumps({"supervisor": _identity(os.getpid()), "children": pids})
        )


def _end(children: Sequence[Child], how: signal.Signals) -> None:
    """Signals the group of each child and waits; SIGKILL after STOP_SECONDS."""
    for child in children:
        if child.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(how)
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)  # its children too, should any be left
        child.process.wait()


def stop_recorded(pid_file: Path) -> list[str]:
    """Ends what a pid file names (of a network whose supervisor is gone or should go).

    Returns the names that were ended. A process id that the system has since given to another
    program is left alone: its start time differs.
    """
    if not pid_file.exists():
        return []
    recorded = json.loads(pid_file.read_text())
    ended = []
    supervisor = _running(recorded["supervisor"])
    if supervisor is not None and supervisor.pid != os.getpid():
        supervisor.terminate()  # it ends its children itself
        try:
            supervisor.wait(2 * STOP_SECONDS)
        except psutil.TimeoutExpired:
            supervisor.kill()
            supervisor.wait(STOP_SECONDS)
        ended.append("the demo")
    for name, identity in recorded["children"].items():
        if _running(identity) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(identity["pid"], signal.SIGKILL)
                ended.append(name)
    pid_file.unlink(missing_ok=True)
    return ended


def _identity(pid: int) -> dict[str, float]:
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except psutil.NoSuchProcess:
        return {"pid": pid, "started": 0.0}


def _running(identity: dict[str, float]) -> psutil.Process | None:
    try:
        process = psutil.Process(int(identity["pid"]))
        return process if process.create_time() == identity["started"] else None
    except psutil.NoSuchProcess:
        return None
