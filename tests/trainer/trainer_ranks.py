"""What the ranks of test_trainer_ranks.py do: one batch's gradient, two steps, a checkpoint.

As a program, MODEL DATA: with weights in host memory, under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import trainer_kit as kit
from trainer_kit import full_state

from prime_core.ids import ZERO_DIGEST, Step
from prime_trainer import checkpoint
from prime_trainer.checkpoint import TrainerState
from prime_trainer.config import ObjectiveSettings
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import Learner, backward, train_step
from prime_trainer.metrics import Stopwatch
from prime_trainer.parallel import World, joined_world

RUN = kit.run_definition()
WANTED = ObjectiveSettings(kl=0.001, entropy=1e-4)


def made(model: Path, data: Path, world: World, **changes: object) -> Learner:
    """A learner whose rows hold 30 tokens."""
    return kit.learner(
        model, data, world, RUN, objective=WANTED, row_tokens=30, micro_tokens=30, **changes
    )


def resumed(model: Path, data: Path) -> None:
    """Writes the weights of the last checkpoint below `data`."""
    with joined_world() as world:
        learner = made(model, data, world)
        checkpoint.load(data, RUN.digest(), learner.policy, learner.optimizer, world)
        weights = full_state(learner.policy)
        if world.leads:
            torch.save({"weights": weights, "size": world.size}, data / "found.pt")


def trained(model: Path, data: Path, *, cpu_offload: bool = False) -> None:
    """Writes a batch's gradient, and the weights after two steps with their checkpoint."""
    with joined_world() as world:
        # Five rows on two ranks: one rank has a micro-batch more than the other.
        learner = made(model, data, world, cpu_offload=cpu_offload, mismatch_every=1)
        statistics = backward(learner, kit.rows())
        gradients = kit.gradients(learner.policy)
        learner.policy.zero_grad()
        state = TrainerState(RUN.digest())
        for step in range(2):
            rollouts = kit.rows(seed=step)
            groups = tuple(tuple(rollouts[i : i + 4]) for i in range(0, len(rollouts), 4))
            batch = TrainingBatch(Step(step), ZERO_DIGEST, groups, ())
            line = train_step(learner, batch, Stopwatch())
            state = state.after((), line, 2)
        checkpoint.save(data, state, learner.policy, learner.optimizer, world)
        files = sorted(p.name for p in (data / "checkpoints" / "2").iterdir())
        weights = full_state(learner.policy)
        rows = kit.answered(learner, 2)
        for step in (2, 3):
            groups = tuple(tuple(rows[i : i + 4]) for i in range(0, len(rows), 4))
            line = train_step(
                learner, TrainingBatch(Step(step), ZERO_DIGEST, groups, ()), Stopwatch()
            )
        if world.leads:
            found = {
                "stale": (line["kl_mismatch_stale"]["1"], line["kl_old"]),
                "gradients": gradients,
                "statistics": statistics,
                "weights": weights,
                "files": files,
                "size": world.size,
            }
            torch.save(found, data / "found.pt")


if __name__ == "__main__":
    trained(Path(sys.argv[1]), Path(sys.argv[2]), cpu_offload=True)
