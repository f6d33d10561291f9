"""The objectives that the trainer brings: what weights a token, and its surrogate.

grpo              mean over samples of each sample's mean over its tokens (arXiv 2402.03300)
grpo_token_mean   mean over all tokens: samples count in proportion to their length (DAPO)
dr_grpo           a constant divisor: a sample's length does not change its tokens' weight
gspo              one ratio a sample, the geometric mean of its tokens' (arXiv 2507.18071). Use
                  small clips: `clip` 3e-4 and `clip_high` 4e-4 in the paper
cispo             REINFORCE with a clipped importance weight (MiniMax-M1, arXiv 2506.13585). No
                  token is without gradient; a large ratio only stops to grow in weight
one_sided         PPO's clip (arXiv 1707.06347). Without δ, the gradient of a token with
                  negative advantage grows with its ratio without bound. For comparison
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prime_trainer.objectives.base import (
    MAX_LOG_RATIO,
    Objective,
    Tokens,
    two_sided,
    two_sided_clip,
)

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings


def sample_means(output_lengths: Sequence[int], max_output_tokens: int) -> list[float]:
    """1/(samples·|o_i|) (arXiv 2402.03300, 2505.07291)."""
    return [1.0 / (len(output_lengths) * length) for length in output_lengths]


def token_mean(output_lengths: Sequence[int], max_output_tokens: int) -> list[float]:
    """1/Σ|o_i| (DAPO, arXiv 2503.14476)."""
    return [1.0 / sum(output_lengths)] * len(output_lengths)


def constant(output_lengths: Sequence[int], max_output_tokens: int) -> list[float]:
    """1/(samples·max_output_tokens) (arXiv 2503.20783)."""
    return [1.0 / (len(output_lengths) * max_output_tokens)] * len(output_lengths)


def by_sample(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """`two_sided` of each sample's ratio, at each of its tokens. Needs `tokens.samples`."""
    if tokens.samples is None:
        raise ValueError("GSPO needs to know which sample each token is of")
    zeros = torch.zeros_like(log_ratio)  # at most as many samples as tokens
    sums = zeros.index_add(0, tokens.samples, log_ratio)
    sizes = zeros.index_add(0, tokens.samples, torch.ones_like(log_ratio))
    return two_sided((sums / sizes.clamp(min=1))[tokens.samples], tokens, settings)


def clipped_weight(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """(N,) min(r, 1 + ε_high)·A·log π without gradient through the weight, and which weights are
    clipped. log r has the gradient of log π."""
    ratio = log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()
    most = 1.0 + settings.upper_clip
    return ratio.clamp(max=most) * tokens.advantages * log_ratio, ratio > most


def one_sided(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """(N,) min( r·A, clip(r, 1−ε, 1+ε_high)·A ), and which tokens have no gradient."""
    return two_sided_clip(
        log_ratio, tokens.advantages, settings.clip, math.inf, settings.upper_clip
    )


REGISTRY: dict[str, Objective] = {
    "grpo": Objective(sample_means, two_sided),
    "grpo_token_mean": Objective(token_mean, two_sided),
    "dr_grpo": Objective(constant, two_sided),
    "gspo": Objective(sample_means, by_sample),
    "cispo": Objective(token_mean, clipped_weight),
    "one_sided": Objective(sample_means, one_sided),
}
