"""Evaluation's figures by brute force; the filter keeps what it says, and pins it."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trainer_kit as kit
from hypothesis import given
from hypothesis import strategies as st

from prime_core.encoding import sha256
from prime_core.errors import FatalError, UserError
from prime_core.gateway import Gateway, GatewayCall, Recording
from prime_core.ids import ZERO_DIGEST, Address
from prime_core.run import MICRO, Conversation, EnvironmentPart, RunDefinition
from prime_envs.base import Grade, Problem
from prime_envs.environments.crowd import pack, write_template
from prime_envs.environments.tasks import TaskDataset
from prime_envs.graders.families import Families
from prime_envs.graders.mathematics import Mathematics
from prime_envs.registry import environment_for, environment_ref, load_environment
from prime_envs.tasks import Task
from prime_orchestrator.rollouts import COLUMNS
from prime_trainer import sampling
from prime_trainer.difficulty import Range, describe, filter_rollouts, filter_tasks, select
from prime_trainer.evaluate import (
    compare,
    compared,
    comparison_table,
    environment_name,
    evaluate,
    evaluation_table,
    interval,
    pass_at_k,
    share,
    summary,
)
from prime_trainer.sampling import Answered, Sampling
from prime_verify.build import PlannedRow

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


def ungraded(one: Answered, *samples: int) -> Answered:
    """The answers, of which the environment could not grade these samples."""
    raised = Grade(0, {}, "the environment raised", ungraded=True)
    grades = [raised if i in samples else grade for i, grade in enumerate(one.grades)]
    return replace(one, grades=tuple(grades))


def test_answers_that_were_not_graded_are_left_out() -> None:
    whole = [answered(0, 1, 2), answered(1, 2, 2), answered(2, 0, 2)]
    partly = [ungraded(whole[0], 1), whole[1], ungraded(whole[2], 0, 1)]
    found = summary(Path("m"), 0, RUN, partly)
    assert (found.reward.mean, found.reward.count, found.samples) == (1.0, 2, 2)
    assert summary(Path("m"), 0, RUN, whole).reward.mean == 0.5
    both = compared(Path("a"), Path("b"), RUN, 0, whole, partly)
    assert (both.reward_gain.mean, both.reward_gain.count) == (0.25, 2)
    assert [one.problem.index for one in select(partly, Range(0.5, 1.0, 2))] == [1]
    none = [ungraded(one, 0, 1) for one in whole]
    other = replace(whole[1], target=20)
    both = compared(Path("a"), Path("b"), RUN, 0, [whole[0], none[1]], [whole[0], other])
    assert re.search(r"target +20 not graded +1\.0000", comparison_table(both))
    with pytest.raises(UserError, match="could grade no answer"):
        summary(Path("m"), 0, RUN, none)
    with pytest.raises(UserError, match="graded no problem of both models"):
        compared(Path("a"), Path("b"), RUN, 0, [whole[0], none[1]], [none[0], whole[1]])


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


def sums(folder: Path, count: int) -> RunDefinition:
    """A run over a file of sums."""
    tasks = [
        {
            "problem_id": f"sum-{i}", "source": "test", "task_type": "verifiable_math",
            "prompt": f"{i} + {i}", "gold_standard_solution": str(2 * i),
            "verification_info": {"ground_truth": str(2 * i)}, "metadata": {"level": i},
        }
        for i in range(count)
    ]  # fmt: skip
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return run_of("tasks", {"sha256": sha256(file.read_bytes()), "path": str(file)}, count)


def run_of(name: str, arguments: dict[str, int | str], count: int) -> RunDefinition:
    """The tests' run with another environment."""
    ref = environment_ref(name, arguments, RUN.budgets, train_size=count, heldout_size=0)
    return RUN.model_copy(update={"environment": ref})


def reopened(out: Path) -> list[Task]:
    """The tasks of a filtered dataset, read as a run that pins it would."""
    found = describe(out)
    again = load_environment(
        found.environment, {"sha256": found.digest, "path": str(out)}, RUN.budgets
    )
    assert isinstance(again, TaskDataset)
    return [again.task(i) for i in range(len(again))]


def test_a_filtered_dataset_is_a_dataset_again(model: Path, tmp_path: Path) -> None:
    run = sums(tmp_path, 6)
    out = tmp_path / "kept.jsonl"
    assert list(filter_tasks(model, run, Range(0.0, 1.0, 2), out))[-1] == (6, 6)
    kept = {task.problem_id: task.plain() for task in reopened(out)}
    assert len(kept) == 6
    for i in range(6):
        found = kept[f"sum-{i}"]
        assert (found["prompt"], found["source"]) == (f"{i} + {i}", "test")
        assert found["verification_info"] == {"ground_truth": str(2 * i)}
        assert found["metadata"]["level"] == i
        assert {"solve_rate", "solve_samples", "index"} <= set(found["metadata"])


