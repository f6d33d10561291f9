"""Advantages: how much better a sample is than the others for the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prime_core.rollout import Rollout
from prime_trainer.config import ObjectiveSettings

AdvantageForm = Literal["mean_std", "mean", "leave_one_out"]
STD_FLOOR = 1e-6
UNCOMPARED = ("tool_limit", "ungraded")
"""Endings of samples with which the others of their group are not compared."""


@dataclass(frozen=True)
class Judged:
    """One value per sample, in the batch's order: its advantage, and whether it counts in the
    loss."""

    advantages: list[float]
    counted: list[bool]
    overlong: int
    """Samples cut at the length limit, independent of their treatment."""


def group_advantages(rewards_G: Sequence[float], form: AdvantageForm) -> list[float]:
    """Advantages of one group of G rewards, in float64; they sum to zero in every form.

    - mean_std: (r − mean) / (std + 1e-6), std with G − 1 (GRPO, arXiv 2402.03300)
    - mean: r − mean (Dr-GRPO, arXiv 2503.20783)
    - leave_one_out: r − mean of the others = (r − mean)·G/(G − 1) (RLOO, arXiv 2402.14740)

    Raises ValueError for fewer than two rewards or one that is not finite.
    """
    count = len(rewards_G)
    if count < 2 or not all(math.isfinite(reward) for reward in rewards_G):
        raise ValueError("a group needs two or more finite rewards")
    mean = math.fsum(rewards_G) / count
    centered = [reward - mean for reward in rewards_G]
    if form == "mean":
        return centered
    if form == "leave_one_out":
        return [value * count / (count - 1) for value in centered]
    std = math.sqrt(math.fsum(value * value for value in centered) / (count - 1))
    return [value / (std + STD_FLOOR) for value in centered]


def judge(groups: Sequence[Sequence[Rollout]], objective: ObjectiveSettings) -> Judged:
    """Every sample's advantage in its group, and the treatment of samples cut at the limit:

    - keep: like any other
    - mask: its reward stays in its group's baseline, its tokens have weight zero (DAPO)
    - penalise: its reward is lowered before the group is compared

    A sample that ended because a call reached a limit (`tool_limit`), or that could not be graded
    (`ungraded`), has advantage 0 and does not count, and its group is compared without it.
    """
    advantages: list[float] = []
    counted: list[bool] = []
    overlong = 0
    penalty = objective.overlong_penalty if objective.overlong == "penalise" else 0.0
    for group in groups:
        cut = [row.finish_reason == "length" for row in group]
        overlong += sum(cut)
        rewards = [
            row.reward - (penalty if is_cut else 0.0)
            for row, is_cut in zip(group, cut, strict=True)
        ]
        answered = [row.finish_reason not in UNCOMPARED for row in group]
        compared = [reward for reward, kept in zip(rewards, answered, strict=True) if kept]
        found = iter(
            group_advantages(compared, objective.advantage)
            if len(compared) > 1
            else [0.0] * len(compared)
        )
        advantages += [next(found) if kept else 0.0 for kept in answered]
        counted += [
            kept and not (is_cut and objective.overlong == "mask")
            for is_cut, kept in zip(cut, answered, strict=True)
        ]
    return Judged(advantages, counted, overlong)
