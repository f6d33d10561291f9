"""Limits of honest drift, taken from a calibration that anyone can rerun.

`calibration.json`, in this folder, is written by

    orchestrator calibrate --model DIR … --out prime_verify/proofs/calibration.json

and `calibration-2.json` by `python -m bench few`, which adds limits of few rows.

It generates honest files with every available setup, replays them like a validator, and records
the distribution of each statistic over rows and over files. Values are multiples of the explained
drift: one rounding step of the stored numbers (FLOORS) plus, for a file in another dtype than the
replay's, the drift that this dtype causes on the same rows (`reference`). So

    limit = limit ratio × √(floor² + reference²)       limit ratio: see tails.py

The reference makes limits independent of the model. Limit ratios are extrapolated to the
calibration's target probability of a false accusation, AIM per file.

A card's limits hold for its family (core.known_cards). They accuse only if they find known lies
(LIES) that were measured on the same card, and if two parties signed the calibration. Any other
card counts as one without limits: it is judged at the widest that the calibration has
(`Calibration.widest`), and its files are accepted or void, never rejected. Files of any other setup
are measured only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from prime_core import encoding
from prime_core.calibration import CalibrationSignature, CalibrationStatement
from prime_core.errors import MalformedError, UntrustedError, UserError
from prime_core.given import read_given
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.known_cards import family_of, is_gpu
from prime_core.signing import DigestField, Domain, Signer, Strict
from prime_verify.proofs.tails import MICRO, Tail

SHIPPED = Path(__file__).with_name("calibration.json")
"""Selected by a run that names no calibration. Its digest is a verification class: it stays."""
NEWEST = Path(__file__).with_name("calibration-2.json")
"""The same limits, and those of few rows. `orchestrator run new` names its digest in the run."""
AIM = 1e-6
"""Target probability that an honest file is accused, over all statistics and rows."""
ROWS_OF_A_FILE = 64
"""Number of replayed rows assumed by AIM."""
FLOORS: Mapping[str, float] = {
    "margin_mean": 1e-4,  # float32 logits of magnitude ~100 carry rounding errors near 1e-5
    "margin_max": 1e-3,
    "logprob_mean": 1e-4,
    "logprob_max": 1e-3,
    "exponent": 4 / 128,  # a few elements around rank 128 may swap
    "sign": 4 / 128,
    "mantissa": 1.0,  # one unit in the last of 7 bits
    "sketch": 2.0**-7,  # two roundings to bf16
}
"""Drift explained by storage and float32 alone."""
TWIN: Mapping[str, str] = {
    "twin_margin": "margin_mean",
    "twin_logprob": "logprob_mean",
    "twin_mantissa": "mantissa",
    "twin_sketch": "sketch",
}
"""Statistics against the replay in the file's own dtype → the statistic against the verifier's
dtype whose floor and reference they share. Where kernels agree, honest values are far below
these."""
STATISTICS = (*FLOORS, *TWIN)
"""Names of all judged statistics."""
MAXIMA = frozenset({"margin_max", "logprob_max"})
"""Statistics of which a set of rows has the largest, not the mean."""
FILE_ROWS = 8
"""File statistics were calibrated on this many rows. Fewer are judged alone and, together, by the
limits of few rows."""
LEAST_TOKENS = 64
"""Rows of a file in another dtype than the replay's are drawn until they have so many tokens.
Between fewer tokens the dtype may happen to cause almost no drift, and an honest row is far beyond
limits that rest on it: 0.4 % of honest pairs of rows were, all of them with at most 8 tokens."""
FEW_TOKENS = (LEAST_TOKENS, 128, 256, 512)
"""Numbers of replayed tokens for which fewer than FILE_ROWS rows have limits of their means."""
ROW_COUNTS = 160
"""Number of tokens that a row counts for at most among few rows. Longer rows were not measured, and
tokens of one row may drift together."""
LONG_TOKENS = 1024
"""From this many replayed tokens on, the tighter limits of long files also apply to means."""
MARGIN_CAP = 4.0
"""Maximum contribution of one token to `margin_mean`."""
LOGPROB_CAP = 2.0
"""Maximum contribution of one token to `logprob_mean`."""
SIGNIFICANCE = 1e-9
"""A count of improbable tokens is rejected if its probability under honest sampling is below
this."""
BROKEN: Mapping[str, float] = {"exponent": 1 / 3, "sign": 1 / 4, "sketch": 0.7}
"""Beyond these, proof or sketch is unrelated to the policy's states (unrelated ones: nearly 1,
1/2, √2). They do not decide an accusation; they distinguish fabricated evidence from different
weights."""

UNSUSPECTED = 1.5
"""Multiple of the largest honest sketch distance measured; states farther away are suspect."""

WIDENED = 1.1
"""Factor of the widest limits, for cards that were not measured. Of 192 honest sets of an H100, one
was at 1.05 times a processor's limit, the others within it; 8-bit weights of the same card were at
1.1 to 1.28 times what rounding explains (docs/detection.md), where a long file's limit is 1 to
1.1. A larger factor would accept them."""

LIES = ("int8", "int4", "old10_1e-4")
"""Lies that the limits of a card must find before they accuse anyone, as prime_engine.variants
names them: 8-bit weights, 4-bit weights, a policy ten optimizer steps old."""
LEAST_LIE_SETS = 16
"""Minimum number of sets of FILE_ROWS rows in which each lie is measured."""
FOUND_LIES = 0.5
"""Minimum share of these sets that the limits must find. A liar's files are judged one after the
other, so half of them is enough."""

LEAST_TWIN = 0.1
"""Minimum limit ratio of the TWIN statistics, where the file's dtype is not the verifier's."""

EXTRAPOLATION = (
    "exponential tail above the 90 % quantile of each statistic's honest ratios, its mean taken "
    "as large as so few values leave open at 97.5 %; at least 1.25 times the largest ratio, and 1 "
    f"({LEAST_TWIN:g} for comparisons in the file's own dtype)"
)

Scope = Literal["row", "few", "file", "long"]
"""One row; fewer than FILE_ROWS rows together; FILE_ROWS or more rows together; the latter with at
least LONG_TOKENS tokens."""
SCOPES: tuple[Scope, ...] = ("row", "file", "long")
"""The scopes that every calibration has."""


def chance_of_one(scope: Scope) -> float:
    """The share of AIM for one statistic of one row, or of one file: half goes to rows, a quarter
    to files of any length, a quarter to long ones; or both quarters to few rows."""
    if scope == "row":
        return AIM / 2 / len(STATISTICS) / ROWS_OF_A_FILE
    return AIM / (2 if scope == "few" else 4) / len(STATISTICS)


@dataclass(frozen=True)
class Reference:
    """Drift caused by a dtype alone on the given rows: statistic → value. `row` is the worst single
    row, `file` all rows together; both are empty if the dtype is the replay's own."""

    row: Mapping[str, float]
    file: Mapping[str, float]


