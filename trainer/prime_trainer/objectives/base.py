"""Common parts of all objectives: typed inputs, one signature, shared functions.

An `Objective` has two functions: `weights` gives the weight of each sample's tokens in the whole
batch, `surrogate` a token's objective. All tensors are flat over the N generated tokens of a
micro-batch; everything that depends on the whole batch is in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings

KlForm = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""exp(20) is finite in fp32; δ and the clip take effect long before it."""


@dataclass(frozen=True)
class Tokens:
    """All (N,): the behavior policy's log-probability, advantage, weight in the batch; the
    reference policy's log-probability if the objective has a KL term; the proximal policy's
    log-probability if the ratio uses it and it differs from the current policy's; `fresh`: 1 if the
    row's policy is the one that this step begins with; `samples`: int64, which sample of the
    micro-batch the token is of, 0, 1, …; `turns`: int64, which of that sample's model turns, 0, 1,
    …"""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None
    proximal: Tensor | None = None
    fresh: Tensor | None = None
    samples: Tensor | None = None
    turns: Tensor | None = None


Weights = Callable[[Sequence[int], int], list[float]]
"""(output lengths of the counted samples, the run's max_output_tokens) → weight of each token of
each sample."""
Surrogate = Callable[[Tensor, Tokens, "ObjectiveSettings"], tuple[Tensor, Tensor]]
"""(log r, tokens, settings) → (N,) objective with gradient through log r, and (N,) bool: which
tokens it clips, as the objective defines it."""


@dataclass(frozen=True)
class Objective:
    """A registered objective."""

    weights: Weights
    surrogate: Surrogate
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Settings of its own (`objective.parameters`) and their defaults."""


def two_sided_clip(
    log_ratio: Tensor, advantages: Tensor, clip: float, delta: float, clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """(N,) min( min(r, δ)·A, clip(r, 1−ε, 1+ε_high)·A ) (arXiv 2505.07291; a higher upper bound:
    DAPO, arXiv 2503.14476), and which tokens have no gradient."""
    high = 1.0 + (clip if clip_high is None else clip_high)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(max=delta) * advantages
    clipped = ratio.clamp(1.0 - clip, high) * advantages
    flat = torch.where(advantages > 0, ratio > high, (ratio < 1.0 - clip) | (ratio > delta))
    return torch.minimum(bounded, clipped), flat


def two_sided(
    log_ratio: Tensor, tokens: Tokens, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """`two_sided_clip` with the settings' bounds."""
    return two_sided_clip(
        log_ratio, tokens.advantages, settings.clip, settings.delta, settings.upper_clip
    )
