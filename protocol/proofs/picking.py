"""The largest magnitudes of many windows at once, ties to the lowest index.

A window (uint16 bf16 bits [N]) is seen as a table of C columns. The 128th largest of its column
maxima is no larger than its 128th largest element, so only columns whose maximum reaches that bound
can hold one of the 128: two passes over all elements (clear the sign; maxima), and the rest touches
some thousand. Those that reach the bound are ordered by one sort of 64-bit keys:

    window (16 bits) ‖ 0x7FFF − magnitude (16 bits) ‖ position (32 bits)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.core.errors import MalformedError
from protocol.core.rollout import PROOF_TOPK

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITE = np.uint16(0x7F80)
_TOGETHER = 1 << 20
"""Elements of the windows that are treated together: 2 MiB, so that they stay in cache."""
_COLUMNS_MAX = 8192
_POSITION = (1 << 32) - 1


def largest_of(windows: Sequence[NDArray[np.uint16]]) -> list[NDArray[np.int64]]:
    """For each window (bf16 bits [N], N < 2³²) the ascending positions of its min(128, N) largest
    magnitudes: int64 [min(128, N)].

    Raises MalformedError if an element is infinite or NaN.
    """
    picked: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(windows)
    for members in _batches(windows):
        table = np.empty((len(members), len(windows[members[0]])), dtype=np.uint16)
        for row, i in enumerate(members):
            np.bitwise_and(windows[i], _MAGNITUDE, out=table[row])
        for i, positions in zip(members, _pick(table), strict=True):
            picked[i] = positions
    return picked


def _batches(windows: Sequence[NDArray[np.uint16]]) -> Iterator[list[int]]:
    """Indices of windows of one size, as many as fit in _TOGETHER (and in a key's 16 bits)."""
    groups: dict[int, list[int]] = {}
    for i, window in enumerate(windows):
        groups.setdefault(len(window), []).append(i)
    for size, members in groups.items():
        step = min(max(1, _TOGETHER // max(1, size)), 1 << 14)
        for start in range(0, len(members), step):
            yield members[start : start + step]


def _pick(magnitudes: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Ascending positions [W, min(128, N)] of the largest of each row of [W, N], all below 2¹⁵."""
    count, size = magnitudes.shape
    if size <= PROOF_TOPK:
        _require_finite(magnitudes)
        return np.broadcast_to(np.arange(size, dtype=np.int64), (count, size))
    columns = PROOF_TOPK
    while columns * 8 <= size and columns < _COLUMNS_MAX:
        columns *= 2
    rows = size // columns
    table = magnitudes[:, : rows * columns].reshape(count, rows, columns)
    rest = magnitudes[:, rows * columns :]
    maxima = table.max(axis=1)
    _require_finite(maxima)
    _require_finite(rest)
    bounds = np.partition(maxima, columns - PROOF_TOPK, axis=1)[:, columns - PROOF_TOPK]
    flat = np.flatnonzero(maxima >= bounds[:, None])
    window, column = flat // columns, flat % columns
    candidates = table[window, :, column]  # [n, rows]
    near = np.flatnonzero(candidates >= bounds[window][:, None])
    pair = near // rows
    keys = _keys(window[pair], candidates.reshape(-1)[near], near % rows * columns + column[pair])
    if rest.size:
        late = np.flatnonzero(rest >= bounds[:, None])
        owner, offset = late // rest.shape[1], late % rest.shape[1]
        more = _keys(owner, rest[owner, offset], offset + rows * columns)
        keys = np.concatenate([keys, more])
    keys.sort()
    first = np.searchsorted(keys, np.arange(count, dtype=np.int64) << 48)
    positions: NDArray[np.int64] = keys[first[:, None] + np.arange(PROOF_TOPK)] & _POSITION
    positions.sort(axis=1)
    return positions


def _keys(
    window: NDArray[np.int64], magnitude: NDArray[np.uint16], position: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The sort keys of the module's docstring."""
    rank = np.int64(0x7FFF) - magnitude.astype(np.int64)
    return (window << 48) | (rank << 32) | position


def _require_finite(magnitudes: NDArray[np.uint16]) -> None:
    if magnitudes.size and magnitudes.max() >= _INFINITE:
        raise MalformedError("hidden states are not finite")
