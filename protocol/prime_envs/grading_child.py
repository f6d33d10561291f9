"""The child of SubprocessGrader: JSON lines in, JSON lines out, limits set before any import.

With "fork", each request is answered by a fork of the warm child with its own CPU time limit: a
request that hangs costs only its own time, and leaves nothing behind for the next.

With "confined", the target prepares (it may import and read files, but must not look at untrusted
text) and returns a function, or an answer that needs none. The function is called in a process that
can only compute: one pipe stays open, and the sandbox's filter rejects every system call that
opens, connects, starts or signals (sandbox/kernel.py). A late import raises an error with the
module's name instead of silently changing the score.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from prime_envs.sandbox import kernel

MAX_ANSWER_BYTES = 8 << 20
CONFINED = "confined"


def main() -> None:
    """argv: module:function, address-space limit in bytes, CPU seconds per request with "fork"
    (0: no fork), module:function for warm-up or "", the JSON list of its arguments, "confined"
    or ""."""
    target, memory, seconds, warm = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    warm_with, confined = json.loads(sys.argv[5]), sys.argv[6] == CONFINED
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries may print; that is not an answer
    grade = _named(target)
    if warm:
        try:
            _named(warm)(*warm_with)
        except Exception as error:  # reported like a grader's own
            answers.write(json.dumps({"raised": _described(error)}).encode() + b"\n")
            return
    random.seed(0)  # makes graders without their own seed deterministic
    gc.freeze()  # forks share these pages
    answers.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = _forked(grade, request, seconds, confined) if seconds else _answer(grade, request)
        answers.write(json.dumps(answer).encode() + b"\n")


def _named(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _answer(grade: Callable[..., Any], request: Any) -> dict[str, Any]:
    """The answer with its CPU time, or what the grader raised."""
    start = time.process_time()
    try:
        answer = grade(request)
    except MemoryError:
        return {"ended": "memory"}
    except Exception as error:  # a grader's bug is reported to the caller
        return {"raised": _described(error)}
    return {"answer": answer, "cpu_seconds": time.process_time() - start}


def _described(error: Exception) -> str:
    """Returns an error's type and message as text that can be encoded, at most 500 characters. The
    message may hold half of a surrogate pair."""
    said = f"{type(error).__name__}: {error}"[:500]
    return said.encode(errors="backslashreplace").decode()


class _Missed(MetaPathFinder):
    """Rejects and records every import of a module that is not loaded yet."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.names.append(name[:100])
        raise ImportError(f"{name} is not loaded, and a confined grader loads nothing")


def _confined(grade: Callable[..., Any], request: Any, write: int, seconds: int) -> dict[str, Any]:
    """Calls the function that `grade(request)` returns, in a process that can only compute. The
    limit of `seconds` and the reported time apply to that call."""
    missed = _Missed()
    try:
        scored = grade(request)
        if not callable(scored):
            return {"answer": scored, "cpu_seconds": time.process_time()}
        os.dup2(2, 0)  # closes the requests; 1 and 2 already go nowhere
        os.closerange(3, write)
        os.closerange(write + 1, 1 << 16)
        sys.meta_path.insert(0, missed)
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds + 1))
        kernel.allow_only_computing()
    except Exception as error:
        return {"raised": _described(error)}
    answer = _answer(lambda _: scored(), request)
    if missed.names:
        return {"raised": f"ImportError: it loads {missed.names[0]} only when it grades"}
    return answer


def _forked(
    grade: Callable[..., Any], request: Any, seconds: float, confined: bool
) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        whole = int(-(-seconds // 1))
        if confined:
            _write_and_exit(write, _confined(grade, request, write, whole))
        resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
        _write_and_exit(write, _answer(grade, request))
    os.close(write)
    # Wall time is only a second limit: a busy machine must not make a right answer wrong.
    deadline = time.monotonic() + 10 * seconds
    data = bytearray()
    with contextlib.closing(os.fdopen(read, "rb", buffering=0)) as stream:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([stream], [], [], left)[0]:
                part = stream.read(1 << 16)
                data += part
                if not part or len(data) > MAX_ANSWER_BYTES:
                    break
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if len(data) > MAX_ANSWER_BYTES:
        return {"ended": "an answer without end"}
    if not data.endswith(b"\n"):
        code = os.waitstatus_to_exitcode(status)
        return {"ended": "time" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "crash"}
    answer: dict[str, Any] = json.loads(data)
    return answer


def _write_and_exit(write: int, answer: dict[str, Any]) -> None:
    view = memoryview(json.dumps(answer).encode() + b"\n")
    while view:
        view = view[os.write(write, view) :]
    os._exit(0)


if __name__ == "__main__":
    main()
