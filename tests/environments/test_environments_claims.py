"""What a node claims about its rewards, and when a validator may call it a lie."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.run import BUDGET_WORDING, Chat, Conversation, LengthBudgets
from prime_core.verdict import MAX_REWARD_MICRO
from prime_core.waiting import StoppedError
from prime_envs import registry
from prime_envs.base import Environment, Grade, Problem, TaskScore, Tokenizer
from prime_envs.crowd_check import NAMES as FINDINGS
from prime_envs.definition import read_toml
from prime_envs.environments.reverse import Reverse
from prime_envs.environments.tasks import TaskDataset
from prime_envs.graders.base import BUILT_IN, Grader, grader_class
from prime_envs.lengths import budgets_from
from prime_envs.mixture import Mixture
from prime_envs.registry import BUILT_IN as ENVIRONMENTS
from prime_envs.registry import environment_class
from prime_envs.sources import file_digest
from prime_envs.tasks import Task
from prime_verify.checks import _parts_of

BUDGETS = LengthBudgets(targets=(100,), penalty_micro=1000, form="exact")


def test_a_claim_is_refuted_by_another_grade_unless_time_decided_or_the_claimant_gave_up() -> None:
    sure = Grade(900_000, {}, "", given_up_micro=-100_000)
    assert not sure.refutes(0.9)
    assert not sure.refutes(-0.1)  # its grader ran out of time: no one gains by that
    assert sure.refutes(1.0)
    assert sure.refutes(0.0)
    assert not Grade(0, {}, "", uncertain=True).refutes(1.0)
    assert Grade(900_000, {}, "").refutes(-0.1)


class Characters:
    """One token a character."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(map(chr, tokens))


class Fails(Reverse):
    """A plugin whose code raises on some rows."""

    error: Exception | None = None
    of_turns: Exception | None = None
    late: bool = False
    micro: Any = 250_000

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        if self.error:
            raise self.error
        return super().check(problem, output_text, output_tokens)

    def turn_rewards(self, problem: Problem, turns: Sequence[str]) -> Sequence[int]:
        if self.late:
            return cast(Sequence[int], self._one_by_one())
        if self.of_turns:
            raise self.of_turns
        return ()

    def _one_by_one(self) -> Iterator[int]:
        if self.of_turns:
            raise self.of_turns
        yield self.micro


class Particular(Reverse):
    """A plugin that needs an argument."""

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__({}, budgets)
        self.level = arguments["level"]


def test_a_plugin_that_cannot_be_made_or_loaded_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("particular", f"{__name__}:Particular", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints([entry]))
    assert registry.load_environment("particular", {"level": 3}, BUDGETS).plugin
    with pytest.raises(UserError, match=r"'particular' cannot be made .*: KeyError\('level'\)"):
        registry.load_environment("particular", {"levle": 3}, BUDGETS)
    monkeypatch.delattr(sys.modules[__name__], "Particular")
    with pytest.raises(UserError, match=r"the plugin 'particular' .* cannot be loaded"):
        registry.environment_class("particular")


class Unasked(Reverse):
    """A plugin without its second problem, and with wrong names of some others."""

    names: ClassVar[dict[int, Any]] = {4: 4, 5: "x" * 257, 6: "\ud800"}

    def problem(self, index: int) -> Problem:
        if index == 1:
            raise KeyError("no question")
        found = super().problem(index)
        return replace(found, problem_id=self.names.get(index, found.problem_id))


def test_a_problem_that_a_plugin_cannot_ask_is_named_and_not_graded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment, tokenizer = Unasked({}, BUDGETS), cast(Tokenizer, Characters())
    with pytest.raises(KeyError):
        environment.ask(1, 6, tokenizer)
    environment.plugin = True
    assert environment.ask(2, 6, tokenizer)[0] == environment.problem(2)
    problem, prompt = environment.ask(1, 6, tokenizer)
    assert prompt == (ord("?"),)
    grade = environment.grade_output(problem, 6, prompt, tokenizer)
    why = "the environment reverse raised KeyError('no question') when problem 1 was asked"
    assert (grade.reward_micro, grade.ungraded, grade.reason) == (0, True, why)
    assert caplog.messages == [f"{why}; its rows are not trained on"]
    for index in environment.names:
        assert environment.ask(index, 6, tokenizer)[0].unasked, "no file could hold its name"

    mixture = Mixture([("a", 1, environment), ("b", 1, Reverse({}, BUDGETS))], BUDGETS)
    mixed, prompt = mixture.ask(2, 6, tokenizer)
    assert (mixed.problem_id, mixed.index) == ("a/unasked", 2)
    assert mixture.grade_output(mixed, 6, prompt, tokenizer).ungraded
    assert mixture.ask(3, 6, tokenizer)[0] == mixture.problem(3)


