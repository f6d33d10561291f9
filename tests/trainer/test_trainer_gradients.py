"""One gradient, however rows are packed, cut into micro-batches or spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainer_kit as kit

from prime_core.rollout import Rollout
from prime_trainer.advantages import group_advantages
from prime_trainer.config import ObjectiveSettings
from prime_trainer.learner import Learner, backward
from prime_trainer.loss import policy_loss, token_weights
from prime_trainer.packing import collate
from prime_trainer.parallel import World

OBJECTIVES = (
    ObjectiveSettings(name="grpo"),
    ObjectiveSettings(name="grpo_token_mean", advantage="mean", entropy=0.001),
    ObjectiveSettings(name="dr_grpo", advantage="leave_one_out", kl=0.001),
    ObjectiveSettings(name="gspo", clip=0.5, clip_high=0.6),
    ObjectiveSettings(name="cispo", clip_high=0.5),
)


def one_at_a_time(learner: Learner, rollouts: list[Rollout]) -> float:
    """The slow way: each sample alone in a row, one backward each; returns the loss."""
    run, size = learner.run, learner.run.samples_per_group
    weights = token_weights(
        [len(r.output_tokens) for r in rollouts], learner.objective.name, run.max_output_tokens
    )
    dtype = next(learner.policy.parameters()).dtype
    loss = 0.0
    for number, rollout in enumerate(rollouts):
        start = number - number % size
        rewards = [r.reward for r in rollouts[start : start + size]]
        advantage = group_advantages(rewards, learner.objective.advantage)[number - start]
        batch, tokens = collate(
            [[0]], [rollout], [advantage], [weights[number]], torch.device("cpu"), dtype
        )
        if learner.reference is not None:
            with torch.no_grad():
                tokens = replace(tokens, reference=learner.reference(batch)[0])
        logprobs, entropy = learner.policy(batch)
        terms = policy_loss(logprobs, entropy, tokens, learner.objective)
        terms.loss.backward()
        loss += float(terms.loss.detach())
    return loss


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
@pytest.mark.parametrize(("row_tokens", "micro_tokens"), [(1, 1), (64, 64), (200, 10_000)])
def test_packing_and_accumulation_leave_the_gradient_alone_in_float64(
    model: Path,
    tmp_path: Path,
    world: World,
    objective: ObjectiveSettings,
    row_tokens: int,
    micro_tokens: int,
) -> None:
    rollouts = kit.rows()
    wanted = {"objective": objective, "row_tokens": row_tokens, "micro_tokens": micro_tokens}
    packed = kit.double_learner(kit.learner(model, tmp_path, world, **wanted), world)
    statistics = backward(packed, rollouts)
    slow = kit.double_learner(packed, world)
    loss = one_at_a_time(slow, rollouts)
    found = kit.relative_difference(kit.gradients(packed.policy), kit.gradients(slow.policy))
    assert found < 1e-9
    assert statistics["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12)


def turns_of(rollout: Rollout) -> list[Rollout]:
    """Each turn of the model as a row whose prompt is everything before it."""
    turns, at = [], 0
    whole = (*rollout.prompt_tokens, *rollout.output_tokens)
    for number, length in enumerate(rollout.spans or (len(rollout.output_tokens),)):
        start, end = at, at + length
        if number % 2 == 0:
            turns.append(
                replace(
                    rollout,
                    prompt_tokens=whole[: len(rollout.prompt_tokens) + start],
                    output_tokens=rollout.output_tokens[start:end],
                    logprobs=rollout.logprobs[start:end],
                    spans=(),
                )
            )
        at = end
    return turns


@pytest.mark.parametrize(
    "objective", [one for one in OBJECTIVES if one.name != "gspo"], ids=lambda one: one.name
)
def test_a_conversation_is_trained_as_its_turns_are(
    model: Path, tmp_path: Path, world: World, objective: ObjectiveSettings
) -> None:
    """The environment's words are read, and neither learned nor weighed. (GSPO's ratio is that of
    all turns together.)"""
    rollouts = kit.conversations(kit.rows())
    run, size = kit.run_definition(), 4
    learner = kit.double_learner(kit.learner(model, tmp_path, world, objective=objective), world)
    statistics = backward(learner, rollouts)
    slow = kit.double_learner(learner, world)
    generated = [sum(len(turn.output_tokens) for turn in turns_of(row)) for row in rollouts]
    weights = token_weights(generated, objective.name, run.max_output_tokens)
    loss = 0.0
    for number, rollout in enumerate(rollouts):
        start = number - number % size
        rewards = [r.reward for r in rollouts[start : start + size]]
        advantage = group_advantages(rewards, objective.advantage)[number - start]
        for turn in turns_of(rollout):
            batch, tokens = collate(
                [[0]], [turn], [advantage], [weights[number]], torch.device("cpu"), torch.float64
            )
            if slow.reference is not None:
                with torch.no_grad():
                    tokens = replace(tokens, reference=slow.reference(batch)[0])
            logprobs, entropy = slow.policy(batch)
            terms = policy_loss(logprobs, entropy, tokens, objective)
            terms.loss.backward()
            loss += float(terms.loss.detach())
    found = kit.relative_difference(kit.gradients(learner.policy), kit.gradients(slow.policy))
    assert found < 1e-9
    assert statistics["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12)


def test_packing_leaves_the_gradient_alone_in_float32(
    model: Path, tmp_path: Path, world: World
) -> None:
    rollouts = kit.rows(6, seed=3)
    packed = kit.learner(model, tmp_path, world, row_tokens=96, micro_tokens=300)
    backward(packed, rollouts)
    slow = kit.learner(model, tmp_path, world)
    one_at_a_time(slow, rollouts)
    assert kit.relative_difference(kit.gradients(packed.policy), kit.gradients(slow.policy)) < 1e-4


def test_the_ratio_is_against_the_files_log_probabilities(
    model: Path, tmp_path: Path, world: World
) -> None:
    # An ancestor took the trainer's current ones: staleness was never corrected.
    learner = kit.learner(model, tmp_path, world)
    rollouts = kit.rows()
    first = backward(learner, rollouts)
    shifted = [replace(r, logprobs=tuple(value - 1.0 for value in r.logprobs)) for r in rollouts]
    learner.policy.zero_grad()
    second = backward(learner, shifted)
    assert second["ratio"] == pytest.approx(first["ratio"] * torch.e, rel=1e-4)
    assert first["ratio"] != pytest.approx(1.0, abs=0.05)


def test_a_sample_longer_than_a_row_keeps_its_own_reward(
    model: Path, tmp_path: Path, world: World
) -> None:
    rollouts = kit.rows(seed=5, longest=39)
    narrow = kit.learner(model, tmp_path, world, row_tokens=8, micro_tokens=8)
    wide = kit.learner(model, tmp_path, world, row_tokens=400, micro_tokens=4000)
    backward(narrow, rollouts)
    backward(wide, rollouts)
    assert kit.relative_difference(kit.gradients(narrow.policy), kit.gradients(wide.policy)) < 1e-4


def test_each_sample_counts_once(model: Path, tmp_path: Path, world: World) -> None:
    # An ancestor's rebalancing duplicated a micro-batch: swapping order must change nothing, and
    # the gradient of a batch is the sum of its groups' (dr_grpo's weights do not depend on rows).
    wanted = ObjectiveSettings(name="dr_grpo")
    rollouts = kit.rows(4)
    whole = kit.double_learner(
        kit.learner(model, tmp_path, world, objective=wanted, micro_tokens=80), world
    )
    backward(whole, rollouts)
    parts = kit.double_learner(whole, world)
    for start in range(0, len(rollouts), 4):
        backward(parts, rollouts[start : start + 4])
    scaled = {name: g / 4 for name, g in kit.gradients(parts.policy).items()}
    assert kit.relative_difference(kit.gradients(whole.policy), scaled) < 1e-9


def test_a_rank_without_work_adds_nothing_to_the_gradient(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world)
    empty, tokens = collate([], [], [], [], world.device)
    logprobs, entropy = learner.policy(empty)
    loss = policy_loss(logprobs, entropy, tokens, learner.objective).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(g.abs().sum()) == 0.0 for g in kit.gradients(learner.policy).values())
