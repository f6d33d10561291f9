"""Attention over packed rows: each sample by itself, causal; the others are never even multiplied.

Registered with transformers under NAME, so any decoder that takes an attention function (Llama,
Qwen2, Qwen3, …) uses it. A model called with `segments` skips masks altogether: the cost is that of
the samples, not of the row's square. Padding gets zeros and is predicted by nobody.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "prime_packed"

Segments = tuple[tuple[int, int, int], ...]
"""(row, first position, end) of every sample of a micro-batch."""


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

    Without `segments` every row is one sample. Deterministic on CPU: a sample's numbers do not
    depend on its neighbours or its place.
    """
    if segments is None:
        segments = tuple((row, 0, query.shape[2]) for row in range(query.shape[0]))
    rows: list[list[Tensor]] = [[] for _ in range(query.shape[0])]
    filled = [0] * query.shape[0]
    grouped = query.shape[1] != key.shape[1]
    for row, start, end in segments:
        here = slice(start, end)
        window = None
        if sliding_window is not None and end - start > sliding_window:
            window = _window(end - start, sliding_window, query.device)
        found = nn.functional.scaled_dot_product_attention(
            query[row : row + 1, :, here],
            key[row : row + 1, :, here],
            value[row : row + 1, :, here],
            attn_mask=window,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        rows[row].append(found[0].transpose(0, 1))
        filled[row] = end
    width = query.shape[2]
    for row, parts in enumerate(rows):
        if filled[row] < width:
            parts.append(value.new_zeros(width - filled[row], query.shape[1], value.shape[-1]))
    return torch.stack([torch.cat(parts) for parts in rows]), None


def _window(length: int, window: int, device: torch.device) -> Tensor:
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def register() -> None:
    """Makes NAME known to transformers; masks are never built for it. May be called again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
