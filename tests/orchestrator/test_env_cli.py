"""`orchestrator env`: from an empty folder to an approved environment, and no other way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prime_core.errors import (
    ConflictError,
    FatalError,
    NotFoundError,
    PolicyError,
    UntrustedError,
    UserError,
)
from prime_core.ids import Digest
from prime_envs.registry import environment_for
from prime_envs.sandbox import kernel
from prime_orchestrator.cli.env import Queue, Record, app
from prime_orchestrator.cli.run import define

pytestmark = pytest.mark.skipif(
    not kernel.supported(), reason="the sandbox needs Linux on x86-64 or aarch64"
)
MODEL = Path(__file__).resolve().parents[2] / "devnet" / "model"


def env(*words: object) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words], standalone_mode=False)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def read(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(env(*words, "--json").splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("env") / "vowels"
    env("new", made)
    rows = (made / "tasks.jsonl").read_text().splitlines(keepends=True)
    (made / "tasks.jsonl").write_text("".join(rows[:2]))  # two are enough, and sooner checked
    return made


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path / "queue"


@pytest.mark.slow
def test_an_environment_goes_from_template_to_run(folder: Path, queue: Path) -> None:
    assert read("check", folder)["ok"] is True
    waiting = read("submit", folder, "--queue", queue)
    assert (waiting["status"], waiting["tasks"], waiting["has_code"]) == ("waiting", 2, True)
    assert [r["file"] for r in read("list", "--queue", queue, "--waiting")["environments"]] == [
        waiting["file"]
    ]
    approved = read("approve", waiting["file"][:10], "--by", "op", "--queue", queue)
    assert (approved["status"], approved["reviewer"]) == ("approved", "op")
    assert read("list", "--queue", queue, "--waiting")["environments"] == []
    assert waiting["file"] in env("show", waiting["file"], "--queue", queue)
    values = {
        "environment": {
            "name": "crowd", "train_size": 1, "heldout_size": 1,
            "arguments": {"sha256": approved["file"], "path": approved["bundle"]},
        },
        "budgets": {"targets": [50], "penalty_micro": 0},
        "name": "vowels", "max_output_tokens": 60, "samples_per_group": 2, "groups_per_lease": 1,
        "groups_per_batch": 1, "task": {"image": "process"}, "price_per_unit": 1,
        "stake_per_seat": 1_000, "slash_amount": 1,
    }  # fmt: skip
    environment = environment_for(define(values, Path("run.toml"), MODEL))
    problem = environment.problem(0)
    assert environment.grade(problem, 50, problem.answer, 50).reward_micro == 1_000_000
    environment.close()


@pytest.mark.slow
def test_refusing_keeps_the_reason_and_is_final(folder: Path, queue: Path) -> None:
    file = read("submit", folder, "--queue", queue)["file"]
    refused = read("refuse", file, "--by", "op", "--note", "too easy", "--queue", queue)
    assert (refused["status"], refused["note"]) == ("refused", "too easy")
    with pytest.raises(ConflictError, match="refused by op"):
        env("approve", file, "--by", "op", "--queue", queue)
    with pytest.raises(ConflictError, match="is refused"):
        env("submit", folder, "--queue", queue)


@pytest.mark.slow
def test_an_unfit_environment_is_neither_submitted_nor_approved(
    folder: Path, queue: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    env("new", bad)
    (bad / "grader.py").write_text("def grade(t, a): return {'score': 1, 'reason': ''}")
    report = CliRunner().invoke(app, ["check", str(bad), "--json"])
    assert report.exit_code == 1
    assert json.loads(report.stdout)["findings"]["unhackable"]
    with pytest.raises(PolicyError, match="not fit"):
        env("submit", bad, "--queue", queue)
    assert read("list", "--queue", queue)["environments"] == []
    # what was altered in the queue after it was submitted is not approved either
    file = read("submit", folder, "--queue", queue)["file"]
    Queue(queue).bundle(file).write_text("{}")
    with pytest.raises(UntrustedError, match="has digest"):
        env("approve", file, "--by", "op", "--queue", queue)
    assert Queue(queue).get(file).status == "waiting"


@pytest.mark.slow
def test_a_packed_file_is_submitted_like_its_folder(
    folder: Path, queue: Path, tmp_path: Path
) -> None:
    first = read("submit", folder, "--queue", queue)
    carried = tmp_path / "carried.jsonl"
    carried.write_bytes(Path(first["bundle"]).read_bytes())
    second = read("submit", carried, "--queue", tmp_path / "elsewhere")
    assert second["file"] == first["file"]


def record(number: int) -> Record:
    return Record(
        file=Digest("0x" + f"{number:064x}"), name="n", version=1, description="d", author="a",
        license="l", tasks=1, has_code=False, submitted=number,
    )  # fmt: skip


def test_digests_are_found_by_how_they_begin(queue: Path) -> None:
    box = Queue(queue)
    box._records.mkdir(parents=True)
    for number in (1, 2):
        box._write(record(number))
    with pytest.raises(UserError, match="2 environments"):
        box.get("0x00")
    with pytest.raises(NotFoundError, match=f"in the queue {queue}; name another by --queue"):
        box.get("ff")
    assert box.get(f"{2:064x}").submitted == 2
    assert [r.submitted for r in box.records()] == [1, 2]
    with pytest.raises(FatalError, match="other bytes"):
        box.submit(b"other", record(3))
    (box._records / "broken.json").write_text("{")
    with pytest.raises(FatalError, match="is not a record"):
        box.records()


@pytest.mark.parametrize("name", ["Big", "a b", "1st", "über"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not a name"):
        env("new", tmp_path / name)


@pytest.mark.slow
def test_refusing_needs_a_reason_and_a_name(folder: Path, queue: Path) -> None:
    file = read("submit", folder, "--queue", queue)["file"]
    for words in (["refuse", file, "--by", "op"], ["approve", file]):
        done = CliRunner().invoke(app, [*words, "--queue", str(queue)])
        assert done.exit_code == 2
    assert isinstance(app, typer.Typer)
