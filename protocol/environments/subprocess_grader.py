"""Grading in a child process that is killed when it takes too long: a grader cannot hang us.

The child (`python -m protocol.environments.grading_child`) reads one JSON line a
request and writes one JSON line an answer. It protects the caller's time and its memory up to
`memory_bytes` of address space; it does not isolate: run no code from outside in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.core.errors import UnavailableError

MAX_ANSWER_BYTES = 1 << 16


class GradingTimeoutError(UnavailableError):
    """The grader did not answer within its limit and was killed."""


class GradingCrashError(UnavailableError):
    """The grader's process ended without an answer."""


class GradingRaisedError(GradingCrashError):
    """The grader itself raised: a defect of it, named in the sentence."""


@dataclass(frozen=True)
class Answered:
    """What the target returned, and the processor seconds it took."""

    value: Any
    cpu_seconds: float


class SubprocessGrader:
    """Calls `target` ("module:function", JSON in, JSON out) in one child that lives between calls.

    With `fork`, `timeout` is processor seconds of a fork of the child for each call: nothing that
    one call leaves behind (caches, settings) reaches the next, and a slow call costs no restart.
    `warm` names a function that the child calls once before its first request; `python` another
    interpreter to run it under, with `path` as its PYTHONPATH.
    Safe to call from several threads (one call at a time). `close` or `with` ends the child.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 5.0,
        start_timeout: float = 60.0,
        memory_bytes: int = 2 << 30,
        fork: bool = False,
        warm: str = "",
        python: str = sys.executable,
        path: Path | None = None,
    ) -> None:
        self._target = target
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._memory_bytes = memory_bytes
        self._fork = fork
        self._warm = warm
        self._python = python
        known = os.environ.get("PYTHONPATH", "")
        self._environment = (
            {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(path), known)))}
            if path
            else None
        )
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._lock = threading.Lock()

    def __enter__(self) -> SubprocessGrader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, request: Any) -> Any:
        """The target's answer. Raises GradingTimeoutError, GradingRaisedError or GradingCrashError;
        after any of them the next call is answered as if nothing had happened."""
        return self.ask(request).value

    def ask(self, request: Any) -> Answered:
        """Like `call`, with the time it took."""
        with self._lock:
            child = self._started()
            try:
                assert child.stdin is not None
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                wall = self._timeout if not self._fork else 12 * self._timeout + 5
                answer = json.loads(self._read_line(child, wall))
            except (OSError, ValueError) as error:
                self._kill()
                raise GradingCrashError(f"The grader {self._target} died: {error}.") from error
            except BaseException:
                self._kill()  # an interrupted talk cannot be taken up again
                raise
            if not self._fork and "answer" not in answer:
                self._kill()
        if "raised" in answer:
            raise GradingRaisedError(f"The grader {self._target} raised {answer['raised']}.")
        if answer.get("ended") == "time":
            raise GradingTimeoutError(
                f"The grader {self._target} did not answer within {self._timeout:g} s."
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
                "protocol.environments.grading_child",
                self._target,
                str(self._memory_bytes),
                str(self._timeout if self._fork else 0),
                self._warm,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )
        try:
            self._read_line(self._child, self._start_timeout)  # the child's "ready"
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
            data = child.stdout.read1(4096)  # type: ignore[attr-defined]
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
