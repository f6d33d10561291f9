"""Replay of drawn rows: per-row statistics, and the accusation that follows from them.

    Replayed    drawn rows through the verifier's engine, and once more in the file's dtype
    .measure    replay compared with the file's claims   → RowStatistics
    .reference  both replays compared                    → drift that this dtype explains
    combine     rows → statistics of the file            (means by token or window, maxima)
    accuse      statistics + limits → Accusation | None  (pure)

Limits for a file in another dtype than the verifier's are multiples of the drift that this dtype
causes on the same rows, so they do not depend on the model. The file is also compared with the
same-dtype replay (the same policy in the file's dtype). Where kernels agree, honest rounding
matches that replay's, so the effect of different weights stands out against much less drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prime_core import seeds
from prime_core.ids import Digest
from prime_core.proof_form import PROOF_WINDOW
from prime_core.run import RunDefinition
from prime_core.verdict import Reason
from prime_engine.base import TAIL_PROBABILITY, Engine, Replay, ReplayRequest
from prime_verify.build import PlannedRow, sketch_keys
from prime_verify.proofs import activations, sampling, sketch
from prime_verify.proofs.tails import LEAST_CHANCE
from prime_verify.proofs.thresholds import (
    BROKEN,
    FILE_ROWS,
    LOGPROB_CAP,
    LONG_TOKENS,
    MARGIN_CAP,
    MAXIMA,
    NO_REFERENCE,
    SIGNIFICANCE,
    TWIN,
    Limits,
    Reference,
    Scope,
    counted,
)
from prime_verify.rollout_file import FileRow

_BY_WINDOW = frozenset({"exponent", "sign", "mantissa", "sketch", "twin_mantissa", "twin_sketch"})
_SAMPLING = frozenset({"margin_mean", "margin_max", "twin_margin"})
_STATES = frozenset({"exponent", "sign", "mantissa", "sketch", "twin_mantissa", "twin_sketch"})
_LOGPROBS = frozenset({"logprob_mean", "logprob_max", "twin_logprob"})


class NoNumbersError(Exception):
    """The replay yields no evidence: policy, machine or engine produced NaN or infinite values."""


@dataclass(frozen=True)
class RowStatistics:
    """One replayed row. `values` has all names in thresholds.STATISTICS; `inner_margin` is the
    largest margin before the last token; `tail_observed` and `tail_expected` count tokens with
    replayed probability below TAIL_PROBABILITY."""

    number: int
    tokens: int
    windows: int
    equal: float
    values: Mapping[str, float]
    inner_margin: float
    ends_early: bool
    tail_observed: int
    tail_expected: float


@dataclass(frozen=True)
class Accusation:
    """An attack that the statistics prove. `chance` is an upper bound on the probability that an
    honest file shows the same, extrapolated from the calibration."""

    reason: Reason
    detail: str
    chance: float


@dataclass(frozen=True)
class _Claim:
    """Claims about one row: by a file, or by another engine."""

    logprobs: NDArray[np.float32]
    proofs: Sequence[activations.DecodedProof]
    sketches: NDArray[np.uint16]


@dataclass(frozen=True)
class _Side:
    """One engine's result: replay, flattened windows and sketches of each row."""

    replays: Sequence[Replay]
    windows: Sequence[Sequence[NDArray[np.uint16]]]
    sketches: Sequence[NDArray[np.uint16]]


@dataclass(frozen=True)
class ClaimedRows:
    """All rows of a file: as its lease plans them, and as the file claims them."""

    lease_digest: Digest
    plan: Sequence[PlannedRow]
    rows: Sequence[FileRow]


