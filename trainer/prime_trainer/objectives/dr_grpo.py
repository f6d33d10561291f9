"""Dr-GRPO: a constant divisor, so that a sample's length does not change its tokens' weight."""

from __future__ import annotations

from collections.abc import Sequence

from prime_trainer.objectives.base import Objective, two_sided


def weights(output_lengths: Sequence[int], max_output_tokens: int) -> list[float]:
    """1/(samples·max_output_tokens) (arXiv 2503.20783)."""
    return [1.0 / (len(output_lengths) * max_output_tokens)] * len(output_lengths)


OBJECTIVE = Objective(weights, two_sided)
