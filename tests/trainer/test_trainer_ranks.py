"""Two and four ranks under torchrun (gloo) do what one process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit as kit
from trainer_pool import finished, pool_server

from protocol.core.run import Objective
from trainer import checkpoint
from trainer.parallel import World, full_state

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launched(ranks: int, model: Path, data: Path, *, resume: bool = False) -> dict[str, Any]:
    data.mkdir(exist_ok=resume)
    script = [str(HERE / "trainer_ranks.py"), str(model), str(data), *["resume"] * resume]
    ended = finished([*TORCHRUN, str(ranks), *script])
    assert ended.returncode == 0, ended.stdout
    found: dict[str, Any] = torch.load(data / "found.pt", weights_only=True)
    assert found["size"] == ranks
    return found


@pytest.mark.slow
def test_four_ranks_give_the_gradient_of_one(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
    model: Path,
) -> None:
    # Five rows on four ranks: some have a micro-batch without work.
    root, one, _ = both
    four = launched(4, model, root / "four")
    assert kit.relative_difference(four["gradients"], one["gradients"]) < 1e-4
    assert four["statistics"]["loss"] == pytest.approx(one["statistics"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_goes_on_with_two(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
    model: Path,
) -> None:
    root, one, _ = both
    found = launched(2, model, root / "one", resume=True)
    assert all(torch.equal(found["weights"][name], one["weights"][name]) for name in one["weights"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, dict, dict]:  # type: ignore[type-arg]
    root = tmp_path_factory.mktemp("ranks")
    return root, launched(1, model, root / "one"), launched(2, model, root / "two")


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(both: tuple[Path, dict, dict]) -> None:  # type: ignore[type-arg]
    _, one, two = both
    assert kit.relative_difference(two["gradients"], one["gradients"]) < 1e-4
    for name in ("loss", "ratio", "ratio_max", "entropy", "kl_reference", "clipped"):
        assert two["statistics"][name] == pytest.approx(one["statistics"][name], rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_checkpoints_are_named_by_global_rank_and_load_into_another_number_of_ranks(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
    model: Path,
    world: World,
) -> None:
    # An ancestor named them by local rank: two machines overwrote each other's.
    root, _, two = both
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(two["files"])
    run = kit.run_definition(Objective(kl_micro=1000, entropy_micro=100))
    alone = kit.learner(model, root / "two", world, run)
    state = checkpoint.load(root / "two", run.digest(), alone.policy, alone.optimizer, world)
    assert state is not None
    assert state.step == 2
    weights = full_state(alone.policy)
    assert all(torch.equal(weights[name], two["weights"][name]) for name in weights)


@pytest.mark.slow
def test_the_whole_program_runs_on_two_ranks(tmp_path: Path, model: Path) -> None:
    with pool_server(tmp_path, model) as pool:
        for step in range(2):
            pool.seal_random(step)
        command = pool.command(tmp_path / "data", "--steps", "2")[1:]
        ended = finished([*TORCHRUN, "2", *command])
        assert ended.returncode == 0, ended.stdout
        assert [s.manifest.version for s in pool.published()] == [0, 1, 2]
