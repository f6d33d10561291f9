"""Graders and budgets: programs a second in the sandbox, grades a second, and how evenly files of
two speed classes take their time.

`file_time_ratio` is measured on the real worker (prime_node.worker.rollout_builder) with the demo's
model, one node slowed fourfold as the demo slows one, budgets chosen by lengths.balanced_targets:
the slower class's median file time over the faster one's, the larger way round.
The model keeps to its budget by force: each row is generated exactly as long as it was asked to be,
so what is measured is the budgets and the machinery, not the model's obedience.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.form import ROOT, Row
from prime_core import encoding
from prime_core.run import LengthBudgets, RunDefinition
from prime_engine.base import Engine, GenerationRequest, StateSink
from prime_engine.batch import RowSet
from prime_envs.graders.mathematics import Mathematics
from prime_envs.lengths import balanced_targets
from prime_envs.registry import environment_ref
from prime_envs.sandbox.client import Program, Sandbox
from prime_envs.tasks import Task as GradedTask
from prime_verify.setups import synthetic_run

PACKAGES = ("math-verify", "sympy", "torch")
TRIVIAL = Program("print(sum(map(int, input().split())))", stdin="20 22\n")
SLOWED = 4.0
MENU = tuple(range(8, 97, 8))


def run(quick: bool) -> list[Row]:
    """All rows. About a minute; `quick` takes fewer of everything."""
    return [*_programs(100 if quick else 400), *_mathematics(quick), *_file_times(quick)]


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


class _Obedient:
    """An engine whose rows are exactly as long as their prompts ask (the first number in them)."""

    def __init__(self, inner: Any, tokenizer: Any) -> None:
        self._inner, self._tokenizer = inner, tokenizer
        inner._end_tokens = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> RowSet:
        asked = [
            replace(
                request,
                max_output_tokens=int(self._tokenizer.decode(request.prompt_tokens).split("|")[0]),
            )
            for request in requests
        ]
        rows: RowSet = self._inner.add(asked, temperature, sink)
        return rows


def _file_times(quick: bool) -> Iterator[Row]:
    from prime_node.worker.rollout_builder import Job, Options, RolloutBuilder
    from prime_verify.calibrate import synthetic_lease
    from prime_verify.engines import load_engine

    by_class = balanced_targets(MENU, {1: Fraction(1), 2: Fraction(4)})
    run = _run(by_class)
    batch = run.samples_per_group  # one group at a time: its rows are equally long
    inner = load_engine(
        ROOT / "devnet" / "model", dtype="float32", device="cpu", threads=1, batch_rows=batch
    )
    engine: Any = _Obedient(inner, inner.tokenizer)
    times: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="prime-bench-") as folder:
        builders = {}
        for speed_class, throttle in ((1, SLOWED), (2, 1.0)):
            options = Options(Path(folder), Path(folder), Path(folder), throttle=throttle)
            # the file of a slowed node takes as much longer as the worker says: no need to sleep
            builders[speed_class] = RolloutBuilder(run, options, sleep=lambda _seconds: None)
            builders[speed_class].engines = _Only(engine)  # type: ignore[assignment]
        for number in range(2 if quick else 9):
            for speed_class, builder in builders.items():
                made = synthetic_lease(run, number, policy_version=0)
                asked = run.budgets.preferred(speed_class)
                target = asked[number % len(asked)]
                lease = made.signed.lease.model_copy(update={"target": target})
                job = Job(
                    made.signed.model_copy(update={"lease": lease}),
                    encoding.sha256(f"{number} {speed_class}".encode()),
                )
                times[speed_class].append(builder.build(job).seconds)
    slow, fast = (statistics.median(times[known]) for known in (1, 2))
    yield Row("file_seconds_slow", slow, f"s, targets {by_class['1']}")
    yield Row("file_seconds_fast", fast, f"s, targets {by_class['2']}")
    yield Row("file_time_ratio", max(slow / fast, fast / slow), "times", 1.25)


class _Only:
    """The one engine, for any policy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def engine(self, _version: int, _digest: object) -> Engine:
        return self._engine


def _run(by_class: dict[str, tuple[int, ...]]) -> RunDefinition:
    budgets = LengthBudgets(targets=tuple(MENU), by_class=by_class, penalty_micro=0)
    reverse = environment_ref("reverse", {}, budgets, train_size=1000, heldout_size=0)
    return synthetic_run(max(MENU), groups=8, samples=8).model_copy(
        update={"environment": reverse, "budgets": budgets}
    )