NO_REFERENCE = Reference(row={}, file={})


def explained(name: str, drift: Mapping[str, float]) -> float:
    """Drift of a statistic explained by storage and dtype: two independent errors, added in
    quadrature."""
    of = TWIN.get(name, name)
    return math.hypot(FLOORS[of], drift.get(of, 0.0))


def least_ratio(name: str, dtype: str, replay_dtype: str) -> float:
    """Lower bound of a statistic's limit ratio, independent of what was measured."""
    return LEAST_TWIN if name in TWIN and dtype != replay_dtype else 1.0


class FoundLies(Strict):
    """Of `sets` sets of FILE_ROWS rows that were made with a lie (LIES), the limits of the setup
    accuse `found`."""

    lie: str
    sets: int = Field(ge=1)
    found: int = Field(ge=0)

    @property
    def separate(self) -> bool:
        """Whether the limits find enough of them."""
        return self.sets >= LEAST_LIE_SETS and self.found >= FOUND_LIES * self.sets


class FewRows(Strict):
    """The distribution of each statistic over sets of fewer than FILE_ROWS rows that have `tokens`
    tokens or a little more (counted by `counted`)."""

    tokens: int = Field(ge=1)
    of: dict[str, Tail]


def counted(tokens: int) -> int:
    """How many tokens a row of `tokens` tokens counts for among few rows."""
    return min(tokens, ROW_COUNTS)


