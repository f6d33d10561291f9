"""From a plan's rows to tensors: where each sample sits, what it predicts, what it weighs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from protocol.core.rollout import Rollout
from trainer.loss import Tokens
from trainer.model import PAD, PackedBatch


def collate(
    rows: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    weights: Sequence[float],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[PackedBatch, Tokens]:
    """One micro-batch. `rows` hold indices into `rollouts`; `advantages` and `weights` are one a
    sample (a weight counts for each of its tokens). No rows give one row of padding without
    tokens to predict: a rank with nothing to do still takes part."""
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
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            rollout = rollouts[sample]
            tokens = (*rollout.prompt_tokens, *rollout.output_tokens)
            end = start + len(tokens)
            inputs[number, start:end] = tokens
            positions[number, start:end] = np.arange(len(tokens))
            sequences[number, start:end] = sample
            first = number * width + start + len(rollout.prompt_tokens) - 1
            predict.append(np.arange(first, first + len(rollout.output_tokens)))
            order.append(sample)
            start = end
    chosen = [rollouts[sample] for sample in order]
    counts = torch.tensor([len(r.output_tokens) for r in chosen], dtype=torch.long)

    def spread(values: Sequence[float]) -> torch.Tensor:
        each = torch.tensor([values[sample] for sample in order], dtype=dtype)
        return each.repeat_interleave(counts).to(device)

    targets = [token for r in chosen for token in r.output_tokens]
    old = [value for r in chosen for value in r.logprobs]
    places = np.concatenate(predict) if predict else np.zeros(0, dtype=np.int64)
    batch = PackedBatch(
        inputs=torch.from_numpy(inputs).to(device),
        positions=torch.from_numpy(positions).to(device),
        sequences=torch.from_numpy(sequences).to(device),
        predict=torch.from_numpy(places).to(device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
    )
    tokens_of = Tokens(
        old_logprobs=torch.tensor(old, dtype=dtype, device=device),
        advantages=spread(advantages),
        weights=spread(weights),
    )
    return batch, tokens_of
