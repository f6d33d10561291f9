"""Activation proofs forged without the states: the known ways to pass TOPLOC's published
thresholds.

For tests, benchmarks and attacking nodes of the devnet; honest nodes never import this. A forger
here gets more information than a real one could have: the typical magnitudes of the very windows to
be proven.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prime_verify.proofs import activations, field
from prime_verify.rollout_file import FileRow

Windows = Sequence[NDArray[np.uint16]]
Forge = Callable[[Windows, int], list[bytes]]
"""(flattened windows, hidden size) → proofs"""


def _typical(window: NDArray[np.uint16]) -> int:
    return int(np.median(window[activations.largest(window)] & 0x7FFF))


def _flat(modulus: int, value: int, count: int) -> bytes:
    return struct.pack(f">{count + 1}H", modulus, value, *[0] * (count - 1))


def constant(windows: Windows, hidden: int) -> list[bytes]:
    """A constant polynomial of the window's typical magnitude."""
    return [_flat(activations.MAX_MODULUS, _typical(w), min(128, len(w))) for w in windows]


def _through(points: dict[int, int], modulus: int, count: int) -> bytes:
    x = np.array([sorted(points)], dtype=np.float64)
    y = np.array([[points[i] for i in sorted(points)]], dtype=np.float64)
    coefficients = field.interpolate(x, y)[0].astype(int).tolist()
    return struct.pack(f">{count + 1}H", modulus, *coefficients, *[0] * (count - len(points)))


def _by_dimension(windows: Windows, hidden: int) -> NDArray[np.uint16]:
    """The median bit pattern of each hidden dimension over all windows (bf16 bits, [hidden])."""
    rows = np.concatenate([w.reshape(-1, hidden) for w in windows])
    order = np.sort(np.where(rows & 0x8000, ~rows, rows | 0x8000), axis=0)  # bits in value order
    middle = order[len(order) // 2]
    median: NDArray[np.uint16] = np.where(middle & 0x8000, middle & 0x7FFF, ~middle)
    return median


def modulus_h(windows: Windows, hidden: int) -> list[bytes]:
    """Modulus H, so that each position maps to its dimension: one typical value for each."""
    typical = _by_dimension(windows, hidden)
    top = np.argsort(typical & 0x7FFF, kind="stable")[::-1][:128]
    points = {int(d): int(typical[d]) for d in top}
    return [_through(points, hidden, min(128, len(w))) for w in windows]


def outlier(windows: Windows, hidden: int) -> list[bytes]:
    """Points at the outlier dimensions, each with its typical value."""
    typical = _by_dimension(windows, hidden)
    order = np.argsort(typical & 0x7FFF, kind="stable")[::-1]
    proofs = []
    for window in windows:
        tokens, count = len(window) // hidden, min(128, len(window))
        places = [t * hidden + int(d) for d in order[: -(-count // tokens)] for t in range(tokens)]
        chosen = np.sort(np.array(places[:count], dtype=np.int64))
        modulus = activations.modulus_of(chosen)
        points = {int(p) % modulus: int(typical[p % hidden]) for p in chosen}
        proofs.append(_through(points, modulus, count))
    return proofs


def sign_flip(windows: Windows, hidden: int) -> list[bytes]:
    """Negates every state: magnitudes are perfect."""
    return activations.build([window ^ np.uint16(0x8000) for window in windows])


FORGERIES: dict[str, Forge] = {
    "const": constant,
    "modh": modulus_h,
    "outlier": outlier,
    "sign_flip": sign_flip,
}


def forged_rows(
    rows: list[FileRow], states: Sequence[NDArray[np.uint16]], forge: Forge
) -> list[FileRow]:
    """`rows` with forged proofs; `states` are [T, H] of each row."""
    changed = []
    for row, of_row in zip(rows, states, strict=True):
        proofs = forge(activations.split_windows(of_row), of_row.shape[1])
        changed.append(replace(row, proofs=activations.pack(proofs)))
    return changed
