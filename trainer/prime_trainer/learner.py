"""Trains on one batch: gradient of the run's objective, clipping, AdamW, a line of metrics.

stale rows scored by their own policies, in some batches (engine–trainer mismatch)
judge (advantages, samples cut at the limit) ─► proximal log-probabilities, if configured
  for each of `optimizer_steps` shares of the batch's groups:
    a weight for each token of the share ─► plan ─► collate ─► forward, −J, backward … ─► step
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prime_core import memory
from prime_core.errors import FatalError, UserError
from prime_core.rollout import Rollout
from prime_core.run import RunDefinition
from prime_trainer.advantages import Judged, judge
from prime_trainer.checkpoint import wait_for_write
from prime_trainer.config import ObjectiveSettings, Settings
from prime_trainer.data import TrainingBatch
from prime_trainer.loading import empty_policy, fill_weights, require_fixed_positions
from prime_trainer.lora import add_adapters
from prime_trainer.loss import kl_estimate, policy_loss, token_weights
from prime_trainer.metrics import Stopwatch, describe_rows
from prime_trainer.model import Policy, Shape, shape_of
from prime_trainer.objectives import with_defaults
from prime_trainer.packing import Extra, Plan, collate, generated_logprobs, plan, quality
from prime_trainer.parallel import (
    World,
    all_finite,
    clip_gradients,
    replaced,
    rounded,
    shard,
    trained_parts,
)
from prime_trainer.samples import spread

log = logging.getLogger(__name__)

MISMATCH_ROWS = 8
"""Stale rows of a batch that are scored again, at most."""
HOST = torch.device("cpu")


class PastPolicies:
    """The trained weights of recent policies by version: this rank's shards, in host memory."""

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._parts

    @torch.no_grad()
    def keep(
        self, version: int, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None
    ) -> None:
        """Copies the current weights as those of policy `version`, in `dtype` (None: their own)."""
        self._parts[version] = [
            part.to(HOST, dtype or part.dtype, copy=True) for part in trained_parts(optimizer)
        ]

    def forget(self, oldest: int) -> None:
        """Drops policies below version `oldest`."""
        for version in [one for one in self._parts if one < oldest]:
            del self._parts[version]

    def in_place(
        self, version: int, policy: Policy, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[None]:
        """Gives `policy` the weights of `version` for a block. A collective operation."""
        return replaced(policy, optimizer, self._parts[version], HOST)


@dataclass(frozen=True)
class Learner:
    """The trained policy and its configuration. `reference`: the frozen base model, if there is a
    KL term."""

    policy: Policy
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    run: RunDefinition
    settings: Settings
    world: World
    past: PastPolicies = field(default_factory=PastPolicies)
    """The policies that stale rows of coming batches are scored by."""

    @property
    def objective(self) -> ObjectiveSettings:
        """The objective's settings."""
        return self.settings.objective

    @property
    def shape(self) -> Shape:
        """The model's compute costs."""
        return shape_of(self.policy.lm.config)

    def planned(self, lengths: Sequence[int]) -> Plan:
        """The packing plan for samples of these lengths; the same on every rank."""
        return plan(
            lengths,
            ranks=self.world.data_size,
            row_tokens=self.settings.row_tokens,
            micro_tokens=self.settings.micro_tokens,
            attention_cost=self.shape.attention_cost,
        )


Fill = Callable[[Policy, Path, torch.device], Policy]
"""Gives the parameters of a policy on the meta device their values."""


def make_learner(run: RunDefinition, settings: Settings, world: World) -> Learner:
    """Loads the base model and shards it over all ranks. Raises UserError for a folder without a
    model, an unregistered objective, or a parameter that it does not have."""
    return filled_learner(*empty_policies(run, settings, world), run, settings, world)


def empty_policies(
    run: RunDefinition, settings: Settings, world: World
) -> tuple[Policy, Policy | None]:
    """The policy to train and, if there is a KL term, its reference; both sharded, on the meta
    device. Raises UserError like `make_learner`."""
    base = settings.need("model")
    wanted = settings.objective
    with_defaults(wanted)
    policy = empty_policy(base, run.temperature)
    if settings.context_parallel > 1:
        require_fixed_positions(policy, base)
    policy.entropy_gradient = bool(wanted.entropy)
    policy.head_fp32 = settings.head_fp32
    if settings.lora_rank:
        add_adapters(policy, settings.lora_rank, settings.lora_alpha or 2 * settings.lora_rank)
    offload = settings.cpu_offload
    shard(policy, world, bf16=settings.bf16, recompute=settings.recompute, cpu_offload=offload)
    reference = None
    if wanted.kl:
        width = torch.bfloat16 if settings.bf16 else torch.float32  # never updated
        reference = empty_policy(base, run.temperature, width).requires_grad_(False)
        reference.head_fp32 = settings.head_fp32
        shard(reference, world, bf16=settings.bf16, cpu_offload=offload)
    return policy, reference


def filled_learner(
    policy: Policy,
    reference: Policy | None,
    run: RunDefinition,
    settings: Settings,
    world: World,
    fill: Fill = fill_weights,
) -> Learner:
    """Builds a learner from `empty_policies`; `fill` sets the parameters' values. Raises UserError
    if `context_parallel` does not divide the number of ranks."""
    memory.collect_as_usual()
    settings = settings.model_copy(update={"objective": with_defaults(settings.objective)})
    world = world.in_groups(settings.context_parallel)
    for one in (policy, reference):
        if one is not None:
            fill(one, settings.need("model"), world.device)
    return Learner(policy, reference, make_optimizer(policy, settings), run, settings, world)


def make_optimizer(policy: Policy, settings: Settings) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained. Raises UserError if torchao is missing."""
    kind: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    if settings.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise UserError(
                "adamw8bit needs the package torchao, which is not installed",
                hint="pip install 'prime-open[trainer-8bit]', or take --optimizer adamw",
            ) from error
        kind = AdamW8bit
    return kind(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then constant."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def groups_of(rollouts: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    """Splits the rows, in the batch's order, into groups of `size`."""
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def backward(
    learner: Learner,
    rollouts: Sequence[Rollout],
    step: int | None = None,
    proximal: Sequence[torch.Tensor] | None = None,
    watch: Stopwatch | None = None,
) -> dict[str, float]:
    """Accumulates the gradient of all `rollouts` over all ranks; returns the statistics.

    The gradient does not depend on how rows are packed, split into micro-batches or distributed
    over ranks. `step`: the policy that this step begins with, if no optimizer step of the batch was
    taken yet.
    """
    run, world = learner.run, learner.world
    watch = watch or Stopwatch()
    with watch.timed("plan"):
        judged = judge(groups_of(rollouts, run.samples_per_group), learner.objective)
        outputs = [row.generated for row in rollouts]
        name = learner.objective.name
        weights = token_weights(outputs, name, run.max_output_tokens, judged.counted)
        lengths = [len(row.prompt_tokens) + len(row.output_tokens) for row in rollouts]
        layout = learner.planned(lengths)
        used = quality(layout, lengths, learner.shape.attention_cost)
    mine = layout.ranks[world.data_rank]
    dtype = next(learner.policy.parameters()).dtype
    fresh = None if step is None else [row.policy_version == step for row in rollouts]
    extra = Extra(proximal, fresh)
    sums: dict[str, torch.Tensor] = {}
    ratio_max = torch.zeros((), dtype=dtype, device=world.device)
    for rows in mine:
        with watch.timed("collate"):
            batch, tokens = collate(
                rows, rollouts, judged.advantages, weights, world.device, dtype, extra,
                world.context,
            )  # fmt: skip
        with watch.timed("forward_backward"):
            if learner.reference is not None:
                with torch.no_grad():
                    tokens = replace(tokens, reference=learner.reference(batch)[0])
            logprobs, entropy = learner.policy(batch)
            terms = policy_loss(logprobs, entropy, tokens, learner.objective)
            # FSDP averages over ranks; the loss is a sum, and a context group's ranks all have it.
            torch.autograd.backward(terms.loss * world.data_size)
            if world.device.type == "cpu":
                memory.release()
        for name, value in {**terms.sums, "loss": terms.loss.detach().double()}.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
        ratio_max = torch.maximum(ratio_max, terms.ratio_max)
    names = sorted(sums)
    with watch.timed("statistics"):  # waits for the device and the slowest rank
        totals = world.sum_over_rows(torch.stack([sums[name] for name in names])).tolist()
    found = _statistics(dict(zip(names, totals, strict=True)), sum(outputs))
    return {
        **found,
        **_counts(judged, rollouts),
        "ratio_max": float(world.max(ratio_max)),
        "padding": used.padding,
        "packing_fill": used.fill,
        "rank_imbalance": used.imbalance,
    }


def _statistics(totals: dict[str, float], count: int) -> dict[str, float]:
    """Converts sums over tokens to means over tokens, except the loss."""
    found = {"loss": totals.pop("loss")}
    fresh = totals.pop("fresh_tokens", 0.0)
    mismatch = totals.pop("kl_mismatch", 0.0)
    if fresh:
        found["kl_mismatch"] = mismatch / fresh
    return {**found, **{name: value / count for name, value in totals.items()}}


def _counts(judged: Judged, rollouts: Sequence[Rollout]) -> dict[str, float]:
    rows = len(rollouts)
    return {
        "overlong": judged.overlong / rows,
        "masked": 1.0 - sum(judged.counted) / rows,
        "advantage_zero": sum(value == 0.0 for value in judged.advantages) / rows,
    }


def proximal_logprobs(learner: Learner, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """Log-probabilities of every sample's generated tokens under the current policy, on every
    rank."""
    world = learner.world
    outputs = [row.generated for row in rollouts]
    lengths = [len(row.prompt_tokens) + len(row.output_tokens) for row in rollouts]
    dtype = next(learner.policy.parameters()).dtype
    starts = [0]
    for size in outputs:
        starts.append(starts[-1] + size)
    whole = torch.zeros(starts[-1], dtype=dtype, device=world.device)
    nothing = [0.0] * len(rollouts)
    for rows in learner.planned(lengths).ranks[world.data_rank]:
        batch, _ = collate(
            rows, rollouts, nothing, nothing, world.device, dtype, context=world.context
        )
        with torch.no_grad():
            logprobs, _ = learner.policy(batch)
        done = 0
        for sample in (sample for row in rows for sample in row):
            size = outputs[sample]
            whole[starts[sample] : starts[sample] + size] = logprobs[done : done + size]
            done += size
    world.sum_over_rows(whole)
    return list(whole.split(outputs))


def optimizer_step(learner: Learner, loss: float, step: int) -> dict[str, Any]:
    """Clips and steps, if loss and gradient are finite; otherwise changes nothing and reports that.

    Raises FatalError if the step produced a weight that is not finite; it is then not saved.
    """
    norm = clip_gradients(learner.policy, learner.settings.gradient_clip)
    applied = math.isfinite(norm) and math.isfinite(loss)
    rate = learning_rate(learner.settings, step)
    if applied:
        for group in learner.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao compiles it into the step
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        # On a CPU compiling torchao's step takes a minute and needs a C++ compiler.
        eager = "force_eager" if learner.world.device.type == "cpu" else "default"
        with torch.compiler.set_stance(eager):
            learner.optimizer.step()
        if not all_finite(learner.policy, learner.world):
            raise FatalError(f"step {step} made weights that are not finite; it is not kept")
    else:
        log.error("step %d is skipped: loss %s, gradient norm %s", step, loss, norm)
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.world.device.type == "cpu":
        memory.release()
    return {"gradient_norm": norm, "learning_rate": rate, "applied": applied}


def _number(value: Any) -> Any:
    """Converts non-finite floats to text, because JSON has no NaN."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _worst(norms: Sequence[float]) -> float:
    """The first norm that is not finite, or else the largest."""
    return next((norm for norm in norms if not math.isfinite(norm)), max(norms))


def shares_of(groups: int, steps: int) -> list[list[int]]:
    """Group numbers of each optimizer step: every group once, sizes differing by at most one, no
    empty step."""
    steps = max(1, min(steps, groups))
    return [list(range(number, groups, steps)) for number in range(steps)]


def _rounds(settings: Settings) -> bool:
    """Whether `round_weights` is set and applies."""
    return settings.round_weights and not settings.bf16 and not settings.lora_rank


def as_published(learner: Learner) -> AbstractContextManager[None]:
    """Rounds the policy's weights to bf16 for the block, if `round_weights` is set and applies."""
    if not _rounds(learner.settings):
        return nullcontext()
    wait_for_write(learner.optimizer)
    return rounded(learner.policy, learner.optimizer)


def stale_mismatch(learner: Learner, batch: TrainingBatch) -> dict[str, float]:
    """KL(π_old ‖ π_θ) of the batch's stale rows by staleness, where π_θ has the weights of the
    policy that generated them: the difference between engine and trainer. An estimate (k3) over the
    tokens of at most MISMATCH_ROWS rows; those of policies that are not in `learner.past` are left
    out. Every rank calls it, with no optimizer step in progress."""
    rows: dict[int, list[Rollout]] = {}
    for row in batch.rollouts:
        if row.policy_version in learner.past:
            rows.setdefault(row.policy_version, []).append(row)
    if rows:
        wait_for_write(learner.optimizer)
    found = {}
    for version, of_policy in sorted(rows.items(), reverse=True):
        chosen = spread(of_policy, MISMATCH_ROWS // len(rows))
        with learner.past.in_place(version, learner.policy, learner.optimizer):
            scored = torch.cat(proximal_logprobs(learner, chosen))
        old = torch.cat([torch.from_numpy(generated_logprobs(row)) for row in chosen])
        apart = kl_estimate(old.to(scored.device, scored.dtype), scored, "k3")
        found[str(batch.step - version)] = float(apart.mean())
    return found


def _note_past(learner: Learner, step: int, version: int) -> None:
    """Keeps the present weights, those of policy `version`, if a batch that scores stale rows may
    have rows of it, and forgets policies that are too old for the batch after `step`."""
    settings, oldest = learner.settings, step + 1 - learner.run.max_staleness
    every = settings.mismatch_every
    learner.past.forget(oldest)
    if version >= oldest and every - version % every <= learner.run.max_staleness:
        dtype = torch.bfloat16 if settings.bf16 or _rounds(settings) else None
        learner.past.keep(version, learner.optimizer, dtype)


def train_step(
    learner: Learner,
    batch: TrainingBatch,
    watch: Stopwatch,
    versions: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Runs `optimizer_steps` steps on one batch; returns the batch's line of metrics without its
    waits. `versions`: the policy that the batch trains and the one that it makes (default: the
    batch's number and the next one).

    Statistics are those of the first step, whose ratios reflect the batch's own staleness, except
    the largest gradient norm and ratio, and `applied`, which is true if any step was taken.
    """
    rollouts = batch.rollouts
    before, after = versions or (batch.step, batch.step + 1)
    size = learner.run.samples_per_group
    shares = shares_of(len(batch.groups), learner.settings.optimizer_steps)
    stale: dict[str, float] = {}
    if every := learner.settings.mismatch_every:
        with watch.timed("mismatch"):
            if batch.step % every == 0:
                stale = stale_mismatch(learner, batch)
            _note_past(learner, batch.step, before)
    proximal = None
    if learner.objective.ratio == "proximal" and len(shares) > 1:
        with watch.timed("proximal"), as_published(learner):
            proximal = proximal_logprobs(learner, rollouts)
    lines: list[dict[str, Any]] = []
    for number, share in enumerate(shares):
        chosen = [group * size + sample for group in share for sample in range(size)]
        with as_published(learner):
            statistics = backward(
                learner,
                [rollouts[i] for i in chosen],
                before if number == 0 else None,
                None if proximal is None else [proximal[i] for i in chosen],
                watch,
            )
        with watch.timed("optimizer"):
            lines.append(statistics | optimizer_step(learner, statistics["loss"], batch.step))
    lengths = [len(row.prompt_tokens) + len(row.output_tokens) for row in rollouts]
    outputs = [row.generated for row in rollouts]
    line = {
        "step": batch.step,
        "version": after,
        "batch": batch.digest,
        "groups": len(batch.groups),
        "groups_alike": batch.alike / batch.seen if batch.seen else 0.0,
        "optimizer_steps": len(shares),
        **describe_rows(rollouts, batch.step, learner.run.environment),
        **lines[0],
        "gradient_norm": _worst([line["gradient_norm"] for line in lines]),
        "ratio_max": max(line["ratio_max"] for line in lines),
        "applied": any(line["applied"] for line in lines),
        "tokens": sum(lengths),
        "flops": learner.shape.training_flops(lengths, outputs),
    }
    if stale:
        line["kl_mismatch_stale"] = {age: _number(value) for age, value in stale.items()}
    return {name: _number(value) for name, value in line.items()}
