"""PPO's clip (arXiv 1707.06347) in the paper's normalisation: without δ, a token of negative
advantage has a gradient that grows with its ratio, without bound. Here for comparison."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from prime_trainer.objectives import grpo
from prime_trainer.objectives.base import Form, two_sided_clip

if TYPE_CHECKING:  # its settings need pydantic, which a kernel machine may lack
    from prime_trainer.config import Objective


def surrogate(log_ratio: Tensor, advantages: Tensor, settings: Objective) -> Tensor:
    """(N,) min( r·A, clip(r, 1−ε, 1+ε)·A )."""
    return two_sided_clip(log_ratio, advantages, settings.clip, math.inf)


FORM = Form(grpo.weights, surrogate, bounded=False)
