"""Packs samples onto ranks, into rows, and rows into micro-batches of tensors. Pure.

    samples, heaviest first ─► the rank with least work      (every rank gets the same mixture, so
                                                              tokens and attention both balance)
    a rank's samples        ─► rows, best fit decreasing
    a rank's rows           ─► micro-batches, heaviest first  (all ranks' m-th cost about the same:
                                                              a collective waits for the slowest)

Every sample is in exactly one row of exactly one rank (checked by a property test). All ranks get
the same number of micro-batches, because a collective waits for every rank; a rank without work
gets empty ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prime_core.rollout import Rollout, model_ranges
from prime_trainer.attention import Segments
from prime_trainer.context import Context, cut_places
from prime_trainer.model import PAD, PackedBatch
from prime_trainer.objectives.base import Tokens

ATTENTION_COST = 1 / 12288
"""Cost of one pair of attended tokens relative to one token's linear layers: 4·h over 24·h²
multiply-adds per layer at hidden size h = 2,048. Callers pass the model's own value to `plan`."""


@dataclass(frozen=True)
class Plan:
    """`ranks[r][m][k]` = the sample numbers in row k of micro-batch m of rank r, in row order."""

    ranks: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    row_tokens: int


def cost(length: int, attention_cost: float = ATTENTION_COST) -> float:
    """Work of one sample: linear layers plus its own causal attention."""
    return length + attention_cost * length * length / 2


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Packs samples into rows of at most `row_tokens` tokens, by best-fit decreasing; returns
    sample numbers.

    A sample longer than a row gets its own row. Deterministic: ties go to the earlier row.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for sample in order:
        length = lengths[sample]
        if length < 1:
            raise ValueError(f"sample {sample} has no tokens")
        place = bisect_left(open_rows, (length, -1))
        if place == len(open_rows):
            row, left = len(rows), row_tokens - length
            rows.append([sample])
        else:
            room, row = open_rows.pop(place)
            left = room - length
            rows[row].append(sample)
        if left > 0:
            insort(open_rows, (left, row))
    return rows


