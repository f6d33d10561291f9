"""What each lie costs to find: `python -m bench detection [--json] [--quick] [--minutes M]
[--model DIR]`.

A model of 3.4 M parameters with outlier dimensions (textmodel.py; its text is neither one-hot nor
flat), or the Hugging Face folder given, generates files of 8 rows of 256 tokens; a validator
replays every row in float32. For each attack of attacks.py, made in bfloat16 as nodes do:

    caught_X   share of such 2,048-token files rejected at the shipped thresholds, by every check
    tokens_X   tokens needed until some single statistic of the replay parts lying from honest text
               with AUC > 0.999, in powers of two up to 2,048; −1 if that does not suffice

how many honest files of every set-up are rejected, and what validating costs beside generating.
Results are kept under var/bench/detection, so a run of M minutes goes on where the last one
stopped, and the rows say how far it came.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.attacks import MUST_CATCH
from bench.detection_kept import restore
from bench.detection_units import (
    OUTPUT_TOKENS,
    Line,
    Record,
    Units,
    attack_lines,
    bench_of,
    honest_lines,
    limits_key,
    numbered,
)
from bench.form import Row
from bench.honest import Bench
from protocol.core.errors import UnavailableError
from protocol.core.rollout import PROOF_WINDOW
from protocol.core.run import MICRO, RunDefinition
from protocol.engine.base import Generation
from protocol.verification import build

PACKAGES = ("numpy", "torch", "transformers")
AUC = 0.999
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
HONEST_SEQUENCES, ATTACK_FILES = 20_000, 25
QUICK_SEQUENCES, QUICK_FILES = 600, 1
REFERENCE_SETUP = "plain-bfloat16-"
"""Honest set-ups against whose windows attacks are measured: the attackers' own."""
Series = dict[str, NDArray[np.float64]]
"""Statistic → value of each window of a file, in order: [windows]."""


def auc(honest: NDArray[np.float64], lying: NDArray[np.float64]) -> float:
    """Chance that a lying value exceeds an honest one, ties counting half: from [N] and [M]."""
    order = np.sort(honest)
    below = np.searchsorted(order, lying, "left")
    upto = np.searchsorted(order, lying, "right")
    return float((below + upto).mean() / 2 / len(order))


def _means(series: Sequence[Series], name: str, windows: int) -> NDArray[np.float64]:
    """Means of `windows` consecutive windows each, over all files."""
    found = []
    for one in series:
        values = one[name]
        whole = len(values) // windows * windows
        if whole:
            found.append(values[:whole].reshape(-1, windows).mean(axis=1))
    return np.concatenate(found) if found else np.empty(0)


def tokens_needed(honest: Sequence[Series], lying: Sequence[Series]) -> tuple[int, str]:
    """(tokens, statistic) of the cheapest single statistic with AUC > 0.999, or (−1, "")."""
    for tokens in LENGTHS:
        windows = tokens // PROOF_WINDOW
        for name in honest[0]:
            good, bad = _means(honest, name, windows), _means(lying, name, windows)
            if len(good) and len(bad) and auc(good, bad) > AUC:
                return tokens, name
    return -1, ""


def _series(records: Sequence[Record]) -> list[Series]:
    return [
        {name: np.array(values) for name, values in record["series"].items()}
        for record in records
        if record["series"]
    ]


def tokens_of(units: Units) -> dict[str, tuple[int, str]]:
    """`tokens_needed` of each attack whose windows, and honest ones, are at hand."""
    honest = _series(
        [
            record
            for line in honest_lines(HONEST_SEQUENCES)
            if line.name.startswith(REFERENCE_SETUP)
            for record in units.records(line)
        ]
    )
    found = {}
    for line in attack_lines(ATTACK_FILES):
        lying = _series(units.records(line))
        if lying and honest:
            found[line.name] = tokens_needed(honest, lying)
    return found


def attack_rows(
    name: str, records: Sequence[Record], needed: tuple[int, str] = (0, "strict decoding")
) -> list[Row]:
    """Both rows of one attack, from the files made so far; `needed` as of tokens_needed."""
    caught = sum(record["outcome"] == "REJECTED" for record in records)
    reasons = Counter(record["reason"] for record in records)
    said = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    bar = 0.99 if name in MUST_CATCH else None
    rows = [
        Row(
            f"caught_{name}",
            caught / len(records),
            f"of {len(records)} files: {said}",
            bar,
            "higher",
        )
    ]
    tokens, by = needed
    return [*rows, Row(f"tokens_{name}", tokens, f"tokens ({by or 'none within 2048'})")]


