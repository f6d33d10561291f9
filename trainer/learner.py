"""One optimizer step: batch in, gradient of the run's objective, new weights, a line of metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from protocol.core.errors import FatalError
from protocol.core.rollout import Rollout
from protocol.core.run import MICRO, RunDefinition
from trainer.advantages import group_advantages
from trainer.collate import collate
from trainer.config import Settings
from trainer.data import TrainingBatch
from trainer.loss import ObjectiveSettings, policy_loss, token_weights
from trainer.metrics import Stopwatch, describe_rows
from trainer.model import Policy, load_policy
from trainer.packing import plan
from trainer.parallel import World, accumulating, all_finite, clip_gradients, shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learner:
    """What is trained and how. `reference`: the frozen base model, if the run has a KL term."""

    policy: Policy
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    run: RunDefinition
    settings: Settings
    world: World

    @property
    def objective(self) -> ObjectiveSettings:
        """The run's objective in plain floats."""
        o = self.run.objective
        return ObjectiveSettings(
            normalisation=o.name,
            clip=o.clip_micro / MICRO,
            delta=o.delta_micro / MICRO,
            kl=o.kl_micro / MICRO,
            entropy=o.entropy_micro / MICRO,
        )


def make_learner(run: RunDefinition, settings: Settings, world: World) -> Learner:
    """Loads the base model and shards it over all ranks."""
    base = settings.need("model")
    policy = shard(load_policy(base, run.temperature), world, bf16=settings.bf16)
    reference = None
    if run.objective.kl_micro:
        reference = load_policy(base, run.temperature).requires_grad_(False)
        reference = shard(reference, world, bf16=settings.bf16)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    return Learner(policy, reference, optimizer, run, settings, world)


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then constant."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def backward(learner: Learner, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Accumulates the whole batch's gradient, all ranks together; returns the step's statistics.

    The same gradient however rows are packed, cut into micro-batches or spread over ranks.
    """
    run, settings, world = learner.run, learner.settings, learner.world
    size = run.samples_per_group
    advantages = [
        value
        for start in range(0, len(rollouts), size)
        for value in group_advantages(
            [row.reward for row in rollouts[start : start + size]], run.objective.advantage
        )
    ]
    outputs = [len(row.output_tokens) for row in rollouts]
    weights = token_weights(outputs, run.objective.name, run.max_output_tokens)
    lengths = [len(row.prompt_tokens) + len(row.output_tokens) for row in rollouts]
    layout = plan(
        lengths,
        ranks=world.size,
        row_tokens=settings.row_tokens,
        micro_tokens=settings.micro_tokens,
    )
    mine = layout.ranks[world.rank]
    dtype = next(learner.policy.parameters()).dtype
    sums: dict[str, torch.Tensor] = {}
    ratio_max = torch.zeros((), dtype=dtype, device=world.device)
    for number, rows in enumerate(mine):
        batch, tokens = collate(rows, rollouts, advantages, weights, world.device, dtype)
        if learner.reference is not None:
            with torch.no_grad():
                tokens = replace(tokens, reference=learner.reference(batch)[0])
        with accumulating(learner.policy, last=number == len(mine) - 1):
            logprobs, entropy = learner.policy(batch)
            terms = policy_loss(logprobs, entropy, tokens, learner.objective)
            # FSDP averages over ranks; the loss is a sum.
            torch.autograd.backward(terms.loss * world.size)
        for name, value in {**terms.sums, "loss": terms.loss.detach().double()}.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
        ratio_max = torch.maximum(ratio_max, terms.ratio_max)
    names = sorted(sums)
    totals = world.sum(torch.stack([sums[name] for name in names])).tolist()
    statistics = dict(zip(names, totals, strict=True))
    loss = statistics.pop("loss")
    count = sum(outputs)
    return {
        "loss": loss,
        **{name: value / count for name, value in statistics.items()},
        "ratio_max": float(world.max(ratio_max)),
        "padding": 1.0 - sum(lengths) / max(1, _padded(layout.ranks, lengths)),
    }


def _padded(ranks: Sequence[Sequence[Sequence[Sequence[int]]]], lengths: Sequence[int]) -> int:
    """Tokens that are computed, padding included."""
    batches = [rows for micro in ranks for rows in micro if rows]
    return sum(len(rows) * max(sum(lengths[i] for i in row) for row in rows) for rows in batches)


def optimizer_step(learner: Learner, loss: float, step: int) -> dict[str, Any]:
    """Clips and steps, if loss and gradient are finite; otherwise changes nothing and says so.

    Raises FatalError if the step made a weight that is not finite: nothing of it is kept.
    """
    norm = clip_gradients(learner.policy, learner.settings.gradient_clip)
    applied = math.isfinite(norm) and math.isfinite(loss)
    rate = learning_rate(learner.settings, step)
    if applied:
        for group in learner.optimizer.param_groups:
            group["lr"] = rate
        learner.optimizer.step()
        if not all_finite(learner.policy, learner.world):
            raise FatalError(f"step {step} made weights that are not finite; it is not kept")
    else:
        log.error("step %d is skipped: loss %s, gradient norm %s", step, loss, norm)
    learner.optimizer.zero_grad(set_to_none=True)
    return {"gradient_norm": _number(norm), "learning_rate": rate, "applied": applied}


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)


def train_step(learner: Learner, batch: TrainingBatch, watch: Stopwatch) -> dict[str, Any]:
    """One optimizer step on one batch; the step's line of metrics without its waits."""
    rollouts = batch.rollouts
    with watch.timed("forward_backward"):
        statistics = backward(learner, rollouts)
    with watch.timed("optimizer"):
        report = optimizer_step(learner, statistics["loss"], batch.step)
    return {
        "step": batch.step,
        "version": batch.step + 1,
        "batch": batch.digest,
        "groups": len(batch.groups),
        **describe_rows(rollouts, batch.step),
        **{name: _number(value) for name, value in statistics.items()},
        **report,
    }
