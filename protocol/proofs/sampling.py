"""Seeded sampling: Gumbel-max with counter-based noise, the same bits on every device.

    token = argmax_v( logits_v / T + g_v ),   g = −log(−log u)          (Gumbel-max trick)

so which token was drawn is a fact that anyone can recompute. The noise of (row, position, token id)
is a hash in wrapping 32-bit arithmetic; `mix` is the two-round xorshift-multiply finalizer with the
constants 0x21f0aaad, 0xd35a2d97 (C. Wellons' hash-prospector, "lowbias32" improved):

    a       = mix(key₀ + C · (position + 1))            C = 0x9e3779b9, all modulo 2³²
    b       = mix(key₁ ⊕ a)
    bits(v) = mix(mix(a + C · (v + 1)) ⊕ b)
    w       = min(float32(bits + ½) · 2⁻³², 1 − 2⁻²⁴)    1 − w is the uniform u
    g(v)    = −log(−log1p(−w))                           float32

(key₀, key₁) come from protocol.core.seeds.noise_key. The bits and w are exact everywhere; g agrees
to a few units in the last place, far below any margin that is judged. torch's twin is
`sampling_torch.gumbel`. This module needs numpy only.

What replay does not show: lies that change no token, such as weights off by less than the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

GOLDEN = 0x9E3779B9
MULTIPLIER_1 = 0x21F0AAAD
MULTIPLIER_2 = 0xD35A2D97
CHUNK = 1 << 16
"""Hash this many elements at a time, so that intermediate arrays stay in cache."""
END_PROBABILITY = 0.1
"""A row that ends by an end token less probable than this needs the noise to explain it."""

_GOLDEN = np.uint32(GOLDEN)
_MULTIPLIER_1 = np.uint32(MULTIPLIER_1)
_MULTIPLIER_2 = np.uint32(MULTIPLIER_2)


def mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The finalizer of the module's docstring, on a fresh uint32 array of any shape."""
    x = x ^ (x >> np.uint32(16))
    x *= _MULTIPLIER_1
    x ^= x >> np.uint32(15)
    x *= _MULTIPLIER_2
    x ^= x >> np.uint32(15)
    return x


def row_words(
    keys: ArrayLike, positions: ArrayLike
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """(a, b) of the docstring: uint32 (N,) each, from keys (N, 2) and output positions (N,)."""
    key = np.asarray(keys, dtype=np.uint32).reshape(-1, 2)
    position = np.asarray(positions, dtype=np.uint32)
    a = mix(key[:, 0] + _GOLDEN * (position + np.uint32(1)))
    return a, mix(key[:, 1] ^ a)


def noise_bits(keys: ArrayLike, positions: ArrayLike, vocabulary: int) -> NDArray[np.uint32]:
    """The hash of every token id: uint32 (N, vocabulary)."""
    a, b = row_words(keys, positions)
    bits = np.empty((len(a), vocabulary), dtype=np.uint32)
    step = max(1, CHUNK // max(1, len(a)))
    for start in range(0, vocabulary, step):
        ids = np.arange(start + 1, min(start + step, vocabulary) + 1, dtype=np.uint32)
        bits[:, start : start + step] = mix(mix(a[:, None] + _GOLDEN * ids) ^ b[:, None])
    return bits


def gumbel(keys: ArrayLike, positions: ArrayLike, vocabulary: int) -> NDArray[np.float32]:
    """The noise g: float32 (N, vocabulary)."""
    bits = noise_bits(keys, positions, vocabulary)
    # Each step is one IEEE-754 float32 operation, rounded to nearest: the same on every device.
    w = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    np.minimum(w, np.float32(1 - 2.0**-24), out=w)
    noise: NDArray[np.float32] = -np.log(-np.log1p(-w))
    return noise


def choose(
    logits: NDArray[np.float32], temperature: float, noise: NDArray[np.float32]
) -> NDArray[np.int64]:
    """The token of each row: (N,) from logits and noise (N, V); ties go to the lowest id."""
    winners: NDArray[np.int64] = (logits / np.float32(temperature) + noise).argmax(axis=1)
    return winners


@dataclass(frozen=True)
class SamplingMatch:
    """Statistics of one row's replay.

    `equal` share of tokens that are the seeded winner; `margin_mean`, `margin_max` by how much the
    winner beats the claimed token, in logits/T units (0 where equal).
    """

    tokens: int
    equal: float
    margin_mean: float
    margin_max: float


def match_sampling(margins: NDArray[np.float32], cap: float) -> SamplingMatch:
    """Statistics over the tokens' margins (T,); each is capped at `cap` in the mean, so that one
    token alone cannot carry it. Infinite margins count as the cap; NaN never occurs in replay."""
    capped = np.minimum(margins, cap).astype(np.float64)
    return SamplingMatch(
        tokens=len(margins),
        equal=float((margins <= 0).mean()),
        margin_mean=float(capped.mean()),
        margin_max=float(margins.max()),
    )


def poisson_tail(observed: int, expected: float) -> float:
    """Upper bound (Chernoff) on P(X ≥ observed) for a sum X of independent or adaptively drawn
    0/1 events whose probabilities add up to `expected`: exp(−μ)·(eμ/k)ᵏ for k > μ, else 1."""
    if observed <= expected or observed == 0:
        return 1.0
    if expected <= 0:
        return 0.0
    k = float(observed)
    return math.exp(min(0.0, k - expected + k * math.log(expected / k)))


def improbable_tokens(
    logprobs: Sequence[float] | NDArray[np.float32], vocabulary: int, share: float = 1e-3
) -> tuple[int, float]:
    """(observed, expected bound) of tokens with probability below share / vocabulary.

    Whatever the model, all such tokens together have probability < `share` at each position, so an
    honest sampler draws at most `share` · T of them on average. A small model's text that a large
    one merely scored has its second hump there.
    """
    values = np.asarray(logprobs, dtype=np.float64)
    return int((values < math.log(share / vocabulary)).sum()), share * len(values)


def ends_plausibly(end_probability: float, margin: float, tolerance: float) -> bool:
    """True if an end token may stand where it does: probable enough, or the noise's own choice."""
    return end_probability > END_PROBABILITY or margin <= tolerance
