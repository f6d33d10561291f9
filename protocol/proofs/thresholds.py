"""Limits of honest drift: numbers from a calibration that anyone can rerun, never guesses.

`calibration.json`, beside this file, is written by

    orchestrator calibrate --model DIR … --out protocol/proofs/calibration.json

It generates honest files with every set-up on hand, replays them as a validator would, and records
the distribution of each statistic over rows and over files, as a multiple of what can be explained:
one rounding step of the stored numbers (FLOORS) plus, for a file in another dtype than the
replay's, the drift that this dtype itself makes on the very same rows (`reference`). So

    limit = limit ratio × (floor + reference)          limit ratio ≥ 1: see tails.py

The reference makes limits independent of the model. Limit ratios are extrapolated to the chance of
a false accusation that the calibration aims at, AIM a file. A set-up that is not in the file has no
limits: it is judged in shadow, never punished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from protocol.core import encoding
from protocol.core.errors import MalformedError
from protocol.core.ids import Digest
from protocol.core.signing import Strict
from protocol.proofs.tails import Tail

SHIPPED = Path(__file__).with_name("calibration.json")
AIM = 1e-6
"""Chance aimed at that an honest file is accused, all statistics and rows together."""
ROWS_OF_A_FILE = 64
"""Replayed rows that AIM reckons with."""
FLOORS: Mapping[str, float] = {
    "margin_mean": 1e-4,  # float32 logits of magnitude ~100 carry rounding errors near 1e-5
    "margin_max": 1e-3,
    "logprob_mean": 1e-4,
    "logprob_max": 1e-3,
    "exponent": 4 / 128,  # a few elements at rank 128 may change places
    "sign": 4 / 128,
    "mantissa": 1.0,  # one unit in the last of 7 bits
    "sketch": 2.0**-7,  # two roundings to bf16
}
"""What storage and float32 alone may do. Also the names of all statistics that are judged."""
STATISTICS = tuple(FLOORS)
FILE_ROWS = 8
"""File statistics were calibrated on this many rows; with fewer drawn, only rows are judged."""
MARGIN_CAP = 4.0
"""One token counts for at most this much in `margin_mean`."""
LOGPROB_CAP = 2.0
"""One token counts for at most this much in `logprob_mean`."""
SIGNIFICANCE = 1e-9
"""Probability under honest sampling below which a count of improbable tokens is a lie."""
BROKEN: Mapping[str, float] = {"exponent": 1 / 3, "sign": 1 / 4, "sketch": 0.7}
"""Beyond these, proof or sketch is no relative of the policy's states (unrelated ones: nearly 1,
1/2, √2). They accuse nobody; they tell made-up evidence from other weights."""

EXTRAPOLATION = (
    "exponential tail above the 90 % quantile of each statistic's honest ratios, its mean taken "
    "at the upper end of two standard errors; at least 1.25 times the largest ratio, and 1"
)

Scope = Literal["row", "file"]


def chance_of_one(scope: Scope) -> float:
    """The share of AIM that one statistic of one row, or of one file, may use up: half for rows,
    half for files."""
    return AIM / 2 / len(STATISTICS) / (ROWS_OF_A_FILE if scope == "row" else 1)


@dataclass(frozen=True)
class Reference:
    """Drift that a dtype alone makes on the rows in question: statistic → value. `row` is the worst
    of single rows, `file` that of all together; both empty if the dtype is the replay's own."""

    row: Mapping[str, float]
    file: Mapping[str, float]


NO_REFERENCE = Reference(row={}, file={})


def explained(name: str, drift: Mapping[str, float]) -> float:
    """What storage and dtype explain of a statistic."""
    return FLOORS[name] + drift.get(name, 0.0)


class SetupLimits(Strict):
    """Honest drift of one set-up, over `rows` rows in `files` files, made in `batches` of so many
    rows.

    `row`, `file`: statistic → distribution of honest value / (floor + reference).
    """

    engine: str
    dtype: str
    device: str
    batches: tuple[int, ...]
    rows: int = Field(ge=1)
    files: int = Field(ge=1)
    tokens: int = Field(ge=1)
    row: dict[str, Tail]
    file: dict[str, Tail]

    def limits(self, reference: Reference) -> Limits:
        """Limits for a file whose dtype alone makes the drift `reference`."""
        row, file = (
            {name: tails[name].limit / 1e6 * explained(name, drift) for name in STATISTICS}
            for tails, drift in ((self.row, reference.row), (self.file, reference.file))
        )
        largest = self.file["sketch"].largest / 1e6
        honest_sketch = 2 * largest * explained("sketch", reference.file)
        return Limits(
            row=row,
            file=file,
            honest_sketch=honest_sketch,
            tails={"row": self.row, "file": self.file},
        )


class Calibration(Strict):
    """What was measured, on what, by which replaying set-up. Named by its SHA-256."""

    version: Literal[2] = 2
    replay_engine: str
    replay_dtype: str
    source: str
    """Models, batch sizes and machine, in words."""
    aim_per_billion: int = Field(default=round(AIM * 1e9), ge=1)
    """Honest files accused out of a billion, as the limits were extrapolated."""
    extrapolation: str = EXTRAPOLATION
    """From what."""
    setups: tuple[SetupLimits, ...]

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        return encoding.sha256(self.canonical())

    def setup(self, engine: str, dtype: str, device: str) -> SetupLimits | None:
        """What was measured of that set-up; None if it never was."""
        for setup in self.setups:
            if (setup.engine, setup.dtype, setup.device) == (engine, dtype, device):
                return setup
        return None


@dataclass(frozen=True)
class Limits:
    """Largest value of each statistic that is still called honest, of a row and of a file.

    `honest_sketch`: sketch distance that honest states stay below even if `file` allows more; it
    accuses nobody, but tells weights from log-probabilities.
    """

    row: Mapping[str, float]
    file: Mapping[str, float]
    honest_sketch: float
    tails: Mapping[Scope, Mapping[str, Tail]] = field(default_factory=dict)

    def honest_chance(self, name: str, value: float, scope: Scope, trials: int) -> float:
        """Chance that an honest file reaches `value` in one of its `trials` rows (1 for the file as
        a whole), all statistics together; 1 if no distribution is known."""
        if scope not in self.tails or math.isnan(value):
            return 1.0
        limits = self.row if scope == "row" else self.file
        tail = self.tails[scope][name]
        ratio = value / limits[name] * tail.limit / 1e6
        return min(1.0, tail.chance(ratio) * trials * len(STATISTICS))

    def named(self) -> dict[str, float]:
        """All limits, as "row.sketch", "file.sketch", …"""
        return {
            f"{scope}.{name}": limits[name]
            for scope, limits in (("row", self.row), ("file", self.file))
            for name in STATISTICS
        }

    def exceeded(self, statistics: Mapping[str, float], scope: Scope) -> set[str]:
        """Names of the statistics beyond their limit. A NaN is beyond every limit."""
        limits = self.row if scope == "row" else self.file
        return {name for name in STATISTICS if not statistics[name] <= limits[name]}


def load(path: Path) -> Calibration:
    """A calibration from its file. Raises MalformedError."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MalformedError(f"{path} is no calibration: {error}") from error


@cache
def shipped() -> Calibration:
    """The calibration that came with this code: what a run's zero `calibration` digest means."""
    return load(SHIPPED)