def test_a_row_on_which_a_plugin_raises_is_not_graded_and_refutes_no_claim(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment, tokenizer = Fails({}, BUDGETS), cast(Any, Characters())
    problem = environment.problem(3)
    tokens = [ord(letter) for letter in f"{'.' * 100}={problem.answer}"]

    def graded() -> Grade:
        return environment.grade_output(problem, 100, tokens, tokenizer)

    assert graded().reward_micro == 1_000_000
    assert graded().refutes(0.0)
    environment.plugin = True
    assert not graded().refutes(0.0), "it may have raised on the machine that claims this"
    assert graded().refutes(0.5)
    environment.error = KeyError("row 3 has no answer")
    found = graded()
    assert (found.reward_micro, found.ungraded) == (0, True)
    assert not found.refutes(1.0)
    environment.error, environment.of_turns = None, KeyError("row 3 has no answer")
    assert not graded().ungraded, "a row of one turn has no rewards of turns"
    environment.conversation = Conversation(turns=2)
    assert graded().ungraded
    environment.late = True
    assert graded().ungraded, "a generator raises only when its rewards are read"
    environment.of_turns = None
    late = graded()
    assert (late.reward_micro, late.parts["turn_0_micro"]) == (1_250_000, 250_000)
    for environment.micro in (0.5, True, 1 << 60, None, MAX_REWARD_MICRO - 999_999):
        assert graded().ungraded, "no table of a verdict could hold it"
    assert "raised ValueError('0.5 is no whole number of millionths up to 10^15')" in caplog.text
    del caplog.records[3:]
    said = "the environment reverse raised KeyError('row 3 has no answer')"
    assert caplog.messages == 3 * [
        f"problem {problem.problem_id}, turn 0: {said} when it graded the row, which is not "
        "trained on"
    ]
    for passed in (UnavailableError("none"), StoppedError(), MemoryError(), OSError("full")):
        environment.error = passed
        with pytest.raises(type(passed)):
            graded()
    environment.plugin, environment.error = False, KeyError("our own mistake")
    with pytest.raises(KeyError):
        graded()


def test_only_environments_that_grade_in_processes_may_give_up(tmp_path: Path) -> None:
    row = {"problem_id": "1", "task_type": "verifiable_math", "prompt": "?",
           "verification_info": {"ground_truth": "2"}}  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    data = TaskDataset({"sha256": file_digest(path), "path": str(path)}, BUDGETS)
    grade = data.grade(data.problem(0), 100, "\\boxed{2}", 90)
    assert (grade.reward_micro, grade.given_up_micro) == (990_000, -10_000)
    reverse = Reverse({}, BUDGETS)
    assert reverse.grade(reverse.problem(0), 100, "no", 2).given_up_micro is None


def test_the_documents_examples_are_right() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    tables = {name: table for block in blocks for name, table in tomllib.loads(block).items()}
    assert tables["chat"].pop("prompts") == "template"
    assert Chat(template=ZERO_DIGEST, **tables["chat"]).budget == BUDGET_WORDING
    budgets = budgets_from(tables["budgets"])
    assert LengthBudgets.model_validate_json(json.dumps(budgets)).preferred(1)[0] == 1000
    assert all(f"`{name}`" in text for name in (*ENVIRONMENTS, *BUILT_IN))
    assert all(finding in text for finding in FINDINGS)


@pytest.mark.parametrize("text", ["a =", f"a = {'9' * 5000}", "a = " + "[" * 100_000])
def test_a_run_s_file_that_cannot_be_parsed_is_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"run\.toml is not TOML: "):
        read_toml(file)


def test_every_built_in_name_is_a_class() -> None:
    for name in ENVIRONMENTS:
        assert environment_class(name).name == name
    for name in BUILT_IN:
        assert issubclass(grader_class(name), Grader)


@pytest.mark.parametrize("kind", ["prime_open.environments", "prime_open.graders"])
def test_plugins_are_found_by_entry_point(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = {"prime_open.environments": "environments.reverse:Reverse"}
    base = plugin.get(kind, "graders.formats:FormatFollowing")
    module = base.partition(":")[0]
    name = f"plugin_{kind.rpartition('.')[2]}"
    (tmp_path / f"{name}.py").write_text(
        f"from prime_envs.{module} import {base.partition(':')[2]} as Made\n"
    )
    info = tmp_path / "plugin_of_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{kind}]\nmade_here = {name}:Made\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    find = environment_class if kind.endswith("environments") else grader_class
    assert find("made_here").__name__ in ("Reverse", "FormatFollowing")


def test_a_row_on_which_a_grader_of_another_package_raises_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("odd", f"{__name__}:OddGrader", "prime_open.graders")
    monkeypatch.setattr("prime_envs.graders.base.entry_points", lambda **_: EntryPoints([entry]))

    def made(*answers: int) -> Environment:
        row = {"task_type": "odd", "prompt": "?"}
        rows = [
            {**row, "problem_id": str(answer), "verification_info": {"answer": answer}}
            for answer in answers
        ]
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        given = {"sha256": file_digest(path), "path": str(path)}
        return registry.load_environment("tasks", given, BUDGETS)

    with pytest.raises(MalformedError, match=r"tasks.jsonl row 2: its grader raised KeyError"):
        made(1, 0)
    environment = made(2)
    grade = environment.grade_output(environment.problem(0), 6, [ord("2")], cast(Any, Characters()))
    assert grade.ungraded
    assert grade.reason == "the environment tasks raised KeyError('no even answers')"


def test_a_table_notes_only_components_that_it_can_hold() -> None:
    parts: Any = {"a": 1, "\ud800": 1, "b": 0.5, "c": None, "d": True, 3: 1, "": 1, "e": 1 << 60}
    assert _parts_of(Grade(0, parts, "")) == {"a": 1}


class OddGrader(Grader):
    """A plugin that raises on some tasks."""

    version = 1

    def require(self, task: Task) -> None:
        if task.verification_info["answer"] == 0:
            raise KeyError("no answer 0")

    def grade(self, task: Task, output_text: str) -> TaskScore:
        raise KeyError("no even answers")

    def gold(self, task: Task) -> str | None:
        return None
