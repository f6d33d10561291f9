"""The largest magnitudes of many windows at once, ties to the lowest index.

A window (uint16 bf16 bits [N]) is treated as a table of C columns. The 128th largest of the column
maxima (of groups of columns, to sort fewer) is a lower bound on the window's 128th largest element,
and only columns whose maximum reaches that bound can contain one of the 128. All elements are read
in place, twice from cache: the signed maximum is the largest positive magnitude, the unsigned
maximum the largest negative one. The remaining steps touch some thousand elements. Those that reach
the bound are ordered by one sort of 64-bit keys:

    window (16 bits) ‖ 0x7FFF − magnitude (16 bits) ‖ position (32 bits)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from prime_core.errors import MalformedError
from prime_core.proof_form import PROOF_TOPK

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITE = np.uint16(0x7F80)
_TOGETHER = 1 << 21
"""Elements of the windows processed together: 4 MiB, so that they fit in cache."""
_COLUMNS_MAX = 8192
_GROUPS_MAX = 512
_POSITION = (1 << 32) - 1
Windows = Sequence[NDArray[np.uint16]]


def largest_of(windows: Windows) -> list[NDArray[np.int64]]:
    """For each window (bf16 bits [N], N < 2³²), returns the ascending positions of its min(128, N)
    largest magnitudes: int64 [min(128, N)].

    Raises MalformedError if an element is infinite or NaN.
    """
    picked: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(windows)
    for members in _batches(windows):
        for i, positions in zip(members, _pick([windows[i] for i in members]), strict=True):
            picked[i] = positions
    return picked


def _batches(windows: Windows) -> Iterator[list[int]]:
    """Indices of windows of equal size, as many as fit in _TOGETHER (and in a key's 16 bits)."""
    groups: dict[int, list[int]] = {}
    for i, window in enumerate(windows):
        groups.setdefault(len(window), []).append(i)
    for size, members in groups.items():
        step = min(max(1, _TOGETHER // max(1, size)), 1 << 14)
        for start in range(0, len(members), step):
            yield members[start : start + step]


def _pick(windows: Windows) -> NDArray[np.int64]:
    """Ascending positions [W, min(128, N)] of the largest magnitudes of W windows [N] each."""
    count, size = len(windows), len(windows[0])
    if size <= PROOF_TOPK:
        _require_finite(np.stack(windows) & _MAGNITUDE)
        return np.broadcast_to(np.arange(size, dtype=np.int64), (count, size))
    columns = PROOF_TOPK
    while columns * 8 <= size and columns < _COLUMNS_MAX:
        columns *= 2
    rows = size // columns
    whole = rows * columns
    tables = [window[:whole].reshape(rows, columns) for window in windows]
    maxima = _column_maxima(tables)
    rest = np.stack([window[whole:] for window in windows]) & _MAGNITUDE
    _require_finite(maxima)
    _require_finite(rest)
    bounds = _bounds(maxima)
    parts = [np.flatnonzero(m >= bound) for m, bound in zip(maxima, bounds, strict=True)]
    widths = [len(part) for part in parts]
    owner, column = np.repeat(np.arange(count), widths), np.concatenate(parts)
    candidates = np.concatenate(
        [t.take(part, axis=1, mode="clip") for t, part in zip(tables, parts, strict=True)], axis=1
    )  # [rows, n]
    candidates &= _MAGNITUDE
    row, pair = _where(candidates >= np.repeat(bounds, widths))
    keys = _keys(owner[pair], candidates[row, pair], row * columns + column[pair])
    if rest.size:
        late, offset = _where(rest >= bounds[:, None])
        keys = np.concatenate([keys, _keys(late, rest[late, offset], offset + whole)])
    keys.sort()
    first = np.searchsorted(keys, np.arange(count, dtype=np.int64) << 48)
    positions: NDArray[np.int64] = keys[first[:, None] + np.arange(PROOF_TOPK)] & _POSITION
    positions.sort(axis=1)
    return positions


def _column_maxima(tables: Sequence[NDArray[np.uint16]]) -> NDArray[np.uint16]:
    """The largest magnitude of each column: uint16 [W, C] of W tables [R, C]."""
    signed = np.empty((len(tables), tables[0].shape[1]), dtype=np.int16)
    unsigned = np.empty(signed.shape, dtype=np.uint16)
    for i, table in enumerate(tables):
        table.view(np.int16).max(axis=0, out=signed[i])
        table.max(axis=0, out=unsigned[i])
    unsigned &= _MAGNITUDE
    np.maximum(unsigned, signed.view(np.uint16) & _MAGNITUDE, out=unsigned)
    return unsigned


def _bounds(maxima: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """For each row of [W, C], a magnitude that at least 128 of its entries reach: uint16 [W]."""
    count, columns = maxima.shape
    groups = min(columns, _GROUPS_MAX)
    largest = maxima.reshape(count, columns // groups, groups).max(axis=1)
    place = groups - PROOF_TOPK
    return np.partition(largest, place, axis=1)[:, place]


def _where(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`nonzero` of a table [R, C]; about six times as fast when few entries are set."""
    flat = np.flatnonzero(mask)
    row = flat // mask.shape[1]
    return row, flat - row * mask.shape[1]


def _keys(
    window: NDArray[np.int64], magnitude: NDArray[np.uint16], position: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The sort keys of the module docstring."""
    rank = np.int64(0x7FFF) - magnitude.astype(np.int64)
    return (window << 48) | (rank << 32) | position


def _require_finite(magnitudes: NDArray[np.uint16]) -> None:
    if magnitudes.size and magnitudes.max() >= _INFINITE:
        raise MalformedError("hidden states are not finite")
