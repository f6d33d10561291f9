"""Seeded sampling: fixed bits everywhere, honest distribution, sound tests of improbability."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from prime_verify.proofs import sampling, sampling_torch

VECTORS = [
    # seed, position, token id, r, g
    (0, 0, 0, 2167721464, 0.3529450),
    (1, 2, 3, 599080849, 1.8956311),
    (-2, 0, 151935, 2405203769, 0.1972416),
    (-9223372036854775808, 32767, 128000, 3109103001, -0.2522922),
    (9223372036854775807, 4095, 49151, 3936341464, -0.9094352),
    (81985529216486895, 100, 7, 3377056390, -0.4337927),
]


def _murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole words, as published."""

    def rotl(x: int, n: int) -> int:
        return (x << n | x >> 32 - n) & 0xFFFFFFFF

    h = 0
    for (word,) in struct.iter_unpack("<I", data):
        k = rotl(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.mark.parametrize(("seed", "position", "token", "bits", "noise"), VECTORS)
def test_noise_is_the_vectors_of_the_specification(
    seed: int, position: int, token: int, bits: int, noise: float
) -> None:
    """Any change here is another noise function and needs another name."""
    assert sampling.NOISE == "murmur3-gumbel-1"
    assert _murmur3(struct.pack("<qII", seed, position, token)) == bits
    assert int(sampling.noise_bits([seed], [position], token + 1)[0, token]) == bits
    found = float(sampling.gumbel([seed], [position], token + 1)[0, token])
    assert found == pytest.approx(noise, abs=1e-6)
    assert found == pytest.approx(-math.log(-math.log1p(-(bits + 0.5) / 2**32)), abs=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 47, 70_000])
def test_torch_gives_the_same_bits_and_the_same_noise(vocabulary: int) -> None:
    rng = np.random.default_rng(3)
    seeds = rng.integers(-(1 << 63), (1 << 63) - 1, 5)
    places = rng.integers(0, 1 << 16, 5)
    ours = sampling.noise_bits(seeds, places, vocabulary)
    tensors = torch.from_numpy(seeds), torch.from_numpy(places)
    theirs = sampling_torch.noise_bits(*tensors, vocabulary)
    assert np.array_equal(theirs.numpy().view(np.uint32), ours)
    noise = sampling_torch.gumbel(*tensors, vocabulary)
    gap = np.abs(noise.numpy() - sampling.gumbel(seeds, places, vocabulary))
    assert gap.max() < 2e-6


def test_both_tails_of_the_noise_keep_their_digits() -> None:
    words = [0, 1, 5, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - (1 << 20), (1 << 32) - 1]
    bits = torch.tensor([sampling_torch.signed(word) for word in words], dtype=torch.int32)
    exact = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words]
    assert np.abs(sampling_torch.noise_of(bits).numpy() - exact).max() < 2e-6
    assert exact[0] == pytest.approx(33 * math.log(2))
    assert exact[-1] == pytest.approx(-math.log(33 * math.log(2)))


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    seeds, places = torch.randint(-(1 << 62), 1 << 62, (64,)), torch.arange(64)
    here = sampling_torch.noise_bits(seeds, places, 152_000)
    there = sampling_torch.noise_bits(seeds.cuda(), places.cuda(), 152_000).cpu()
    assert torch.equal(here, there)


def test_seeded_choice_has_the_softmax_distribution() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, 12).astype(np.float32)
    temperature = 0.7
    draws = 60_000
    seeds = rng.integers(-(1 << 63), (1 << 63) - 1, draws)
    noise = sampling.gumbel(seeds, np.arange(draws), 12)
    chosen = sampling.choose(np.tile(logits, (draws, 1)), temperature, noise)
    weights = np.exp(logits / temperature)
    expected = draws * weights / weights.sum()
    counts = np.bincount(chosen, minlength=12)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 33  # 11 degrees of freedom: honest noise exceeds it once in 2,000


def test_neighboring_rows_positions_and_tokens_are_uncorrelated() -> None:
    bits = sampling.noise_bits(np.arange(64), np.zeros(64), 4096)
    u = bits / 2.0**32
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.01
    along = sampling.noise_bits([9] * 64, np.arange(64), 4096) / 2.0**32
    assert abs(np.corrcoef(along[:-1].ravel(), along[1:].ravel())[0, 1]) < 0.01


def test_margins_are_capped_in_the_mean_only() -> None:
    match = sampling.match_sampling(np.array([0, 0, 100.0, 0], dtype=np.float32), cap=4.0)
    assert (match.tokens, match.equal, match.margin_mean, match.margin_max) == (4, 0.75, 1.0, 100.0)


def test_poisson_tail_bounds_the_exact_probability() -> None:
    def exact(k: int, mean: float) -> float:
        return 1 - sum(math.exp(-mean) * mean**i / math.factorial(i) for i in range(k))

    for mean in (0.1, 1.0, 5.0):
        for k in range(1, 30):
            assert sampling.poisson_tail(k, mean) >= exact(k, mean) - 1e-12
    assert sampling.poisson_tail(0, 0.0) == 1.0
    assert sampling.poisson_tail(1, 0.0) == 0.0
    assert sampling.poisson_tail(40, 0.2) < 1e-9


def test_honest_samples_never_look_improbable_for_any_model() -> None:
    rng = np.random.default_rng(11)
    for scale in (0.1, 3.0, 12.0):
        logits = rng.normal(0, scale, (4000, 50)).astype(np.float32)
        noise = sampling.gumbel(rng.integers(0, 1 << 62, 4000), np.arange(4000), 50)
        chosen = sampling.choose(logits, 1.0, noise)
        logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))[:, None]
        logprobs -= logits.max(1, keepdims=True)
        claimed = logprobs[np.arange(4000), chosen]
        assert sampling.poisson_tail(*sampling.improbable_tokens(claimed, 50)) > 1e-3


def test_an_improbable_end_stands_only_if_the_noise_chose_it() -> None:
    assert sampling.ends_plausibly(0.11, margin=5.0, tolerance=0.01)
    assert sampling.ends_plausibly(0.01, margin=0.0, tolerance=0.01)
    assert not sampling.ends_plausibly(0.01, margin=0.5, tolerance=0.01)
