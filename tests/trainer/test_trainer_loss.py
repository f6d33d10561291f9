"""The objective's gradients against slow formulas in float64, worked out by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_trainer.config import ObjectiveSettings
from prime_trainer.loss import (
    KlForm,
    Tokens,
    kl_estimate,
    policy_loss,
    token_weights,
    two_sided_clip,
)

NORMALIZATIONS: tuple[str, ...] = ("grpo", "grpo_token_mean", "dr_grpo", "one_sided")
LENGTHS = [3, 1, 5, 2]
VOCABULARY = 6
MAX_OUTPUT = 8


def slow_gradient(
    logits: np.ndarray,
    targets: list[int],
    old: list[float],
    reference: list[float],
    advantages: list[float],
    settings: ObjectiveSettings,
) -> np.ndarray:
    """∂(−J)/∂logits, token by token, from the formulas of the paper; no autograd."""
    gradient = np.zeros_like(logits)
    start = 0
    for advantage, length in zip(advantages, LENGTHS, strict=True):
        for t in range(start, start + length):
            weight = {
                "grpo": 1 / len(LENGTHS) / length,
                "grpo_token_mean": 1 / sum(LENGTHS),
                "dr_grpo": 1 / len(LENGTHS) / MAX_OUTPUT,
                "one_sided": 1 / len(LENGTHS) / length,
            }[settings.name]
            delta = math.inf if settings.name == "one_sided" else settings.delta
            p = np.exp(logits[t] - logits[t].max())
            p /= p.sum()
            logp = math.log(p[targets[t]])
            ratio = math.exp(logp - old[t])
            low, high = 1 - settings.clip, 1 + settings.clip
            bounded = min(ratio, delta) * advantage
            clipped = min(max(ratio, low), high) * advantage
            if bounded <= clipped:
                slope = ratio * advantage if ratio < delta else 0.0
            else:
                slope = ratio * advantage if low < ratio < high else 0.0
            d = reference[t] - logp
            slope -= settings.kl * {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[settings.kl_form]
            onehot = np.eye(VOCABULARY)[targets[t]]
            entropy = -(p * np.log(p)).sum()
            gradient[t] -= weight * slope * (onehot - p)
            gradient[t] -= weight * settings.entropy * (-p * (np.log(p) + entropy))
        start += length
    return gradient


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kl_form", ["k1", "k2", "k3"])
@pytest.mark.parametrize("seed", range(4))
def test_every_objectives_gradient_is_the_slow_one(
    normalization: str, kl_form: KlForm, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    total = sum(LENGTHS)
    logits = rng.normal(size=(total, VOCABULARY)) * 2
    targets = rng.integers(0, VOCABULARY, total).tolist()
    old = (-rng.uniform(0.05, 5, total)).tolist()  # ratios on both sides of every bound
    reference = (-rng.uniform(0.05, 3, total)).tolist()
    advantages = rng.normal(size=len(LENGTHS)).tolist()
    settings = ObjectiveSettings(
        name=normalization, clip=0.2, delta=4.0, kl=0.3, kl_form=kl_form, entropy=0.2
    )
    weights = token_weights(LENGTHS, normalization, MAX_OUTPUT)

    def spread(values: list[float]) -> torch.Tensor:
        return torch.tensor(
            [v for v, n in zip(values, LENGTHS, strict=True) for _ in range(n)], dtype=torch.float64
        )

    z = torch.tensor(logits, requires_grad=True)
    logprobs_all = torch.log_softmax(z, -1)
    logprobs = logprobs_all[torch.arange(total), torch.tensor(targets)]
    entropy = -(logprobs_all.exp() * logprobs_all).sum(-1)
    tokens = Tokens(
        old_logprobs=torch.tensor(old, dtype=torch.float64),
        advantages=spread(advantages),
        weights=spread(weights),
        reference=torch.tensor(reference, dtype=torch.float64),
    )
    policy_loss(logprobs, entropy, tokens, settings).loss.backward()
    assert z.grad is not None
    expected = slow_gradient(logits, targets, old, reference, advantages, settings)
    np.testing.assert_allclose(z.grad.numpy(), expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("form", ["k1", "k2", "k3"])
def test_the_kl_term_has_a_gradient(form: KlForm) -> None:
    # An ancestor computed it from tensors without gradient: it did nothing for months.
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-1.5, -0.5]), form).sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).all()


def test_an_objective_with_kl_refuses_to_go_without_a_reference() -> None:
    tokens = Tokens(torch.zeros(1), torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="reference"):
        policy_loss(torch.zeros(1), torch.zeros(1), tokens, ObjectiveSettings(kl=0.1))


@given(st.floats(-30, 60), st.floats(-5, 5))
def test_the_two_sided_bound_holds_for_any_ratio(log_ratio: float, advantage: float) -> None:
    value, _ = two_sided_clip(
        torch.tensor([log_ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        0.2,
        4.0,
    )
    assert torch.isfinite(value).all()
    assert abs(float(value)) <= 4.0 * abs(advantage) + 1e-12


def test_a_huge_ratio_with_negative_advantage_has_no_gradient_only_under_two_sides() -> None:
    def gradient(delta: float) -> float:
        log_ratio = torch.tensor([5.0], requires_grad=True)
        two_sided_clip(log_ratio, torch.tensor([-1.0]), 0.2, delta)[0].sum().backward()
        assert log_ratio.grad is not None
        return float(log_ratio.grad)

    assert gradient(4.0) == 0.0
    assert gradient(math.inf) < -100  # what one-sided clipping lets through


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_weights_of_a_whole_batch_sum_as_the_form_says(normalization: str) -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 20) for _ in range(12)]
    weights = token_weights(lengths, normalization, 20)
    total = math.fsum(w * n for w, n in zip(weights, lengths, strict=True))
    expected = sum(lengths) / (12 * 20) if normalization == "dr_grpo" else 1.0
    assert total == pytest.approx(expected)
    if normalization not in ("grpo", "one_sided"):
        assert len(set(weights)) == 1
