"""Replay of drawn rows: the statistics of each, and what they say together.

    Replayed    drawn rows through the verifier's engine, one prefill for all of them
    .measure    … against what the file claims           → RowStatistics
    .reference  … against the same policy in the file's dtype → drift that this dtype explains
    combine     rows → statistics of the file            (means by token or window, maxima)
    accuse      statistics + limits → Accusation | None  (pure)

A file made in another dtype than the verifier's is held to a multiple of the drift that the dtype
itself makes on the very same rows, so that no number depends on the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protocol.core import seeds
from protocol.core.ids import Digest
from protocol.core.rollout import PROOF_WINDOW
from protocol.core.run import RunDefinition
from protocol.core.verdict import Reason
from protocol.engine.base import TAIL_PROBABILITY, Engine, Replay, ReplayRequest
from protocol.proofs import activations, sampling, sketch
from protocol.proofs.thresholds import (
    BROKEN,
    FILE_ROWS,
    LOGPROB_CAP,
    MARGIN_CAP,
    SIGNIFICANCE,
    Limits,
    Reference,
)
from protocol.verification.build import PlannedRow, sketch_keys
from protocol.verification.rollout_file import FileRow

_MAXIMA = frozenset({"margin_max", "logprob_max"})
_BY_WINDOW = frozenset({"exponent", "sign", "mantissa", "sketch"})
_SAMPLING = frozenset({"margin_mean", "margin_max"})
_STATES = frozenset({"exponent", "sign", "mantissa"})
_LOGPROBS = frozenset({"logprob_mean", "logprob_max"})


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
    """A lie that the statistics show."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class _Claim:
    """What is said of one row: by a file, or by another engine."""

    logprobs: NDArray[np.float32]
    proofs: Sequence[activations.DecodedProof]
    sketches: NDArray[np.uint16]