def share_out(
    lengths: Sequence[int], ranks: int, attention_cost: float = ATTENTION_COST
) -> list[list[int]]:
    """Sample numbers of each rank: heaviest first, to the rank with least work (LPT: within 4/3
    of the optimal makespan, Graham 1969; with many samples, within a fraction of the last one's
    work)."""
    if ranks == 1:
        return [list(range(len(lengths)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = loads[0]
        shares[rank].append(sample)
        heapq.heapreplace(loads, (load + cost(lengths[sample], attention_cost), rank))
    return shares


def plan(
    lengths: Sequence[int],
    *,
    ranks: int,
    row_tokens: int,
    micro_tokens: int,
    attention_cost: float = ATTENTION_COST,
) -> Plan:
    """Assigns samples to ranks, rows and micro-batches. `lengths` are in tokens; same result on
    every rank.

    A micro-batch holds rows of at most `micro_tokens` padded tokens, and at least one row. Raises
    ValueError for a sample without tokens.
    """
    micro = [
        _micro_batches(lengths, share, row_tokens, micro_tokens, attention_cost)
        for share in share_out(lengths, ranks, attention_cost)
    ]
    most = max(len(batches) for batches in micro)
    return Plan(
        ranks=tuple(tuple(b + [()] * (most - len(b))) for b in micro), row_tokens=row_tokens
    )


def _micro_batches(
    lengths: Sequence[int],
    share: Sequence[int],
    row_tokens: int,
    micro_tokens: int,
    attention_cost: float,
) -> list[tuple[tuple[int, ...], ...]]:
    """Packs one rank's samples into rows and micro-batches."""
    rows = pack_rows([lengths[i] for i in share], row_tokens)
    named = [tuple(share[i] for i in row) for row in rows]
    widths = [sum(lengths[i] for i in row) for row in named]
    work = [sum(cost(lengths[i], attention_cost) for i in row) for row in named]
    batches: list[list[tuple[int, ...]]] = []
    widest = 0
    # Sort by work, so that the ranks' m-th batches cost about the same. (Sorted by width they
    # differed by 12 %: rows are equally full, but few long samples attend more than many short.)
    for row in sorted(range(len(named)), key=lambda k: (-work[k], k)):
        wider = max(widest, widths[row])
        if batches and wider * (len(batches[-1]) + 1) <= micro_tokens:
            batches[-1].append(named[row])
            widest = wider
        else:
            batches.append([named[row]])
            widest = widths[row]
    return [tuple(batch) for batch in batches]


@dataclass(frozen=True)
class Quality:
    """Quality of a plan. `fill`: tokens in rows over their capacity. `padding`: share of padding in
    the computed tokens. `imbalance`: the heaviest rank's work over the mean, minus one. `lockstep`:
    the same if every micro-batch waits for the slowest rank."""

    fill: float
    padding: float
    imbalance: float
    lockstep: float


def quality(found: Plan, lengths: Sequence[int], attention_cost: float = ATTENTION_COST) -> Quality:
    """Measures how well a plan uses the ranks."""
    micro = [[[sum(lengths[i] for i in row) for row in m] for m in rank] for rank in found.ranks]
    room = sum(max(found.row_tokens, w) for rank in micro for m in rank for w in m)
    computed = sum(len(m) * max(m) for rank in micro for m in rank if m)
    work = [
        [sum(cost(lengths[i], attention_cost) for row in m for i in row) for m in rank]
        for rank in found.ranks
    ]
    mean = sum(map(sum, work)) / len(work)
    slowest = sum(max(step) for step in zip(*work, strict=True))
    return Quality(
        fill=sum(lengths) / room,
        padding=1.0 - sum(lengths) / computed,
        imbalance=max(map(sum, work)) / mean - 1.0,
        lockstep=slowest / mean - 1.0,
    )


@dataclass(frozen=True)
class Extra:
    """One entry per sample: log-probabilities (|o_i|,) of the proximal policy; whether the sample's
    policy is the one that this step begins with."""

    proximal: Sequence[torch.Tensor] | None = None
    fresh: Sequence[bool] | None = None


def collate(
    rows: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    weights: Sequence[float],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    extra: Extra | None = None,
    context: Context | None = None,
) -> tuple[PackedBatch, Tokens]:
    """Builds one micro-batch. `rows` hold indices into `rollouts`; `advantages` and `weights` have
    one entry per sample (a weight applies to each of its tokens). Without rows, returns one row of
    padding with no tokens to predict, so that an idle rank still takes part in collectives. With
    `context`, the batch is this rank's part of the rows; the tokens are those of whole rows."""
    lengths = [
        [len(rollouts[i].prompt_tokens) + len(rollouts[i].output_tokens) for i in row]
        for row in rows
    ]
    width = max((sum(row) for row in lengths), default=1)
    if context is not None:
        width = context.width(width)
    shape = (max(1, len(rows)), width)
    inputs = np.zeros(shape, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    sequences = np.full(shape, PAD, dtype=np.int64)
    predict: list[np.ndarray] = []
    order: list[int] = []
    segments: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            rollout = rollouts[sample]
            middle = start + len(rollout.prompt_tokens)
            end = middle + len(rollout.output_tokens)
            inputs[number, start:middle] = rollout.prompt_tokens
            inputs[number, middle:end] = rollout.output_tokens
            positions[number, start:end] = np.arange(end - start)
            sequences[number, start:end] = sample
            first = number * width + middle - 1
            predict.append(first + _places(rollout))
            order.append(sample)
            segments.append((number, start, end))
            start = end
    places = _join(predict, np.int64)
    targets = _join(
        [
            np.asarray(rollouts[i].output_tokens, dtype=np.int64)[_places(rollouts[i])]
            for i in order
        ],
        np.int64,
    )
    cut = None
    if context is not None:
        inputs, positions, sequences = (
            np.concatenate([whole[:, start:end] for start, end in context.pieces(width)], axis=1)
            for whole in (inputs, positions, sequences)
        )
        own, places, cut = cut_places(places, width, context, device)
        targets = targets[own]
    batch = PackedBatch(
        inputs=torch.from_numpy(inputs).to(device),
        positions=torch.from_numpy(positions).to(device),
        sequences=torch.from_numpy(sequences).to(device),
        predict=torch.from_numpy(places).to(device),
        targets=torch.from_numpy(targets).to(device),
        segments=_whole(segments),
        cut=cut,
    )
    counts = [rollouts[i].generated for i in order]

    def spread(values: Sequence[float]) -> torch.Tensor:
        each = np.array([values[sample] for sample in order], dtype=np.float64)
        return torch.from_numpy(np.repeat(each, counts)).to(device, dtype)

    old = _join([generated_logprobs(rollouts[i]) for i in order], np.float64)
    proximal = fresh = None
    if extra is not None and extra.proximal is not None:
        parts = [extra.proximal[sample] for sample in order]
        proximal = (torch.cat(parts) if parts else torch.zeros(0)).to(device, dtype)
    if extra is not None and extra.fresh is not None:
        fresh = spread([float(value) for value in extra.fresh])
    tokens_of = Tokens(
        old_logprobs=torch.from_numpy(old).to(device, dtype),
        advantages=spread(advantages),
        weights=spread(weights),
        proximal=proximal,
        fresh=fresh,
        samples=torch.from_numpy(np.repeat(np.arange(len(order)), counts)).to(device),
        turns=torch.from_numpy(_join([_turns(rollouts[i]) for i in order], np.int64)).to(device),
    )
    return batch, tokens_of


def generated_logprobs(rollout: Rollout) -> np.ndarray:
    """The file's log-probabilities of the tokens that the model generated, float64 (M,)."""
    found: np.ndarray = np.asarray(rollout.logprobs, dtype=np.float64)[_places(rollout)]
    return found


def _places(rollout: Rollout) -> np.ndarray:
    """Positions of the output tokens that the model generated, int64 (M,), ascending. The others
    are only read: neither predicted nor weighted."""
    ranges = model_ranges(rollout.spans, len(rollout.output_tokens))
    return np.concatenate([np.arange(start, end) for start, end in ranges])


def _turns(rollout: Rollout) -> np.ndarray:
    """The number of the model turn that each generated token is of, int64 (M,)."""
    ranges = model_ranges(rollout.spans, len(rollout.output_tokens))
    lengths = [end - start for start, end in ranges]
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _whole(segments: list[tuple[int, int, int]]) -> Segments:
    """Without samples, returns a segment of padding, so that the rank takes part in every
    collective."""
    return tuple(segments) or ((0, 0, 1),)