class SetupLimits(Strict):
    """Honest drift of one setup, over `rows` rows in `files` files, generated in `batches` of
    these row counts.

    `row`, `file`, `long`: statistic → distribution of honest value / √(floor² + reference²).
    Missing statistics were not measured and are not judged. `few`: the same for fewer rows, by
    ascending tokens; empty in older calibrations, by which few rows are judged alone. `lies`: what
    these limits find of known lies.
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
    few: tuple[FewRows, ...] = Field(default=(), exclude_if=lambda found: not found)
    lies: tuple[FoundLies, ...] = Field(default=(), exclude_if=lambda found: not found)

    def overlooked(self) -> list[str]:
        """Returns those of LIES that the limits do not find, or that were not measured."""
        separate = {one.lie for one in self.lies if one.separate}
        return [lie for lie in LIES if lie not in separate]

    def limits(self, reference: Reference, few_tokens: int = 0) -> Limits:
        """Limits for a file whose dtype alone causes the drift `reference`. `few_tokens`: the
        tokens, as counted, of fewer than FILE_ROWS rows; 0 for more rows."""
        tails: dict[Scope, Mapping[str, Tail]] = {
            "row": self.row,
            "file": self.file,
            "long": self.long,
        }
        drifts = dict.fromkeys(("few", "file", "long"), reference.file) | {"row": reference.row}
        filled = [one for one in self.few if one.tokens <= few_tokens]
        if filled:
            tails["few"] = max(filled, key=lambda one: one.tokens).of
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
    """Combines two measurements of one setup so that the limits hold for honest nodes on either
    machine: for each statistic, the distribution with the larger limit. What these limits find of
    lies has to be measured again."""

    def of(here: Mapping[str, Tail], there: Mapping[str, Tail]) -> dict[str, Tail]:
        return {
            name: max((tails[name] for tails in (here, there) if name in tails), key=_limit)
            for name in STATISTICS
            if name in here or name in there
        }

    here, there = _few_of(one), _few_of(other)
    both = {
        tokens: of(here.get(tokens, {}), there.get(tokens, {}))
        for tokens in here.keys() | there.keys()
    }
    file = of(one.file, other.file)
    return SetupLimits(
        engine=one.engine,
        dtype=one.dtype,
        device=one.device,
        batches=tuple(sorted({*one.batches, *other.batches})),
        rows=one.rows + other.rows,
        files=one.files + other.files,
        tokens=one.tokens + other.tokens,
        row=of(one.row, other.row),
        file=file,
        long=of(one.long, other.long),
        few=few_limits(both, file),
    )


def few_limits(
    fitted: Mapping[int, Mapping[str, Tail]], file: Mapping[str, Tail]
) -> tuple[FewRows, ...]:
    """The limits of few rows with so many tokens, by ascending tokens. None is tighter than that of
    more tokens or of a whole `file`: a mean of fewer tokens scatters more."""
    found: list[FewRows] = []
    least = dict(file)
    for tokens in sorted(fitted, reverse=True):
        of = {
            name: tail.model_copy(update={"limit": max(tail.limit, least.get(name, tail).limit)})
            for name, tail in fitted[tokens].items()
        }
        if of:
            found.insert(0, FewRows(tokens=tokens, of=of))
        least |= of
    return tuple(found)


def _few_of(setup: SetupLimits) -> dict[int, dict[str, Tail]]:
    return {one.tokens: one.of for one in setup.few}


def _limit(tail: Tail) -> int:
    return tail.limit


def widest(setups: Sequence[SetupLimits], factor: float = 1.0) -> SetupLimits:
    """Returns limits that accept what any of the setups (at least one) accepts: for each statistic
    that all of them judge, the distribution with the largest limit, which is multiplied by
    `factor` ≥ 1."""

    def of(tails: Sequence[Mapping[str, Tail]]) -> dict[str, Tail]:
        found = {
            name: max((one[name] for one in tails), key=_limit)
            for name in STATISTICS
            if all(name in one for one in tails)
        }
        return {
            name: tail.model_copy(update={"limit": math.ceil(factor * tail.limit)})
            for name, tail in found.items()
        }

    few = [_few_of(setup) for setup in setups]
    return SetupLimits(
        engine=setups[0].engine,
        dtype=setups[0].dtype,
        device=setups[0].device,
        batches=tuple(sorted({batch for setup in setups for batch in setup.batches})),
        rows=sum(setup.rows for setup in setups),
        files=sum(setup.files for setup in setups),
        tokens=sum(setup.tokens for setup in setups),
        row=of([setup.row for setup in setups]),
        file=of([setup.file for setup in setups]),
        long=of([setup.long for setup in setups]),
        few=tuple(
            FewRows(tokens=tokens, of=of([one[tokens] for one in few]))
            for tokens in sorted(few[0].keys())
            if all(tokens in one for one in few)
        ),
    )


class ProvenClass(Strict):
    """An exact class in which rows were compared bit for bit without an unexplained mismatch.
    `longest`: the longest of them, in tokens after the prompt; a longer row is no evidence."""

    key: DigestField
    """NumericClass.key (prime_engine.exact)."""
    rows: int = Field(ge=10_000)
    providers: int = Field(ge=3)
    longest: int = Field(ge=1)


class Calibration(Strict):
    """A measurement: on what, and by which replaying setup. Its limits apply to replays by that
    setup only. Named by its SHA-256. One that a run names is signed by the pool's manager. For
    limits of cards that accuse, another party signs it too."""

    version: Literal[3] = 3
    replay_engine: str
    replay_dtype: str
    replay_device: str = "cpu"
    """As in a file's metadata. Objects older than this field were measured on CPUs."""
    source: str
    """Models, batch sizes and machine, as text."""
    aim_per_billion: int = Field(default=round(AIM * 1e9), ge=1)
    """Expected false accusations per billion honest files, as extrapolated."""
    extrapolation: str = EXTRAPOLATION
    """Method of the extrapolation, as text."""
    setups: tuple[SetupLimits, ...]
    proven: tuple[ProvenClass, ...] = Field(default=(), exclude_if=lambda found: not found)
    """Exact classes in which a mismatch is evidence. In others it voids the file at most."""
    signed: CalibrationSignature | None = None
    second: CalibrationSignature | None = Field(default=None, exclude_if=lambda one: one is None)
    """The signature of another party than `signed`, over the same statement. Without it the limits
    of cards accuse no one."""

    def canonical(self) -> bytes:
        """The object's bytes. Unset fields are omitted, so that older objects keep their
        digests."""
        unstated = {"replay_device"} - self.model_fields_set
        if self.signed is None:
            unstated.add("signed")
        return encoding.canonical_json(self.model_dump(mode="json", exclude=unstated))

    def digest(self) -> Digest:
        return encoding.sha256(self.canonical())

    def unsigned(self) -> Calibration:
        """Returns a copy without signatures."""
        return self.model_copy(update={"signed": None, "second": None})

    def sign(
        self, signer: Signer, domain: Domain, made_at: int, *, second: bool = False
    ) -> Calibration:
        """Returns a copy signed by the manager, or (`second`) by another party. `domain` is that of
        a CalibrationStatement. Raises UserError if the signer's is the other signature, too."""
        made = self._statement(made_at)
        signature = CalibrationSignature(
            made_at=made_at, signer=signer.address, signature=signer.sign(made, domain)
        )
        here, there = ("second", "signed") if second else ("signed", "second")
        other: CalibrationSignature | None = getattr(self, there)
        if other is not None and other.signer == signer.address:
            raise UserError(
                f"{signer.address} has signed this calibration already, and the two signatures "
                "are of two parties",
                hint="sign with the key of another party",
            )
        return self.model_copy(update={here: signature})

    def check_signature(self, signer: Address, domain: Domain) -> None:
        """Raises UntrustedError unless `signer` signed it, and another party if it has a second
        signature."""
        if self.signed is None:
            raise UntrustedError(
                f"calibration {self.digest()} is not signed: orchestrator calibrate --sign"
            )
        for one in (self.signed, self.second):
            made = None if one is None else self._statement(one.made_at)
            if one and made and made.recover(domain, one.signature) != one.signer:
                raise UntrustedError(
                    f"calibration {self.digest()} is not signed by {one.signer}, whom it names"
                )
        if self.signed.signer != signer:
            raise UntrustedError(
                f"calibration {self.digest()} is signed by {self.signed.signer}, not by the "
                f"pool's manager, {signer}"
            )
        if self.second is not None and self.second.signer == signer:
            raise UntrustedError(f"both signatures of calibration {self.digest()} are {signer}'s")

    def _statement(self, made_at: int) -> CalibrationStatement:
        return CalibrationStatement(calibration=self.unsigned().digest(), made_at=made_at)

    def _family(self, engine: str, dtype: str, device: str) -> list[SetupLimits]:
        """The measurements of that engine and dtype on devices of this one's family."""
        return [
            one
            for one in self.setups
            if (one.engine, one.dtype) == (engine, dtype)
            and family_of(one.device) == family_of(device)
        ]

    def why_unlisted(self, setup: SetupLimits) -> str:
        """Returns why the limits of a measured setup accuse no one; empty if they do accuse. A
        family of cards with one engine and dtype is listed if each of its measurements finds
        LIES."""
        if not is_gpu(setup.device):
            return ""
        for one in self._family(setup.engine, setup.dtype, setup.device):
            if missing := one.overlooked():
                return f"its limits on {one.device} are not shown to find {', '.join(missing)}"
        return "" if self.second else "no second party signed the calibration"

    def unlisted(self) -> list[str]:
        """Returns a sentence for each measured setup whose limits accuse no one."""
        return [
            f"{one.engine} {one.dtype} on {one.device} is judged like a card without limits and "
            f"accuses no one: {why}"
            for one in self.setups
            if (why := self.why_unlisted(one))
        ]

    def replayed_by(self, engine: str, dtype: str, device: str) -> bool:
        """Whether its limits apply to replays by that setup: by a device of the same family."""
        mine = (self.replay_engine, self.replay_dtype, family_of(self.replay_device))
        return mine == (engine, dtype, family_of(device))

    def replayed_widely_by(self, engine: str, dtype: str, device: str) -> bool:
        """Whether that setup is a card without a calibration, whose replays may accept a file
        within its limits but accuse no one."""
        mine = (self.replay_engine, self.replay_dtype)
        return mine == (engine, dtype) and is_gpu(device)

    def proven_to(self, key: Digest) -> int:
        """The longest row in tokens up to which the exact class is proven; 0 if it is not."""
        return max((found.longest for found in self.proven if found.key == key), default=0)

    def measured(self, engine: str, dtype: str, device: str) -> SetupLimits | None:
        """The measurement of that setup, else the widest of the same engine and dtype on devices of
        its family; None if there is none."""
        family = self._family(engine, dtype, device)
        same = [one for one in family if one.device == device]
        return same[0] if same else widest(family) if family else None

    def setup(self, engine: str, dtype: str, device: str) -> SetupLimits | None:
        """As `measured`; None also if these limits accuse no one (`why_unlisted`)."""
        found = self.measured(engine, dtype, device)
        return None if found is None or self.why_unlisted(found) else found

    def widest(self, engine: str, dtype: str, device: str) -> SetupLimits | None:
        """The limits for a card that `setup` does not find: WIDENED times the widest of all cards
        whose limits accuse with the same engine and dtype, or, if there is none, of the processors
        measured with them. If there is neither, as in older calibrations, the widest of the cards
        whose limits accuse no one, not widened: observed ones among them already are. None for a
        processor, or if nothing was measured."""
        measured = [one for one in self.setups if (one.engine, one.dtype) == (engine, dtype)]
        if not measured or not is_gpu(device):
            return None
        alike = [one for one in measured if not self.why_unlisted(one)]
        if not alike:
            return widest(measured)
        return widest([one for one in alike if is_gpu(one.device)] or alike, WIDENED)

    def covers(self, device: str) -> bool:
        """Whether files of a device of this one's family can be accused, with any engine and
        dtype."""
        return any(
            family_of(one.device) == family_of(device) and not self.why_unlisted(one)
            for one in self.setups
        )


