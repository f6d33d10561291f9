"""Several environments in one run: their shares, their problems, and what each part still does."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.honest import Bench
from devnet.network import MODEL
from prime_core import encoding
from prime_core.errors import MalformedError, PolicyError, UserError
from prime_core.ids import Digest
from prime_core.run import MICRO, LengthBudgets, RunDefinition
from prime_core.verdict import Outcome, Reason
from prime_envs.base import Environment, Problem, TaskScore
from prime_envs.definition import run_from
from prime_envs.mixture import Mixture, spread
from prime_envs.registry import environment_for, load_environment
from prime_envs.sources import bring_files, file_digest
from prime_envs.tasks import MAX_ID, parse_task
from prime_verify.rollout_file import read_rollout_file, write_rollout_file

BUDGETS = LengthBudgets(targets=(2, 6), penalty_micro=0)
RUN = """
name = "both"
max_output_tokens = 24
samples_per_group = 4
groups_per_lease = 16
groups_per_batch = 16
{more}
[environment]
name = "mixture"
train_size = 400
heldout_size = 40
{parts}
[budgets]
targets = [2, 6]
penalty_micro = 0
[task]
image = "none@sha256:{zeros}"
"""
PARTS = """
[[environment.parts]]
name = "reverse"
label = "short"
weight = 3
arguments = { shortest = 3, longest = 3 }
[[environment.parts]]
name = "reverse"
label = "long"
arguments = { shortest = 5, longest = 5 }
"""


class Numbers(Environment):
    """`size` problems, each answered by its own number."""

    name = "numbers"
    version = 1

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        self._size = int(arguments["size"])

    def data_digest(self) -> Digest:
        return encoding.sha256(b"")

    def __len__(self) -> int:
        return self._size

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        return Problem(str(index), index, f"which number is {index}?", str(index))

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return problem.prompt

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        right = output_text == str(problem.index) == problem.problem_id
        return TaskScore(MICRO if right else 0, "")


def run_of(parts: str = PARTS, more: str = "") -> RunDefinition:
    values = tomllib.loads(RUN.format(parts=parts, more=more, zeros="0" * 64))
    money = {"price_per_unit": 0, "stake_per_seat": 0, "slash_amount": 0}
    return run_from({**money, **values}, Path("run.toml"), MODEL, Digest("0x" + "0" * 64))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=5))
def test_each_part_has_its_share_and_none_of_its_problems_comes_twice(
    wanted: list[tuple[int, int]],
) -> None:
    parts = [
        (f"part-{number}", weight, Numbers({"size": size}, BUDGETS))
        for number, (weight, size) in enumerate(wanted)
    ]
    mixture = Mixture(parts, BUDGETS)
    weights = [weight for weight, _ in wanted]
    total = sum(weights)
    problems = [mixture.problem(index) for index in range(len(mixture))]
    assert [problem.index for problem in problems] == list(range(len(mixture)))
    assert len({problem.problem_id for problem in problems}) == len(mixture)
    seen: Counter[str] = Counter()
    for number, problem in enumerate(problems, start=1):
        label, _, own = problem.problem_id.partition("/")
        assert problem.metadata["environment"] == label
        assert own == str(seen[label]), "a part's problems come in order"
        seen[label] += 1
        for (name, weight, _), within in zip(parts, weights, strict=True):
            assert abs(seen[name] - number * within / total) < len(parts), (name, weight)
        assert mixture.check(problem, own, 1).task_micro == MICRO
        assert mixture.check(problem, f"{own}0", 1).task_micro == 0
    with pytest.raises(MalformedError):
        mixture.problem(len(mixture))
    full = [name for name, _, part in parts if seen[name] == len(part)]
    assert full, "the mixture ends only where a part has no problem left"


def test_a_cycle_holds_each_part_by_its_weight() -> None:
    assert spread([5, 1, 1]) == [0, 0, 1, 0, 2, 0, 0]
    assert spread([1]) == [0]


def test_a_run_names_its_parts_and_pins_them() -> None:
    run = run_of()
    assert run.schema_version == 5
    assert RunDefinition.parse(run.raw()).digest() == run.digest()
    with pytest.raises(MalformedError, match=r"else 5 with environment\.parts"):
        RunDefinition.parse(run.raw().replace(b'"schema_version":5', b'"schema_version":1'))
    environment = environment_for(run)
    assert environment.digest() == run.environment.digest
    other = run_of(PARTS.replace("weight = 3", "weight = 2"))
    assert other.environment.digest != run.environment.digest
    labels = Counter(run.environment.source_of(environment.problem(i).problem_id) for i in range(8))
    assert labels == {"short": 6, "long": 2}
    short = run.model_copy(
        update={"environment": run.environment.model_copy(update={"train_size": 10**7})}
    )
    with pytest.raises(PolicyError, match="The run wants"):
        environment_for(short)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (PARTS.replace('"long"', '"short"'), "two parts are called 'short'"),
        (PARTS.replace('label = "long"', 'label = "a/b"'), "label"),
        (PARTS.replace("weight = 3", "weight = 0"), "weight"),
        (PARTS.replace('name = "reverse"', 'name = "none"', 1), "no environment 'none'"),
        (PARTS.replace('name = "reverse"', 'name = "mixture"', 1), "no environment 'mixture'"),
        (PARTS.replace("longest = 3", "longest = 3, wrong = 1"), "no argument 'wrong'"),
        ("", "no environment 'mixture'"),
        ("arguments = { shortest = 3 }" + PARTS, "arguments of a mixture belong to its parts"),
    ],
)
def test_a_wrong_part_is_refused_in_one_sentence(parts: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as found:
        run_of(parts)
    assert "\n" not in str(found.value)


def test_two_parts_of_the_same_problems_are_refused(tmp_path: Path) -> None:
    """What one of them trains on, the other would hold out."""
    twice = PARTS.replace("shortest = 5, longest = 5", "shortest = 3, longest = 3")
    with pytest.raises(UserError, match="'short' and 'long' have the same problems"):
        run_of(twice)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(json.dumps(row_of("one")))
    part = '[[environment.parts]]\nname = "tasks"\nlabel = "{}"\narguments = {{ {} }}\n'
    parts = "".join(
        part.format(file.stem, f'sha256 = "{file_digest(file)}", path = "{file}"') for file in files
    )
    with pytest.raises(UserError, match="'a' and 'b' have the same problems"):
        run_of(parts)


def row_of(name: str) -> dict[str, Any]:
    """A row of the environment `tasks`, answered by 4."""
    return {
        "problem_id": name, "source": "test", "task_type": "verifiable_math", "prompt": "2 + 2",
        "gold_standard_solution": "4", "verification_info": {"ground_truth": "4"},
    }  # fmt: skip


def test_long_ids_of_a_part_fit_into_a_file(tmp_path: Path) -> None:
    names = ["a/b", "x" * MAX_ID, "y" * MAX_ID]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row_of(name)) + "\n" for name in names))
    arguments = {"sha256": str(file_digest(file)), "path": str(file)}
    part = load_environment("tasks", arguments, BUDGETS)
    mixture = Mixture([("maths", 1, part)], BUDGETS)
    try:
        problems = [mixture.problem(index) for index in range(3)]
        found = {problem.problem_id for problem in problems}
        assert "maths/a/b" in found
        assert len(found) == 3
        for problem in problems:
            assert len(problem.problem_id) <= MAX_ID
            assert problem.problem_id.startswith("maths/")
            task = mixture.as_task(problem.index)
            assert task is not None
            assert parse_task(task.plain(), "row").problem_id == problem.problem_id
            assert mixture.check(problem, "\\boxed{4}", 1).task_micro == MICRO
    finally:
        mixture.close()


def test_a_part_that_the_conversation_does_not_fit_is_named() -> None:
    guess = PARTS.replace('name = "reverse"\nlabel = "long"', 'name = "guess"').replace(
        "arguments = { shortest = 5, longest = 5 }", ""
    )
    run = run_of(guess, "[conversation]\nturns = 2\ntools = []")
    assert run.schema_version == 5
    environment = environment_for(run)
    assert all(one.conversation == run.conversation for one in environment.members())
    with pytest.raises(UserError, match="says nothing after a turn"):
        run_of(PARTS, "[conversation]\nturns = 2\ntools = []")


def test_an_agent_brings_every_part_s_dataset(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("{}\n" * (1 + len(files)))
    run = run_of()
    parts = tuple(
        part.model_copy(update={"arguments": {"sha256": file_digest(file), "path": str(file)}})
        for part, file in zip(run.environment.parts, files, strict=True)
    )
    run = run.model_copy(
        update={"environment": run.environment.model_copy(update={"parts": parts})}
    )
    brought = bring_files(run, tmp_path / "datasets")
    assert [path.read_bytes() for path in brought] == [file.read_bytes() for file in files]


def test_a_file_of_both_parts_is_accepted_and_a_false_reward_of_either_is_not() -> None:
    bench = Bench(max_output_tokens=24, folder=MODEL, groups=8, samples=4)
    changes: dict[str, Any] = {"environment": run_of().environment, "schema_version": 5}
    bench.run = bench.run.model_copy(update=changes)
    bench.environment = environment_for(bench.run)
    file = bench.honest(0, bench.engine())
    assert bench.judge(file).outcome is Outcome.ACCEPTED
    made = read_rollout_file(file.data)
    labels = [bench.run.environment.source_of(row.problem_id) for row in made.rows]
    for label in ("short", "long"):
        rows = list(made.rows)
        rows[labels.index(label)] = replace(rows[labels.index(label)], reward=0.5)
        lie = replace(file, data=write_rollout_file(rows, made.metadata))
        assert bench.judge(lie).reason is Reason.TAMPERED_REWARD
