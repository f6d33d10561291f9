"""Graders: programs a second in the sandbox, and seconds that a grade takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from bench.form import Row
from prime_envs.graders.mathematics import Mathematics
from prime_envs.sandbox.client import Program, Sandbox
from prime_envs.tasks import Task as GradedTask

PACKAGES = ("math-verify", "sympy")
TRIVIAL = Program("print(sum(map(int, input().split())))", stdin="20 22\n")


def run(quick: bool) -> list[Row]:
    """All rows. About a minute; `quick` takes fewer of everything."""
    return [*_programs(100 if quick else 400), *_mathematics(quick)]


def _programs(count: int) -> Iterator[Row]:
    for level in ("namespaces", "limits"):
        with Sandbox(level) as one, Sandbox(level) as two:
            boxes = (one, two)
            for box in boxes:
                box.run(TRIVIAL)  # the server starts
            start = time.perf_counter()
            threads = [threading.Thread(target=_run_many, args=(box, count // 2)) for box in boxes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rate = count / (time.perf_counter() - start)
            yield Row(f"programs_s_{one.level}", rate, "1/s, 2 sandboxes", 40, "higher")


def _run_many(box: Sandbox, count: int) -> None:
    for _ in range(count):
        if box.run(TRIVIAL).output != "42\n":
            raise AssertionError("the sandbox gave a wrong output")


def _mathematics(quick: bool) -> Iterator[Row]:
    grader = Mathematics()
    try:
        for name, gold, answer, count in (
            ("number", "1234", "1{,}234", 2000),
            ("algebra", "x^2-1", "(x-1)(x+1)", 20 if quick else 60),
        ):
            task = GradedTask("1", "verifiable_math", "?", {"ground_truth": gold})
            text = f"\\boxed{{{answer}}}"
            if grader.grade(task, text).task_micro == 0:
                raise AssertionError("the gold answer is not accepted")
            start = time.perf_counter()
            for _ in range(count):
                grader.grade(task, text)
            yield Row(f"math_{name}_ms", 1000 * (time.perf_counter() - start) / count, "ms")
    finally:
        grader.close()
