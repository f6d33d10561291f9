"""Seeded sampling: fixed bits everywhere, honest distribution, sound tests of improbability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from protocol.proofs import sampling, sampling_torch


def test_bits_are_the_vectors_of_the_specification() -> None:
    found = sampling.noise_bits([[1, 2], [0xFFFFFFFF, 0xDEADBEEF]], [0, 7], 4)
    assert found.tolist() == [
        [1045964093, 47460417, 1650276837, 280845588],
        [3571586924, 2977723781, 1059908240, 589802815],
    ]


def test_bits_follow_the_written_formula() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0xD35A2D97 & 0xFFFFFFFF
        return x ^ x >> 15

    key, position, token = (123456789, 987654321), 4000, 151_000
    a = mix((key[0] + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF)
    b = mix(key[1] ^ a)
    expected = mix(mix((a + 0x9E3779B9 * (token + 1)) & 0xFFFFFFFF) ^ b)
    assert int(sampling.noise_bits([key], [position], token + 1)[0, token]) == expected


@pytest.mark.parametrize("vocabulary", [1, 47, 70_000])
def test_torch_gives_the_same_bits_and_the_same_noise(vocabulary: int) -> None:
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 1 << 32, (5, 2))
    places = rng.integers(0, 1 << 16, 5)
    ours = sampling.noise_bits(keys, places, vocabulary)
    theirs = sampling_torch.noise_bits(torch.from_numpy(keys), torch.from_numpy(places), vocabulary)
    assert np.array_equal(theirs.numpy().view(np.uint32), ours)
    noise = sampling_torch.gumbel(torch.from_numpy(keys), torch.from_numpy(places), vocabulary)
    gap = np.abs(noise.numpy() - sampling.gumbel(keys, places, vocabulary))
    assert gap.max() < 2e-6


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    keys = torch.randint(0, 1 << 32, (64, 2))
    places = torch.arange(64)
    here = sampling_torch.noise_bits(keys, places, 152_000)
    there = sampling_torch.noise_bits(keys.cuda(), places.cuda(), 152_000).cpu()
    assert torch.equal(here, there)


def test_noise_is_finite_at_both_ends_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = np.array([[0, 0xFFFFFFFF]], dtype=np.uint32)
    monkeypatch.setattr(sampling, "noise_bits", lambda *_: ends)
    noise = sampling.gumbel([[0, 0]], [0], 2)
    assert np.isfinite(noise).all()
    assert set(np.round(noise[0]).tolist()) == {23.0, -3.0}


def test_seeded_choice_has_the_softmax_distribution() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, 12).astype(np.float32)
    temperature = 0.7
    draws = 60_000
    keys = rng.integers(0, 1 << 32, (draws, 2))
    noise = sampling.gumbel(keys, np.arange(draws), 12)
    chosen = sampling.choose(np.tile(logits, (draws, 1)), temperature, noise)
    weights = np.exp(logits / temperature)
    expected = draws * weights / weights.sum()
    counts = np.bincount(chosen, minlength=12)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 33  # 11 degrees of freedom: honest noise exceeds it once in 2,000


def test_neighbouring_rows_positions_and_tokens_are_uncorrelated() -> None:
    bits = sampling.noise_bits([[i, 0] for i in range(64)], np.zeros(64), 4096)
    u = bits / 2.0**32
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.01
    along = sampling.noise_bits([[9, 9]] * 64, np.arange(64), 4096) / 2.0**32
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


def test_honest_samples_never_look_improbable_whatever_the_model() -> None:
    rng = np.random.default_rng(11)
    for scale in (0.1, 3.0, 12.0):
        logits = rng.normal(0, scale, (4000, 50)).astype(np.float32)
        noise = sampling.gumbel(rng.integers(0, 1 << 32, (4000, 2)), np.arange(4000), 50)
        chosen = sampling.choose(logits, 1.0, noise)
        logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))[:, None]
        logprobs -= logits.max(1, keepdims=True)
        claimed = logprobs[np.arange(4000), chosen]
        assert sampling.poisson_tail(*sampling.improbable_tokens(claimed, 50)) > 1e-3


def test_an_improbable_end_stands_only_if_the_noise_chose_it() -> None:
    assert sampling.ends_plausibly(0.11, margin=5.0, tolerance=0.01)
    assert sampling.ends_plausibly(0.01, margin=0.0, tolerance=0.01)
    assert not sampling.ends_plausibly(0.01, margin=0.5, tolerance=0.01)
