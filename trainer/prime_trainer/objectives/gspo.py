"""GSPO: one ratio a sample, the geometric mean of its tokens' (arXiv 2507.18071), with the
two-sided bound. Use small clips: `clip` 3e-4 and `clip_high` 4e-4 in the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prime_trainer.objectives import grpo
from prime_trainer.objectives.base import Objective, Tokens, two_sided

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings


def surrogate(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """`two_sided` of each sample's ratio, at each of its tokens. Needs `tokens.samples`."""
    if tokens.samples is None:
        raise ValueError("GSPO needs to know which sample each token is of")
    zeros = torch.zeros_like(log_ratio)  # at most as many samples as tokens
    sums = zeros.index_add(0, tokens.samples, log_ratio)
    sizes = zeros.index_add(0, tokens.samples, torch.ones_like(log_ratio))
    return two_sided((sums / sizes.clamp(min=1))[tokens.samples], tokens, settings)


OBJECTIVE = Objective(grpo.weights, surrogate)
