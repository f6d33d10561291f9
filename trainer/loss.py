"""The objective, as small pure functions over the generated tokens of a micro-batch.

All tensors are flat over the N generated tokens of the micro-batch, whatever rows they sat in.
Each token carries its weight in the whole batch, computed before packing (`token_weights`), so a
sum over micro-batches, accumulation steps and ranks is the objective itself, whatever the layout.

With r = π_θ/π_old, π_old the *behaviour* policy whose log-probabilities came with the file:

    J = Σ_t w_t · [ min( min(r_t, δ)·A_t, clip(r_t, 1−ε, 1+ε)·A_t ) − β·KL_t + η·H_t ]

δ > 1+ε bounds the ratio where A < 0, which one-sided clipping leaves open (arXiv 2505.07291).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["grpo", "grpo_token_mean", "dr_grpo"]
KlForm = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""exp(20) is finite in fp32; δ and the clip decide long before it."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """ε, δ, β, η of the module's docstring; all plain floats."""

    normalisation: Normalisation = "grpo"
    clip: float = 0.2
    delta: float = 4.0
    kl: float = 0.0
    kl_form: KlForm = "k3"
    entropy: float = 0.0


@dataclass(frozen=True)
class Tokens:
    """(N,) each: behaviour policy's log-probability, advantage, weight in the batch; reference
    policy's log-probability where the objective has a KL term."""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """`loss` to be summed over micro-batches and ranks, and detached sums for the metrics."""

    loss: Tensor
    sums: dict[str, Tensor]
    ratio_max: Tensor


def token_weights(
    output_lengths: Sequence[int], normalisation: Normalisation, max_output_tokens: int
) -> list[float]:
    """Weight of each token of each sample; `output_lengths` are those of the *whole* batch.

    - grpo: 1/(samples·|o_i|), the paper's mean of means
    - grpo_token_mean: 1/Σ|o_i|
    - dr_grpo: 1/(samples·max_output_tokens): no sample's length changes its tokens' weight
    """
    samples = len(output_lengths)
    if normalisation == "grpo":
        return [1.0 / (samples * length) for length in output_lengths]
    if normalisation == "grpo_token_mean":
        return [1.0 / sum(output_lengths)] * samples
    return [1.0 / (samples * max_output_tokens)] * samples


def two_sided_clip(log_ratio: Tensor, advantages: Tensor, clip: float, delta: float) -> Tensor:
    """(N,) objective: min( min(r, δ)·A, clip(r, 1−ε, 1+ε)·A )."""
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(max=delta) * advantages
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantages
    return torch.minimum(bounded, clipped)


def kl_estimate(logprobs: Tensor, reference: Tensor, form: KlForm) -> Tensor:
    """(N,) estimates of KL(π_θ ‖ π_ref) on sampled tokens (Schulman, "Approximating KL"): with
    d = log π_ref − log π_θ, k1 = −d, k2 = d²/2, k3 = exp(d) − 1 − d. Gradients flow through
    `logprobs`; a published ancestor computed this without gradient, for months."""
    d = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if form == "k1":
        return -d
    if form == "k2":
        return 0.5 * d * d
    return d.exp() - 1.0 - d


def policy_loss(
    logprobs: Tensor, entropy: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> LossTerms:
    """−J over this micro-batch's tokens. `logprobs`, `entropy`: (N,) of the trained policy at the
    run's temperature, with gradient."""
    log_ratio = logprobs - tokens.old_logprobs
    objective = two_sided_clip(log_ratio, tokens.advantages, settings.clip, settings.delta)
    if settings.kl:
        if tokens.reference is None:
            raise ValueError("an objective with a KL term needs the reference policy")
        kl = kl_estimate(logprobs, tokens.reference, settings.kl_form)
        objective = objective - settings.kl * kl
    if settings.entropy:
        objective = objective + settings.entropy * entropy
    loss = -(objective * tokens.weights).sum()
    with torch.no_grad():
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        positive = tokens.advantages > 0
        clipped = torch.where(positive, ratio > 1 + settings.clip, ratio < 1 - settings.clip)
        clipped |= ~positive & (ratio > settings.delta)
        sums = {
            "ratio": ratio.sum(),
            "clipped": clipped.sum(),
            "entropy": entropy.sum(),
            "kl_old": (ratio - 1.0 - log_ratio).sum(),  # k3 of KL(π_old ‖ π_θ): samples of π_old
        }
        if settings.kl:
            sums["kl_reference"] = kl.sum()
        empty = ratio.new_zeros(())
        ratio_max = ratio.max() if ratio.numel() else empty
    return LossTerms(loss, {k: v.detach().double() for k, v in sums.items()}, ratio_max)
