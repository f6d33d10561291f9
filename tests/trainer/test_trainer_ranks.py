"""Two and four ranks (gloo) do what one process does; two of them under torchrun."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trainer_kit as kit
from forks import run_ranks
from trainer_kit import full_state
from trainer_pool import finished, pool_server, started, until
from trainer_ranks import resumed, trained

from prime_trainer import checkpoint
from prime_trainer.config import ObjectiveSettings
from prime_trainer.parallel import World

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def trained_by(ranks: int, model: Path, data: Path) -> dict[str, Any]:
    data.mkdir()
    run_ranks(ranks, trained, model, data)
    return found_in(data, ranks)


def found_in(data: Path, ranks: int) -> dict[str, Any]:
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
    four = trained_by(4, model, root / "four")
    assert kit.relative_difference(four["gradients"], one["gradients"]) < 1e-4
    assert four["statistics"]["loss"] == pytest.approx(one["statistics"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_goes_on_with_two(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
    model: Path,
) -> None:
    root, one, _ = both
    run_ranks(2, resumed, model, root / "one")
    found = found_in(root / "one", 2)
    assert all(torch.equal(found["weights"][name], one["weights"][name]) for name in one["weights"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, dict, dict]:  # type: ignore[type-arg]
    root = tmp_path_factory.mktemp("ranks")
    return root, trained_by(1, model, root / "one"), trained_by(2, model, root / "two")


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(both: tuple[Path, dict, dict]) -> None:  # type: ignore[type-arg]
    _, one, two = both
    assert kit.relative_difference(two["gradients"], one["gradients"]) < 1e-4
    for name in ("loss", "ratio", "ratio_max", "entropy", "kl_reference", "clipped"):
        assert two["statistics"][name] == pytest.approx(one["statistics"][name], rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_two_ranks_score_stale_rows_by_the_policy_that_generated_them(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
) -> None:
    for found in both[1:]:
        own, present = found["stale"]
        assert own < 1e-9
        assert present > 1e-5


@pytest.mark.slow
def test_checkpoints_are_named_by_global_rank_and_load_into_another_number_of_ranks(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
    model: Path,
    world: World,
) -> None:
    # An ancestor named them by local rank: two machines overwrote each other's.
    root, _, two = both
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(two["files"])
    run, wanted = kit.run_definition(), ObjectiveSettings(kl=0.001, entropy=1e-4)
    alone = kit.learner(model, root / "two", world, run, objective=wanted)
    state = checkpoint.load(root / "two", run.digest(), alone.policy, alone.optimizer, world)
    assert state is not None
    assert (state.step, state.ranks) == (2, 2)
    weights = full_state(alone.policy)
    assert all(torch.equal(weights[name], two["weights"][name]) for name in weights)


@pytest.mark.slow
def test_two_launchers_as_on_two_machines_and_weights_in_host_memory_give_the_same_bits(
    both: tuple[Path, dict, dict],  # type: ignore[type-arg]
    model: Path,
) -> None:
    root, _, two = both
    data = root / "launchers"
    data.mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    commands = [
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
         "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port),
         str(HERE / "trainer_ranks.py"), str(model), str(data)]
        for number in (0, 1)
    ]  # fmt: skip
    with started(commands[0]) as child:
        ended = finished(commands[1])
        said, _ = child.communicate(timeout=120)
    assert (ended.returncode, child.returncode) == (0, 0), ended.stdout + said
    found = found_in(data, 2)
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(found["files"])
    assert all(torch.equal(found["weights"][name], two["weights"][name]) for name in two["weights"])


STEPS = 3


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    """Digests of what two ranks publish when nothing happens to them."""
    root = tmp_path_factory.mktemp("straight")
    with pool_server(root, model) as pool:
        for step in range(STEPS):
            pool.seal_random(step)
        ended = finished([*TORCHRUN, "2", *pool.command(root / "data", "--steps", str(STEPS))[1:]])
        assert ended.returncode == 0, ended.stdout
        assert [s.manifest.version for s in pool.published()] == list(range(STEPS + 1))
        return [s.manifest.result_digest for s in pool.published()]


@pytest.mark.slow
def test_the_whole_program_runs_on_two_ranks(straight: list[str]) -> None:
    assert len(set(straight)) == STEPS + 1


@pytest.mark.soak
def test_two_ranks_of_which_one_is_killed_publish_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, model: Path, straight: list[str]
) -> None:
    """Either of them: the other ends with it, and the next start goes on with the same batches."""
    data = tmp_path / "data"
    with pool_server(tmp_path, model) as pool:
        command = [*TORCHRUN, "2", *pool.command(data, "--steps", str(STEPS))[1:]]
        for step, victim in enumerate((0, 1)):
            pool.seal_random(step)
            with started(command) as child:
                drained = threading.Thread(target=child.stdout.read)  # type: ignore[union-attr]
                drained.start()
                until(lambda s=step: len(pool.published()) > s + 1, "the policy")
                ranks = sorted(psutil.Process(child.pid).children(), key=lambda p: p.pid)
                ranks[victim].send_signal(signal.SIGKILL)
                assert child.wait(timeout=90) != 0
                psutil.wait_procs(ranks, timeout=60)
                assert not any(rank.is_running() for rank in ranks)
                drained.join()
        pool.seal_random(STEPS - 1)
        ended = finished(command)
        assert ended.returncode == 0, ended.stdout
        assert [s.manifest.result_digest for s in pool.published()] == straight
    lines = (data / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))
