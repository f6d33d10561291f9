"""Evaluation's figures by brute force; the filter keeps what it says, and pins it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import trainer_kit as kit
from hypothesis import given
from hypothesis import strategies as st

from protocol.core.encoding import sha256
from protocol.core.errors import UserError
from protocol.core.ids import ZERO_DIGEST
from protocol.environments.base import Grade, Problem
from protocol.environments.dataset import TaskDataset
from protocol.environments.registry import environment_ref, load_environment
from trainer.difficulty import Range, describe, filter_tasks, select
from trainer.evaluate import (
    compare,
    environment_name,
    evaluate,
    interval,
    pass_at_k,
    share,
    summary,
)
from trainer.sampling import Answered
from trainer.tables import comparison_table, evaluation_table

RUN = kit.run_definition()


def answered(number: int, passes: int, samples: int, **metadata: object) -> Answered:
    problem = Problem(f"p{number}", number, "prompt", "gold", metadata)
    grades = tuple(
        Grade(1_000_000 * (i < passes), {"task_micro": 1_000_000 * (i < passes), "length": 4}, "")
        for i in range(samples)
    )
    return Answered(problem, 6, grades)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_k_draws_with_a_pass(samples: int, data: st.DataObject) -> None:
    passes = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = list(itertools.combinations(range(samples), k))
    expected = sum(any(i < passes for i in draw) for draw in draws) / len(draws)
    assert pass_at_k(samples, passes, k) == pytest.approx(expected)


def test_pass_at_more_than_was_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be had"):
        pass_at_k(4, 1, 5)


def test_figures_are_by_budget_and_by_where_a_problem_comes_from() -> None:
    both = [
        answered(0, 4, 4, source="maths"),
        answered(1, 0, 4, source="maths"),
        answered(2, 1, 4, source="code"),
        answered(3, 1, 4),
    ]
    found = summary(Path("m"), 0, RUN, both)
    assert found.pass_1.mean == pytest.approx((1 + 0 + 0.25 + 0.25) / 4)
    assert found.pass_k.mean == pytest.approx(3 / 4)
    assert found.by_environment["maths"].pass_1.mean == 0.5
    assert found.by_environment["code"].pass_k.mean == 1.0
    assert found.by_environment[RUN.environment.name].pass_1.count == 1
    assert found.by_budget["6"].length_error.mean == 2.0
    assert environment_name(both[2], RUN) == "code"
    table = evaluation_table(found)
    assert "pass@4" in table
    assert "maths" in table


def test_the_interval_is_over_problems_and_infinite_for_one() -> None:
    found = interval([0.0, 1.0, 1.0, 0.0])
    half = 1.959964 * math.sqrt((1 / 3) / 4)
    assert (found.mean, found.high - found.mean) == (0.5, pytest.approx(half))
    assert interval([0.3]).high == math.inf


def test_a_share_s_interval_is_wilson_s_and_stays_between_0_and_1() -> None:
    none, some = share([0.0] * 10), share([1.0] * 8 + [0.0] * 2)
    assert (none.low, none.high) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert (some.low, some.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, 1e-4))
    assert share([1.0]).high == 1.0
    assert share([1.0]).low == pytest.approx(0.2065, abs=1e-4)
    with pytest.raises(ValueError, match="between 0 and 1"):
        share([1.5])


def test_pass_at_1_is_printed_once_where_there_is_one_sample() -> None:
    lines = evaluation_table(summary(Path("m"), 0, RUN, [answered(0, 1, 1), answered(1, 0, 1)]))
    assert all(line.count("pass@1") <= 1 for line in lines.splitlines())
    assert [line.startswith("pass@1") for line in lines.splitlines()].count(True) == 1


def test_a_model_against_itself_gains_nothing_on_any_problem(model: Path) -> None:
    both = compare(model, model, RUN, problems=6, seed=1, samples=2)
    assert both.base.reward == both.trained.reward
    assert both.reward_gain.mean == both.reward_gain.high == 0.0
    assert both.trained == evaluate(model, RUN, problems=6, seed=1, samples=2)
    assert "gain" in comparison_table(both)


@given(st.lists(st.integers(0, 8), max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_the_filter_keeps_each_task_of_the_range_once_and_no_other(
    passes: list[int], one: float, two: float
) -> None:
    wanted = Range(min(one, two), max(one, two), 8)
    tasks = [answered(number, count, 8) for number, count in enumerate(passes)]
    kept = select([*tasks, *tasks], wanted)
    assert [a.problem.index for a in kept] == [
        number for number, count in enumerate(passes) if wanted.low <= count / 8 <= wanted.high
    ]


def test_a_filtered_dataset_is_a_dataset_again(model: Path, tmp_path: Path) -> None:
    tasks = [
        {
            "problem_id": f"sum-{i}", "source": "test", "task_type": "verifiable_math",
            "prompt": f"{i} + {i}", "gold_standard_solution": str(2 * i),
            "verification_info": {"ground_truth": str(2 * i)}, "metadata": {"level": i},
        }
        for i in range(6)
    ]  # fmt: skip
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    arguments: dict[str, int | str] = {"sha256": sha256(file.read_bytes()), "path": str(file)}
    ref = environment_ref("tasks", arguments, RUN.budgets, train_size=6, heldout_size=0)
    run = RUN.model_copy(update={"environment": ref})
    out = tmp_path / "kept.jsonl"
    assert list(filter_tasks(model, run, Range(0.0, 1.0, 2), out))[-1] == (6, 6)
    again = load_environment(
        "tasks", {"sha256": describe(out).digest, "path": str(out)}, RUN.budgets
    )
    assert isinstance(again, TaskDataset)
    kept = {task.problem_id: task for task in (again.task(i) for i in range(len(again)))}
    assert len(kept) == 6
    for task in tasks:
        found = kept[str(task["problem_id"])].plain()
        assert found["prompt"] == task["prompt"]
        assert found["verification_info"] == task["verification_info"]
        assert {"level", "solve_rate", "solve_samples", "index"} <= set(found["metadata"])


def test_the_filtered_dataset_is_named_by_its_digest_and_made_again_alike(
    model: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for out in outs:
        progress = list(filter_tasks(model, RUN, Range(0.0, 1.0, 2), out, tasks=5))
        assert progress[-1] == (5, 5)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    found = describe(outs[0])
    assert found.digest == sha256(outs[0].read_bytes()) != ZERO_DIGEST
    assert [json.loads(line)["problem_id"] for line in outs[0].read_text().splitlines()]
    assert sum(found.passes.values()) == 5
    with pytest.raises(UserError, match="exists already"):
        list(filter_tasks(model, RUN, Range(0.0, 1.0, 2), outs[0], tasks=5))
    with pytest.raises(UserError, match="pass rate"):  # a random model solves nothing
        list(filter_tasks(model, RUN, Range(0.9, 1.0, 2), tmp_path / "none.jsonl", tasks=3))
    assert not (tmp_path / "none.jsonl").exists()
