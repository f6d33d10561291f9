"""A plan's memory is what a step of the trainer really allocates."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit as kit
from typer.testing import CliRunner

from prime_core.errors import UserError
from prime_engine.tiny import write_tiny_model
from prime_trainer.cli import app
from prime_trainer.dryrun import parameters_of
from prime_trainer.loading import fill_weights
from prime_trainer.parallel import joined_world
from prime_trainer.planning import counted_step, plan_step

TOKENS = {"sample_tokens": 48, "prompt_tokens": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": True}, {"lora_rank": 4}, {"bf16": True}, {"optimizer_steps": 2}],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_the_simulated_step_allocates_what_the_real_one_does(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = kit.run_definition()
    settings = kit.settings(model, tmp_path, **changes)
    planned = plan_step(run, settings, ranks=1, **TOKENS)
    with joined_world() as world:
        real = counted_step(run, settings, world, 48, 8, fill_weights, nullcontext())
    assert abs(planned.kept - real.kept) < 0.01 * real.kept
    assert abs(planned.peak - real.peak) < 0.02 * real.peak
    assert planned.peak > planned.kept


@pytest.mark.slow
def test_with_offload_a_device_holds_only_the_layers_in_use(model: Path, tmp_path: Path) -> None:
    run, plain = kit.run_definition(), kit.settings(model, tmp_path, bf16=True)
    offloaded = kit.settings(model, tmp_path, bf16=True, cpu_offload=True)
    on, off = (plan_step(run, settings, ranks=2, **TOKENS) for settings in (plain, offloaded))
    weights = parameters_of(model)
    assert on.host == 0
    assert 16 * weights / 2 <= off.host < 1.1 * 16 * weights / 2  # with gradients
    assert off.kept < 0.02 * on.kept
    assert 0 < off.peak <= on.peak - off.host
    assert (off.gathered, off.reduced) == (on.gathered, on.reduced)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_moments_in_8_bits_take_a_quarter(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=256, layers=1)
    run, settings = kit.run_definition(), kit.settings(model, tmp_path, optimizer="adamw8bit")
    with joined_world() as world:
        real = counted_step(run, settings, world, 48, 8, fill_weights, nullcontext())
    weights = parameters_of(model)  # 4 bytes each, and twice 1 byte and a scale every 256
    for ranks in (1, 2):
        planned = plan_step(run, settings, ranks=ranks, **TOKENS)
        assert planned.kept == pytest.approx(real.kept / ranks, rel=0.02)
        assert planned.kept == pytest.approx(6.05 * weights / ranks, rel=0.03)


@pytest.mark.slow
def test_more_ranks_hold_less_and_talk_more(model: Path, tmp_path: Path) -> None:
    run, settings = kit.run_definition(), kit.settings(model, tmp_path)
    one, four = (plan_step(run, settings, ranks=ranks, **TOKENS) for ranks in (1, 4))
    weights = parameters_of(model)
    assert one.trained == four.trained == weights
    assert 12 * weights <= one.kept < 1.02 * 12 * weights
    assert 3 * weights <= four.kept < 1.1 * 3 * weights
    assert one.gathered == one.reduced == 0
    assert four.reduced >= 4 * weights
    assert four.gathered >= 4 * weights


def test_ranks_that_share_rows_hold_their_part_of_the_activations(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=128, layers=2)
    run = kit.run_definition()
    long = {"sample_tokens": 2048, "prompt_tokens": 8}
    alone, shared = (
        plan_step(
            run, kit.settings(model, tmp_path, context_parallel=size, recompute=True),
            ranks=4, **long,
        )
        for size in (1, 4)
    )  # fmt: skip
    assert shared.kept == alone.kept
    assert shared.peak - shared.kept < 0.4 * (alone.peak - alone.kept)
    # The gradients of keys and values: 2 layers, 2 heads of 32 numbers each, 4 bytes.
    assert shared.reduced - alone.reduced == pytest.approx(2 * 2 * 2 * 32 * 2048 * 4, rel=0.02)
    assert shared.gathered > alone.gathered
    with pytest.raises(UserError, match="context_parallel is 4, which does not divide"):
        plan_step(run, kit.settings(model, tmp_path, context_parallel=4), ranks=6, **long)


@pytest.mark.slow
def test_a_plan_needs_the_models_configuration_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    run = tmp_path / "run.json"
    run.write_bytes(kit.run_definition().raw())
    words = ["plan", "--model", str(tmp_path), "--run", str(run), "--ranks", "1", "--ranks", "2"]
    ended = CliRunner().invoke(app, [*words, "--memory-gib", "0.00001", "--json"])
    assert ended.exit_code == 0, ended.output
    one, two = json.loads(ended.stdout)
    assert one["fits"] is False
    assert one["micro_batches"] >= two["micro_batches"] >= 1
    assert two["step"]["ranks"] == 2
    assert two["traffic"] > 0
    plain = CliRunner().invoke(app, words)
    assert "micro-batches" in plain.stdout
    assert one["seconds_per_batch"] is None
    timed = CliRunner().invoke(app, [*words, "--peak-tflops", "1", "--json"])
    assumed, measured = json.loads(timed.stdout)[0]["seconds_per_batch"]
    assert measured / assumed == pytest.approx(0.4 / 0.166)
    assert "40% of the device's peak (assumed) to 16.6% (the best measured" in plain.stdout
    (tmp_path / "config.json").unlink()
    failed = CliRunner().invoke(app, words)
    assert "no config.json" in str(failed.exception)
    assert not torch.distributed.is_initialized()
