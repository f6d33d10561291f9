"""Limits of honest drift: numbers from a calibration that anyone can rerun, never guesses.

`calibration.json`, beside this file, is written by

    orchestrator calibrate --model DIR … --out prime_verify/proofs/calibration.json

It generates honest files with every set-up on hand, replays them as a validator would, and records
the distribution of each statistic over rows and over files, as a multiple of what can be explained:
one rounding step of the stored numbers (FLOORS) plus, for a file in another dtype than the
replay's, the drift that this dtype itself makes on the very same rows (`reference`). So

    limit = limit ratio × √(floor² + reference²)       limit ratio: see tails.py

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

from prime_core import encoding
from prime_core.calibration import CalibrationSignature, CalibrationStatement
from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import Address, Digest
from prime_core.signing import Domain, Signer, Strict
from prime_verify.proofs.tails import MICRO, Tail

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
"""What storage and float32 alone may do."""
TWIN: Mapping[str, str] = {
    "twin_margin": "margin_mean",
    "twin_logprob": "logprob_mean",
    "twin_mantissa": "mantissa",
    "twin_sketch": "sketch",
}
"""Statistics against the replay in the file's own dtype, by the one against the verifier's dtype
whose floor and reference they share. Honest ones lie far below these where kernels agree."""
STATISTICS = (*FLOORS, *TWIN)
"""Names of all statistics that are judged."""
FILE_ROWS = 8
"""File statistics were calibrated on this many rows; with fewer drawn, only rows are judged."""
LONG_TOKENS = 1024
"""With so many tokens replayed, means are held to the tighter limits of long files as well."""
MARGIN_CAP = 4.0
"""One token counts for at most this much in `margin_mean`."""
LOGPROB_CAP = 2.0
"""One token counts for at most this much in `logprob_mean`."""
SIGNIFICANCE = 1e-9
"""Probability under honest sampling below which a count of improbable tokens is a lie."""
BROKEN: Mapping[str, float] = {"exponent": 1 / 3, "sign": 1 / 4, "sketch": 0.7}
"""Beyond these, proof or sketch is no relative of the policy's states (unrelated ones: nearly 1,
1/2, √2). They accuse nobody; they tell made-up evidence from other weights."""

UNSUSPECTED = 1.5
"""Times the largest honest sketch distance seen: states that are farther off are suspect."""

LEAST_TWIN = 0.1
"""Least limit ratio of the statistics of TWIN, where the file's dtype is not the verifier's."""

EXTRAPOLATION = (
    "exponential tail above the 90 % quantile of each statistic's honest ratios, its mean taken "
    "as large as so few values leave open at 97.5 %; at least 1.25 times the largest ratio, and 1 "
    f"({LEAST_TWIN:g} for comparisons in the file's own dtype)"
)

Scope = Literal["row", "file", "long"]
"""One row; FILE_ROWS rows or more together; these if they have LONG_TOKENS tokens or more."""
SCOPES: tuple[Scope, ...] = ("row", "file", "long")


def chance_of_one(scope: Scope) -> float:
    """The share of AIM that one statistic of one row, or of one file, may use up: half for rows,
    a quarter for files of any length, a quarter for long ones."""
    if scope == "row":
        return AIM / 2 / len(STATISTICS) / ROWS_OF_A_FILE
    return AIM / 4 / len(STATISTICS)


@dataclass(frozen=True)
class Reference:
    """Drift that a dtype alone makes on the rows in question: statistic → value. `row` is the worst
    of single rows, `file` that of all together; both empty if the dtype is the replay's own."""

    row: Mapping[str, float]
    file: Mapping[str, float]


NO_REFERENCE = Reference(row={}, file={})


def explained(name: str, drift: Mapping[str, float]) -> float:
    """What storage and dtype explain of a statistic: two independent errors, so in quadrature."""
    of = TWIN.get(name, name)
    return math.hypot(FLOORS[of], drift.get(of, 0.0))


def least_ratio(name: str, dtype: str, replay_dtype: str) -> float:
    """What a statistic's limit ratio is at least, whatever was measured."""
    return LEAST_TWIN if name in TWIN and dtype != replay_dtype else 1.0


