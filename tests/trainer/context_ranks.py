"""What the ranks of test_trainer_context.py do: gradients and metrics of four, of which two or all
four share rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trainer_kit as kit

from prime_core.ids import ZERO_DIGEST, Step
from prime_trainer.config import ObjectiveSettings
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import backward, proximal_logprobs, train_step
from prime_trainer.metrics import Stopwatch
from prime_trainer.parallel import World, joined_world

CASES: dict[str, dict[str, Any]] = {
    # Four or five rows, each a micro-batch of its own: some data-parallel ranks have none.
    "plain": {
        "objective": ObjectiveSettings(kl=0.001, entropy=1e-4),
        "row_tokens": 50, "micro_tokens": 50,
    },
    # Micro-batches of two rows and one ratio for all tokens of a sample.
    "sliding": {
        "objective": ObjectiveSettings(name="gspo", clip=0.5), "recompute": True,
        "row_tokens": 50, "micro_tokens": 110,
    },
    "lora": {"lora_rank": 4, "row_tokens": 50, "micro_tokens": 50},
}  # fmt: skip
PACKING = ("padding", "packing_fill", "rank_imbalance")


def trained(models: dict[str, Path], data: Path, world: World, size: int) -> dict[str, Any]:
    """Log-probabilities, gradients and metrics of each case if `size` ranks share rows."""
    found = {}
    for case, changes in CASES.items():
        model = models.get(case, models["plain"])
        learner = kit.learner(model, data, world, context_parallel=size, **changes)
        rows = kit.conversations(kit.rows())
        scored = torch.cat(proximal_logprobs(learner, rows))
        backward(learner, rows, 0)
        for parameter in learner.policy.parameters():
            if not parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        gradients = kit.gradients(learner.policy)
        learner.policy.zero_grad()
        groups = tuple(tuple(rows[i : i + 4]) for i in range(0, len(rows), 4))
        line = train_step(learner, TrainingBatch(Step(0), ZERO_DIGEST, groups, ()), Stopwatch())
        numbers = {
            name: value
            for name, value in line.items()
            if isinstance(value, int | float) and name not in PACKING
        }
        found[case] = {"scored": scored, "gradients": gradients, "line": numbers}
    return found


def shared(models: dict[str, Path], data: Path) -> None:
    """The work of a rank: writes what two and four ranks that share rows find."""
    with joined_world() as world:
        found = {size: trained(models, data, world, size) for size in (2, 4)}
        if world.leads:
            torch.save(found, data / "found.pt")
