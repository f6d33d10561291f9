"""CountSketch of a window's hidden states, 128 bytes, which cannot be made without the states.

Element i of the flattened window (bf16 [t·H]) is added with a sign s(i) to bucket h(i) of 64
(Charikar, Chen, Farach-Colton 2002). h and s come from a hash keyed by lease, group, sample, window
and the window's own tokens (prime_core.seeds.sketch_key). A sketch is therefore valid in one place
only, and knowing the projection does not help to make one without the states:

    byte(i) = byte i mod 4 (lowest first) of mix(mix(k_0 + C · (⌊i/4⌋ + 1)) ⊕ k_1)
    h(i) = byte(i) mod 64,  s(i) = −1 if byte(i) has bit 6 set, else +1

with C = 0x9e3779b9, k_0 and k_1 the first two big-endian words of the key and `mix` the two-round
xorshift-multiply finalizer with the constants 0x21f0aaad, 0xd35a2d97 (C. Wellons' hash-prospector,
"lowbias32" improved), all modulo 2³². Sums are taken in float64, then rounded to bf16.

Limitation: on models where a few outlier dimensions carry nearly all of the norm, small weight
differences are not detected, because the elements are not standardized.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prime_core.errors import MalformedError
from prime_core.proof_form import SKETCH_DIMENSIONS

GOLDEN = 0x9E3779B9
MULTIPLIER_1 = 0x21F0AAAD
MULTIPLIER_2 = 0xD35A2D97
_GOLDEN = np.uint32(GOLDEN)
_MULTIPLIER_1 = np.uint32(MULTIPLIER_1)
_MULTIPLIER_2 = np.uint32(MULTIPLIER_2)
_BATCH = 1 << 18
"""Elements hashed at once."""


def mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The finalizer of the module docstring; returns a new uint32 array of the same shape."""
    x = x ^ (x >> np.uint32(16))
    x *= _MULTIPLIER_1
    x ^= x >> np.uint32(15)
    x *= _MULTIPLIER_2
    x ^= x >> np.uint32(15)
    return x


def bf16_to_float(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bit patterns as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite float32 rounded to nearest-even bf16 bit patterns."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(
        np.uint16
    )
    return rounded


def build(windows: Sequence[NDArray[np.uint16]], keys: Sequence[bytes]) -> NDArray[np.uint16]:
    """Sketches of W flattened windows (uint16 bf16 bits), as bf16 bit patterns [W, 64]."""
    sketches = np.zeros((len(windows), SKETCH_DIMENSIONS), dtype=np.float32)
    for w, (window, key) in enumerate(zip(windows, keys, strict=True)):
        first = np.uint32(int.from_bytes(key[:4], "big"))
        second = np.uint32(int.from_bytes(key[4:8], "big"))
        sums = np.zeros(2 * SKETCH_DIMENSIONS, dtype=np.float64)  # buckets with +, then with −
        for start in range(0, len(window), _BATCH):
            part = window[start : start + _BATCH]
            ids = np.arange(start // 4 + 1, (start + len(part) + 3) // 4 + 1, dtype=np.uint32)
            bits = mix(mix(first + _GOLDEN * ids) ^ second).astype("<u4", copy=False)
            signed_buckets = bits.view(np.uint8)[: len(part)] & np.uint8(0x7F)
            sums += np.bincount(signed_buckets, bf16_to_float(part), 2 * SKETCH_DIMENSIONS)
        sketches[w] = sums[:SKETCH_DIMENSIONS] - sums[SKETCH_DIMENSIONS:]
    return float_to_bf16(sketches)


def pack(sketches: NDArray[np.uint16]) -> bytes:
    """Little-endian bytes of [W, 64] bit patterns, as stored in the file."""
    return sketches.astype("<u2").tobytes()


def decode(data: bytes, windows: int) -> NDArray[np.uint16]:
    """Decodes bf16 bit patterns [windows, 64]. Raises MalformedError if the length is wrong or a
    value is not finite."""
    if len(data) != 2 * SKETCH_DIMENSIONS * windows:
        raise MalformedError(f"a sketch of {len(data)} bytes for {windows} windows")
    bits = np.frombuffer(data, dtype="<u2").astype(np.uint16).reshape(windows, SKETCH_DIMENSIONS)
    if ((bits & 0x7FFF) >= 0x7F80).any():
        raise MalformedError("a sketch is not finite")
    return bits


def distances(claimed: NDArray[np.uint16], own: NDArray[np.uint16]) -> NDArray[np.float64]:
    """‖claimed − own‖ / ‖own‖ of each window: float64 [W], from bit patterns [W, 64].

    0 for equal sketches, about √2 for unrelated states of equal norm, capped at 2.
    """
    a, b = (bf16_to_float(bits).astype(np.float64) for bits in (claimed, own))
    norm = np.linalg.norm(b, axis=1)
    gap = np.linalg.norm(a - b, axis=1)
    ratio = np.divide(gap, norm, out=np.where(gap > 0, 2.0, 0.0), where=norm > 0)
    capped: NDArray[np.float64] = np.minimum(ratio, 2.0)
    return capped