class Replayed:
    """The rows `numbers` of a file, replayed by `engine` and by `same_dtype`: the same policy in
    the file's own dtype (`engine` itself if the dtypes are equal, or if it cannot compute in that
    dtype).

    The rows have passed the structural checks: prompts as planned, decodable proofs. Raises
    MalformedError if a row does not fit the model, and NoNumbersError.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunDefinition,
        claimed: ClaimedRows,
        numbers: Sequence[int],
        same_dtype: Engine,
    ) -> None:
        plan, rows = claimed.plan, claimed.rows
        self._numbers = numbers
        self._temperature = run.temperature
        self._rows = [rows[i] for i in numbers]
        seed = seeds.lease_seed(claimed.lease_digest)
        self._keys = [
            sketch_keys(seed, row.group, row.sample, row.model_tokens) for row in self._rows
        ]
        requests = [
            ReplayRequest(plan[i].prompt_tokens, rows[i].output_tokens, plan[i].noise_seed)
            for i in numbers
        ]
        self._places = [row.places for row in self._rows]
        replays = engine.replay(requests, self._temperature)
        self._own = self._side(replays)
        self._same_dtype = self._own
        if same_dtype is not engine:
            asked = [
                replace(request, rivals=tuple(own.rivals.tolist()))
                for request, own in zip(requests, replays, strict=True)
            ]
            self._same_dtype = self._side(same_dtype.replay(asked, self._temperature))

    def _side(self, whole: Sequence[Replay]) -> _Side:
        replays = [
            _only(replay, places) for replay, places in zip(whole, self._places, strict=True)
        ]
        if not all(map(_numbers, replays)):
            raise NoNumbersError("the replay's own states or probabilities are not numbers")
        windows = [activations.split_windows(replay.states) for replay in replays]
        sketches = [
            sketch.build(of_row, keys) for of_row, keys in zip(windows, self._keys, strict=True)
        ]
        return _Side(replays, windows, sketches)

    def _claimed(self, i: int) -> _Claim:
        """The file's claim about its i-th replayed row."""
        row, windows = self._rows[i], self._own.windows[i]
        packed = activations.unpack(row.proofs, len(windows))
        proofs = [
            activations.decode(proof, len(window))
            for proof, window in zip(packed, windows, strict=True)
        ]
        own = row.logprobs[self._places[i]]
        return _Claim(own, proofs, sketch.decode(row.sketch, len(windows)))

    def _same_dtype_claim(self, i: int) -> _Claim:
        """The claim that the same-dtype replay would make about the i-th row."""
        windows = self._same_dtype.windows[i]
        proofs = [
            activations.decode(proof, len(window))
            for proof, window in zip(activations.build(windows), windows, strict=True)
        ]
        return _Claim(self._same_dtype.replays[i].logprobs, proofs, self._same_dtype.sketches[i])

    def measure(self) -> list[RowStatistics]:
        """Compares the file's claims with the replay; returns one RowStatistics per row."""
        found = []
        for i, row in enumerate(self._rows):
            replay = self._own.replays[i]
            claim = self._claimed(i)
            drawn = sampling.match_sampling(replay.margins, MARGIN_CAP)
            values = {
                "margin_mean": drawn.margin_mean,
                "margin_max": drawn.margin_max,
                **self._compare(claim, self._own, i),
            }
            last_margin = float(replay.margins[-1])
            found.append(
                RowStatistics(
                    number=self._numbers[i],
                    tokens=len(self._places[i]),
                    windows=len(self._keys[i]),
                    equal=drawn.equal,
                    values={**values, **self._against_same_dtype(claim, values, i)},
                    inner_margin=float(replay.margins[:-1].max(initial=0.0)),
                    ends_early=row.finish_reason != "length"
                    and not sampling.ends_plausibly(replay.end_probability, last_margin, 0.0),
                    tail_observed=int((replay.logprobs < np.log(TAIL_PROBABILITY)).sum()),
                    tail_expected=float(replay.tail_mass.sum()),
                )
            )
        return found

    def _against_same_dtype(
        self, claim: _Claim, values: Mapping[str, float], i: int
    ) -> dict[str, float]:
        """The TWIN statistics: the same claim compared with the same-dtype replay."""
        if self._same_dtype is not self._own:
            margins = self._same_dtype.replays[i].margins
            drawn = sampling.match_sampling(margins, MARGIN_CAP)
            values = {
                "margin_mean": drawn.margin_mean,
                **self._compare(claim, self._same_dtype, i),
            }
        return {name: values[of] for name, of in TWIN.items()}

    def by_window(self, i: int) -> dict[str, NDArray[np.float64]]:
        """The i-th replayed row's claims compared with both replays, window by window: arrays
        [windows]; token statistics are averaged over the window. For benchmarks."""
        claim = self._claimed(i)
        starts = np.arange(0, len(claim.logprobs), PROOF_WINDOW)
        lengths = np.diff(np.append(starts, len(claim.logprobs)))
        found: dict[str, NDArray[np.float64]] = {}
        for prefix, side in (("", self._own), ("twin_", self._same_dtype)):
            replay = side.replays[i]
            match = activations.verify(claim.proofs, side.windows[i])
            gap = np.abs(claim.logprobs.astype(np.float64) - replay.logprobs)
            margins = np.minimum(replay.margins, MARGIN_CAP).astype(np.float64)
            of_side = {
                "margin": np.add.reduceat(margins, starts) / lengths,
                "logprob": np.add.reduceat(np.minimum(gap, LOGPROB_CAP), starts) / lengths,
                "exponent": match.exponent,
                "sign": match.sign,
                "mantissa": match.mantissa,
                "sketch": sketch.distances(claim.sketches, side.sketches[i]),
            }
            found |= {prefix + name: values for name, values in of_side.items()}
        return found

    def reference(self) -> Reference:
        """Drift between the two replays, which the file's dtype alone explains; NO_REFERENCE if
        they are the same engine."""
        return reference_of(self.drifts())

    def drifts(self) -> list[RowStatistics]:
        """The drift between the two replays of each row; empty if they are the same engine.

        Margins: a claimed token's margin is at most the difference between the two engines'
        contrasts, so the largest difference stands in for `margin_max`. A difference δ flips a
        token whose rival is closer than δ, by δ/2 on average, and rivals have a density below one
        per unit (Gumbel noise), so the mean of δ²/2 stands in for `margin_mean`.
        """
        if self._same_dtype is self._own:
            return []
        rows = []
        for i, other in enumerate(self._same_dtype.replays):
            values = self._compare(self._same_dtype_claim(i), self._own, i)
            drift = np.abs(other.contrasts.astype(np.float64) - self._own.replays[i].contrasts)
            values["margin_mean"] = float((np.minimum(drift, MARGIN_CAP) ** 2).mean() / 2)
            values["margin_max"] = float(drift.max())
            tokens, windows = len(other.logprobs), len(self._keys[i])
            rows.append(RowStatistics(i, tokens, windows, 1.0, values, 0.0, False, 0, 0.0))
        return rows

    def _compare(self, claim: _Claim, side: _Side, i: int) -> dict[str, float]:
        match = activations.verify(claim.proofs, side.windows[i])
        distance = sketch.distances(claim.sketches, side.sketches[i])
        gap = np.abs(claim.logprobs.astype(np.float64) - side.replays[i].logprobs)
        return {
            "logprob_mean": float(np.minimum(gap, LOGPROB_CAP).mean()),
            "logprob_max": float(gap.max()),
            "exponent": float(match.exponent.mean()),
            "sign": float(match.sign.mean()),
            "mantissa": float(match.mantissa.mean()),
            "sketch": float(distance.mean()),
        }


