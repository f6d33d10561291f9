"""CISPO: REINFORCE with a clipped importance weight (MiniMax-M1, arXiv 2506.13585). No token is
without gradient; a large ratio only stops to grow in weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from prime_trainer.objectives import grpo_token_mean
from prime_trainer.objectives.base import MAX_LOG_RATIO, Objective, Tokens

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings


def surrogate(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """(N,) min(r, 1 + ε_high)·A·log π without gradient through the weight, and which weights are
    clipped. log r has the gradient of log π."""
    ratio = log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()
    most = 1.0 + settings.upper_clip
    return ratio.clamp(max=most) * tokens.advantages * log_ratio, ratio > most


OBJECTIVE = Objective(grpo_token_mean.weights, surrogate)
