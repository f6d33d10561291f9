"""What each lie costs to find: `python -m bench detection [--json] [--quick]`.

A model of 3.4 M parameters with outlier dimensions (textmodel.py; its text is neither one-hot nor
flat) generates in bfloat16, as nodes do, files of 8 rows of 256 tokens; a validator replays every
row in float32. For each attack of attacks.py:

    caught_X   share of such 2,048-token files rejected at the shipped thresholds, by every check
    tokens_X   tokens needed until some single statistic of the replay parts lying from honest text
               with AUC > 0.999, in powers of two up to 2,048; −1 if that does not suffice

how many honest files of other set-ups are rejected, and what validating costs beside generating.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.attacks import ATTACKS, DTYPE, MUST_CATCH, Job
from bench.form import Row
from bench.honest import SETUPS, Bench
from protocol.core.errors import MalformedError
from protocol.core.rollout import PROOF_WINDOW
from protocol.core.verdict import Outcome
from protocol.engine.base import Generation
from protocol.verification import build, replay
from protocol.verification.rollout_file import read_rollout_file
from protocol.verification.setups import HonestFile

PACKAGES = ("numpy", "torch", "transformers")
OUTPUT_TOKENS = 256
AUC = 0.999
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
Series = dict[str, NDArray[np.float64]]
"""Statistic → value of each window of a file, in order: [windows]."""


def _bench() -> Bench:
    return Bench(max_output_tokens=OUTPUT_TOKENS, groups=2, samples=4)


def _series(bench: Bench, file: HonestFile) -> Series | None:
    """Statistics of all windows; None if the file's proofs do not even decode."""
    rows = read_rollout_file(file.data).rows
    _, plan = bench.lease(file.signed.lease.index)
    try:
        replayed = replay.Replayed(
            bench.engine(), bench.run, file.lease_digest, range(len(rows)), plan, rows
        )
        parts = [replayed.by_window(i) for i in range(len(rows))]
    except MalformedError:
        return None
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


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


def attack_rows(
    bench: Bench, honest: Sequence[Series], name: str, files: int, first: int
) -> Iterator[Row]:
    """Both rows of one attack, over `files` files of leases from `first`."""
    caught, reasons, series = 0, Counter[str](), []
    for number in range(first, first + files):
        file = ATTACKS[name](Job(bench, number))
        finding = bench.judge(file, number)
        caught += finding.outcome is Outcome.REJECTED
        reasons[finding.reason.name] += 1
        found = _series(bench, file)
        if found is not None:
            series.append(found)
    needed, by = tokens_needed(honest, series) if series else (0, "strict decoding")
    said = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    bar = 0.99 if name in MUST_CATCH else None
    yield Row(f"caught_{name}", caught / files, f"of {files} files: {said}", bar, "higher")
    yield Row(f"tokens_{name}", needed, f"tokens ({by or 'none within 2048'})")


def honest_rows(bench: Bench, files: int) -> tuple[list[Row], list[Series]]:
    """Rejections of honest files over all set-ups of the plain engine, and the statistics of those
    in bfloat16 batches, against which attacks are measured."""
    rejected = sequences = 0
    series = []
    for number in range(files):
        dtype, batch_rows = SETUPS[1] if number % 8 else SETUPS[number // 8 % len(SETUPS)]
        file = bench.honest(number, bench.engine(dtype, batch_rows))
        finding = bench.judge(file, number)
        rejected += finding.outcome is not Outcome.ACCEPTED
        sequences += len(finding.rows_drawn)
        if dtype == DTYPE:
            found = _series(bench, file)
            assert found is not None
            series.append(found)
    bound = 3 / max(1, files)  # the rule of three
    rows = [
        Row("honest_rejected", rejected, f"of {files} files (rate below {bound:.2g} at 95 %)", 0),
        Row("honest_sequences", sequences, "of 256 tokens, plain engine", 20_000, "higher"),
    ]
    return rows, series


def cost_rows(bench: Bench) -> list[Row]:
    """Rows a CPU second of validating (every check, all rows) beside generating, float32."""
    engine, one = bench.engine("float32", 64), bench.engine("float32", 1)
    wide = Bench(max_output_tokens=OUTPUT_TOKENS, groups=4, samples=16)
    lease, plan = wide.lease(0)

    def cpu(act: Callable[[], object]) -> float:
        start = time.process_time()
        act()
        return time.process_time() - start

    build.generate_rows(plan[:4], wide.run, engine)  # warms up
    made: list[Generation] = []
    together = cpu(lambda: made.extend(build.generate_rows(plan, wide.run, engine)))
    alone = cpu(lambda: build.generate_rows(plan[:2], wide.run, one)) * len(plan) / 2
    file = wide.assemble(lease, plan, made, engine)
    judged = cpu(lambda: wide.judge(file))
    share = wide.run.replay_rows_micro / 1e6
    return [
        Row("validate_ratio_b64", together / judged, "× generating 64 together", 5, "higher"),
        Row("validate_ratio_b1", alone / judged, "× generating one by one", 20, "higher"),
        Row("validate_rows_s", len(plan) / judged, f"rows/s, {share:.0%} replayed"),
    ]


def run(quick: bool) -> list[Row]:
    """All rows; `quick` takes one file an attack and few honest ones."""
    bench = _bench()
    files, honest_files = (1, 10) if quick else (25, 2500)
    rows, honest = honest_rows(bench, honest_files)
    if quick:
        rows = [row for row in rows if row.name != "honest_sequences"]
    for name in ATTACKS:
        started = time.monotonic()
        rows += attack_rows(bench, honest, name, files, 100_000)
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return [*rows, *cost_rows(bench)]
