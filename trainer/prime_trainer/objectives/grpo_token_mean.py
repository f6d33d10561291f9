"""GRPO with the mean over all tokens of the batch: samples count in proportion to their length."""

from __future__ import annotations

from collections.abc import Sequence

from prime_trainer.objectives.base import Objective, two_sided


def weights(output_lengths: Sequence[int], max_output_tokens: int) -> list[float]:
    """1/Σ|o_i| (DAPO, arXiv 2503.14476)."""
    return [1.0 / sum(output_lengths)] * len(output_lengths)


OBJECTIVE = Objective(weights, two_sided)