@dataclass(frozen=True)
class Limits:
    """`of`: the largest value of each statistic that is accepted as honest, by scope; statistics
    without a limit are not judged.

    `honest`: sketch distances below which honest states stay even if a limit allows more. They do
    not decide an accusation; they distinguish wrong weights from tampered log-probabilities.
    """

    of: Mapping[Scope, Mapping[str, float]]
    honest: Mapping[str, float] = field(default_factory=dict)
    tails: Mapping[Scope, Mapping[str, Tail]] = field(default_factory=dict)

    def honest_chance(self, name: str, value: float, scope: Scope, trials: int) -> float:
        """Probability that an honest file reaches `value` in one of its `trials` rows (1 for the
        file as a whole), over all statistics; 1 if no distribution is known."""
        tail = self.tails.get(scope, {}).get(name)
        if tail is None or math.isnan(value):
            return 1.0
        ratio = value / self.of[scope][name] * tail.limit / MICRO
        return min(1.0, tail.chance(ratio) * trials * len(STATISTICS))

    def named(self) -> dict[str, float]:
        """All limits, keyed "row.sketch", "few.sketch", "file.sketch", "long.sketch", …"""
        return {
            f"{scope}.{name}": limit
            for scope, limits in self.of.items()
            for name, limit in limits.items()
        }

    def exceeded(self, statistics: Mapping[str, float], scope: Scope) -> set[str]:
        """Names of the statistics beyond their limits. NaN exceeds every limit."""
        limits = self.of.get(scope, {})
        return {name for name, limit in limits.items() if not statistics[name] <= limit}


