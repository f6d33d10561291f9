"""Verdict tables with made-up measurements of files of a card without limits."""

from __future__ import annotations

import numpy as np

from prime_core.encoding import sha256
from prime_core.verdict import Reason, VerdictRow, VerdictTable
from prime_verify import replay
from prime_verify.finding import Finding
from prime_verify.proofs.tails import MICRO
from prime_verify.proofs.thresholds import (
    FLOORS,
    STATISTICS,
    Calibration,
    Reference,
    SetupLimits,
    explained,
    shipped,
)

CARD = "NVIDIA H200"
_LARGEST = {"margin_mean": "margin_max", "logprob_mean": "logprob_max"}


def seen_rows(
    seed: int, scale: float, reference: Reference, wide: SetupLimits
) -> list[replay.RowStatistics]:
    """Returns 64 rows of 160 tokens whose statistics are exponential, with a mean of `scale` times
    the smallest limit of `wide`."""
    mean = [
        scale * min(limits[name].limit for limits in (wide.row, wide.file, wide.long)) / MICRO
        for name in STATISTICS
    ]
    drawn = np.random.default_rng(seed).exponential(mean, (64, len(STATISTICS)))
    return [
        replay.RowStatistics(
            number=number, tokens=160, windows=5, equal=1.0, inner_margin=0.0, ends_early=False,
            tail_observed=0, tail_expected=0.0,
            values={
                name: float(ratio) * explained(name, reference.row)
                for name, ratio in zip(STATISTICS, ratios, strict=True)
            },
        )
        for number, ratios in enumerate(drawn)
    ]  # fmt: skip


def drift_of(share: float) -> Reference:
    """Returns the drift of a dtype: `share` times the floor of each statistic."""
    of_file = {name: share * floor for name, floor in FLOORS.items()}
    return Reference(row={name: of_file[_LARGEST.get(name, name)] for name in FLOORS}, file=of_file)


def table_of(
    seed: int,
    scale: float = 0.02,
    *,
    base: Calibration | None = None,
    setup: str = f"plain/1 bfloat16 {CARD}",
) -> VerdictTable:
    """Returns the table of an accepted file that was judged by the widest limits of `base`."""
    engine, dtype, device = setup.split(" ", 2)
    wide = (base or shipped()).widest(engine, dtype, device.removesuffix(" exact"))
    assert wide is not None
    reference = drift_of(2.0)
    rows = seen_rows(seed, scale, reference, wide)
    found = Finding(
        Reason.NONE, "", statistics=replay.combine(rows), row_statistics=tuple(rows), setup=setup,
        thresholds=wide.limits(reference).named(), rows_drawn=tuple(row.number for row in rows),
        table=tuple(
            VerdictRow(
                problem_id="p", group=row.number // 16, sample=row.number % 16, reward_micro=0,
                prompt_tokens=1, output_tokens=row.tokens,
            )
            for row in rows
        ),
    )  # fmt: skip
    return found.verdict_table(sha256(str(seed).encode()), sha256(b""), 1, 1)
