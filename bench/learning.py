"""Does it learn as well when asynchronous and permissionless? Samples to held-out reward 0.75.

    python -m bench learning            the main runs that are missing (an hour), then the figures
    python -m bench learning --quick    two steps of three modes: that they run, no figure of merit
    python -m bench.learning --minutes 30 [--mode NAME]   some of the missing runs, to be continued:
                                        the main modes' eight seeds first, then the ablations' three
    python -m bench.learning --keep     every finished run into bench/results/learning-runs.json

Each finished run is a file under var/bench/learning, so a run of hours may be stopped and taken up
again; figures are made of what is there, and rows whose seeds are not complete say so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from bench.form import ROOT, Row
from bench.learning_run import MODES, Record, learn
from prime_trainer.parallel import joined_world

PACKAGES = ("torch", "transformers", "reasoning-gym")
FOLDER = ROOT / "var" / "bench" / "learning"
KEPT = ROOT / "bench" / "results" / "learning-runs.json"
SEEDS, ABLATION_SEEDS = range(8), range(3)
STEPS = 64
MAIN = ("sync", "stale2", "stale4", "liars20")
BARS = (
    ("stale2_vs_sync", "stale2", "sync", 1.15),
    ("stale4_vs_sync", "stale4", "sync", 1.25),
    ("liars_vs_honest", "liars20", "stale2", 1.25),
)
STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def run(quick: bool) -> list[Row]:
    """The rows; without `quick` after every missing main run."""
    if quick:
        return quick_rows()
    work(None, MAIN)
    return rows(read(FOLDER))


def quick_rows() -> list[Row]:
    """Two steps of three modes."""
    found = []
    with joined_world() as world:
        for name in ("sync", "stale2", "liars20"):
            record = learn(name, 0, 2, world)
            found.append(Row(f"{name}_reward_after_2", record.curve[-1][2], "reward"))
            if MODES[name].liars:
                share = record.missed / max(1, record.liars_files)
                found.append(Row("liars_files_missed", share, "of lying files", 0.0))
    return found


def wanted(modes: Collection[str]) -> list[tuple[str, int]]:
    """(mode, seed) of every run: the main modes seed by seed, then the ablations."""
    main = [(name, seed) for seed in SEEDS for name in MAIN]
    others = [(name, seed) for seed in ABLATION_SEEDS for name in MODES if name not in MAIN]
    return [(name, seed) for name, seed in main + others if name in modes]


def work(minutes: float | None, modes: Collection[str]) -> int:
    """Makes missing runs of `modes`; returns how many it made."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    started, made = time.monotonic(), 0
    with joined_world() as world:
        for name, seed in wanted(modes):
            path = FOLDER / f"{name}-{seed}.json"
            if path.exists():
                continue
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                return made
            record = learn(name, seed, STEPS, world)
            staging = path.with_suffix(".tmp")
            staging.write_text(record.to_json())
            staging.rename(path)
            made += 1
            reported = f"{record.steps} steps, {record.samples} samples"
            reported += f", goal after {record.samples_to_goal}"
            print(f"{name} seed {seed}: {reported}", file=sys.stderr, flush=True)
    return made


def read(folder: Path) -> list[Record]:
    """Every finished run."""
    return [Record.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))]


def kept() -> list[Record]:
    """The runs that were kept next to the results."""
    return [Record(**run) for run in json.loads(KEPT.read_text())["runs"]]


def seeds_of(name: str) -> int:
    """How many seeds make a mode complete."""
    return len(SEEDS if name in MAIN else ABLATION_SEEDS)


def rows(records: list[Record]) -> list[Row]:
    """Means with half-widths of their 95 % intervals; ratios with theirs by the delta method."""
    found: list[Row] = []
    means: dict[str, tuple[float, float, int]] = {}
    for name in MODES:
        values = [r.samples_to_goal for r in records if r.mode == name]
        reached = [value for value in values if value is not None]
        if not values:
            continue
        if len(reached) == len(values):
            means[name] = mean_interval(reached)
        whole = seeds_of(name)
        missing = "" if len(values) == whole == len(SEEDS) else f", {len(values)} of {whole} seeds"
        if name in means:
            mean, half, _ = means[name]
            found.append(Row(name, mean, f"samples ± {half:.0f}{missing}"))
        else:
            found.append(Row(f"{name}_reached", len(reached) / len(values), f"of runs{missing}"))
        lies = [r for r in records if r.mode == name and r.liars_files]
        if lies:
            files = sum(r.liars_files for r in lies)
            missed, wronged = sum(r.missed for r in lies), sum(r.wronged for r in lies)
            found.append(Row(f"{name}_missed", missed / files, f"of {files} lying files"))
            found.append(Row(f"{name}_wronged", wronged, "honest files rejected", 0.0))
    trained = {
        name: [
            r.samples_to_goal * (1 - r.rejected / r.samples)
            for r in records
            if r.mode == name and r.samples_to_goal is not None
        ]
        for name in ("stale2", "liars20")
    }
    if all(trained.values()):
        share = statistics.fmean(trained["liars20"]) / statistics.fmean(trained["stale2"])
        found.append(Row("liars_vs_honest_accepted", share, "times, rejected samples left out"))
    for row, one, two, bar in BARS:
        if one in means and two in means:
            (a, da, n), (b, db, m) = means[one], means[two]
            half = a / b * math.sqrt((da / a) ** 2 + (db / b) ** 2)
            complete = n == m == len(SEEDS)
            found.append(
                Row(row, a / b, f"times ± {half:.2f}" + ("" if complete else ", seeds missing"),
                    bar if complete else None)
            )  # fmt: skip
    return found


def mean_interval(values: list[float]) -> tuple[float, float, int]:
    """(mean, half-width of its 95 % interval, count); infinite for a single value."""
    count = len(values)
    if count == 1:
        return values[0], math.inf, 1
    half = STUDENT_95.get(count - 1, 1.96) * statistics.stdev(values) / math.sqrt(count)
    return statistics.fmean(values), half, count


def rounded(record: Record) -> Record:
    """The record with as many digits as it is worth."""
    return replace(
        record,
        curve=[(policy, samples, round(reward, 5)) for policy, samples, reward in record.curve],
        lengths={name: [round(v, 4) for v in values] for name, values in record.lengths.items()},
        actual={name: [round(v, 4) for v in values] for name, values in record.actual.items()},
        gradient_norms=[float(f"{norm:.4g}") for norm in record.gradient_norms],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.learning")
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--mode", choices=sorted(MODES), default=None)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.keep:
        lines = [json.dumps(vars(rounded(record))) for record in read(FOLDER)]
        KEPT.write_text('{"runs": [\n' + ",\n".join(lines) + "\n]}\n")
        print(f"{KEPT}: {len(lines)} runs")
        return
    modes = tuple(MODES) if arguments.mode is None else (arguments.mode,)
    print(f"{work(arguments.minutes, modes)} runs made")


if __name__ == "__main__":
    main()
