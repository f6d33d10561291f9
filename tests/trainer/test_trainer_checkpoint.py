"""Resume is exact to the bit, and a half-written checkpoint is no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit as kit

from prime_core.errors import FatalError, UserError
from prime_core.ids import Digest, Step
from prime_trainer import checkpoint
from prime_trainer.checkpoint import STATE_NAME, TrainerState
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import Learner, train_step
from prime_trainer.metrics import MetricsFile, Stopwatch
from prime_trainer.parallel import World, full_state

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


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    model: Path, tmp_path: Path, world: World
) -> None:
    straight = kit.learner(model, tmp_path / "straight", world, RUN)
    train(straight, TrainerState(RUN.digest()), 5)

    data = tmp_path / "data"
    first = kit.learner(model, data, world, RUN)
    state = train(first, TrainerState(RUN.digest()), 2)
    checkpoint.save(data, state, first.policy, first.optimizer, world)
    train(first, state, 3)  # work after the checkpoint, lost in the crash

    second = kit.learner(model, data, world, RUN)
    resumed = checkpoint.load(data, RUN.digest(), second.policy, second.optimizer, world)
    assert resumed is not None
    assert resumed.step == 2
    assert resumed.recent_groups() == state.recent_groups()
    train(second, resumed, 5)
    ours, theirs = weights(second), weights(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


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


def test_the_last_two_checkpoints_are_kept(model: Path, tmp_path: Path, world: World) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    for step in (8, 9, 10, 11):
        state = TrainerState(RUN.digest(), step=step)
        checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"10", "11"}
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    assert latest.name == "11"  # by number, not by letter


def test_another_runs_checkpoint_is_refused(model: Path, tmp_path: Path, world: World) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(OTHER, step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    with pytest.raises(UserError, match="another run"):
        checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)


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
        state = state.after(((Digest(f"0x{step:064x}"), 0),), {"step": step}, 2)
    assert sorted(state.trained) == [3, 4, 5]
    assert TrainerState.from_json(state.to_json()) == state


@pytest.mark.parametrize(
    ("text", "last", "expected"),
    [
        ("", None, []),
        ("", {"step": 0}, [0]),  # killed between checkpoint and line
        ('{"step": 0}\n', {"step": 0}, [0]),
        ('{"step": 0}\n{"st', {"step": 1}, [0, 1]),  # killed in the middle of a line
        ('{"step": 0}\n{"step": 1}\n', {"step": 0}, [0]),  # a line without its checkpoint
        ('{"step": 0}\n', None, []),
    ],
)
def test_each_step_has_one_line_of_metrics_after_any_crash(
    tmp_path: Path, text: str, last: dict[str, Any] | None, expected: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    file = MetricsFile(path)
    file.repair(last)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected
    file.append({"step": 9})
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 9}


def test_a_damaged_line_of_metrics_is_named_and_nothing_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 0}\n\x00\x00\n{"step": 2}\n'
    path.write_text(text)
    with pytest.raises(UserError, match=r"line 2 of .* is no step's line"):
        MetricsFile(path).repair({"step": 2})
    assert path.read_text() == text
