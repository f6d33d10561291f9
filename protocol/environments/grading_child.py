"""The child of SubprocessGrader: JSON lines in, JSON lines out, limits set before any import."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys


def main() -> None:
    """argv: module:function, address-space limit in bytes."""
    target, memory = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, function = target.partition(":")
    grade = getattr(importlib.import_module(module), function)
    answers.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        answers.write(json.dumps(grade(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
