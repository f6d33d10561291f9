"""What each lie costs to find: `python -m bench detection [--json] [--quick] [--minutes M]
[--model DIR] [--device cpu|cuda:0] [--costs]`.

A model of 3.4 M parameters with outlier dimensions (textmodel.py; its text is neither one-hot nor
flat), or the Hugging Face folder given, generates files of 8 rows of 256 tokens; a validator
replays every row in float32. For each attack of attacks.py, made in bfloat16 as nodes do, declared
as that or (`_as_vllm`) as vLLM's work:

    caught_X      share of such 2,048-token files rejected at the shipped thresholds, by every check
    caught256_X   share of their lying rows, 256 tokens each, that are caught alone
    tokens_X      tokens needed until some single statistic of the replay parts lying from honest
                  text with AUC > 0.999, in powers of two up to 2,048; −1 if that does not suffice

how many honest files of every setup are rejected, and what validating costs compared with
generating (`--costs` measures just that, again). Results are kept under var/bench/detection, so a
run of M minutes goes on where the last one stopped, and the rows say how far it came.

On a GPU everything is generated and replayed there. Its setups have no shipped limits: files are
judged in shadow, so that `caught_X` shows what is caught before any replay, and `tokens_X` what the
replay would show.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.detection_attacks import LYING_ROWS, MUST_CATCH
from bench.detection_kept import restore
from bench.detection_units import (
    AGED,
    AS_VLLM,
    OLDER_UNITS,
    OUTPUT_TOKENS,
    REFERENCE_OLDER,
    REFERENCE_SETUP,
    REFERENCES,
    SAMPLES,
    Line,
    Record,
    Units,
    attack_lines,
    bench_of,
    honest_lines,
    numbered,
    older_line,
)
from bench.form import Row
from bench.honest import Bench
from bench.honest_files import SHADOW
from prime_core.errors import UnavailableError
from prime_core.proof_form import PROOF_WINDOW
from prime_core.run import MICRO, RunDefinition
from prime_core.verdict import Reason
from prime_engine.base import Generation
from prime_verify import build

PACKAGES = ("numpy", "torch", "transformers")
AUC = 0.999
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
HONEST_SEQUENCES, ATTACK_FILES = 20_000, 25
QUICK_SEQUENCES, QUICK_FILES = 600, 1
Series = dict[str, NDArray[np.float64]]
"""Statistic → value of each window of a file, in order: [windows]."""
Cost = tuple[str, float, str, float | None]
"""Name, value, unit, bar (at least)."""
DTYPES = ("float32", "bfloat16")
COST_TOKENS = 256
ALONE = 2
"""Rows generated one by one; the others of a file are reckoned to take as long."""


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
    device = units.bench.device
    of_setup = [one for one in honest_lines(HONEST_SEQUENCES, device) if one.name in REFERENCES]
    honest = {line.name: _series(units.records(line)) for line in (*of_setup, older_line(device))}
    found = {}
    for line in attack_lines(ATTACK_FILES, units.bench.device):
        lying = _series(units.records(line))
        reference = honest.get(REFERENCE_OLDER if line.name in AGED else REFERENCE_SETUP)
        if lying and reference:
            found[line.name] = tokens_needed(reference, lying)
    return found


def _every(row: int, samples: int) -> bool:
    return True


def attack_rows(
    name: str,
    records: Sequence[Record],
    needed: tuple[int, str] = (0, "strict decoding"),
) -> list[Row]:
    """The rows of one attack, from the files made so far; `needed` as of tokens_needed, given
    where files are declared as what they are."""
    bare = name.removesuffix(AS_VLLM)
    bar = 0.99 if bare in MUST_CATCH else None
    if not records:
        return [Row(f"caught_{name}", 0.0, "of 0 files: not reached", bar, "higher")]
    shadow = all(record["alone"] is None for record in records)
    caught = sum(record["outcome"] == "REJECTED" for record in records)
    reasons = Counter(record["reason"] for record in records)
    said = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    rows = [
        Row(
            f"caught_{name}",
            caught / len(records),
            f"of {len(records)} files: {said}",
            None if shadow else bar,
            "higher",
        )
    ]
    lies = LYING_ROWS.get(bare, _every)
    alone = [
        found
        for record in records
        for row, found in enumerate(record["alone"] or ())
        if lies(row, SAMPLES)
    ]
    if alone:
        said = f"of {len(alone)} sequences of up to {OUTPUT_TOKENS} tokens, each judged alone"
        rows.append(Row(f"caught256_{name}", sum(alone) / len(alone), said, None, "higher"))
    if bare == name:
        tokens, by = needed
        rows.append(Row(f"tokens_{name}", tokens, f"tokens ({by or 'none within 2048'})"))
    return rows


def honest_rows(found: dict[str, list[Record]], aim: int) -> list[Row]:
    """Honest files that were not accepted, over all setups, and how far each came."""
    records = [record for of_setup in found.values() for record in of_setup]
    wrong = [
        record
        for record in records
        if record["outcome"] != "ACCEPTED" and Reason[record["reason"]] not in SHADOW
    ]
    alone = [found for record in records for found in record["alone"] or ()]
    judged = sum(record["rows"] for record in records)
    for record in wrong:
        print(f"honest file {record['number']}: {record['detail']}", file=sys.stderr)
    rows = [
        Row(
            "honest_rejected", len(wrong),
            f"of {len(records)} files (rate below {3 / max(1, len(records)):.2g} at 95 %)", 0,
        ),
        Row(
            "honest_sequences", judged, f"of {OUTPUT_TOKENS} tokens, all setups", aim, "higher",
        ),
        Row(
            "honest_rows_accused", sum(alone),
            f"of {len(alone)} sequences judged alone; the other {judged - len(alone)} lie in "
            "files that were accepted, which none with a row beyond a row's limits is", 0,
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


def run(
    quick: bool,
    minutes: float | None = None,
    model: Path | None = None,
    device: str = "cpu",
    costs: bool = False,
) -> list[Row]:
    """All rows; `quick` takes one file an attack and few honest ones; `minutes` stops the work
    after that time and reports what is there; `costs` measures what validating costs, no more."""
    units = Units(bench_of(model, device))
    if costs:
        units.keep("cost", _costs(units, quick))
        return _shown(units.kept("cost"))
    known = restore(units) if model is None and device == "cpu" else {}
    sequences, files = (QUICK_SEQUENCES, QUICK_FILES) if quick else (HONEST_SEQUENCES, ATTACK_FILES)
    honest = [*honest_lines(sequences, device), older_line(device, 1 if quick else OLDER_UNITS)]
    attacks = attack_lines(files, device)
    bases = dict(numbered(honest))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    lines: list[Line] = [*attacks, *honest]
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
        needed = tokens.get(line.name, (0, "strict decoding"))
        rows += attack_rows(line.name, found[line.name], needed)
    in_time = end is None or time.monotonic() < end
    cost = units.once("cost", lambda: _costs(units, quick)) if in_time else units.kept("cost")
    return [*rows, *_shown(cost)]


def _costs(units: Units, quick: bool) -> list[Cost]:
    return cost_rows(units.bench.folder, units.bench.device, 1 if quick else 5)


def _shown(costs: Sequence[Cost]) -> list[Row]:
    return [Row(name, value, unit, bar, "higher") for name, value, unit, bar in costs]


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
    """Validating a file of 64 rows (every check, all rows replayed) compared with generating it, 64
    rows together and one by one: medians of `turns` turns, generating and validating in turn. By
    wall time, which is that of an idle machine only if it is idle, and by CPU time, which a busy
    machine changes little. The bars are for files in the replay's dtype; one in bfloat16 is
    generated in it, and replayed in both. And the replay's computation as a share of generation's
    for the rows that a run draws."""
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
    drawn = Bench(max_output_tokens=COST_TOKENS, folder=folder, share=share, device=device)
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
    wide = Bench(max_output_tokens=COST_TOKENS, folder=folder, device=device)
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
