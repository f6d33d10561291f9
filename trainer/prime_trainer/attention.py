"""Attention over packed rows: causal within each sample; other samples are never even multiplied.

Registered with transformers under NAME, so that any decoder that takes an attention function
(Llama, Qwen2, Qwen3, …) can use it. A model called with `segments` needs no masks, and the cost is
that of the samples, not of the row's square. In half precision a GPU computes all samples in one
kernel. Padding attends to padding at most and is never predicted. With a context group, the queries
are those of this rank's tokens, and keys and values are gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from prime_trainer.context import Context

NAME = "prime_packed"

Segments = tuple[tuple[int, int, int], ...]
"""(row, first position, end) of every sample of a micro-batch."""
_PADDING = 128
"""Tokens of padding that attend to each other on a GPU: few, since the cost is their square."""


class Run(NamedTuple):
    """Queries of one sample that follow one another: number of the sample in its row, of queries,
    and of the sample's keys up to the last query's. Padding counts as samples of at most _PADDING
    tokens."""

    sample: int
    queries: int
    keys: int
    padding: bool


class Row(NamedTuple):
    """Token counts of a row's samples, padding too, and the runs of this rank's queries."""

    lengths: tuple[int, ...]
    runs: tuple[Run, ...]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    context: Context | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(R, H, L, D) queries, (R, K, L, D) keys and values → (R, L, H, D), as transformers expects.

    Without `segments` every row is one sample. With `context`, L are this rank's tokens, and
    `segments` refer to whole rows. Deterministic on CPU: a sample's results do not depend on its
    neighbors or position.
    """
    if context is not None:
        sizes = [key.shape[3], value.shape[3]]
        key, value = context.whole_rows(torch.cat([key, value], dim=3)).split(sizes, dim=3)
    count, width = query.shape[0], key.shape[2]
    if segments is None:
        segments = tuple((row, 0, width) for row in range(count))
    pieces = ((0, width),) if context is None else context.pieces(width)
    rows = _rows(segments, count, width, pieces)
    if query.is_cuda and _flash_runs(query):
        return _in_one_kernel(query, key, value, rows, scaling, sliding_window), None
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:  # torch's other kernels for GPUs do not share the keys
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1)
                      for part in (key, value))  # fmt: skip
        grouped = False
    runs = [run for row in rows for run in row.runs]
    queries = [
        part
        for row, whole in zip(rows, query.unbind(), strict=True)
        for part in whole.split([run.queries for run in row.runs], dim=1)
    ]
    parts = zip(runs, queries, _of_runs(key, rows), _of_runs(value, rows), strict=True)
    # A rank whose tokens are all padding takes part in the gradient of gathered keys, too.
    found = [
        value.new_zeros(run.queries, query.shape[1], value.shape[-1])
        if run.padding and context is None
        else _attend(q, k, v, scaling=scaling, window=sliding_window, grouped=grouped)
        for run, q, k, v in parts
    ]
    return torch.cat(found).unflatten(0, (count, query.shape[2])), None


@lru_cache(maxsize=8)  # every layer asks for the same
def _rows(
    segments: Segments, count: int, width: int, pieces: tuple[tuple[int, int], ...]
) -> tuple[Row, ...]:
    """The samples of `count` rows of `width` tokens, and the runs of queries in `pieces`. Raises
    ValueError if the samples of a row do not follow one another."""
    samples: list[list[int]] = [[] for _ in range(count)]
    for row, start, end in segments:
        if start != sum(samples[row]):
            raise ValueError(f"the samples of row {row} do not follow one another at {start}")
        samples[row].append(end - start)
    found = []
    for lengths in samples:
        padding = width - sum(lengths)
        parts = [min(_PADDING, padding - at) for at in range(0, padding, _PADDING)]
        ends = list(accumulate([*lengths, *parts]))
        runs = [
            Run(number, min(end, stop) - max(begin, start), min(end, stop) - start,
                number >= len(lengths))
            for begin, end in pieces
            for number, (start, stop) in enumerate(pairwise([0, *ends]))
            if max(begin, start) < min(end, stop)
        ]  # fmt: skip
        found.append(Row((*lengths, *parts), tuple(runs)))
    return tuple(found)


def _of_runs(part: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """(R, K, L, D) keys or values → (K, T, D) for each run."""
    found = []
    # Use unbind and split, whose gradients are assembled once. The gradient of a slice is a tensor
    # as large as all rows together, for each sample.
    for row, whole in zip(rows, part.unbind(), strict=True):
        samples = whole.split(row.lengths, dim=1)
        found += [samples[run.sample][:, : run.keys] for run in row.runs]
    return found


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
    rows: Sequence[Row],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Computes packed_attention with one call of the variable-length flash kernel, whose last query
    of a run attends to the run's last key. Returns (R, L, H, D)."""
    runs = [run for row in rows for run in row.runs]
    starts, longest = _starts(tuple(run.queries for run in runs), query.device)
    key_starts, most_keys = _starts(tuple(run.keys for run in runs), query.device)
    attend: Any = varlen_attn
    options = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13; implied before
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    whole = query.shape[2] == key.shape[2]
    flat, flat_key, flat_value = (
        part.transpose(1, 2).flatten(0, 1)
        if whole or part is query
        else torch.cat([keys.transpose(0, 1) for keys in _of_runs(part, rows)])
        for part in (query, key, value)
    )
    found: Tensor = attend(
        flat, flat_key, flat_value, starts, key_starts, longest, most_keys, **options
    )
    return torch.unflatten(found, 0, (query.shape[0], query.shape[2]))


@lru_cache(maxsize=8)  # every layer asks for the same
def _starts(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Returns where parts of these lengths begin, one after the other, followed by the total: int32
    (n + 1,); and the longest one's length."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return starts, max(lengths)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None,
    grouped: bool,
) -> Tensor:  # fmt: skip
    """(H, T, D) queries of one sample, (K, S, D) keys and values, which end where the queries do →
    (T, H, D)."""
    queries, keys = query.shape[1], key.shape[1]
    mask = None
    if queries != keys or (window is not None and keys > window):
        mask = _mask(queries, keys, window, query.device)
    found = nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None],
        attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped,
    )  # fmt: skip
    return found[0].transpose(0, 1)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    place = torch.arange(keys, device=device)
    last = place[keys - queries :, None]
    mask = place <= last
    return mask if window is None else mask & (place > last - window)


def register() -> None:
    """Registers NAME with transformers; no masks are built for it. Idempotent."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
