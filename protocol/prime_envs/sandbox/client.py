"""`Sandbox.run(program) → Outcome`: a Python program that nobody trusts, bounded in everything.

What holds, whatever the program does:
- no network, no new process, no file opened, read or written: the kernel refuses the calls
  (kernel.py). A program reads its standard input, writes its output, and imports what was loaded
  before it started (server.MODULES: a good part of the standard library). So there is no scratch
  folder to leave anything in, and no test file to read: expected answers never enter the sandbox.
- processor time, memory (address space), threads, output and time without progress are limited;
  a program that breaks a limit is killed, its `status` says which.
- "namespaces" (the machine lets us): also an empty read-only root, no network device, no view of
  other processes, a user of its own. "limits" (inside a task's container): filter and limits alone,
  with the container around them. A program sees no difference; verdicts agree.

What it does not protect from: bugs of the kernel in the few calls that remain, and of the processor
(Spectre and its kin: a program could time what shares its core); time spent: a program may use all
of its limits each time. In "limits" as root without the right to change user, the program keeps our
user (the filter still refuses everything that would use it), and anywhere in "limits" it may learn
that a file exists, how large and how old it is, of paths that it guesses (newfstatat). A clock can
be read, so a program may behave differently from run to run: graders call such answers uncertain
(graders/code.py).
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
"""A program within 1/SLACK of a limit may break it on a machine that much slower."""
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """Of one program: processor and wall seconds, seconds without progress, MiB of memory beyond
    the interpreter's own, bytes of output."""

    cpu_seconds: float = 4.0
    wall_seconds: float = 40.0
    idle_seconds: float = 3.0
    memory_mb: int = 512
    output_bytes: int = 1 << 20
    threads: int = 64


@dataclass(frozen=True)
class Program:
    """Source text with its standard input; with `function`, that function (or method of a class
    without arguments) is called with `arguments` and its result handed back as JSON. `prelude` runs
    before, in the same names."""

    source: str
    stdin: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    prelude: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `code` is its exit code, negative for a signal; `error` the end of what
    it wrote to standard error; `result` JSON text of a function's result, "" if there is none."""

    status: Status
    code: int
    output: str
    error: str
    result: str
    cpu_seconds: float
    peak_mb: int

    def uncertain(self, limits: Limits) -> bool:
        """Whether a slower or faster machine might have found otherwise."""
        return (
            self.status in ("cpu", "wall", "idle", "threads")
            or self.cpu_seconds * SLACK > limits.cpu_seconds
            or self.error.startswith("MemoryError")
            or self.error.startswith("RuntimeError: can't start new thread")
            or self.peak_mb > limits.memory_mb // 2
        )


class Sandbox:
    """One warm server process; `run` is safe to call from several threads (one program at a time).
    `close` or `with` ends it. Raises UserError where the sandbox cannot be had."""

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
        """What was achieved, once a program was run."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Raises UnavailableError if the server died; the next call starts a fresh one."""
        limits = limits or Limits()
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
                self._kill()  # an interrupted talk cannot be taken up again
                raise
        answer["output"] = answer["output"].encode("latin-1").decode("utf-8", "replace")
        answer["result"] = answer["result"].encode("latin-1").decode("utf-8", "replace")
        if answer["code"] == 99 and not answer["output"] and not answer["error"]:
            raise UnavailableError(
                "the sandbox could not be closed round the program; it never ran"
            )
        return Outcome(**answer)

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
    """The same hash seed everywhere: sets of text come in the same order."""
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
    """What the server needs of our own files where they lie under the folder that it sees empty."""
    source = str(Path(__file__).resolve().parents[3])
    needed = dict.fromkeys([sys.prefix, sys.base_prefix, source])
    inside = [place for place in needed if Path(place).is_relative_to(_TEMPORARY)]
    return [word for place in inside for word in ("--ro-bind", place, place)]