def _only(replay: Replay, places: NDArray[np.int64]) -> Replay:
    """The replay restricted to these positions of the output."""
    if len(places) == len(replay.logprobs):
        return replay
    return Replay(
        logprobs=replay.logprobs[places],
        winners=replay.winners[places],
        margins=replay.margins[places],
        rivals=replay.rivals[places],
        contrasts=replay.contrasts[places],
        tail_mass=replay.tail_mass[places],
        end_probability=replay.end_probability,
        states=replay.states[places],
    )


def _numbers(replay: Replay) -> bool:
    """Whether a replay is usable as evidence: finite states, no NaN. A margin may be infinite (a
    token to which the policy gives probability 0)."""
    found = (replay.logprobs, replay.margins, replay.contrasts, replay.tail_mass)
    finite = bool(((replay.states & 0x7FFF) < 0x7F80).all())
    return finite and not any(np.isnan(values).any() for values in found)


def reference_of(drifts: Sequence[RowStatistics]) -> Reference:
    """The reference of rows of one file, from each one's drift between two replays; NO_REFERENCE
    if there are none."""
    if not drifts:
        return NO_REFERENCE
    worst = {name: max(row.values[name] for row in drifts) for name in drifts[0].values}
    # A row may be one token long, so its means are compared with the largest drift of a token.
    worst["margin_mean"], worst["logprob_mean"] = worst["margin_max"], worst["logprob_max"]
    return Reference(row=worst, file=combine(drifts))


def combine(rows: Sequence[RowStatistics]) -> dict[str, float]:
    """Statistics of all replayed rows together: maxima, or means weighted by windows or tokens.
    Adds `tokens`, `equal` and `tail_probability` to the judged statistics."""
    tokens = np.array([row.tokens for row in rows], dtype=np.float64)
    windows = np.array([row.windows for row in rows], dtype=np.float64)
    result: dict[str, float] = {}
    for name in rows[0].values:
        values = np.array([row.values[name] for row in rows])
        if name in MAXIMA:
            result[name] = float(values.max())
        else:
            weights = windows if name in _BY_WINDOW else tokens
            result[name] = float(np.average(values, weights=weights))
    result["tokens"] = float(tokens.sum())
    result["equal"] = float(np.average([row.equal for row in rows], weights=tokens))
    result["tail_probability"] = sampling.poisson_tail(
        sum(row.tail_observed for row in rows), sum(row.tail_expected for row in rows)
    )
    return result


