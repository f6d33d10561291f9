"""GRPO as in the paper: the mean over samples of each sample's mean over its tokens,
1/(S·|o_i|)."""

from __future__ import annotations

from collections.abc import Sequence

from prime_trainer.objectives.base import Objective, two_sided


def weights(output_lengths: Sequence[int], max_output_tokens: int) -> list[float]:
    """1/(samples·|o_i|) (arXiv 2402.03300, 2505.07291)."""
    return [1.0 / (len(output_lengths) * length) for length in output_lengths]


OBJECTIVE = Objective(weights, two_sided)
