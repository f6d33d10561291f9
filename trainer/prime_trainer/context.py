"""Context parallelism: the ranks of a group share the same packed rows, each holds some tokens.

    piece      0   1   2   3   4   5   6   7      2·size pieces of equal length
    rank       0   1   2   3   3   2   1   0      (size = 4)

With one piece each, the last rank would have up to twice its share of causal attention, and the
others would wait for it. Attention gathers the keys and values of whole rows (as for Llama 3, arXiv
2407.21783, section 3.3.2); all other layers see a rank's own tokens only. The log-probabilities are
gathered, too, so that every rank of a group computes the loss of whole samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Context:
    """A group of `size` ranks that share rows, and this rank's number in it."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def width(self, tokens: int) -> int:
        """The width of rows that hold `tokens`, rounded up so that the pieces have one length."""
        return -(-tokens // (2 * self.size)) * 2 * self.size

    def pieces(self, width: int) -> tuple[tuple[int, int], ...]:
        """Start and end of this rank's pieces of rows of `width` tokens."""
        length = width // (2 * self.size)
        numbers = (self.rank, 2 * self.size - 1 - self.rank)
        return tuple((number * length, (number + 1) * length) for number in numbers)

    def gather(self, part: Tensor) -> Tensor:
        """(…) → (size, …): the tensors of all ranks, which have one shape. Their gradient is the
        sum of the gradients that the ranks have for it."""
        found: Tensor = _Gather.apply(part, self)  # type: ignore[no-untyped-call]
        return found

    def whole_rows(self, part: Tensor) -> Tensor:
        """(R, K, L / size, D), of this rank's tokens → (R, K, L, D), of all tokens in order."""
        first, second = (half.unbind() for half in self.gather(part).chunk(2, dim=3))
        return torch.cat([*first, *reversed(second)], dim=2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context) -> Tensor:
        ctx.context = context
        whole = part.new_empty((context.size * part.shape[0], *part.shape[1:]))
        dist.all_gather_single(whole, part.contiguous(), group=context.group)
        return torch.unflatten(whole, 0, (context.size, part.shape[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (whole,) = gradients
        part = whole.new_empty(whole.shape[1:])
        dist.reduce_scatter_single(part, whole.flatten(0, 1).contiguous(), group=ctx.context.group)
        return part, None


@dataclass(frozen=True)
class Cut:
    """Which rank of a group has which predicted tokens of a micro-batch. `order`: (N,) int64, each
    token's place among the gathered ones, of which every rank has `most`."""

    context: Context
    order: Tensor
    most: int

    def whole(self, values: Tensor) -> Tensor:
        """(V, n) values of this rank's tokens → (V, N) of all tokens of the micro-batch."""
        padded = nn.functional.pad(values, (0, self.most - values.shape[1]))
        every = self.context.gather(padded).transpose(0, 1).flatten(1)
        return every.index_select(1, self.order)


def cut_places(
    places: np.ndarray, width: int, context: Context, device: torch.device
) -> tuple[np.ndarray, np.ndarray, Cut]:
    """Cuts predicted tokens. `places`: (N,) flat positions in rows of `width` tokens. Returns which
    of them are this rank's, (N,) bool; the places of those in its own parts of the rows; the
    cut."""
    row, column = np.divmod(places, width)
    length = width // (2 * context.size)
    piece, within = np.divmod(column, length)
    second = piece >= context.size
    rank = np.where(second, 2 * context.size - 1 - piece, piece)
    own = rank == context.rank
    local = (row * 2 + second) * length + within
    counts = np.bincount(rank, minlength=context.size)
    most = max(1, int(counts.max()))
    order = np.empty_like(places)
    for number, count in enumerate(counts):
        order[rank == number] = number * most + np.arange(count)
    return own, local[own], Cut(context, torch.from_numpy(order).to(device), most)