def file_scopes(rows: Sequence[RowStatistics]) -> tuple[Scope, ...]:
    """The file-level scopes whose limits apply to these rows."""
    if len(rows) < FILE_ROWS:
        return ()
    return ("file", "long") if sum(row.tokens for row in rows) >= LONG_TOKENS else ("file",)


def few_tokens(rows: Sequence[RowStatistics]) -> int:
    """Their tokens, as counted among fewer than FILE_ROWS rows; 0 if they are more."""
    return sum(counted(row.tokens) for row in rows) if len(rows) < FILE_ROWS else 0


def accuse(rows: Sequence[RowStatistics], limits: Limits) -> Accusation | None:
    """The attack that the replayed rows show beyond the limits, or None.

    States are judged before sampling, because different weights also change the sampled tokens.
    """
    together = combine(rows)
    scopes = _scopes(rows)
    file_excess = {name for scope in scopes for name in limits.exceeded(together, scope)}
    row_excess = {row.number: limits.exceeded(row.values, "row") for row in rows}
    bad = [row for row in rows if row_excess[row.number]] or list(rows)
    excess = file_excess.union(*row_excess.values())
    where = f"{len([r for r in rows if row_excess[r.number]])} of {len(rows)} rows; " + ", ".join(
        f"{name} {max(together[name], *(r.values[name] for r in bad)):.4g}"
        for name in sorted(excess)
    )
    chance = _chance(rows, together, limits)
    tail = max(LEAST_CHANCE, together["tail_probability"])
    if excess:
        where += f"; an honest file does so with a chance below {chance:.0e}"
    if excess & _STATES:
        return Accusation(_states_reason(excess, bad), where, chance)
    if excess & _SAMPLING:
        inner = max(row.inner_margin for row in rows)
        if inner <= limits.of["row"]["margin_max"] and any(row.ends_early for row in bad):
            return Accusation(Reason.EARLY_END, where, chance)
        if tail < SIGNIFICANCE:
            return Accusation(Reason.IMPROBABLE_TOKENS, where, min(chance, tail))
        return Accusation(Reason.WRONG_SAMPLING, where, chance)
    if tail < SIGNIFICANCE:
        return Accusation(
            Reason.IMPROBABLE_TOKENS, f"tail probability {tail:.3g}", min(chance, tail)
        )
    if excess & _LOGPROBS:
        drifted = any(together[name] > most for name, most in limits.honest.items())
        reason = Reason.WRONG_ACTIVATIONS if drifted else Reason.TAMPERED_LOGPROBS
        return Accusation(reason, where, chance)
    return None


def _scopes(rows: Sequence[RowStatistics]) -> tuple[Scope, ...]:
    """The scopes whose limits apply to all rows together."""
    return file_scopes(rows) or ("few",)


def _chance(rows: Sequence[RowStatistics], together: Mapping[str, float], limits: Limits) -> float:
    """Probability that an honest file reaches the most unlikely of these statistics."""
    chances = [
        limits.honest_chance(name, row.values[name], "row", len(rows))
        for row in rows
        for name in limits.exceeded(row.values, "row")
    ]
    chances += [
        limits.honest_chance(name, together[name], scope, 1)
        for scope in _scopes(rows)
        for name in limits.exceeded(together, scope)
    ]
    return min(chances, default=1.0)


def _states_reason(excess: set[str], bad: Sequence[RowStatistics]) -> Reason:
    """Classifies an accusation about states. Different weights shift proof, sketch and
    log-probabilities together; fabricated data is broken in isolation, or next to correct
    tokens."""
    mean = {name: float(np.mean([row.values[name] for row in bad])) for name in BROKEN}
    sketch_broken = mean["sketch"] > BROKEN["sketch"]
    proof_broken = any(mean[name] > BROKEN[name] for name in BROKEN.keys() - {"sketch"})
    if sketch_broken != proof_broken:
        return Reason.WRONG_SKETCH if sketch_broken else Reason.FORGED_PROOF
    if proof_broken and not excess & (_SAMPLING | _LOGPROBS):
        return Reason.FORGED_PROOF
    return Reason.WRONG_ACTIVATIONS
