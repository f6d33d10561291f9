"""The child of SubprocessGrader: JSON lines in, JSON lines out, limits set before any import.

With "fork", each request is answered by a fork of the warm child under a processor limit of its
own: a request that hangs costs its own time only, and leaves nothing behind for the next.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """argv: module:function, address-space limit in bytes, seconds a request may take with "fork"
    (0: no fork), module:function to warm up with or ""."""
    target, memory, seconds, warm = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    grade = _named(target)
    if warm:
        _named(warm)()
    gc.freeze()  # forks share these pages
    answers.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = _forked(grade, request, seconds) if seconds else _answer(grade, request)
        answers.write(json.dumps(answer).encode() + b"\n")


def _named(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _answer(grade: Callable[..., Any], request: Any) -> dict[str, Any]:
    """The answer with the processor time it took, or what the grader raised."""
    start = time.process_time()
    try:
        answer = grade(request)
    except MemoryError:
        return {"ended": "memory"}
    except Exception as error:  # a grader's defect is told, by name, to whoever asked
        return {"raised": f"{type(error).__name__}: {error}"[:500]}
    return {"answer": answer, "cpu_seconds": time.process_time() - start}


def _forked(grade: Callable[..., Any], request: Any, seconds: float) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        whole = int(-(-seconds // 1))
        resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
        _write_and_exit(write, _answer(grade, request))
    os.close(write)
    # Wall time is a second net only: a busy machine must not turn a right answer into a wrong one.
    deadline = time.monotonic() + 10 * seconds
    data = bytearray()
    with contextlib.closing(os.fdopen(read, "rb", buffering=0)) as stream:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([stream], [], [], left)[0]:
                part = stream.read(1 << 16)
                if not part:
                    break
                data += part
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
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
