"""What validating costs beside generating by the same engine, for the detection bench."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.honest import Bench
from prime_core.run import MICRO, RunDefinition
from prime_engine.base import Generation
from prime_verify import build

Cost = tuple[str, float, str, float | None]
"""Name, value, unit, bar (at least)."""
DTYPES = ("float32", "bfloat16")
OUTPUT_TOKENS = 256
ALONE = 2
"""Rows generated one by one; the others of a file are reckoned to take as long."""


@dataclass(frozen=True)
class Seconds:
    """Of one act: by the clock, and of one thread's processor."""

    wall: float
    cpu: float


def timed(act: Callable[[], object]) -> Seconds:
    """How long an act takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def cost_rows(folder: Path, device: str = "cpu", turns: int = 5) -> list[Cost]:
    """Validating a file of 64 rows (every check, all rows replayed) beside generating it, 64 rows
    together and one by one: medians of `turns` turns, generating and validating in turn. By wall
    time, which is that of an idle machine only if it is idle, and by CPU time, which a busy machine
    changes little. The bars are for files in the replay's dtype; one in bfloat16 is generated in
    it, and replayed in both. And the replay's computation as a share of generation's for the rows
    that a run draws."""
    rows: list[Cost] = []
    for dtype in DTYPES:
        together, alone, judged = _turns(folder, device, dtype, turns)
        suffix, bars = ("", (5, 20)) if dtype == "float32" else ("_bf16", (None, None))
        for name, made, bar, words in (
            ("b64", together, bars[0], "64 together"),
            ("b1", alone, bars[1], "one by one"),
        ):
            words = f"× generating {words}, {dtype}"
            rows += [
                (f"validate_ratio_{name}{suffix}", _ratio(made, judged, "wall"), words, bar),
                (
                    f"validate_cpu_ratio_{name}{suffix}",
                    _ratio(made, judged, "cpu"),
                    f"{words}, CPU time",
                    None,
                ),
            ]
        second = statistics.median(one.wall for one in judged)
        words = f"rows/s of a {dtype} file, all replayed, every check"
        rows.append((f"validate_rows_s{suffix}", 64 / second, words, None))
    share = RunDefinition.model_fields["replay_rows_micro"].default / MICRO
    drawn = Bench(max_output_tokens=OUTPUT_TOKENS, folder=folder, share=share, device=device)
    for dtype in DTYPES:
        found = drawn.judge(drawn.honest(0, drawn.engine(dtype, 64))).statistics["compute_share"]
        words = f"of generation's, {share:.0%} of the rows"
        rows.append((f"drawn_flops_{dtype}", found, words, None))
    return rows


def _ratio(made: list[Seconds], judged: list[Seconds], clock: str) -> float:
    ratio: float = _median(made, clock) / _median(judged, clock)
    return ratio


def _median(seconds: list[Seconds], clock: str) -> float:
    return statistics.median(float(getattr(one, clock)) for one in seconds)


def _turns(
    folder: Path, device: str, dtype: str, turns: int
) -> tuple[list[Seconds], list[Seconds], list[Seconds]]:
    """Seconds of a file of 64 rows each turn: generated together, one by one, validated."""
    wide = Bench(max_output_tokens=OUTPUT_TOKENS, folder=folder, device=device)
    engine, one = wide.engine(dtype, 64), wide.engine(dtype, 1)
    lease, plan = wide.lease(0)
    build.generate_rows(plan[:4], wide.run, engine)  # warms up
    build.generate_rows(plan[:1], wide.run, one)
    together, alone, judged = [], [], []
    for turn in range(turns):
        made: list[Generation] = []

        def all_rows(made: list[Generation] = made) -> None:
            made += build.generate_rows(plan, wide.run, engine)

        together.append(timed(all_rows))
        few = timed(lambda: build.generate_rows(plan[:ALONE], wide.run, one))
        share = len(plan) / ALONE
        alone.append(Seconds(few.wall * share, few.cpu * share))
        file = wide.assemble(lease, plan, made, engine)
        if not turn:
            wide.judge(file)  # warms up
        judged.append(timed(lambda file=file: wide.judge(file)))  # type: ignore[misc]
    return together, alone, judged
