"""Replay of drawn rows: the statistics of each, and what they say together.

    Replayed    drawn rows through the verifier's engine, and through its twin in the file's dtype
    .measure    … against what the file claims           → RowStatistics
    .reference  … against each other                     → drift that this dtype explains
    combine     rows → statistics of the file            (means by token or window, maxima)
    accuse      statistics + limits → Accusation | None  (pure)

A file made in another dtype than the verifier's is held to a multiple of the drift that the dtype
itself makes on the very same rows, so that no number depends on the model. It is also compared with
the twin: honest rounding falls where the twin's does wherever the kernels agree, so what other
weights change shows above far less drift.
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
    NO_REFERENCE,
    SIGNIFICANCE,
    TWIN,
    Limits,
    Reference,
    Scope,
)
from prime_verify.rollout_file import FileRow

_MAXIMA = frozenset({"margin_max", "logprob_max"})
_BY_WINDOW = frozenset({"exponent", "sign", "mantissa", "sketch", "twin_mantissa", "twin_sketch"})
_SAMPLING = frozenset({"margin_mean", "margin_max", "twin_margin"})
_STATES = frozenset({"exponent", "sign", "mantissa", "sketch", "twin_mantissa", "twin_sketch"})
_LOGPROBS = frozenset({"logprob_mean", "logprob_max", "twin_logprob"})


class NoNumbersError(Exception):
    """The replay is no evidence: policy, machine or engine gave states or probabilities that are
    not numbers."""


@dataclass(frozen=True)
class RowStatistics:
    """One replayed row. `values` has every name in thresholds.STATISTICS; `inner_margin` is the
    largest margin before the last token; `tail_observed` and `tail_expected` count tokens of
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
    """A lie that the statistics show. `chance`: at most so probable is it that an honest file shows
    the same, as the calibration extrapolates it."""

    reason: Reason
    detail: str
    chance: float


@dataclass(frozen=True)
class _Claim:
    """What is said of one row: by a file, or by another engine."""

    logprobs: NDArray[np.float32]
    proofs: Sequence[activations.DecodedProof]
    sketches: NDArray[np.uint16]


@dataclass(frozen=True)
class _Side:
    """What one engine makes of the rows: replay, flattened windows and sketches of each."""

    replays: Sequence[Replay]
    windows: Sequence[Sequence[NDArray[np.uint16]]]
    sketches: Sequence[NDArray[np.uint16]]


class Replayed:
    """The rows `numbers` of a file, replayed by `engine` and by `twin`, the same policy in the
    file's own dtype (`engine` itself if that is its dtype, or one that it cannot compute in).

    `rows` have passed the structural checks: prompts as planned, proofs that decode. Raises
    MalformedError if a row does not fit the model, NoNumbersError.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunDefinition,
        lease_digest: Digest,
        numbers: Sequence[int],
        plan: Sequence[PlannedRow],
        rows: Sequence[FileRow],
        twin: Engine,
    ) -> None:
        self._numbers = numbers
        self._temperature = run.temperature
        self._rows = [rows[i] for i in numbers]
        seed = seeds.lease_seed(lease_digest)
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
        self._twin = self._own
        if twin is not engine:
            asked = [
                replace(request, rivals=tuple(own.rivals.tolist()))
                for request, own in zip(requests, replays, strict=True)
            ]
            self._twin = self._side(twin.replay(asked, self._temperature))

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
        """What the file says of its i-th replayed row."""
        row, windows = self._rows[i], self._own.windows[i]
        packed = activations.unpack(row.proofs, len(windows))
        proofs = [
            activations.decode(proof, len(window))
            for proof, window in zip(packed, windows, strict=True)
        ]
        own = row.logprobs[self._places[i]]
        return _Claim(own, proofs, sketch.decode(row.sketch, len(windows)))

    def _twins_claim(self, i: int) -> _Claim:
        """What the twin would say of it."""
        windows = self._twin.windows[i]
        proofs = [
            activations.decode(proof, len(window))
            for proof, window in zip(activations.build(windows), windows, strict=True)
        ]
        return _Claim(self._twin.replays[i].logprobs, proofs, self._twin.sketches[i])

    def measure(self) -> list[RowStatistics]:
        """What the file claims, against the replay."""
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
                    values={**values, **self._against_twin(claim, values, i)},
                    inner_margin=float(replay.margins[:-1].max(initial=0.0)),
                    ends_early=row.finish_reason == "end"
                    and not sampling.ends_plausibly(replay.end_probability, last_margin, 0.0),
                    tail_observed=int((replay.logprobs < np.log(TAIL_PROBABILITY)).sum()),
                    tail_expected=float(replay.tail_mass.sum()),
                )
            )
        return found

    def _against_twin(self, claim: _Claim, values: Mapping[str, float], i: int) -> dict[str, float]:
        """The statistics of TWIN: those of the same claim against the twin's replay."""
        if self._twin is not self._own:
            margins = self._twin.replays[i].margins
            drawn = sampling.match_sampling(margins, MARGIN_CAP)
            values = {
                "margin_mean": drawn.margin_mean,
                **self._compare(claim, self._twin, i),
            }
        return {name: values[of] for name, of in TWIN.items()}

    def by_window(self, i: int) -> dict[str, NDArray[np.float64]]:
        """What the file's i-th replayed row claims against replay and twin, window by window:
        arrays [windows], means of tokens where a statistic is one of tokens. For benches."""
        claim = self._claimed(i)
        starts = np.arange(0, len(claim.logprobs), PROOF_WINDOW)
        lengths = np.diff(np.append(starts, len(claim.logprobs)))
        found: dict[str, NDArray[np.float64]] = {}
        for prefix, side in (("", self._own), ("twin_", self._twin)):
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
        """Drift between twin and replay: what the file's dtype alone explains; none if they are
        one.

        Margins: a claimed token's lies below 0 by as much as two engines' contrasts differ at most,
        so the largest difference stands in for `margin_max`. A difference δ tips a token whose
        rival is closer than δ, by δ/2 on average; rivals lie less dense than one a unit (Gumbel
        noise), so the mean of δ²/2 stands in for `margin_mean`.
        """
        if self._twin is self._own:
            return NO_REFERENCE
        rows = []
        for i, other in enumerate(self._twin.replays):
            values = self._compare(self._twins_claim(i), self._own, i)
            drift = np.abs(other.contrasts.astype(np.float64) - self._own.replays[i].contrasts)
            values["margin_mean"] = float((np.minimum(drift, MARGIN_CAP) ** 2).mean() / 2)
            values["margin_max"] = float(drift.max())
            tokens, windows = len(other.logprobs), len(self._keys[i])
            rows.append(RowStatistics(i, tokens, windows, 1.0, values, 0.0, False, 0, 0.0))
        together = combine(rows)
        worst = {name: max(row.values[name] for row in rows) for name in rows[0].values}
        # A row may be one token long: its means are held against the largest drift of a token.
        worst["margin_mean"], worst["logprob_mean"] = worst["margin_max"], worst["logprob_max"]
        return Reference(row=worst, file=together)

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
    """The replay at those places of the output."""
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
    """Whether a replay can be held against anybody: finite states, no NaN. A margin may be infinite
    (a token that the policy gives no chance)."""
    found = (replay.logprobs, replay.margins, replay.contrasts, replay.tail_mass)
    finite = bool(((replay.states & 0x7FFF) < 0x7F80).all())
    return finite and not any(np.isnan(values).any() for values in found)


