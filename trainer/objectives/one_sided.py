"""PPO's clip (arXiv 1707.06347) in the paper's normalisation: without δ, a token of negative
advantage has a gradient that grows with its ratio, without bound. Here for comparison."""

from __future__ import annotations

import math

from torch import Tensor

from trainer.objectives import grpo
from trainer.objectives.base import Form, ObjectiveSettings, two_sided_clip


def surrogate(log_ratio: Tensor, advantages: Tensor, settings: ObjectiveSettings) -> Tensor:
    """(N,) min( r·A, clip(r, 1−ε, 1+ε)·A )."""
    return two_sided_clip(log_ratio, advantages, settings.clip, math.inf)


FORM = Form(grpo.weights, surrogate, bounded=False)
