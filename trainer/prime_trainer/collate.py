"""Converts a plan's rows to tensors: location, targets and weights of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prime_core.rollout import Rollout, model_ranges
from prime_trainer.attention import Segments
from prime_trainer.model import PAD, PackedBatch
from prime_trainer.objectives.base import Tokens


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
) -> tuple[PackedBatch, Tokens]:
    """Builds one micro-batch. `rows` hold indices into `rollouts`; `advantages` and `weights` have
    one entry per sample (a weight applies to each of its tokens). Without rows, returns one row of
    padding with no tokens to predict, so that an idle rank still takes part in collectives."""
    lengths = [
        [len(rollouts[i].prompt_tokens) + len(rollouts[i].output_tokens) for i in row]
        for row in rows
    ]
    width = max((sum(row) for row in lengths), default=1)
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
    batch = PackedBatch(
        inputs=torch.from_numpy(inputs).to(device),
        positions=torch.from_numpy(positions).to(device),
        sequences=torch.from_numpy(sequences).to(device),
        predict=torch.from_numpy(_join(predict, np.int64)).to(device),
        targets=torch.from_numpy(
            _join(
                [
                    np.asarray(rollouts[i].output_tokens, dtype=np.int64)[_places(rollouts[i])]
                    for i in order
                ],
                np.int64,
            )
        ).to(device),
        segments=_whole(segments),
    )
    counts = [rollouts[i].generated for i in order]

    def spread(values: Sequence[float]) -> torch.Tensor:
        each = np.array([values[sample] for sample in order], dtype=np.float64)
        return torch.from_numpy(np.repeat(each, counts)).to(device, dtype)

    old = _join(
        [np.asarray(rollouts[i].logprobs, dtype=np.float64)[_places(rollouts[i])] for i in order],
        np.float64,
    )
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
    )
    return batch, tokens_of


def _places(rollout: Rollout) -> np.ndarray:
    """Positions of the output tokens that the model generated, int64 (M,), ascending. The others
    are only read: neither predicted nor weighted."""
    ranges = model_ranges(rollout.spans, len(rollout.output_tokens))
    return np.concatenate([np.arange(start, end) for start, end in ranges])


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _whole(segments: list[tuple[int, int, int]]) -> Segments:
    """Without samples, returns a segment of padding, so that the rank takes part in every
    collective."""
    return tuple(segments) or ((0, 0, 1),)
