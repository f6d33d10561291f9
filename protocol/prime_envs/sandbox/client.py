"""`Sandbox.run(program) → Outcome`: runs an untrusted Python program with limited resources.

Guarantees for any program:
- No network, no new processes, no file is opened, read or written: the kernel rejects the calls
  (kernel.py). A program can read its standard input, write its output, and import what was loaded
  before it started (server.MODULES: much of the standard library). There is no scratch folder to
  leave anything in and no test file to read: expected answers never enter the sandbox.
- CPU time, memory (address space), threads, output and time without progress are limited. A
  program that exceeds a limit is killed; `status` says which limit.
- "namespaces" (if the machine permits it): also an empty read-only root, no network device, no
  view of other processes, a separate user. "limits" (inside a task's container): only the filter
  and limits, with the container around them. Programs see no difference; verdicts agree.

Not covered: kernel bugs in the few remaining calls, and processor bugs (Spectre and similar: a
program could time what shares its core). A program may use all of its limits every time. In
"limits", as root without the right to change user, the program keeps our user (the filter still
rejects everything that would use it). In "limits" it may also learn the existence, size and age of
files whose paths it guesses (newfstatat). Clocks are readable, so a program may behave differently
from run to run; graders mark such answers as uncertain (graders/code.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from prime_core.errors import UnavailableError, UserError
from prime_envs.sandbox import kernel

Level = Literal["namespaces", "bubblewrap", "limits"]
Status = Literal["ok", "failed", "cpu", "wall", "idle", "output", "threads"]
SLACK = 8
"""A program within 1/SLACK of a limit may exceed it on a machine that is SLACK times slower."""
_START_SECONDS = 60.0


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program: CPU and wall seconds, seconds without progress, MiB of memory beyond
    the interpreter's own, bytes of output."""

    cpu_seconds: float = 4.0
    wall_seconds: float = 40.0
    idle_seconds: float = 3.0
    memory_mb: int = 512
    output_bytes: int = 1 << 20
    threads: int = 64


@dataclass(frozen=True)
class Program:
    """Source text and its standard input. With `function`, that function (or method of a class
    without constructor arguments) is called with `arguments` and its result returned as JSON.
    `prelude` runs first, in the same namespace."""

    source: str
    stdin: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    prelude: str = ""


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended. `code` is its exit code, negative for a signal; `error` is the end of
    its standard error; `result` is the JSON text of a function's result, "" if there is none."""

    status: Status
    code: int
    output: str
    error: str
    result: str
    cpu_seconds: float
    peak_mb: int

    def uncertain(self, limits: ProgramLimits) -> bool:
        """Whether a slower or faster machine might get another result."""
        return (
            self.status in ("cpu", "wall", "idle", "threads")
            or self.cpu_seconds * SLACK > limits.cpu_seconds
            or self.error.startswith("MemoryError")
            or self.error.startswith("RuntimeError: can't start new thread")
            or self.peak_mb > limits.memory_mb // 2
        )


class Sandbox:
    """A warm server process. `run` is thread-safe (one program at a time). `close` or `with` ends
    it. Raises UserError on platforms without a sandbox."""

    def __init__(self, level: Level = "namespaces") -> None:
        if not kernel.supported():
            raise UserError(
                "programs are only run on Linux, on x86-64 or aarch64: elsewhere there is no "
                "sandbox for them",
                hint="grade code on another machine, or choose a task without code",
            )
        self._wanted = level
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.level: Level | None = None
        """The isolation achieved, set when a program is run."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, program: Program, limits: ProgramLimits | None = None) -> ProgramOutcome:
        """Runs a program. Raises UnavailableError if the server died; the next call starts a new
        one."""
        limits = limits or ProgramLimits()
        request = {**asdict(program), "limits": asdict(limits)}
        with self._lock:
            child = self._started()
            try:
                self._send(child, request)
                answer = self._receive(child, limits.wall_seconds + 20.0)
            except (OSError, EOFError, ValueError) as error:
                self._kill()
                raise UnavailableError(f"the sandbox's server died: {error}") from error
            except BaseException:
                self._kill()  # an interrupted exchange cannot be resumed
                raise
        answer["output"] = answer["output"].encode("latin-1").decode("utf-8", "replace")
        answer["result"] = answer["result"].encode("latin-1").decode("utf-8", "replace")
        if answer["code"] == 99 and not answer["output"] and not answer["error"]:
            raise UnavailableError(
                "the sandbox could not be closed round the program; it never ran"
            )
        return ProgramOutcome(**answer)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._kill()
        for level in _attempts(self._wanted):
            try:
                self._child = subprocess.Popen(
                    _command(level),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
                )
                ready = self._receive(self._child, _START_SECONDS)
            except (OSError, EOFError, ValueError):
                self._kill()
                continue
            except BaseException:
                self._kill()
                raise
            if level == "namespaces" and ready["level"] == "limits" and _bubblewrap():
                self._kill()
                continue
            self.level = "bubblewrap" if level == "bubblewrap" else ready["level"]
            return self._child
        raise UnavailableError(f"the sandbox's server does not start ({self._wanted})")

    def _send(self, child: subprocess.Popen[bytes], value: dict[str, Any]) -> None:
        assert child.stdin is not None
        data = json.dumps(value).encode()
        child.stdin.write(struct.pack("!I", len(data)) + data)
        child.stdin.flush()

    def _receive(self, child: subprocess.Popen[bytes], timeout: float) -> dict[str, Any]:
        assert child.stdout is not None
        deadline = time.monotonic() + timeout
        size = struct.unpack("!I", self._read(child.stdout.fileno(), 4, deadline))[0]
        answer: dict[str, Any] = json.loads(self._read(child.stdout.fileno(), size, deadline))
        return answer

    def _read(self, descriptor: int, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise OSError("it did not answer in time")
            data = os.read(descriptor, min(size - len(parts), 1 << 16))
            if not data:
                raise EOFError("it ended without an answer")
            parts += data
        return bytes(parts)

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _environment() -> dict[str, str]:
    """Environment of the server. The hash seed is fixed, so that sets of text iterate in the same
    order everywhere."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def _attempts(wanted: Level) -> tuple[Level, ...]:
    if wanted == "namespaces":
        return ("namespaces", "bubblewrap", "limits") if _bubblewrap() else ("namespaces", "limits")
    return (wanted,)


def _bubblewrap() -> bool:
    return shutil.which("bwrap") is not None


_TEMPORARY = "/tmp"  # noqa: S108 - hidden, not written to


def _command(level: Level) -> list[str]:
    server = [sys.executable, "-m", "prime_envs.sandbox.server"]
    if level != "bubblewrap":
        return [*server, level]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc",
        "--dev", "/dev", "--tmpfs", _TEMPORARY, *_shown_again(), "--", *server, "limits",
    ]  # fmt: skip


def _shown_again() -> list[str]:
    """Bind mounts for the server's own files that lie under the folder that it sees empty."""
    source = str(Path(__file__).resolve().parents[3])
    needed = dict.fromkeys([sys.prefix, sys.base_prefix, source])
    inside = [place for place in needed if Path(place).is_relative_to(_TEMPORARY)]
    return [word for place in inside for word in ("--ro-bind", place, place)]
