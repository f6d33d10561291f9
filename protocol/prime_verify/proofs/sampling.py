"""Seeded sampling: Gumbel-max with counter-based noise, the same bits on every device.

    token = argmax_v( logits_v / T + g_v ),   g = −ln(−ln u)          (Gumbel-max trick)

so anyone can recompute which token was drawn. The noise is named `NOISE`. It is the function of
vLLM ≥ 0.32 (vllm/v1/worker/gpu/sample/gumbel.py, float32 path, no speculative decoding), so vLLM
can sample natively with `SamplingParams.seed`. All integers wrap at 2³²:

    mix(h, k) = 5 · rotl(h ⊕ 0x1b873593 · rotl(0xcc9e2d51 · k, 15), 13) + 0xe6546b64
    h         = mix(mix(mix(0, seed mod 2³²), seed ≫ 32), position mod 2³²)
    r(v)      = fmix(mix(h, v) ⊕ 16)
    u         = (r + ½) / 2³²
    g(v)      = −ln(−ln(1 − u))

r is MurmurHash3_x86_32 with seed 0 of the 16 bytes (seed, position, token id), little-endian, and
`fmix` is its finalizer. `seed` is the row's 64-bit key (prime_core.seeds.noise_seed), `position`
the index of the *input* token in the whole row: prompt length − 1 for the first output token. r is
exact everywhere. g is defined as a real number; `gumbel` in this module rounds it to float32.
`sampling_torch` and the Triton kernel are within 1e-5 of it, and so is vLLM's kernel where
u < 1 − 2⁻¹⁰ (above, it loses digits of noise below −1.9, which decides almost no draw). Margins
that small are ignored.

h has 32 bits, so only 2³² streams exist. Two rows of the same prompt are identical with probability
2⁻³², which is harmless because keys come from keccak-256 of a lease.

Limitation: replay does not detect changes that alter no token, such as weight errors smaller than
the noise. This module requires only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NOISE = "murmur3-gumbel-1"
"""The name of the noise function, as used in run definitions."""
KEY_1 = 0xCC9E2D51
KEY_2 = 0x1B873593
STEP = 0xE6546B64
FINAL_1 = 0x85EBCA6B
FINAL_2 = 0xC2B2AE35
BYTES = 16
"""Length of the hash input."""
CHUNK = 1 << 16
"""Number of elements hashed at a time, so that intermediate arrays fit in cache."""
IMPROBABLE_SHARE = 1e-3
"""Bound of the probability of all tokens together that `improbable_tokens` counts."""
END_PROBABILITY = 0.1
"""A row that ends with an end token less probable than this is plausible only if the noise chose
it."""

_Words = NDArray[np.uint32]


def _rotl(x: _Words, n: int) -> _Words:
    return (x << np.uint32(n)) | (x >> np.uint32(32 - n))


def _scramble(key: _Words) -> _Words:
    return _rotl(key * np.uint32(KEY_1), 15) * np.uint32(KEY_2)


def _mix(h: _Words, scrambled: _Words) -> _Words:
    return _rotl(h ^ scrambled, 13) * np.uint32(5) + np.uint32(STEP)


def _finish(h: _Words) -> _Words:
    """MurmurHash3's finalizer, in place."""
    h ^= np.uint32(BYTES)
    h ^= h >> np.uint32(16)
    h *= np.uint32(FINAL_1)
    h ^= h >> np.uint32(13)
    h *= np.uint32(FINAL_2)
    h ^= h >> np.uint32(16)
    return h


def row_state(seeds: ArrayLike, positions: ArrayLike) -> _Words:
    """h of the module docstring: uint32 (N,), from signed or unsigned 64-bit seeds (N,) and
    positions."""
    seed = np.asarray(seeds).reshape(-1).astype(np.int64).view(np.uint64)
    position = np.asarray(positions).reshape(-1).astype(np.uint32)
    h = np.zeros(len(seed), dtype=np.uint32)
    for word in (seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32), position):
        h = _mix(h, _scramble(word))
    return h


def noise_bits(seeds: ArrayLike, positions: ArrayLike, vocabulary: int) -> NDArray[np.uint32]:
    """The hash r of every token id: uint32 (N, vocabulary)."""
    h = row_state(seeds, positions)[:, None]
    bits = np.empty((len(h), vocabulary), dtype=np.uint32)
    step = max(1, CHUNK // max(1, len(h)))
    for start in range(0, vocabulary, step):
        ids = np.arange(start, min(start + step, vocabulary), dtype=np.uint32)
        bits[:, start : start + step] = _finish(_mix(h, _scramble(ids)))
    return bits


def gumbel(seeds: ArrayLike, positions: ArrayLike, vocabulary: int) -> NDArray[np.float32]:
    """The noise g: float32 (N, vocabulary), computed in float64."""
    u = (noise_bits(seeds, positions, vocabulary) + 0.5) * 2.0**-32
    noise: NDArray[np.float32] = (-np.log(-np.log1p(-u))).astype(np.float32)
    return noise


def choose(
    logits: NDArray[np.float32], temperature: float, noise: NDArray[np.float32]
) -> NDArray[np.int64]:
    """The token of each row: (N,), from logits and noise (N, V); ties go to the lowest id."""
    winners: NDArray[np.int64] = (logits / np.float32(temperature) + noise).argmax(axis=1)
    return winners


@dataclass(frozen=True)
class SamplingMatch:
    """Statistics of one row's replay.

    `equal`: share of tokens that are the seeded winner. `margin_mean`, `margin_max`: by how much
    the winner beats the claimed token, in units of logits/T (0 where equal).
    """

    tokens: int
    equal: float
    margin_mean: float
    margin_max: float


def match_sampling(margins: NDArray[np.float32], cap: float) -> SamplingMatch:
    """Statistics over the tokens' margins (T,). In the mean, each margin is capped at `cap`, so
    that one token cannot dominate. Infinite margins count as the cap; the replay has no NaN."""
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
    logprobs: Sequence[float] | NDArray[np.float32], vocabulary: int
) -> tuple[int, float]:
    """(observed, expected bound) of tokens with probability below IMPROBABLE_SHARE / vocabulary.

    For every model, all such tokens together have probability < IMPROBABLE_SHARE at each position,
    so an honest sampler draws at most IMPROBABLE_SHARE · T of them on average. Text of a small
    model that a large one only scored has more of them.
    """
    values = np.asarray(logprobs, dtype=np.float64)
    return int((values < math.log(IMPROBABLE_SHARE / vocabulary)).sum()), IMPROBABLE_SHARE * len(
        values
    )


def ends_plausibly(end_probability: float, margin: float, tolerance: float) -> bool:
    """Whether an end token is plausible: probable enough, or chosen by the noise."""
    return end_probability > END_PROBABILITY or margin <= tolerance
