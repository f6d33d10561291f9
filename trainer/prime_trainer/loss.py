"""The objective of a micro-batch, as small pure functions over its generated tokens.

All tensors are flat over the N generated tokens of the micro-batch, independent of rows. Each token
has a weight in the whole batch, computed before packing (`token_weights`), so that the sum over
micro-batches, accumulation steps and ranks equals the objective for any layout.

    J = Σ_t w_t · [ c_t · surrogate(r_t, A_t) − β·KL_t + η·H_t ]

    ratio = "behaviour":  r = π_θ/π_old, c = 1; π_old generated the row, and its
                          log-probabilities are in the file
    ratio = "proximal":   r = π_θ/π_prox, c = `importance` of π_prox/π_old, no gradient; π_prox is
                          the trainer's own policy at the start of the batch. Decoupled PPO
                          (arXiv 2110.00641); c is also the truncated importance weight between
                          engine and trainer

`surrogate` and w_t come from the registered objective (prime_trainer/objectives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prime_trainer.objectives import objective_of
from prime_trainer.objectives.base import (
    MAX_LOG_RATIO,
    KlForm,
    Tokens,
    two_sided_clip,
)

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings

__all__ = [
    "MAX_LOG_RATIO",
    "KlForm",
    "LossTerms",
    "Tokens",
    "kl_estimate",
    "policy_loss",
    "token_weights",
    "two_sided_clip",
]


@dataclass(frozen=True)
class LossTerms:
    """`loss`, to be summed over micro-batches and ranks, and detached sums for the metrics."""

    loss: Tensor
    sums: dict[str, Tensor]
    ratio_max: Tensor


def token_weights(
    output_lengths: Sequence[int],
    normalization: str,
    max_output_tokens: int,
    counted: Sequence[bool] | None = None,
) -> list[float]:
    """Weight of each token of each sample; `output_lengths` are those of the *whole* batch.

    Samples that are not `counted` (masked) have weight zero, and the others are weighted as if
    those did not exist. Raises UserError for an unregistered objective.
    """
    if counted is None:
        counted = [True] * len(output_lengths)
    kept = [length for length, counts in zip(output_lengths, counted, strict=True) if counts]
    weights = iter(objective_of(normalization).weights(kept, max_output_tokens) if kept else ())
    return [next(weights) if counts else 0.0 for counts in counted]


def kl_estimate(logprobs: Tensor, reference: Tensor, form: KlForm) -> Tensor:
    """Estimates (N,) of KL(π_θ ‖ π_ref) on sampled tokens (Schulman, "Approximating KL"): with d
    = log π_ref − log π_θ, k1 = −d, k2 = d²/2, k3 = exp(d) − 1 − d. Gradients flow through
    `logprobs`."""
    d = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if form == "k1":
        return -d
    if form == "k2":
        return 0.5 * d * d
    return d.exp() - 1.0 - d


def importance(
    logprobs: Tensor, proximal: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """Weight w = π_prox/π_old of each token, (N,), without gradient, and which tokens have another
    weight than w, (N,) bool: min(w, cap) ("truncate", IMPALA's, arXiv 1802.01561); w where floor ≤
    w ≤ cap and else 0 ("mask", IcePop's, arXiv 2510.18855); or min(w, cap), and 0 where
    |π_θ − π_old| of the sampled token is above `importance_divergence` and the update would raise
    it ("divergence", DPPO's with binary total variation, arXiv 2602.04879)."""
    weight = (proximal - tokens.old_logprobs).detach().clamp(max=MAX_LOG_RATIO).exp()
    above = weight > settings.importance_cap
    if settings.importance == "mask":
        outside = above | (weight < settings.importance_floor)
        return torch.where(outside, 0.0, weight), outside
    weight = weight.clamp(max=settings.importance_cap)
    if settings.importance == "truncate":
        return weight, above
    apart = logprobs.detach().exp() - tokens.old_logprobs.exp()
    outside = (apart.abs() > settings.importance_divergence) & (apart * tokens.advantages > 0)
    return torch.where(outside, 0.0, weight), above | outside


def policy_loss(
    logprobs: Tensor, entropy: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> LossTerms:
    """−J over this micro-batch's tokens. `logprobs`, `entropy`: (N,) of the trained policy at the
    run's temperature, with gradient. Raises ValueError if the KL term lacks its reference."""
    chosen = objective_of(settings.name)
    changed: Tensor | None = None
    if settings.ratio == "proximal":
        proximal = logprobs.detach() if tokens.proximal is None else tokens.proximal
        log_ratio = logprobs - proximal
        correction, changed = importance(logprobs, proximal, tokens, settings)
        value, clipped = chosen.surrogate(log_ratio, tokens, settings)
        objective = correction * value
    else:
        log_ratio = logprobs - tokens.old_logprobs
        objective, clipped = chosen.surrogate(log_ratio, tokens, settings)
    kl = None
    if settings.kl:
        if tokens.reference is None:
            raise ValueError("an objective with a KL term needs the reference policy")
        kl = kl_estimate(logprobs, tokens.reference, settings.kl_form)
        objective = objective - settings.kl * kl
    if settings.entropy:
        objective = objective + settings.entropy * entropy
    # Mask tokens without weight instead of multiplying by 0 (0 · inf is NaN).
    weighted = torch.where(tokens.weights != 0, objective * tokens.weights, 0.0)
    loss = -weighted.sum()
    with torch.no_grad():
        sums = _statistics(logprobs, entropy, log_ratio, tokens)
        sums["clipped"] = clipped.sum()
        if changed is not None:
            sums["truncated"] = changed.sum()
        if kl is not None:
            sums["kl_reference"] = kl.sum()
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        ratio_max = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return LossTerms(loss, {k: v.detach().double() for k, v in sums.items()}, ratio_max)


def _statistics(
    logprobs: Tensor, entropy: Tensor, log_ratio: Tensor, tokens: Tokens
) -> dict[str, Tensor]:
    """Sums over tokens. `kl_old` and `kl_mismatch` are k3 of KL(π_old ‖ π_θ) (tokens are samples of
    π_old). `kl_mismatch` covers only rows generated by the current policy itself, so it measures
    the difference between engine and trainer."""
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    behind = (logprobs - tokens.old_logprobs).clamp(max=MAX_LOG_RATIO)
    kl_old = behind.exp() - 1.0 - behind
    sums = {
        "ratio": ratio.sum(),
        "entropy": entropy.sum(),
        "kl_old": kl_old.sum(),
    }
    if tokens.fresh is not None:
        sums["kl_mismatch"] = (kl_old * tokens.fresh).sum()
        sums["fresh_tokens"] = tokens.fresh.sum()
    return sums
