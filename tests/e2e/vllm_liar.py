"""`python -P vllm_liar.py --engine vllm …`: the worker of a node that decodes with the policy's
weights and proves with others.

It announces the exact class of the policy's weights, which it has. Takes the honest worker's
arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from prime_engine.exact import ProofPart
from prime_engine.shared import SharedEngine
from prime_node.worker.__main__ import main
from prime_node.worker.rollout_builder import Job, RolloutBuilder

MOVED = 1 + 1e-6
"""Factor of one norm's weights while the liar proves."""


class MovedWeights:
    """An engine whose proof passes have other weights."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def proof_pass(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], temperature: float
    ) -> Iterator[ProofPart]:
        engine: Any = self._shared.engine

        def prove() -> list[ProofPart]:
            (norm,) = engine._llm.apply_model(_first_norm)
            with torch.inference_mode():
                true = norm.clone()
                norm.mul_(MOVED)
            try:
                return list(engine.proof_pass(prompt_tokens, output_tokens, temperature))
            finally:
                with torch.inference_mode():
                    norm.copy_(true)

        # as one operation: no row of another lease is generated meanwhile
        yield from self._shared._thread.run(prove)


def _first_norm(model: torch.nn.Module) -> torch.Tensor:
    names = dict(model.named_parameters())
    return names["model.layers.0.input_layernorm.weight"]


class Liar(RolloutBuilder):
    def make(self, job: Job, engine: Any) -> bytes:
        return super().make(job, MovedWeights(engine))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(make_builder=Liar))