@pytest.mark.slow
def test_problems_of_a_procedural_family_are_kept_with_their_grader(
    model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
    run = run_of("reasoning_gym", {"family": "chain_sum", "seed": 3}, 4)
    out = tmp_path / "kept.jsonl"
    assert list(filter_tasks(model, run, Range(0.0, 1.0, 2), out))[-1] == (4, 4)
    environment = environment_for(run)
    grader = Families()
    try:
        for task in reopened(out):
            problem = environment.problem(dict(task.metadata or {})["index"])
            for answer in (f"Answer: {problem.answer}", f"Answer: {problem.answer}1", "Answer: no"):
                asked = environment.check(problem, answer, 9).task_micro
                assert grader.grade(task, answer).task_micro == asked
            assert "Answer:" in task.prompt
    finally:
        grader.close()
        environment.close()


def test_an_environment_without_rows_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    nowhere = tmp_path / "no model"
    with pytest.raises(UserError, match="'reverse' cannot be a row of a dataset"):
        list(filter_tasks(nowhere, RUN, Range(0.0, 1.0, 2), tmp_path / "kept.jsonl"))
    with pytest.raises(UserError, match="JSON lines"):
        list(filter_tasks(nowhere, RUN, Range(0.0, 1.0, 2), tmp_path / "kept.parquet"))


@pytest.mark.parametrize("second", ["reverse", "crowd"])
def test_a_mixture_is_refused_before_anything_is_sampled_if_a_part_has_no_rows(
    tmp_path: Path, second: str
) -> None:
    first = sums(tmp_path, 6).environment
    other: dict[str, int | str] = {}
    if second == "crowd":
        write_template(tmp_path / "crowd", "crowd")
        packed = tmp_path / "packed.jsonl"
        packed.write_bytes(pack(tmp_path / "crowd"))
        other = {"sha256": sha256(packed.read_bytes()), "path": str(packed)}
    parts = (
        EnvironmentPart(name="tasks", arguments=first.arguments),
        EnvironmentPart(name=second, arguments=other),
    )
    ref = environment_ref("mixture", {}, RUN.budgets, train_size=4, heldout_size=0, parts=parts)
    run = RUN.model_copy(update={"environment": ref})
    why = "cannot be a row" if second == "reverse" else "has a grader of its own"
    with pytest.raises(UserError, match=why):
        list(filter_tasks(tmp_path / "no model", run, Range(0.0, 1.0, 2), tmp_path / "k.jsonl"))


def test_a_filtered_dataset_whose_gold_answers_fail_gets_no_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sums(tmp_path, 3)
    monkeypatch.setattr(Mathematics, "gold", lambda self, task: "\\boxed{-1}")
    out = tmp_path / "kept.jsonl"
    with pytest.raises(FatalError, match="its gold answer scores 0"):
        list(filter_tasks(model, run, Range(0.0, 1.0, 2), out))
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_the_filtered_dataset_is_named_by_its_digest_and_made_again_alike(
    model: Path, tmp_path: Path
) -> None:
    run = sums(tmp_path, 5)
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for out in outs:
        progress = list(filter_tasks(model, run, Range(0.0, 1.0, 2), out, tasks=5))
        assert progress[-1] == (5, 5)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    found = describe(outs[0])
    assert found.digest == sha256(outs[0].read_bytes()) != ZERO_DIGEST
    assert [json.loads(line)["problem_id"] for line in outs[0].read_text().splitlines()]
    assert sum(found.passes.values()) == 5
    with pytest.raises(UserError, match="exists already"):
        list(filter_tasks(model, run, Range(0.0, 1.0, 2), outs[0], tasks=5))
    with pytest.raises(UserError, match="pass rate"):  # a random model solves nothing
        list(filter_tasks(model, run, Range(0.9, 1.0, 2), tmp_path / "none.jsonl", tasks=3))
    assert not (tmp_path / "none.jsonl").exists()


def test_the_filter_takes_a_pool_s_accepted_rollouts_for_answers(tmp_path: Path) -> None:
    run, out, file = sums(tmp_path, 4), tmp_path / "kept.jsonl", tmp_path / "rollouts.parquet"

    def rows(
        index: int,
        scores: list[int | None],
        verdict: str = "accepted",
        finish: str = "end",
        digest: str = run.environment.digest,
    ) -> Any:
        for score in scores:
            parts = [] if score is None else [{"name": "task_micro", "value": score * MICRO}]
            yield {"problem_id": f"sum-{index}", "verdict": verdict, "reward": score,
                   "reward_parts": parts, "finish_reason": finish,
                   "environment_digest": digest}  # fmt: skip

    def write(*some: Any) -> None:
        table = pa.Table.from_pylist([row for own in some for row in own], schema=COLUMNS)
        pq.write_table(table, file)

    write(rows(0, [1, 0, 1, None]), rows(1, [1, 1]), rows(2, [0]), rows(9, [0, 1]),
          rows(2, [1], "rejected"), rows(3, [0, 0, 1]), rows(1, [1, 0]),
          rows(1, [0] * 9, finish="tool_limit"),
          rows(0, [0] * 9, digest=ZERO_DIGEST))  # fmt: skip
    filter_rollouts(file, run, Range(0.3, 0.7, 2), out)
    assert {task.problem_id: (task.metadata or {})["solve_rate"] for task in reopened(out)} == {
        "sum-0": pytest.approx(2 / 3),
        "sum-3": pytest.approx(1 / 3),
    }
    found = describe(out)
    assert (found.asked, found.kept, found.passes) == (4, 2, {"0": 1, "1": 1, "2": 1, "3": 1})
    later = tmp_path / "later.jsonl"
    with pytest.raises(UserError, match="none of 2 tasks has a pass rate"):
        filter_rollouts(file, run, Range(0.9, 1.0, 2), later, tasks=2)
    write(rows(0, [None, None]))
    with pytest.raises(UserError, match="has no grades"):
        filter_rollouts(file, run, Range(0.0, 1.0, 1), later)
    write(rows(9, [1]))
    with pytest.raises(UserError, match="no accepted rollout of the first 4 problems"):
        filter_rollouts(file, run, Range(0.0, 1.0, 1), later)
    write(rows(0, [1], digest=ZERO_DIGEST))
    other = f"are of the environment {ZERO_DIGEST}, and the run pins {run.environment.digest}"
    with pytest.raises(UserError, match=other):
        filter_rollouts(file, run, Range(0.0, 1.0, 1), later)
    pq.write_table(pq.read_table(file).drop_columns("environment_digest"), file)
    with pytest.raises(UserError, match="has no column 'environment_digest'"):
        filter_rollouts(file, run, Range(0.0, 1.0, 1), later)
    file.write_text("no Parquet file")
    with pytest.raises(UserError, match="is no export of rollouts"):
        filter_rollouts(file, run, Range(0.0, 1.0, 1), later)
    assert not later.exists()


def test_a_plugin_that_raises_is_named_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out, file = sums(tmp_path, 2), tmp_path / "kept.jsonl", tmp_path / "rollouts.parquet"
    same = {"verdict": "accepted", "finish_reason": "end"}
    part = {"reward": 1.0, "reward_parts": [{"name": "task_micro", "value": MICRO}]}
    row = {**same, **part, "problem_id": "sum-1", "environment_digest": run.environment.digest}
    pq.write_table(pa.Table.from_pylist([row], schema=COLUMNS), file)
    for kind, method, where in (
        (TaskDataset, "problem", "problem 0"), (TaskDataset, "as_task", "problem sum-1"),
        (Mathematics, "gold", "problem sum-1"), (Mathematics, "grade", "problem sum-1"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, Mock(side_effect=KeyError("a\nb")))
            name = f"{kind.__module__}.{kind.__qualname__}"
            with pytest.raises(UserError, match=f"^{name} raised KeyError on {where}: ") as error:
                filter_rollouts(file, run, Range(0.0, 1.0, 1), out)
        assert "\n" not in str(error.value)
        assert not out.exists()


class DiedError(Exception):
    pass


def test_an_evaluation_that_was_ended_goes_on_where_it_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "ROWS", 4)  # two problems a batch
    whole = evaluate(model, RUN, problems=6, seed=1, samples=2)
    counted: list[int] = []

    def die(answered: int) -> None:
        counted.append(answered)
        if sum(counted) == 4:
            raise DiedError

    kept = Sampling(answers=tmp_path / "answers", progress=die)
    with pytest.raises(DiedError):
        evaluate(model, RUN, problems=6, seed=1, samples=2, sampling=kept)
    file = tmp_path / "answers" / "model.jsonl"
    with file.open("a") as torn:
        torn.write('{"number": 4, "ind')  # the machine stopped in the middle of a line

    generated: list[int] = []
    generate = sampling.generate_rows

    def counting(plan: list[PlannedRow], *rest: Any, **more: Any) -> Any:
        generated.extend(row.group for row in plan)
        return generate(plan, *rest, **more)

    monkeypatch.setattr(sampling, "generate_rows", counting)
    again = Sampling(answers=tmp_path / "answers", progress=counted.append)
    assert evaluate(model, RUN, problems=6, seed=1, samples=2, sampling=again) == whole
    assert generated == [4, 4, 5, 5], "only what was missing is generated"
    assert counted == [2, 2, 2, 2, 2]
    generated.clear()
    assert evaluate(model, RUN, problems=6, seed=1, samples=2, sampling=again) == whole
    assert generated == []


def test_answers_to_another_question_are_not_used(model: Path, tmp_path: Path) -> None:
    kept = Sampling(answers=tmp_path)
    evaluate(model, RUN, problems=2, seed=1, sampling=kept)
    with pytest.raises(UserError, match="holds answers for seed 1, not 2"):
        evaluate(model, RUN, problems=2, seed=2, sampling=kept)
    file = tmp_path / "model.jsonl"
    file.write_text(file.read_text().replace('"grades"', '"marks"'))
    with pytest.raises(UserError, match=r"line 2 of .* is not a graded answer"):
        evaluate(model, RUN, problems=2, seed=1, sampling=kept)


def test_a_run_with_a_gateway_is_sampled_with_recorded_answers_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cassette, each row with a call would end there, and the figures would be of those
    without."""
    gateway = Gateway(url="http://127.0.0.1:1", key=Address("0x" + "11" * 20), tools=("fetch-1",))
    talking = {
        "conversation": Conversation(turns=2, tools=("fetch-1",), gateway=gateway),
        "schema_version": 4,
    }
    evaluated, filtered = (one.model_copy(update=talking) for one in (RUN, sums(tmp_path, 2)))
    tape = tmp_path / "tape.jsonl"
    line = Recording(step=0, tool="fetch-1", arguments={"input": "page 0"}, text="said")
    tape.write_text(line.model_dump_json() + "\n")
    call = GatewayCall(
        group=0, sample=0, turn=0, prefix=ZERO_DIGEST, tool="fetch-1", arguments={"input": "page 0"}
    )
    asked: list[str | None] = []
    generate = sampling.generate_rows

    def asking(*given: Any) -> Any:
        found = given[-1].answer(call)
        asked.append(found and found.text)
        return generate(*given)

    monkeypatch.setattr(sampling, "generate_rows", asking)

    def evaluates(how: Sampling) -> None:
        evaluate(model, evaluated, problems=2, seed=1, sampling=how)

    def filters(how: Sampling) -> None:
        list(filter_tasks(model, filtered, Range(0.0, 1.0, 2), tmp_path / "o.jsonl", sampling=how))

    for command in (evaluates, filters):
        with pytest.raises(UserError, match="ask a gateway") as error:
            command(Sampling())
        assert "--cassette" in error.value.hint
        command(Sampling(cassette=tape))
    assert asked == ["said", "said"]
    with pytest.raises(UserError, match=r"has no \[conversation\.gateway\]"):
        evaluate(model, RUN, problems=2, seed=1, sampling=Sampling(cassette=tape))
    kept = Sampling(answers=tmp_path / "answers", cassette=tape)
    evaluates(kept)
    tape.write_text(line.model_copy(update={"text": "other"}).model_dump_json() + "\n")
    with pytest.raises(UserError, match="holds answers for cassette"):
        evaluates(kept)


def test_a_filter_that_was_ended_goes_on_where_it_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "ROWS", 4)
    run = sums(tmp_path, 6)
    kept, out = Sampling(answers=tmp_path / "answers"), tmp_path / "kept.jsonl"
    steps = filter_tasks(model, run, Range(0.0, 1.0, 2), out, sampling=kept)
    assert next(steps) == (2, 2)
    steps.close()
    assert not out.exists()
    assert list(filter_tasks(model, run, Range(0.0, 1.0, 2), out, sampling=kept))[-1] == (6, 6)
    other = tmp_path / "other.jsonl"
    assert list(filter_tasks(model, run, Range(0.0, 1.0, 2), other))[-1] == (6, 6)
    assert out.read_bytes() == other.read_bytes()
