"""PPO's clip (arXiv 1707.06347) with GRPO's weights. Without δ, the gradient of a token with
negative advantage grows with its ratio without bound. Included for comparison."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from prime_trainer.objectives import grpo
from prime_trainer.objectives.base import Objective, Tokens, two_sided_clip

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings


def surrogate(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """(N,) min( r·A, clip(r, 1−ε, 1+ε_high)·A ), and which tokens have no gradient."""
    return two_sided_clip(
        log_ratio, tokens.advantages, settings.clip, math.inf, settings.upper_clip
    )


OBJECTIVE = Objective(grpo.weights, surrogate)