def load(path: Path) -> Calibration:
    """Reads a calibration file. Raises UserError if it cannot be read or is none."""
    hint = "make one with: orchestrator calibrate --out FILE"
    raw = read_given(path, "calibration", hint)
    try:
        return Calibration.model_validate_json(raw)
    except ValueError as error:
        raise UserError(f"{path} is not a calibration", hint=hint) from error


def parse_signed(raw: bytes, manager: Address, domain: Domain) -> Calibration:
    """Parses the calibration that a run names. Raises MalformedError, or UntrustedError unless the
    pool's manager signed it."""
    try:
        found = Calibration.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError("the object that the run names is not a calibration") from error
    if found.canonical() != raw:
        raise MalformedError("the calibration that the run names is not in its canonical form")
    found.check_signature(manager, domain)
    return found


@cache
def shipped() -> Calibration:
    """The calibration shipped with this code, which a run's zero `calibration` digest selects."""
    return load(SHIPPED)


@cache
def shipped_digest() -> Digest:
    """The digest of the shipped calibration."""
    return shipped().digest()


@cache
def newest() -> Calibration:
    """The newest calibration shipped with this code, which new runs name by its digest."""
    return load(NEWEST)


@cache
def _shipped_by_name() -> dict[str, Calibration]:
    found: dict[str, Calibration] = {ZERO_DIGEST: shipped()}
    return found | {str(one.digest()): one for one in (newest(), shipped())}


def shipped_as(named: str) -> Calibration | None:
    """The calibration shipped with this code that a run selects by naming the digest `named` (zero:
    the shipped one); None if it names an object of its own. A shipped one needs no signature:
    everyone has it."""
    return _shipped_by_name().get(named)