def combine(rows: Sequence[RowStatistics]) -> dict[str, float]:
    """Statistics of all replayed rows together: maxima, else means weighted by windows or tokens;
    with `tokens`, `equal` and `tail_probability` besides those that are judged."""
    tokens = np.array([row.tokens for row in rows], dtype=np.float64)
    windows = np.array([row.windows for row in rows], dtype=np.float64)
    result: dict[str, float] = {}
    for name in rows[0].values:
        values = np.array([row.values[name] for row in rows])
        if name in _MAXIMA:
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
    """By which limits these rows are judged together."""
    if len(rows) < FILE_ROWS:
        return ()
    return ("file", "long") if sum(row.tokens for row in rows) >= LONG_TOKENS else ("file",)


def accuse(rows: Sequence[RowStatistics], limits: Limits) -> Accusation | None:
    """The lie that the replayed rows show beyond the limits, or None.

    States are judged before sampling: other weights also change what is sampled.
    """
    together = combine(rows)
    file_excess = {name for scope in file_scopes(rows) for name in limits.exceeded(together, scope)}
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
            return Accusation(Reason.TWO_HUMPED, where, min(chance, tail))
        return Accusation(Reason.WRONG_SAMPLING, where, chance)
    if tail < SIGNIFICANCE:
        return Accusation(Reason.TWO_HUMPED, f"tail probability {tail:.3g}", min(chance, tail))
    if excess & _LOGPROBS:
        drifted = any(together[name] > most for name, most in limits.honest.items())
        reason = Reason.WRONG_ACTIVATIONS if drifted else Reason.TAMPERED_LOGPROBS
        return Accusation(reason, where, chance)
    return None


def _chance(rows: Sequence[RowStatistics], together: Mapping[str, float], limits: Limits) -> float:
    """Chance that an honest file reaches the most unlikely of these statistics."""
    chances = [
        limits.honest_chance(name, row.values[name], "row", len(rows))
        for row in rows
        for name in limits.exceeded(row.values, "row")
    ]
    chances += [
        limits.honest_chance(name, together[name], scope, 1)
        for scope in file_scopes(rows)
        for name in limits.exceeded(together, scope)
    ]
    return min(chances, default=1.0)


def _states_reason(excess: set[str], bad: Sequence[RowStatistics]) -> Reason:
    """Which lie about states. Other weights shift proof, sketch and log-probabilities together;
    what is made up is broken alone, or beside tokens that are right."""
    mean = {name: float(np.mean([row.values[name] for row in bad])) for name in BROKEN}
    sketch_broken = mean["sketch"] > BROKEN["sketch"]
    proof_broken = any(mean[name] > BROKEN[name] for name in BROKEN.keys() - {"sketch"})
    if sketch_broken != proof_broken:
        return Reason.WRONG_SKETCH if sketch_broken else Reason.FORGED_PROOF
    if proof_broken and not excess & (_SAMPLING | _LOGPROBS):
        return Reason.FORGED_PROOF
    return Reason.WRONG_ACTIVATIONS
