"""Replay of drawn rows: the statistics of each, and what they say together.

measure:  file row + engine → RowStatistics       (one prefill for all drawn rows)
combine:  rows → statistics of the file           (means by token or window, maxima)
accuse:   statistics + limits → Accusation | None (pure)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.core import seeds
from protocol.core.ids import Digest
from protocol.core.run import RunDefinition
from protocol.core.verdict import Reason
from protocol.engine.base import TAIL_PROBABILITY, Engine, Replay, ReplayRequest
from protocol.proofs import activations, sampling, sketch
from protocol.proofs.thresholds import (
    LOGPROB_CAP,
    MARGIN_CAP,
    SIGNIFICANCE,
    UNRELATED,
    Limits,
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


def measure(
    engine: Engine,
    run: RunDefinition,
    lease_digest: Digest,
    numbers: Sequence[int],
    plan: Sequence[PlannedRow],
    rows: Sequence[FileRow],
) -> list[RowStatistics]:
    """Replays the rows `numbers` of a file and compares.

    `rows` have passed the structural checks: prompts as planned, proofs that decode. Raises
    MalformedError if a row does not fit the model.
    """
    requests = [
        ReplayRequest(plan[i].prompt_tokens, rows[i].output_tokens, plan[i].noise_key)
        for i in numbers
    ]
    replays = engine.replay(requests, run.temperature)
    seed = seeds.lease_seed(lease_digest)
    return [
        _measure_row(i, rows[i], replay, seed, engine)
        for i, replay in zip(numbers, replays, strict=True)
    ]


def _measure_row(
    number: int, row: FileRow, replay: Replay, seed: Digest, engine: Engine
) -> RowStatistics:
    windows = activations.split_windows(replay.states)
    packed = activations.unpack(row.proofs, len(windows))
    proofs = [
        activations.decode(proof, len(window))
        for proof, window in zip(packed, windows, strict=True)
    ]
    match = activations.verify(proofs, windows)
    keys = sketch_keys(seed, row.group, row.sample, row.output_tokens)
    distance = sketch.distances(
        sketch.decode(row.sketch, len(windows)), sketch.build(windows, keys)
    )
    drawn = sampling.match_sampling(replay.margins, MARGIN_CAP)
    gap = np.abs(row.logprobs.astype(np.float64) - replay.logprobs)
    improbable = replay.logprobs < np.log(TAIL_PROBABILITY)
    last_margin = float(replay.margins[-1])
    return RowStatistics(
        number=number,
        tokens=len(row.output_tokens),
        windows=len(windows),
        equal=drawn.equal,
        values={
            "margin_mean": drawn.margin_mean,
            "margin_max": drawn.margin_max,
            "logprob_mean": float(np.minimum(gap, LOGPROB_CAP).mean()),
            "logprob_max": float(gap.max()),
            "exponent": float(match.exponent.mean()),
            "sign": float(match.sign.mean()),
            "mantissa": float(match.mantissa.mean()),
            "sketch": float(distance.mean()),
        },
        inner_margin=float(replay.margins[:-1].max(initial=0.0)),
        ends_early=row.finish_reason == "end"
        and not sampling.ends_plausibly(replay.end_probability, last_margin, 0.0),
        tail_observed=int(improbable.sum()),
        tail_expected=float(replay.tail_mass.sum()),
    )


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
    file_excess = limits.exceeded(together, "file")
    row_excess = {row.number: limits.exceeded(row.values, "row") for row in rows}
    bad = [row for row in rows if row_excess[row.number]] or list(rows)
    excess = file_excess.union(*row_excess.values())
    where = f"{len([r for r in rows if row_excess[r.number]])} of {len(rows)} rows; " + ", ".join(
        f"{name} {max(together[name], *(r.values[name] for r in bad)):.4g}"
        for name in sorted(excess)
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
        return Accusation(Reason.TAMPERED_LOGPROBS, where)
    return None


def _states_reason(excess: set[str], bad: Sequence[RowStatistics]) -> Reason:
    """Which lie about states: proof and sketch check one another, tokens check both."""
    if "sketch" not in excess:
        return Reason.FORGED_PROOF  # the states were there, the proof is not of them
    if not excess & _STATES:
        return Reason.WRONG_SKETCH
    unrelated = float(np.mean([row.values["sketch"] for row in bad])) > UNRELATED
    if unrelated and not excess & (_SAMPLING | _LOGPROBS):
        return Reason.FORGED_PROOF  # the tokens are the policy's, proof and sketch are not theirs
    return Reason.WRONG_ACTIVATIONS
