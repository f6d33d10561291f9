"""The whole program: bad batches, alarms, adapters, plans, a finished run as a folder."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import httpx
import pytest
import torch
import trainer_kit as kit
from safetensors.torch import load_file
from trainer_pool import Pool, asked_to_stop, finished, pool_server, started, until
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_core.errors import UserError
from prime_trainer.cli import with_file
from prime_trainer.config import load
from prime_trainer.dryrun import parameters_of, sources
from prime_trainer.finished import curve, export_run


def lines(data: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (data / "metrics.jsonl").read_text().splitlines()]


def broken(pool: Pool, step: int) -> None:
    """A batch whose file is of a policy from the future."""
    pool.seal(step, kit.rows(3, pool.run.samples_per_group, seed=step, version=step + 1))


def weights(data: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(data / "origin" / "policies" / str(version) / "model.safetensors")


@pytest.mark.slow
def test_a_batch_that_breaks_a_rule_ends_the_run_with_its_file_named(
    pool: Pool, tmp_path: Path
) -> None:
    pool.seal_random(0)
    broken(pool, 1)
    ended = finished(pool.command(tmp_path / "data", "--steps", "2"))
    assert ended.returncode == 77, ended.stdout
    last = ended.stdout.strip().splitlines()[-1]
    assert last.startswith("trainer: file 0x")
    assert "policy 2" in last
    assert "Traceback" not in ended.stdout
    assert len(pool.published()) == 2  # what was whole is published, nothing of the bad batch


@pytest.mark.slow
def test_a_batch_that_is_skipped_publishes_the_weights_unchanged_and_says_so(
    pool: Pool, tmp_path: Path
) -> None:
    pool.seal_random(0)
    broken(pool, 1)
    pool.seal_random(2)
    data = tmp_path / "data"
    ended = finished(pool.command(data, "--steps", "3", "--bad-batch", "skip"))
    assert ended.returncode == 0, ended.stdout
    first, second, third = lines(data)
    assert (first["applied"], second["applied"], third["applied"]) == (True, False, True)
    assert "policy 2" in str(second["skipped"])
    before, same, after = (weights(data, version) for version in (1, 2, 3))
    assert all(torch.equal(before[name], same[name]) for name in before)
    assert any(not torch.equal(same[name], after[name]) for name in before)
    assert [s.manifest.version for s in pool.published()] == [0, 1, 2, 3]


@pytest.mark.slow
def test_three_skipped_batches_in_a_row_end_the_run_in_any_case(pool: Pool, tmp_path: Path) -> None:
    for step in range(4):
        broken(pool, step)
    ended = finished(pool.command(tmp_path / "data", "--steps", "4", "--bad-batch", "skip"))
    assert ended.returncode == 70, ended.stdout
    assert "3 steps in a row changed no weight" in ended.stdout


@pytest.mark.slow
def test_an_alarm_that_stops_the_run_leaves_its_batch_kept_and_the_next_untouched(
    pool: Pool, tmp_path: Path
) -> None:
    for step in range(2):
        pool.seal_random(step)
    data = tmp_path / "data"
    ended = finished(
        pool.command(data, "--steps", "2", "--alarm-ratio", "0.001", "--alarm-action", "stop")
    )
    assert ended.returncode == 70, ended.stdout
    assert "alarm at step 0: ratio_max" in ended.stdout
    assert len(lines(data)) == 1
    assert lines(data)[0]["alarms"]


@pytest.mark.slow
def test_adapters_are_trained_resumed_and_published_merged(pool: Pool, tmp_path: Path) -> None:
    for step in range(2):
        pool.seal_random(step)
    data = tmp_path / "data"
    for steps in ("1", "2"):
        ended = finished(pool.command(data, "--steps", steps, "--lora-rank", "4"))
        assert ended.returncode == 0, ended.stdout
    assert [s.manifest.version for s in pool.published()] == [0, 1, 2]
    assert set(weights(data, 2)) == set(weights(data, 0))


@pytest.mark.slow
def test_a_run_shows_itself_and_ends_as_a_model_folder(pool: Pool, tmp_path: Path) -> None:
    data, events = tmp_path / "data", tmp_path / "events"
    command = [*pool.command(data), "--metrics-port", "0", "--tensorboard", str(events)]
    for step in range(2):
        pool.seal_random(step)
    with started(command) as child:
        assert child.stdout is not None
        url = next(line.split()[1] for line in child.stdout if line.startswith("metrics: "))
        until(lambda: "prime_trainer_step 1" in httpx.get(url).text, "the second step")
        page = httpx.get(url).text
        code, said = asked_to_stop(child)
        assert code == 0, said
    for name in ("reward", "length_error", "staleness", "ratio", "clipped", "entropy", "kl_old",
                 "gradient_norm", "tokens_s", "seconds", "background", "overlong"):  # fmt: skip
        assert f"prime_trainer_{name}" in page, name
    assert len(list(events.iterdir())) == 1
    out = tmp_path / "out"
    assert export_run(data, out) == 2
    training = json.loads((out / "trainer.json").read_text())
    assert training["objective"]["name"] == "grpo"
    assert "wallet" not in training
    (listed,) = [f for f in pool.published()[2].manifest.files if f.name == "trainer.json"]
    assert listed.size == (out / "trainer.json").stat().st_size
    assert {"README.md", "run.json", "policy.json", "metrics.jsonl", "curve.svg"} <= {
        path.name for path in out.iterdir()
    }
    assert pool.run.digest() in (out / "README.md").read_text()
    assert (out / "run.json").read_bytes() == pool.run.raw()
    assert AutoModelForCausalLM.from_pretrained(out, local_files_only=True).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(out, local_files_only=True).eos_token_id is not None
    with pytest.raises(UserError, match="exists already"):
        export_run(data, out)
    with pytest.raises(UserError, match="no policy 9"):
        export_run(data, tmp_path / "nine", 9)


def test_a_curve_without_steps_is_still_a_picture() -> None:
    assert "no step was trained" in curve([])
    assert curve([{"step": 3, "reward": 0.5}]).count("polyline") == 1


@pytest.mark.slow
def test_the_plan_is_printed_and_nothing_is_done(pool: Pool, tmp_path: Path, model: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('beta2 = 0.5\nlearning_rate = 0.1\nbad_batch = "skip"\n')
    command = pool.command(tmp_path / "data", "--dry-run", "--json", f"@{file}")
    ended = finished(command)
    assert ended.returncode == 0, ended.stdout
    reported = json.loads(ended.stdout.strip().splitlines()[-1])
    assert reported["settings"]["beta2"] == {"value": "0.5", "from": str(file)}
    assert reported["settings"]["learning_rate"] == {"value": "0.001", "from": "flag"}
    assert reported["settings"]["beta1"]["from"] == "default"
    assert reported["estimate"]["parameters"] == parameters_of(model)
    assert reported["estimate"]["parameters"] == sum(
        tensor.numel() for tensor in load_file(model / "model.safetensors").values()
    )
    assumed, measured = reported["estimate"]["seconds_per_batch"]
    assert 0 < assumed < measured
    weights_and_optimizer = 12 * reported["estimate"]["parameters"]
    assert (
        weights_and_optimizer <= reported["estimate"]["step"]["kept"] < 1.05 * weights_and_optimizer
    )
    assert reported["estimate"]["step"]["trained"] == reported["estimate"]["parameters"]
    tokens = reported["estimate"]["tokens_per_batch"]
    assert 8 * tokens < reported["estimate"]["batches"] < 16 * tokens
    assert not (tmp_path / "data").exists()
    assert pool.published() == []
    plain = finished([word for word in command if word != "--json"])
    assert "at most on each of 1" in plain.stdout
    assert "for two batches" in plain.stdout
    assert "objective   grpo" in plain.stdout


def test_each_setting_is_shown_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("beta2 = 0.5\nwarmup_steps = 3\n")
    flags: dict[str, object] = {"beta1": 0.7, "warmup_steps": None}
    environment = {"PRIME_TRAINER_BETA2": "0.6"}
    found = sources(load(flags, file), flags, file, environment)
    assert [found[n][1] for n in ("beta1", "beta2", "warmup_steps", "steps")] == [
        "flag", "environment", str(file), "default",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [["run", "@", "f.toml"], ["run", "@f.toml"]])
def test_at_names_the_settings_file(words: list[str]) -> None:
    assert with_file(words) == ["run", "--config", "f.toml"]


@pytest.mark.parametrize(
    "seed",
    [pytest.param(0, marks=pytest.mark.slow)]
    + [pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2)],
)
def test_killed_at_random_instants_it_publishes_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, model: Path, seed: int
) -> None:
    steps, rng = 6, random.Random(seed)
    root = tmp_path / "straight"
    root.mkdir()
    digests, seconds, struck = [], 0.0, 0
    for data, kills in ((tmp_path / "a", 0), (tmp_path / "b", 5)):
        home = root / data.name
        home.mkdir()
        with pool_server(home, model) as pool:
            for step in range(steps):
                pool.seal_random(step)
            command = pool.command(data, "--steps", str(steps))
            for _ in range(kills):
                with started(command) as child:
                    assert child.stdout is not None
                    # from its first word on, any instant of two thirds of the undisturbed run
                    child.stdout.readline()
                    instant = time.monotonic() + rng.uniform(0.0, seconds * 2 / 3)
                    until(lambda end=instant: time.monotonic() > end, "the instant")
                    struck += child.poll() is None
                    child.send_signal(signal.SIGKILL)
                    child.wait()
            with started(command) as child:
                assert child.stdout is not None
                child.stdout.readline()
                start = time.monotonic()
                said, _ = child.communicate()
                seconds = time.monotonic() - start
            assert child.returncode == 0, said
            digests.append([s.manifest.result_digest for s in pool.published()])
            assert [line["step"] for line in lines(data)] == list(range(steps))
    assert struck, "each kill came after its end"
    assert digests[0] == digests[1]
