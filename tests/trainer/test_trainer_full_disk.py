"""A disk that is full: one sentence, and nothing half-written is resumed from or published.

The system's limit on a file's size stands for the full disk: it refuses the very same writes, in
Python's files, torch's and safetensors' alike.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trainer_kit as kit
from full_disk import a_full_disk
from torch.distributed.checkpoint import state_dict_saver
from trainer_kit import full_state

from prime_core.errors import FatalError, UnavailableError
from prime_trainer import checkpoint
from prime_trainer.checkpoint import TrainerState
from prime_trainer.loading import load_policy
from prime_trainer.metrics import MetricsFile
from prime_trainer.parallel import World
from prime_trainer.publish import WEIGHTS, export

RUN = kit.run_definition()


@pytest.mark.parametrize("largest_file", [0, 1_000, 40_000])
def test_a_checkpoint_that_does_not_fit_is_one_sentence_and_never_resumed_from(
    model: Path, tmp_path: Path, world: World, largest_file: int
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    first, second = (TrainerState(RUN.digest(), step=step) for step in (1, 2))
    checkpoint.save(tmp_path, first, learner.policy, learner.optimizer, world)
    with (
        a_full_disk(largest_file),
        pytest.raises(UnavailableError, match="checkpoint 2 could not be written") as caught,
    ):
        checkpoint.save(tmp_path, second, learner.policy, learner.optimizer, world)
    assert "free some space" in str(caught.value)
    assert "\n" not in str(caught.value)
    found = checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)
    assert found == first
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    checkpoint.save(tmp_path, second, learner.policy, learner.optimizer, world)  # space again


def test_a_defect_in_saving_is_not_blamed_on_the_disk(
    model: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    def broken(*_: object, **__: object) -> None:
        raise CheckpointException("write", {0: (TypeError("ours"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(state_dict_saver, "save", broken)
    learner = kit.learner(model, tmp_path, world, RUN)
    with pytest.raises(CheckpointException):
        checkpoint.save(
            tmp_path, TrainerState(RUN.digest()), learner.policy, learner.optimizer, world
        )


def test_a_checkpoint_with_cut_off_tensors_is_said_to_be_unreadable(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, RUN)
    state = TrainerState(RUN.digest(), step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    for shard in (tmp_path / "checkpoints" / "1").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:5_000])
    with pytest.raises(FatalError, match="cannot be read"):
        checkpoint.load(tmp_path, RUN.digest(), learner.policy, learner.optimizer, world)


@pytest.mark.parametrize("largest_file", [0, 40_000])
def test_a_policy_that_does_not_fit_leaves_nothing_to_publish(
    model: Path, tmp_path: Path, world: World, largest_file: int
) -> None:
    state = full_state(kit.learner(model, tmp_path, world, RUN).policy)
    folder = tmp_path / "export"
    with (
        a_full_disk(largest_file),
        pytest.raises(UnavailableError, match="policy to publish could not be written"),
    ):
        export(state, model, folder)
    assert not folder.exists()
    export(state, model, folder)
    assert (folder / WEIGHTS).stat().st_size > 40_000
    load_policy(folder, 1.0)
    name = min(state)
    for wrong, words in (
        ({name: state[name][:-1]}, "the base's is"),
        ({other: tensor for other, tensor in state.items() if other != name}, "lacks"),
    ):
        spoiled = wrong if words == "lacks" else state | wrong
        with pytest.raises(FatalError, match=words):
            export(spoiled, model, tmp_path / "spoiled")
    assert not (tmp_path / "spoiled").exists()


def test_a_metrics_line_that_does_not_fit_is_one_sentence_and_written_at_the_restart(
    tmp_path: Path,
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 0, "version": 1})
    long = {"step": 1, "version": 2, "words": "x" * 20_000}
    with a_full_disk(10_000), pytest.raises(UnavailableError, match="metrics of step 1"):
        file.append(long)
    with a_full_disk(10_000), pytest.raises(UnavailableError, match="the metrics file"):
        file.repair(long, 2)
    file.repair(long, 2)
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [0, 1]
