"""Resume is exact to the bit, and a half-written checkpoint is not a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trainer_kit as kit
from trainer_kit import full_state

from prime_core.errors import FatalError, UserError
from prime_core.ids import Digest, Step
from prime_engine.tiny import write_tiny_model
from prime_trainer import checkpoint
from prime_trainer.checkpoint import STATE_NAME, TrainerState
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import Learner, train_step
from prime_trainer.metrics import MetricsFile, Stopwatch
from prime_trainer.parallel import World

RUN = kit.run_definition()
OTHER = Digest("0x" + "77" * 32)


def batch(step: int) -> TrainingBatch:
    rollouts = kit.rows(seed=step)
    size = RUN.samples_per_group
    groups = tuple(tuple(rollouts[i : i + size]) for i in range(0, len(rollouts), size))
    keys = tuple((Digest(f"0x{step:064x}"), number) for number in range(len(groups)))
    return TrainingBatch(Step(step), OTHER, groups, keys)


def train(learner: Learner, state: TrainerState, until: int) -> TrainerState:
    while state.step < until:
        found = batch(state.step)
        line = train_step(learner, found, Stopwatch())
        state = state.after(found.keys, line, RUN.max_staleness)
    return state


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return full_state(learner.policy)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, world: World, optimizer: str, request: pytest.FixtureRequest
) -> None:
    if optimizer == "adamw8bit":
        request.getfixturevalue("torchao")
        # Not compiled, which takes minutes: a test of test_trainer_plan.py steps with it compiled.
        request.addfinalizer(partial(torch.compiler.set_stance, "default"))
        torch.compiler.set_stance("force_eager")
    model = write_tiny_model(tmp_path / "model", hidden=64, layers=2)
    changes = {"optimizer": optimizer}
    straight = kit.learner(model, tmp_path / "straight", world, RUN, **changes)
    train(straight, TrainerState(RUN.digest()), 5)

    data = tmp_path / "data"
    first = kit.learner(model, data, world, RUN, **changes)
    state = train(first, TrainerState(RUN.digest()), 2)
    checkpoint.save(data, state, first.policy, first.optimizer, world)
    train(first, state, 3)  # work after the checkpoint, lost in the crash

    second = kit.learner(model, data, world, RUN, **changes)
    resumed = checkpoint.load(data, RUN.digest(), second.policy, second.optimizer, world)
    assert resumed is not None
    assert resumed.step == 2
    assert resumed.recent_groups() == state.recent_groups()
    train(second, resumed, 5)
    ours, theirs = weights(second), weights(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_an_optimizer_that_was_not_fused_goes_on_fused(
    model: Path, tmp_path: Path, world: World
) -> None:
    older, newer = (kit.learner(model, tmp_path, world, RUN) for _ in range(2))
    older.optimizer.param_groups[0]["fused"] = None
    state = train(older, TrainerState(RUN.digest()), 1)
    checkpoint.save(tmp_path, state, older.policy, older.optimizer, world)
    assert checkpoint.load(tmp_path, RUN.digest(), newer.policy, newer.optimizer, world) == state
    assert newer.optimizer.param_groups[0]["fused"]
    train(newer, state, 2)


def test_a_checkpoint_holds_the_moment_it_was_begun_however_far_training_has_gone_on(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = train(learner, TrainerState(RUN.digest()), 1)
    then = weights(learner)
    saving = checkpoint.begin(tmp_path, state, learner.policy, learner.optimizer, world)
    assert checkpoint.latest(tmp_path) is None  # it does not count yet
    train(learner, state, 3)  # … while the thread writes
    saving.finish(world.leads)
    other = kit.learner(model, tmp_path, world, RUN)
    assert checkpoint.load(tmp_path, RUN.digest(), other.policy, other.optimizer, world) == state
    now = weights(other)
    assert all(torch.equal(now[name], then[name]) for name in then)
    assert any(not torch.equal(weights(learner)[name], then[name]) for name in then)


def test_a_checkpoint_of_more_or_fewer_ranks_is_read_and_said_so(
    model: Path, tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(RUN.digest(), step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    path = tmp_path / "checkpoints" / "1" / STATE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ranks": 4}))
    found = checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)
    assert found is not None
    assert "written by 4 ranks and is read by 1" in caplog.text


def test_a_half_written_checkpoint_is_ignored_and_cleared_away(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(RUN.digest(), step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    staging = tmp_path / "checkpoints" / ".staging-2"
    staging.mkdir()
    (staging / "__0_0.distcp").write_bytes(b"half")
    found = checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)
    assert found is not None
    assert found.step == 1
    assert not staging.exists()


def test_the_newest_checkpoints_are_kept(model: Path, tmp_path: Path, world: World) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    for step in (8, 9, 11, 100):
        state = TrainerState(RUN.digest(), step=step)
        checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"11", "100"}
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    assert latest.name == "100"  # by number, not by letter


def test_another_runs_checkpoint_is_refused(model: Path, tmp_path: Path, world: World) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(OTHER, step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    with pytest.raises(UserError, match="another run"):
        checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)


def test_a_checkpoint_without_the_shards_of_another_machine_is_refused(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(RUN.digest(), step=1)
    saving = checkpoint.begin(tmp_path, state, learner.policy, learner.optimizer, world)
    alone = replace(saving, state=replace(saving.state, ranks=2))
    with pytest.raises(FatalError, match=r"shards of 1 of 2 ranks .* shared disk"):
        alone.finish(world.leads)
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"run_digest": "0x", "step": "x"}'])
def test_a_damaged_state_is_never_guessed_at(
    model: Path, tmp_path: Path, world: World, text: str
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(RUN.digest(), step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    (tmp_path / "checkpoints" / "1" / STATE_NAME).write_text(text)
    with pytest.raises(FatalError, match="damaged"):
        checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)


def test_groups_are_remembered_as_long_as_staleness_could_bring_them_back() -> None:
    state = TrainerState(RUN.digest())
    for step in range(6):
        state = state.after(
            ((Digest(f"0x{step:064x}"), 0),), {"step": step, "version": step + 1}, 2
        )
    assert sorted(state.trained) == [3, 4, 5]
    assert TrainerState.from_json(state.to_json()) == state


@pytest.mark.parametrize(
    ("text", "last", "newest", "expected"),
    [
        ("", None, 0, []),
        ("", 1, 1, [1]),  # killed between checkpoint and line
        ('{"version": 1}\n', 1, 1, [1]),
        ('{"version": 1}\n{"ve', 2, 2, [1, 2]),  # killed in the middle of a line
        ('{"version": 1}\n{"version": 2}\n', 1, 1, [1]),  # neither in a checkpoint nor published
        ('{"version": 1}\n{"version": 2}\n{"version": 3}\n', 1, 2, [1, 2]),  # 2 is published
        ('{"version": 1}\n', None, 0, []),
    ],
)
def test_each_version_has_one_line_of_metrics_after_any_crash(
    tmp_path: Path, text: str, last: int | None, newest: int, expected: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    file = MetricsFile(path)
    file.repair(None if last is None else {"version": last}, newest)
    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == expected
    file.append({"step": 9, "version": 10})
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 9, "version": 10}


def test_a_damaged_line_of_metrics_is_named_and_nothing_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = '{"version": 1}\n\x00\x00\n{"version": 3}\n'
    path.write_text(text)
    with pytest.raises(UserError, match=r"line 2 of .* is not a step's line"):
        MetricsFile(path).repair({"version": 3}, 3)
    assert path.read_text() == text
