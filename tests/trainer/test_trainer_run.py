"""`trainer run` against a real orchestrator API: each step trained and published once."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
import torch
import trainer_kit as kit
from safetensors.torch import load_file
from trainer_pool import Pool, asked_to_stop, finished, pool_server, started, until

from prime_broadcast.manifest import verify_folder
from prime_chain.keystore import save_keystore
from prime_core.errors import UserError
from prime_orchestrator.store import batches
from prime_trainer import checkpoint
from prime_trainer.evaluate import evaluate
from prime_trainer.follow import due
from prime_trainer.run import publish_by_hand
from prime_trainer.samples import chosen_samples

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.tiny_model(tmp_path_factory.mktemp("base") / "tiny")


def lines(data: Path) -> list[dict[str, object]]:
    path = data / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[list[str], list[dict[str, object]]]:
    """Policy digests and metrics of a run that no one disturbed."""
    root = tmp_path_factory.mktemp("straight")
    with pool_server(root, model) as pool:
        for step in range(STEPS):
            pool.seal_random(step)
        ended = finished(pool.command(root / "data", "--steps", str(STEPS)))
        assert ended.returncode == 0, ended.stdout
        published = pool.published()
        for signed in published:
            version = signed.manifest.version
            folder = root / "data" / "origin" / "policies" / str(version)
            names = {entry.name for entry in signed.manifest.files}
            for path in folder.iterdir():  # deltas are next to the policy's own files
                if path.name.startswith("delta-"):
                    path.unlink()
            verify_folder(folder, signed.manifest)
            weights = load_file(folder / "model.safetensors")
            assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
            assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
        texts = chosen_samples(root / "data", step=None, order="best", count=100)
        assert len(texts) == 8
        assert {text["step"] for text in texts} == {0}, "every tenth batch's texts are kept"
        assert all(text["prompt"] and text["turns"] for text in texts)
        return [signed.manifest.digest() for signed in published], lines(root / "data")


def test_each_sealed_batch_becomes_one_published_policy(
    uninterrupted: tuple[list[str], list[dict[str, object]]],
) -> None:
    digests, metrics = uninterrupted
    assert len(set(digests)) == len(digests) == STEPS + 1
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert all(line["applied"] for line in metrics)
    assert metrics[3]["staleness"] == {"0": 8, "2": 4}
    for name in ("wait_batch", "forward_backward", "optimizer", "wait_kept"):
        assert name in metrics[1]["seconds"]  # type: ignore[operator]
    for name in ("sealed", "fetch", "checkpoint", "publish"):  # next to the loop's own work
        assert name in metrics[2]["background"]  # type: ignore[operator]


@pytest.mark.slow
def test_a_trainer_killed_again_and_again_trains_no_batch_twice_and_publishes_the_same_bytes(
    pool: Pool, tmp_path: Path, uninterrupted: tuple[list[str], list[dict[str, object]]]
) -> None:
    data = tmp_path / "data"
    command = pool.command(data, "--steps", str(STEPS))
    for step in range(STEPS):
        pool.seal_random(step)
    checkpoints = data / "checkpoints"
    moments = [
        lambda: (checkpoints / ".staging-1").exists(),  # in the middle of a checkpoint
        lambda: (checkpoints / "2").exists(),  # trained, not yet published
        lambda: len(pool.published()) >= 4,  # published, the next one under way
    ]
    for reached in moments:
        with started(command) as child:
            until(lambda r=reached: r() or child.poll() is not None, "the moment")
            child.send_signal(signal.SIGKILL)
            child.wait()
    ended = finished(command)
    assert ended.returncode == 0, ended.stdout
    digests, metrics = uninterrupted
    assert [signed.manifest.digest() for signed in pool.published()] == digests
    found = lines(data)
    assert [line["step"] for line in found] == list(range(STEPS))
    for ours, theirs in zip(found, metrics, strict=True):
        for name in ("batch", "loss", "gradient_norm", "reward", "rows"):
            assert ours[name] == theirs[name], name


@pytest.mark.slow
def test_it_waits_for_batches_serves_its_policies_and_ends_cleanly_on_sigterm(
    pool: Pool, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with started(pool.command(data)) as child:
        until(lambda: len(pool.published()) == 1, "policy 0")
        until(lambda: bool(pool.relays()), "the origin's announcement")
        (origin,) = pool.relays()
        assert (data / "origin.url").read_text().strip() == origin
        manifest = httpx.get(f"{origin}/policies/0/manifest.json").json()
        assert manifest["manifest"]["result_digest"] == pool.run.base_model
        pool.seal_random(0)
        until(lambda: len(pool.published()) == 2, "policy 1")
        code, said = asked_to_stop(child)
        assert code == 0, said
        with pytest.raises(httpx.ConnectError):  # no one is left at the origin's port
            httpx.get(f"{origin}/policies/0/manifest.json")
    assert len(lines(data)) == 1


@pytest.mark.slow
def test_a_second_trainer_in_the_same_folder_is_refused_and_the_first_goes_on(
    pool: Pool, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with started(pool.command(data)) as child:
        until(lambda: len(pool.published()) == 1, "policy 0")
        ended = finished(pool.command(data))
        assert ended.returncode == 64, ended.stdout
        assert f"another trainer (process {child.pid}) works in {data}" in ended.stdout
        assert "Traceback" not in ended.stdout
        by_hand = kit.settings(
            pool.model, data, orchestrator=pool.url, wallet=pool.wallet, password_file=pool.password
        )
        with pytest.raises(UserError, match="another trainer"):
            publish_by_hand(by_hand, pool.model, 7)
        pool.seal_random(0)
        until(lambda: len(pool.published()) == 2, "policy 1")


@pytest.mark.slow
def test_a_stopping_trainer_leaves_the_ready_batches(pool: Pool, tmp_path: Path) -> None:
    sealed = 30
    for step in range(sealed):
        pool.seal_random(step)
    data = tmp_path / "data"
    with started(pool.command(data)) as child:
        until(lambda: len(lines(data)) > 0, "the first step")
        code, said = asked_to_stop(child)
        assert code == 0, said
    assert 0 < len(lines(data)) < sealed


@pytest.mark.slow
def test_an_orchestrator_that_comes_late_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    with started(
        [*pool.command(tmp_path / "data"), "--orchestrator", "http://127.0.0.1:9"]
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "does not answer" in line:
                break
        else:
            pytest.fail("it did not say what it waits for")
        code, said = asked_to_stop(child)
        assert code == 0, said


@pytest.mark.slow
def test_an_orchestrator_that_never_answered_ends_the_first_start_and_no_later_one(
    pool: Pool, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    silent = ["--orchestrator", "http://127.0.0.1:9", "--first-answer-seconds", "0"]
    ended = finished([*pool.command(data), *silent])
    assert ended.returncode == 69, ended.stdout
    [said] = [line for line in ended.stdout.splitlines() if line.startswith("trainer: ")]
    assert "127.0.0.1:9 does not answer" in said
    assert "check the address" in said
    (data / "run.json").write_bytes(pool.run.raw())  # as an earlier start leaves it
    with started([*pool.command(data), *silent]) as child:
        assert child.stdout is not None
        assert any("trying again" in line for line in child.stdout)
        code, said = asked_to_stop(child)
        assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--wallet", "{tmp}/none.json"], 64, "no keystore"),
        (["--password-file", "{tmp}/wrong"], 64, "password does not open"),
        (["--wallet", "{tmp}/stranger.json"], 64, "not the trainer of pool"),
        (["--model", "{tmp}/other"], 64, "base model is"),
        (["--model", "{tmp}"], 64, "is not a model folder"),
        (["--pool", "99"], 64, "serves pool 7"),
        (["--gradient-clip", "-1"], 64, "gradient_clip"),
        (["--origin-port", "{taken}"], 64, "cannot listen"),
    ],
    ids=lambda value: "",
)
def test_a_users_mistake_is_one_sentence_and_an_exit_code(
    pool: Pool, tmp_path: Path, flags: list[str], code: int, words: str
) -> None:
    (tmp_path / "wrong").write_text("wrong")
    save_keystore(tmp_path / "stranger.json", b"\x33" * 32, "correct horse", light=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if any("other" in flag for flag in flags):
            kit.tiny_model(tmp_path / "other", seed=9)
        filled = [f.format(tmp=tmp_path, taken=taken.getsockname()[1]) for f in flags]
        ended = finished([*pool.command(tmp_path / "data"), *filled])
    assert ended.returncode == code, ended.stdout
    assert words in ended.stdout
    assert "Traceback" not in ended.stdout
    assert ended.stdout.strip().splitlines()[-1].startswith("trainer: ")


@pytest.mark.slow
def test_a_trainer_killed_between_publication_and_checkpoint_makes_no_version_again(
    pool: Pool, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    command = pool.command(data, "--checkpoint-every", "2")
    for step in range(3):
        pool.seal_random(step)
    with started(command) as child:
        until(lambda: len(pool.published()) == 4, "policy 3")
        child.send_signal(signal.SIGKILL)  # batch 2 is trained and published, not in a checkpoint
        child.wait()
    assert [path.name for path in (data / "checkpoints").iterdir()] == ["2"]
    before = [signed.manifest.digest() for signed in pool.published()]
    weights = data / "origin" / "policies" / "3" / "model.safetensors"
    bits = weights.read_bytes()
    with started([*command, "--learning-rate", "1e-2"]) as child:
        until(lambda: len(pool.published()) == 5, "policy 4")
        with pool.store.read() as connection:
            assert batches.next_step(connection) == 4  # no batch 3: policy 4 exists already
        pool.seal(4, kit.rows(3, pool.run.samples_per_group, seed=9, version=4))
        until(lambda: len(pool.published()) == 6, "policy 5")
        code, said = asked_to_stop(child)
        assert code == 0, said
    assert [signed.manifest.digest() for signed in pool.published()][:4] == before
    assert weights.read_bytes() == bits
    made = [(line["step"], line["version"], line["staleness_mean"]) for line in lines(data)]
    assert [one[:2] for one in made] == [(0, 1), (1, 2), (2, 3), (2, 4), (4, 5)]
    origins = [
        json.loads((data / "origin" / "policies" / str(version) / "trainer.json").read_text())
        for version in (3, 4, 5)
    ]
    assert [(one["batch"], one["before"]) for one in origins] == [(2, 2), (2, 2), (4, 4)]
    assert checkpoint.latest(data) == data / "checkpoints" / "5"  # written at SIGTERM


@pytest.mark.slow
def test_every_second_policy_is_evaluated_by_a_follower_without_a_key(
    pool: Pool, tmp_path: Path
) -> None:
    """It is stopped after the first one, and goes on while the trainer has gone further."""
    data, found = tmp_path / "data", tmp_path / "follower"
    command = [
        sys.executable, "-m", "prime_trainer.cli", "follow", "--orchestrator", pool.url,
        "--data", str(found), "--every", "2", "--problems", "4", "--samples", "2",
        "--tensorboard", str(tmp_path / "events"),
    ]  # fmt: skip
    record = found / "evaluations.jsonl"

    def versions() -> list[int]:
        lines = record.read_text().splitlines() if record.is_file() else []
        return [json.loads(line)["version"] for line in lines]

    with started(pool.command(data)) as trainer:
        with started(command) as follower:
            until(lambda: versions() == [0], "policy 0's evaluation")
            code, said = asked_to_stop(follower)
            assert code == 130, said
        with record.open("a") as torn:
            torn.write('{"version": 1')  # the machine stopped in the middle of a line
        for step in range(3):
            pool.seal_random(step)
        until(lambda: len(pool.published()) == 4, "policy 3")
        ended = finished([*command, "--until", "2"])
        assert ended.returncode == 0, ended.stdout
        assert "policy 2, 4 held-out problems: reward" in ended.stdout
        assert versions() == [0, 2]
        code, said = asked_to_stop(trainer)
        assert code == 0, said
    by_hand = evaluate(found / "policies" / "2", pool.run, problems=4, seed=0, samples=2)
    line = json.loads(record.read_text().splitlines()[-1])
    assert line["found"]["mean_reward"] == by_hand.reward.mean
    assert not list((found / "answers").iterdir())
    assert b"heldout/mean_reward" in b"".join(
        path.read_bytes() for path in (tmp_path / "events").iterdir()
    )


@pytest.mark.slow
def test_a_follower_of_a_pool_that_holds_out_too_few_problems_is_refused(
    pool: Pool, tmp_path: Path
) -> None:
    assert [due(latest, last, 3) for latest, last in ((None, -1), (0, -1), (2, 0), (7, 0))] == [
        None, 0, None, 6,
    ]  # fmt: skip
    with started(pool.command(tmp_path / "data")):
        until(lambda: len(pool.published()) == 1, "policy 0")
        ended = finished([
            sys.executable, "-m", "prime_trainer.cli", "follow", "--orchestrator", pool.url,
            "--data", str(tmp_path / "follower"), "--problems", "100000",
        ])  # fmt: skip
    assert ended.returncode == 64, ended.stdout
    assert "100000 problems were asked for; the run holds out" in ended.stdout
