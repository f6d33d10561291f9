"""Adds seeded noise to vLLM's sampling steps and records tokens, log-probabilities, and states.

    hidden states of the sampled positions [n, H] ──► LM head ──► logits [n, V]
              │ `hidden`                                             │ `step`
              └──── both, for the same n rows in the same order ─────┘  → logits/T + noise, greedy

vLLM moves rows within its batch; `assign` and `move` track that. A step may be discarded (a prompt
prefilled in parts, a row preempted and resumed), so the last record for a row's position counts.
Imports torch but nothing of vLLM, so that it can be tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prime_core.errors import FatalError
from prime_engine.base import Noise
from prime_engine.batch import RowSet

TOGETHER = 256
"""Steps whose results are fetched from the device at once."""


@dataclass
class Row:
    """A row being generated: number `number` of the rows of `owner`. `seed` None selects the most
    probable token; `prompt` is the number of its prompt tokens; `output` is vLLM's own growing list
    of its tokens."""

    owner: RowSet
    number: int
    seed: int | None
    prompt: int
    output: Sequence[int]


@dataclass
class _Step:
    """One step's rows of one owner, or several steps': numbers and positions (n,), and their
    results (n, …). Tokens and log-probabilities of single steps are on the device."""

    numbers: list[int]
    places: list[int]
    tokens: Tensor
    logprobs: Tensor
    states: Tensor


class Recorder:
    """Records the rows of all RowSets that are being generated, in their `steps`."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._batch: dict[int, Row] = {}
        self._hidden: Tensor | None = None

    def assign(self, index: int, row: Row | None) -> None:
        """Sets the row at batch index `index`; None for one that is not ours."""
        if row is None:
            self._batch.pop(index, None)
        else:
            self._batch[index] = row

    def move(self, one: int, other: int, swap: bool) -> None:
        """Moves the row at `one` to `other`; with `swap`, exchanges the two."""
        a, b = self._batch.pop(one, None), self._batch.pop(other, None)
        self.assign(other, a)
        if swap:
            self.assign(one, b)

    def hidden(self, states: Tensor) -> None:
        """Receives the final norm's output (n, H) at the positions about to be sampled."""
        self._hidden = states

    def step(self, logits: Tensor) -> Tensor:
        """Logits (n, V) → logits/T + noise (n, V), whose maximum is each row's token.

        Rows that are not ours (warm-up) are unchanged.
        """
        rows = [self._batch.get(index) for index in range(len(logits))]
        own = [row for row in rows if row is not None]
        if not own:
            return logits
        if self._hidden is None or len(self._hidden) != len(logits) or len(own) != len(rows):
            raise FatalError("vLLM's states and logits are not of the same rows")
        places = [len(row.output) for row in own]
        temperatures = [row.owner.temperature for row in own]
        if len(set(temperatures)) == 1:
            scaled = logits.float() / temperatures[0]
        else:
            scaled = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
        seeds, where, noisy = on_device(
            [
                [row.seed or 0 for row in own],
                [row.prompt + place - 1 for row, place in zip(own, places, strict=True)],
                [int(row.seed is not None) for row in own],
            ],
            logits.device,
        ).unbind()
        noise = self._noise(seeds, where, scaled.shape[1])
        if any(row.seed is None for row in own):
            noise = noise * noisy[:, None]
        drawn: Tensor = scaled + noise
        tokens = drawn.argmax(dim=1)
        logprobs = scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=1)
        states = self._hidden.detach().to(torch.bfloat16)
        members: dict[RowSet, list[int]] = {}
        for index, row in enumerate(own):
            members.setdefault(row.owner, []).append(index)
        for owner, at in members.items():
            numbers, their = [own[i].number for i in at], [places[i] for i in at]
            chosen = slice(None) if len(members) == 1 else torch.tensor(at, device=logits.device)
            part = states[chosen]
            if owner.sink is not None:
                owner.sink.step(numbers, their, tokens[chosen], part)
                part = part[:, :0]
            owner.steps.append(_Step(numbers, their, tokens[chosen], logprobs[chosen], part.cpu()))
            if owner.sink is not None and len(owner.steps) > TOGETHER:
                owner.steps = [_merged(owner.steps)]
        self._hidden = None
        return drawn


def _merged(steps: Sequence[_Step]) -> _Step:
    """Steps as one, in main memory; the first may be one of several already."""
    tokens, logprobs = (
        torch.cat([getattr(steps[0], name).cpu(), *_fetched(steps[1:], name)])
        for name in ("tokens", "logprobs")
    )
    return _Step(
        [number for step in steps for number in step.numbers],
        [place for step in steps for place in step.places],
        tokens,
        logprobs,
        torch.cat([step.states for step in steps]),
    )


def _fetched(steps: Sequence[_Step], name: str) -> list[Tensor]:
    return [torch.cat([getattr(step, name) for step in steps]).cpu()] if steps else []


def on_device(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 (n, m) on `device`. A GPU takes them from pinned memory, so that nothing waits for its
    other work to end."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def recorded(
    rows: RowSet, outputs: Sequence[Sequence[int]]
) -> list[tuple[NDArray[np.float32], NDArray[np.uint16]]]:
    """(log-probabilities float32 [T], states uint16 bf16 bits [T, H], or [T, 0] if a sink received
    them) of each of `rows`, for the tokens that vLLM returned.

    Raises FatalError if these differ from the recorded tokens.
    """
    latest: list[dict[int, int]] = [{} for _ in outputs]
    whole = _merged(rows.steps)
    for at, (row, place) in enumerate(zip(whole.numbers, whole.places, strict=True)):
        latest[row][place] = at
    found = []
    for tokens, places in zip(outputs, latest, strict=True):
        if not all(place in places for place in range(len(tokens))):
            raise FatalError("vLLM returned a token whose step was not recorded")
        chosen = [places[place] for place in range(len(tokens))]
        if whole.tokens[chosen].tolist() != list(tokens):
            raise FatalError("vLLM returned other tokens than the seeded ones")
        bits = whole.states[chosen].view(torch.int16).numpy().view(np.uint16)
        found.append((whole.logprobs[chosen].numpy(), bits))
    return found