class Replayed:
    """The rows `numbers` of a file, replayed by `engine`.

    `rows` have passed the structural checks: prompts as planned, proofs that decode. Raises
    MalformedError if a row does not fit the model.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunDefinition,
        lease_digest: Digest,
        numbers: Sequence[int],
        plan: Sequence[PlannedRow],
        rows: Sequence[FileRow],
    ) -> None:
        self._numbers = numbers
        self._temperature = run.temperature
        self._rows = [rows[i] for i in numbers]
        self._requests = [
            ReplayRequest(plan[i].prompt_tokens, rows[i].output_tokens, plan[i].noise_key)
            for i in numbers
        ]
        self._replays = engine.replay(self._requests, run.temperature)
        seed = seeds.lease_seed(lease_digest)
        self._keys = [
            sketch_keys(seed, row.group, row.sample, row.output_tokens) for row in self._rows
        ]
        self._windows = [activations.split_windows(replay.states) for replay in self._replays]
        self._sketches = [
            sketch.build(windows, keys)
            for windows, keys in zip(self._windows, self._keys, strict=True)
        ]

    @staticmethod
    def _claim(replay: Replay, keys: Sequence[bytes]) -> _Claim:
        windows = activations.split_windows(replay.states)
        proofs = [
            activations.decode(proof, len(window))
            for proof, window in zip(activations.build(windows), windows, strict=True)
        ]
        return _Claim(replay.logprobs, proofs, sketch.build(windows, keys))

    def measure(self) -> list[RowStatistics]:
        """What the file claims, against the replay."""
        found = []
        for i, row in enumerate(self._rows):
            replay = self._replays[i]
            windows = self._windows[i]
            packed = activations.unpack(row.proofs, len(windows))
            claim = _Claim(
                row.logprobs,
                [
                    activations.decode(proof, len(window))
                    for proof, window in zip(packed, windows, strict=True)
                ],
                sketch.decode(row.sketch, len(windows)),
            )
            drawn = sampling.match_sampling(replay.margins, MARGIN_CAP)
            last_margin = float(replay.margins[-1])
            found.append(
                RowStatistics(
                    number=self._numbers[i],
                    tokens=len(row.output_tokens),
                    windows=len(windows),
                    equal=drawn.equal,
                    values={
                        "margin_mean": drawn.margin_mean,
                        "margin_max": drawn.margin_max,
                        **self._compare(claim, i),
                    },
                    inner_margin=float(replay.margins[:-1].max(initial=0.0)),
                    ends_early=row.finish_reason == "end"
                    and not sampling.ends_plausibly(replay.end_probability, last_margin, 0.0),
                    tail_observed=int((replay.logprobs < np.log(TAIL_PROBABILITY)).sum()),
                    tail_expected=float(replay.tail_mass.sum()),
                )
            )
        return found

    def by_window(self, i: int) -> dict[str, NDArray[np.float64]]:
        """What the file's i-th replayed row claims against the replay, window by window: arrays
        [windows], means of tokens where a statistic is one of tokens. For benches."""
        row, replay, windows = self._rows[i], self._replays[i], self._windows[i]
        packed = activations.unpack(row.proofs, len(windows))
        proofs = [activations.decode(p, len(w)) for p, w in zip(packed, windows, strict=True)]
        match = activations.verify(proofs, windows)
        claimed = sketch.decode(row.sketch, len(windows))
        starts = np.arange(0, len(row.output_tokens), PROOF_WINDOW)
        lengths = np.diff(np.append(starts, len(row.output_tokens)))
        gap = np.abs(row.logprobs.astype(np.float64) - replay.logprobs)

        def means(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.add.reduceat(values, starts) / lengths

        return {
            "margin": means(np.minimum(replay.margins, MARGIN_CAP).astype(np.float64)),
            "logprob": means(np.minimum(gap, LOGPROB_CAP)),
            "exponent": match.exponent,
            "sign": match.sign,
            "mantissa": match.mantissa,
            "sketch": sketch.distances(claimed, self._sketches[i]),
        }

    def reference(self, twin: Engine) -> Reference:
        """Drift between `twin` (the same policy in another dtype) and the replay.

        A margin is at most the difference of two engines' contrasts, so these stand in for it.
        """
        asked = [
            replace(request, rivals=tuple(own.rivals.tolist()))
            for request, own in zip(self._requests, self._replays, strict=True)
        ]
        rows = []
        for i, other in enumerate(twin.replay(asked, self._temperature)):
            values = self._compare(self._claim(other, self._keys[i]), i)
            drift = np.abs(other.contrasts.astype(np.float64) - self._replays[i].contrasts)
            values["margin_mean"] = float(np.minimum(drift, MARGIN_CAP).mean())
            values["margin_max"] = float(drift.max())
            tokens, windows = len(other.logprobs), len(self._keys[i])
            rows.append(RowStatistics(i, tokens, windows, 1.0, values, 0.0, False, 0, 0.0))
        together = combine(rows)
        worst = {name: max(row.values[name] for row in rows) for name in rows[0].values}
        # A row may be one token long: its means are held against the largest drift of a token.
        worst["margin_mean"], worst["logprob_mean"] = worst["margin_max"], worst["logprob_max"]
        return Reference(row=worst, file=together)

    def _compare(self, claim: _Claim, i: int) -> dict[str, float]:
        replay = self._replays[i]
        match = activations.verify(claim.proofs, self._windows[i])
        distance = sketch.distances(claim.sketches, self._sketches[i])
        gap = np.abs(claim.logprobs.astype(np.float64) - replay.logprobs)
        return {
            "logprob_mean": float(np.minimum(gap, LOGPROB_CAP).mean()),
            "logprob_max": float(gap.max()),
            "exponent": float(match.exponent.mean()),
            "sign": float(match.sign.mean()),
            "mantissa": float(match.mantissa.mean()),
            "sketch": float(distance.mean()),
        }


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


def accuse(rows: Sequence[RowStatistics], limits: Limits) -> Accusation | None:
    """The lie that the replayed rows show beyond the limits, or None.

    States are judged before sampling: other weights also change what is sampled.
    """
    together = combine(rows)
    file_excess = limits.exceeded(together, "file") if len(rows) >= FILE_ROWS else set()
    row_excess = {row.number: limits.exceeded(row.values, "row") for row in rows}
    bad = [row for row in rows if row_excess[row.number]] or list(rows)
    excess = file_excess.union(*row_excess.values())
    where = f"{len([r for r in rows if row_excess[r.number]])} of {len(rows)} rows; " + ", ".join(
        f"{name} {max(together[name], *(r.values[name] for r in bad)):.4g}"
        for name in sorted(excess)
    )
    if excess:
        where += (
            f"; an honest file does so with a chance below {_chance(rows, together, limits):.0e}"
        )
    if excess & _STATES or "sketch" in excess:
        return Accusation(_states_reason(excess, bad), where)
    if excess & _SAMPLING:
        inner = max(row.inner_margin for row in rows)
        if inner <= limits.row["margin_max"] and any(row.ends_early for row in bad):
            return Accusation(Reason.EARLY_END, where)
        if together["tail_probability"] < SIGNIFICANCE:
            return Accusation(Reason.TWO_HUMPED, where)
        return Accusation(Reason.WRONG_SAMPLING, where)
    if together["tail_probability"] < SIGNIFICANCE:
        return Accusation(Reason.TWO_HUMPED, f"tail probability {together['tail_probability']:.3g}")
    if excess & _LOGPROBS:
        drifted = together["sketch"] > limits.honest_sketch
        reason = Reason.WRONG_ACTIVATIONS if drifted else Reason.TAMPERED_LOGPROBS
        return Accusation(reason, where)
    return None


def _chance(rows: Sequence[RowStatistics], together: Mapping[str, float], limits: Limits) -> float:
    """Chance that an honest file reaches the most unlikely of these statistics."""
    chances = [
        limits.honest_chance(name, row.values[name], "row", len(rows))
        for row in rows
        for name in limits.exceeded(row.values, "row")
    ]
    if len(rows) >= FILE_ROWS:
        chances += [
            limits.honest_chance(name, together[name], "file", 1)
            for name in limits.exceeded(together, "file")
        ]
    return min(chances, default=1.0)


def _states_reason(excess: set[str], bad: Sequence[RowStatistics]) -> Reason:
    """Which lie about states. Other weights shift proof, sketch and log-probabilities together;
    what is made up is broken alone, or beside tokens that are right."""
    mean = {name: float(np.mean([row.values[name] for row in bad])) for name in BROKEN}
    sketch_broken = mean["sketch"] > BROKEN["sketch"]
    proof_broken = any(mean[name] > BROKEN[name] for name in _STATES & BROKEN.keys())
    if sketch_broken != proof_broken:
        return Reason.WRONG_SKETCH if sketch_broken else Reason.FORGED_PROOF
    if proof_broken and not excess & (_SAMPLING | _LOGPROBS):
        return Reason.FORGED_PROOF
    return Reason.WRONG_ACTIVATIONS