def honest_rows(found: dict[str, list[Record]], aim: int) -> list[Row]:
    """Honest files that were not accepted, over all set-ups, and how far each came."""
    records = [record for of_setup in found.values() for record in of_setup]
    wrong = [record for record in records if record["outcome"] != "ACCEPTED"]
    for record in wrong:
        print(f"honest file {record['number']}: {record['detail']}", file=sys.stderr)
    rows = [
        Row(
            "honest_rejected", len(wrong),
            f"of {len(records)} files (rate below {3 / max(1, len(records)):.2g} at 95 %)", 0,
        ),
        Row(
            "honest_sequences", sum(record["rows"] for record in records),
            f"of {OUTPUT_TOKENS} tokens, all set-ups", aim, "higher",
        ),
    ]  # fmt: skip
    for setup, of_setup in found.items():
        largest: dict[str, float] = {}
        for record in of_setup:
            for name, share in record["shares"].items():
                largest[name] = max(largest.get(name, 0.0), share)
        name = max(largest, key=lambda one: largest[one], default="")
        said = f"sequences; largest share of a file's limit {largest.get(name, 0):.2f} ({name})"
        rows.append(Row(f"honest_{setup}", sum(record["rows"] for record in of_setup), said))
    return rows


def cost_rows(bench: Bench) -> list[tuple[str, float, str, float | None]]:
    """Validating a file of 64 rows (every check, all rows replayed) beside generating it by the
    same engine, float32, CPU time of one thread (the wall time of an idle machine); and the
    replay's computation as a share of generation's for the rows that a run draws."""
    engine, one = bench.bare_engine("float32", 64), bench.bare_engine("float32", 1)
    wide = Bench(max_output_tokens=OUTPUT_TOKENS, folder=bench.folder)
    lease, plan = wide.lease(0)

    def seconds(act: Callable[[], object]) -> float:
        start = time.process_time()
        act()
        return time.process_time() - start

    build.generate_rows(plan[:4], wide.run, engine)  # warms up
    made: list[Generation] = []
    together = seconds(lambda: made.extend(build.generate_rows(plan, wide.run, engine)))
    alone = seconds(lambda: build.generate_rows(plan[:2], wide.run, one)) * len(plan) / 2
    file = wide.assemble(lease, plan, made, engine)
    wide.judge(file)
    judged = min(seconds(lambda: wide.judge(file)) for _ in range(3))
    share = RunDefinition.model_fields["replay_rows_micro"].default / MICRO
    drawn = Bench(max_output_tokens=OUTPUT_TOKENS, folder=bench.folder, share=share)
    shares = {
        dtype: drawn.judge(
            drawn.honest(0, bench.engine(dtype, 64))
        ).statistics["compute_share"]
        for dtype in ("float32", "bfloat16")
    }  # fmt: skip
    return [
        ("validate_ratio_b64", together / judged, "× generating 64 together", 5),
        ("validate_ratio_b1", alone / judged, "× generating one by one", 20),
        ("validate_rows_s", len(plan) / judged, "rows/CPU s, all replayed, every check", None),
        *(
            (f"drawn_flops_{dtype}", found, f"of generation's, {share:.0%} of the rows", None)
            for dtype, found in shares.items()
        ),
    ]


def run(quick: bool, minutes: float | None = None, model: Path | None = None) -> list[Row]:
    """All rows; `quick` takes one file an attack and few honest ones; `minutes` stops the work
    after so many and reports what is there."""
    units = Units(bench_of(model))
    known = restore(units) if model is None else {}
    sequences, files = (QUICK_SEQUENCES, QUICK_FILES) if quick else (HONEST_SEQUENCES, ATTACK_FILES)
    honest, attacks = honest_lines(sequences), attack_lines(files)
    bases = dict(numbered(honest))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    lines: list[Line] = [line for line in (*attacks, *honest) if limits_key(line) != "none"]
    while (end is None or time.monotonic() < end) and (line := units.behind(lines)):
        started = time.monotonic()
        try:
            units.work(line, bases.get(line, 0))
        except UnavailableError as error:
            print(f"bench: {error}", file=sys.stderr, flush=True)
            lines.remove(line)
            continue
        spent = time.monotonic() - started
        print(
            f"{line.name} {units.done(line)}/{line.aim}: {spent:.1f} s", file=sys.stderr, flush=True
        )
    found = {line.name: units.records(line) for line in (*honest, *attacks)}
    rows = honest_rows({line.name: found[line.name] for line in honest}, sequences)
    tokens = {**known, **tokens_of(units)}
    for line in attacks:
        if found[line.name]:
            needed = [tokens[line.name]] if line.name in tokens else []
            rows += attack_rows(line.name, found[line.name], *needed)
        else:
            bar = 0.99 if line.name in MUST_CATCH else None
            rows.append(Row(f"caught_{line.name}", 0.0, "of 0 files: not reached", bar, "higher"))
    in_time = end is None or time.monotonic() < end
    costs = units.once("cost", lambda: cost_rows(units.bench)) if in_time else units.kept("cost")
    return [*rows, *(Row(name, value, unit, bar, "higher") for name, value, unit, bar in costs)]
