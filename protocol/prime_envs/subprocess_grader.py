"""Grading in a child process that is killed on timeout, so that a grader cannot hang the caller.

The child (`python -m prime_envs.grading_child`) reads one JSON line per request and writes one JSON
line per answer. It protects the caller's time, and its memory up to a limit of address space. Only
`confined` isolates: without it, do not run untrusted code in the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_core.errors import UnavailableError, UserError
from prime_envs.grading_child import CONFINED, MAX_ANSWER_BYTES
from prime_envs.sandbox import kernel

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR")
"""The only environment variables passed to a child (with _PREFIXES): no passwords, no tokens."""
_PREFIXES = ("HF_", "OMP_", "MKL_", "OPENBLAS_", "XDG_", "TIKTOKEN_")


class GradingTimeoutError(UnavailableError):
    """The grader did not answer within its limit and was killed."""


class GradingCrashError(UnavailableError):
    """The grader's process ended without an answer."""


class GradingRaisedError(GradingCrashError):
    """The grader raised an exception: a bug in it, named in the sentence."""


@dataclass(frozen=True)
class Answered:
    """The target's return value and its CPU time in seconds."""

    value: Any
    cpu_seconds: float


@dataclass(frozen=True)
class GraderLimits:
    """What a child may take: `call_seconds` for each call, `start_seconds` until it is ready, and
    `memory_bytes` of address space."""

    call_seconds: float = 5.0
    start_seconds: float = 60.0
    memory_bytes: int = 2 << 30


class SubprocessGrader:
    """Calls `target` ("module:function", JSON in, JSON out) in one child that lives between calls.

    With `fork`, each call runs in a fork of the child, and its time counts in CPU seconds: no state
    (caches, settings) carries over to the next call, and a slow call costs no restart. `confined`
    (with `fork`): a function that `target` returns is called once the fork can only compute (see
    grading_child.py); raises UserError on platforms without that sandbox. `warm` names a function
    that the child calls once before its first request, then its arguments. `python` is the
    interpreter to run it in; another one than this sees the package prime_envs, and otherwise its
    own packages. Thread-safe (one call at a time). `close` or `with` ends the child.
    """

    def __init__(
        self,
        target: str,
        limits: GraderLimits = GraderLimits(),
        *,
        fork: bool = False,
        confined: bool = False,
        warm: Sequence[str | int] = (),
        python: str = sys.executable,
    ) -> None:
        self._target = target
        self._limits = limits
        if confined and not (fork and kernel.supported()):
            raise UserError(
                "answers that a grader evaluates are only graded on Linux, on x86-64 or aarch64: "
                "elsewhere there is no sandbox for them",
                hint="grade them on another machine, or choose another environment",
            )
        self._fork = fork
        self._confined = confined
        self._warm = str(warm[0]) if warm else ""
        self._warm_with = json.dumps(list(warm[1:]))
        self._python = python
        self._seen: tempfile.TemporaryDirectory[str] | None = None
        if python != sys.executable:  # our site-packages would hide those of that interpreter
            self._seen = tempfile.TemporaryDirectory(prefix="prime-grader-")
            Path(self._seen.name, "prime_envs").symlink_to(Path(__file__).resolve().parent)
        self._environment = _environment("" if self._seen is None else self._seen.name)
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._lock = threading.Lock()

    def __enter__(self) -> SubprocessGrader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, request: Any) -> Any:
        """Returns the target's answer. Raises GradingTimeoutError, GradingRaisedError or
        GradingCrashError; the next call works normally after any of them."""
        return self.ask(request).value

    def ask(self, request: Any) -> Answered:
        """Like `call`, with the CPU time used."""
        with self._lock:
            child = self._started()
            try:
                assert child.stdin is not None
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                seconds = self._limits.call_seconds
                wall = seconds if not self._fork else 12 * seconds + 5
                answer = json.loads(self._read_line(child, wall))
            except (OSError, ValueError) as error:
                self._kill()
                raise GradingCrashError(f"The grader {self._target} died: {error}.") from error
            except BaseException:
                self._kill()  # an interrupted exchange cannot be resumed
                raise
            if not self._fork and "answer" not in answer:
                self._kill()
        if "raised" in answer:
            raise GradingRaisedError(f"The grader {self._target} raised {answer['raised']}.")
        if answer.get("ended") == "time":
            raise GradingTimeoutError(
                f"The grader {self._target} did not answer within {self._limits.call_seconds:g} s."
            )
        if "ended" in answer:
            raise GradingCrashError(f"The grader {self._target} died: {answer['ended']}.")
        return Answered(answer["answer"], answer["cpu_seconds"])

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._kill()
        self._child = subprocess.Popen(
            [
                self._python,
                "-m",
                "prime_envs.grading_child",
                self._target,
                str(self._limits.memory_bytes),
                str(self._limits.call_seconds if self._fork else 0),
                self._warm,
                self._warm_with,
                CONFINED if self._confined else "",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )
        try:
            said = json.loads(self._read_line(self._child, self._limits.start_seconds))
            if said != "ready":
                raise GradingRaisedError(f"The grader {self._target} raised {said['raised']}.")
        except BaseException:
            self._kill()
            raise
        return self._child

    def _read_line(self, child: subprocess.Popen[bytes], timeout: float) -> bytes:
        assert child.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                raise GradingTimeoutError(
                    f"The grader {self._target} did not answer within {timeout:g} s."
                )
            data = child.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not data:
                raise GradingCrashError(f"The grader {self._target} ended without an answer.")
            self._buffer += data
            if len(self._buffer) > MAX_ANSWER_BYTES:
                raise GradingCrashError(f"The grader {self._target} answered without end.")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _kill(self) -> None:
        child, self._child, self._buffer = self._child, None, b""
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # unsent bytes to a dead child
                    stream.close()


def _environment(path: str) -> dict[str, str]:
    """Environment of the child, with `path` first in its PYTHONPATH. The hash seed is fixed, so
    that sets of text iterate in the same order everywhere; scorers and algebra systems may depend
    on it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(_PREFIXES)
    }
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(filter(None, (path, known)))
    return {**kept, "PYTHONHASHSEED": "0", **({"PYTHONPATH": paths} if paths else {})}


def require_module(python: str, module: str, variable: str, need: str, hint: str) -> None:
    """Raises UserError unless the interpreter `python` has `module`. `variable` is the environment
    variable that names the interpreter; `need` begins the sentence, `hint` says how to install."""
    look = (
        "import importlib.util, sys\n"
        "try: found = importlib.util.find_spec(sys.argv[1])\n"
        "except ModuleNotFoundError: found = None\n"
        "sys.exit(found is None)"
    )
    try:
        done = subprocess.run(
            [python, "-c", look, module], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} cannot be run: {error}", hint=f"correct {variable}") from error
    if done.returncode != 0:
        raise UserError(f"{need}, which is not installed for {python}", hint=hint)
