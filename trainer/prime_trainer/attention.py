"""Attention over packed rows: causal within each sample; other samples are never even multiplied.

Registered with transformers under NAME, so that any decoder that takes an attention function
(Llama, Qwen2, Qwen3, …) can use it. A model called with `segments` needs no masks, and the cost is
that of the samples, not of the row's square. In half precision a GPU computes all samples in one
kernel. Padding attends to padding at most and is never predicted.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

NAME = "prime_packed"

Segments = tuple[tuple[int, int, int], ...]
"""(row, first position, end) of every sample of a micro-batch."""
_PADDING = 128
"""Tokens of padding that attend to each other on a GPU: few, since the cost is their square."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(R, H, L, D) queries, (R, K, L, D) keys and values → (R, L, H, D), as transformers expects.

    Without `segments` every row is one sample. Deterministic on CPU: a sample's results do not
    depend on its neighbors or position.
    """
    width = query.shape[2]
    if segments is None:
        segments = tuple((row, 0, width) for row in range(query.shape[0]))
    rows: list[list[int]] = [[] for _ in range(query.shape[0])]
    for row, start, end in segments:
        if start != sum(rows[row]):
            raise ValueError(f"the samples of row {row} do not follow one another at {start}")
        rows[row].append(end - start)
    if query.is_cuda and _flash_runs(query):
        of_rows = tuple(map(tuple, rows))
        return _in_one_kernel(query, key, value, of_rows, scaling, sliding_window), None
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # torch's other kernels for GPUs do not share the keys
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1)
                      for part in (key, value))  # fmt: skip
        grouped = False
    found = []
    # Use unbind and split, whose gradients are assembled once. The gradient of a slice is a tensor
    # as large as all rows together, for each sample.
    for lengths, *parts in zip(rows, query.unbind(), key.unbind(), value.unbind(), strict=True):
        sizes = [*lengths, width - sum(lengths)]
        cut = [part.split(sizes, dim=1) for part in parts]
        attended = [
            _attend(q, k, v, scaling=scaling, window=sliding_window, grouped=grouped)
            for q, k, v in list(zip(*cut, strict=True))[:-1]
        ]
        if sizes[-1]:
            attended.append(value.new_zeros(sizes[-1], query.shape[1], value.shape[-1]))
        found.append(torch.cat(attended))
    return torch.stack(found), None


def _flash_runs(query: Tensor) -> bool:
    """Whether the variable-length kernel supports this dtype, head size and GPU."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] % 8 == 0
        and query.shape[3] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _in_one_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[tuple[int, ...], ...],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Computes packed_attention with one call of the variable-length flash kernel. `lengths`: token
    counts of each row's samples. Returns (R, L, H, D)."""
    starts, longest = _starts(lengths, query.shape[2], query.device)
    attend: Any = varlen_attn
    options = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13; implied before
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    flat = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    found: Tensor = attend(*flat, starts, starts, longest, longest, **options)
    return torch.unflatten(found, 0, (query.shape[0], query.shape[2]))


@lru_cache(maxsize=8)  # every layer asks for the same
def _starts(
    lengths: tuple[tuple[int, ...], ...], width: int, device: torch.device
) -> tuple[Tensor, int]:
    """Returns the start offsets of all samples in the flattened rows, followed by the total: int32
    (n + 1,), and the length of the longest sample. Padding counts as samples of at most _PADDING
    tokens."""
    parts: list[int] = []
    for row in lengths:
        padding = width - sum(row)
        parts += row
        parts += [min(_PADDING, padding - at) for at in range(0, padding, _PADDING)]
    starts = torch.tensor([0, *accumulate(parts)], dtype=torch.int32, device=device)
    return starts, max(parts)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None,
    grouped: bool,
) -> Tensor:  # fmt: skip
    """One sample's (H, T, D) queries, (K, T, D) keys and values → (T, H, D)."""
    length = query.shape[1]
    mask = None
    if window is not None and length > window:
        mask = _window(length, window, query.device)
    found = nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None],
        attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped,
    )  # fmt: skip
    return found[0].transpose(0, 1)


def _window(length: int, window: int, device: torch.device) -> Tensor:
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def register() -> None:
    """Registers NAME with transformers; no masks are built for it. Idempotent."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