class SetupLimits(Strict):
    """Honest drift of one set-up, over `rows` rows in `files` files, made in `batches` of so many
    rows.

    `row`, `file`, `long`: statistic → distribution of honest value / √(floor² + reference²). What
    is not there was not measured, and is not judged.
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
    long: dict[str, Tail] = Field(default_factory=dict)

    def limits(self, reference: Reference) -> Limits:
        """Limits for a file whose dtype alone makes the drift `reference`."""
        tails: dict[Scope, Mapping[str, Tail]] = {
            "row": self.row,
            "file": self.file,
            "long": self.long,
        }
        drifts = {"row": reference.row, "file": reference.file, "long": reference.file}
        return Limits(
            of={
                scope: {
                    name: tail.limit / MICRO * explained(name, drifts[scope])
                    for name, tail in of_scope.items()
                }
                for scope, of_scope in tails.items()
            },
            honest={
                name: UNSUSPECTED * tail.largest / MICRO * explained(name, reference.file)
                for name, tail in self.file.items()
                if name in ("sketch", "twin_sketch")
            },
            tails=tails,
        )


def wider(one: SetupLimits, other: SetupLimits) -> SetupLimits:
    """What holds for honest nodes on either machine, by two measurements of one set-up: of each
    statistic the distribution with the larger limit."""

    def of(scope: Scope) -> dict[str, Tail]:
        here: dict[str, Tail] = getattr(one, scope)
        there: dict[str, Tail] = getattr(other, scope)
        return {
            name: max((tails[name] for tails in (here, there) if name in tails), key=_limit)
            for name in STATISTICS
            if name in here or name in there
        }

    return SetupLimits(
        engine=one.engine,
        dtype=one.dtype,
        device=one.device,
        batches=tuple(sorted({*one.batches, *other.batches})),
        rows=one.rows + other.rows,
        files=one.files + other.files,
        tokens=one.tokens + other.tokens,
        row=of("row"),
        file=of("file"),
        long=of("long"),
    )


def _limit(tail: Tail) -> int:
    return tail.limit


class Calibration(Strict):
    """What was measured, on what, by which replaying set-up: its limits hold for replays by that
    one alone. Named by its SHA-256. One that a run names is signed by the pool's manager."""

    version: Literal[3] = 3
    replay_engine: str
    replay_dtype: str
    replay_device: str = "cpu"
    """As in a file's metadata. Objects from before it was stated were measured on CPUs."""
    source: str
    """Models, batch sizes and machine, in words."""
    aim_per_billion: int = Field(default=round(AIM * 1e9), ge=1)
    """Honest files accused out of a billion, as the limits were extrapolated."""
    extrapolation: str = EXTRAPOLATION
    """From what."""
    setups: tuple[SetupLimits, ...]
    signed: CalibrationSignature | None = None

    def canonical(self) -> bytes:
        """The object's bytes. What it does not state is left out, so that older ones keep their
        names."""
        unstated = {"replay_device"} - self.model_fields_set
        if self.signed is None:
            unstated.add("signed")
        return encoding.canonical_json(self.model_dump(mode="json", exclude=unstated))

    def digest(self) -> Digest:
        return encoding.sha256(self.canonical())

    def sign(self, signer: Signer, domain: Domain, made_at: int) -> Calibration:
        """The same, signed. `domain` is that of a CalibrationStatement."""
        made = self._statement(made_at)
        signature = CalibrationSignature(
            made_at=made_at, signer=signer.address, signature=signer.sign(made, domain)
        )
        return self.model_copy(update={"signed": signature})

    def check_signature(self, signer: Address, domain: Domain) -> None:
        """Raises UntrustedError unless `signer` signed it."""
        if self.signed is None:
            raise UntrustedError(
                f"calibration {self.digest()} is not signed: orchestrator calibrate --sign"
            )
        made = self._statement(self.signed.made_at)
        if made.recover(domain, self.signed.signature) != self.signed.signer:
            raise UntrustedError(
                f"calibration {self.digest()} is not signed by {self.signed.signer}, whom it names"
            )
        if self.signed.signer != signer:
            raise UntrustedError(
                f"calibration {self.digest()} is signed by {self.signed.signer}, not by the "
                f"pool's manager, {signer}"
            )

    def _statement(self, made_at: int) -> CalibrationStatement:
        unsigned = self.model_copy(update={"signed": None})
        return CalibrationStatement(calibration=unsigned.digest(), made_at=made_at)

    def replayed_by(self, engine: str, dtype: str, device: str) -> bool:
        """Whether its limits hold for replays by that set-up."""
        mine = (self.replay_engine, self.replay_dtype, self.replay_device)
        return mine == (engine, dtype, device)

    def setup(self, engine: str, dtype: str, device: str) -> SetupLimits | None:
        """What was measured of that set-up; None if it never was."""
        for setup in self.setups:
            if (setup.engine, setup.dtype, setup.device) == (engine, dtype, device):
                return setup
        return None


@dataclass(frozen=True)
class Limits:
    """`of`: the largest value of each statistic that is still called honest, by scope; what has no
    limit is not judged.

    `honest`: sketch distances that honest states stay below even if a limit allows more; they
    accuse nobody, but tell weights from log-probabilities.
    """

    of: Mapping[Scope, Mapping[str, float]]
    honest: Mapping[str, float] = field(default_factory=dict)
    tails: Mapping[Scope, Mapping[str, Tail]] = field(default_factory=dict)

    def honest_chance(self, name: str, value: float, scope: Scope, trials: int) -> float:
        """Chance that an honest file reaches `value` in one of its `trials` rows (1 for the file as
        a whole), all statistics together; 1 if no distribution is known."""
        tail = self.tails.get(scope, {}).get(name)
        if tail is None or math.isnan(value):
            return 1.0
        ratio = value / self.of[scope][name] * tail.limit / MICRO
        return min(1.0, tail.chance(ratio) * trials * len(STATISTICS))

    def named(self) -> dict[str, float]:
        """All limits, as "row.sketch", "file.sketch", "long.sketch", …"""
        return {
            f"{scope}.{name}": limit
            for scope, limits in self.of.items()
            for name, limit in limits.items()
        }

    def exceeded(self, statistics: Mapping[str, float], scope: Scope) -> set[str]:
        """Names of the statistics beyond their limit. A NaN is beyond every limit."""
        limits = self.of.get(scope, {})
        return {name for name, limit in limits.items() if not statistics[name] <= limit}


def load(path: Path) -> Calibration:
    """A calibration from its file. Raises MalformedError."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MalformedError(f"{path} is no calibration: {error}") from error


def parse_signed(raw: bytes, manager: Address, domain: Domain) -> Calibration:
    """The calibration that a run names, from its object's bytes. Raises MalformedError,
    UntrustedError unless the pool's manager signed it."""
    try:
        found = Calibration.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError("the object that the run names is no calibration") from error
    if found.canonical() != raw:
        raise MalformedError("the calibration that the run names is not in its canonical form")
    found.check_signature(manager, domain)
    return found


@cache
def shipped() -> Calibration:
    """The calibration that came with this code: what a run's zero `calibration` digest means."""
    return load(SHIPPED)
