"""The run definition: its bounds, and its bytes among peers of different releases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pools import RUN, run_definition
from pydantic import ValidationError

from prime_core import encoding
from prime_core.errors import MalformedError
from prime_core.ids import ZERO_DIGEST
from prime_core.run import Chat, EnvironmentRef, LengthBudgets, RunDefinition, SpeedClasses
from prime_core.run_file import read_run
from prime_core.task import Task
from prime_envs.definition import unsaid


class LaterTask(Task):
    shared_memory_mb: int = 64


class LaterRun(RunDefinition):
    """The model of a later release: an optional field more, in the run and within it."""

    prompt_price: int = 7
    task: LaterTask


def test_a_field_added_later_changes_no_digest_of_an_older_run() -> None:
    read_later = LaterRun.parse(RUN.raw())
    assert read_later.prompt_price == 7
    assert read_later.task.shared_memory_mb == 64
    assert (read_later.raw(), read_later.digest()) == (RUN.raw(), RUN.digest())


def test_an_older_peer_reads_a_later_run_and_passes_its_bytes_on(tmp_path: Path) -> None:
    later = json.loads(RUN.raw()) | {"prompt_price": 7}
    later["task"]["shared_memory_mb"] = 64
    file = json.dumps(later, indent=2).encode() + b"\n"  # no canonical form is asked for
    agent = RunDefinition.parse(file)
    worker = RunDefinition.parse(agent.raw())
    assert worker.digest() == encoding.sha256(file)
    assert worker.model_dump() == RUN.model_dump()
    (tmp_path / "run.json").write_bytes(file)
    assert read_run(tmp_path / "run.json").raw() == file
    with pytest.raises(MalformedError, match=r"task.shared_memory_mb|prompt_price"):
        RunDefinition.parse(file, exact=True)


def test_a_run_of_a_later_schema_is_refused_with_the_upgrade_command() -> None:
    later = json.loads(RUN.raw()) | {"schema_version": 7}
    with pytest.raises(MalformedError, match="pip install --upgrade"):
        RunDefinition.parse(json.dumps(later).encode())


def test_chat_raises_the_schema_and_leaves_the_digest_of_runs_without_it() -> None:
    """A program that does not know `chat` would ask without the template and be slashed for it."""
    plain = run_definition(
        environment=EnvironmentRef(
            name="reverse", digest=ZERO_DIGEST, train_size=9, heldout_size=1
        ),
        budgets=LengthBudgets(targets=(2,), penalty_micro=0),
    )
    assert plain.digest() == "0xf8e00732df3afac5c63d9ebc10093927310de24af5d71164d1ea4861dd6b53e4"
    chat = Chat(template=ZERO_DIGEST, system="be kind")
    asked = plain.model_copy(update={"chat": chat, "schema_version": 2})
    assert RunDefinition.parse(asked.raw(), exact=True).chat == chat
    for wrong in ({"chat": chat.model_dump()}, {"schema_version": 2}):
        with pytest.raises(MalformedError, match="else 2 with chat, else 1"):
            RunDefinition.parse(json.dumps(json.loads(plain.raw()) | wrong).encode())


def test_a_changed_copy_has_bytes_of_its_own() -> None:
    file = json.dumps(json.loads(RUN.raw()), indent=1).encode()
    run = RunDefinition.parse(file)
    assert run.model_copy().raw() == file
    other = run.model_copy(update={"name": "other"})
    assert RunDefinition.parse(other.raw()).name == "other"
    assert other.digest() != run.digest()


def test_a_challenge_s_solution_has_at_most_64_mebibytes() -> None:
    assert SpeedClasses(challenge_size=2048, challenge_rounds=2).challenge_rounds == 2
    with pytest.raises(ValidationError, match="64 MiB"):
        SpeedClasses(challenge_size=2048, challenge_rounds=3)
    with pytest.raises(ValidationError, match="64 MiB"):
        SpeedClasses(challenge_size=8192, challenge_rounds=64)


def test_a_silent_node_is_dead_within_a_minute_by_default() -> None:
    ticks = 2  # seconds: silence must exceed the bound, and a tick a second must notice it
    assert RunDefinition.model_fields["death_seconds"].default + ticks < 60


def test_in_a_new_run_a_silent_node_is_dead_within_45_seconds_and_four_heartbeats() -> None:
    named = unsaid({})["death_seconds"]
    assert named + 2 < 45
    assert named >= 4 * RunDefinition.model_fields["heartbeat_seconds"].default
    assert unsaid({"death_seconds": 60}) == unsaid({"heartbeat_seconds": 60}) == {}
