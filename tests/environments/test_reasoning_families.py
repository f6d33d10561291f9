"""reasoning-gym's families: no answer without work is paid; what no one can train on is refused."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from prime_core.errors import MalformedError, UserError
from prime_core.run import MICRO, LengthBudgets
from prime_envs.environments.reasoning_gym import ReasoningGym
from prime_envs.graders.families import Families
from prime_envs.reasoning import SIZES, UNFIT, only_data, reasoning_gym, score
from prime_envs.sandbox import kernel
from prime_envs.tasks import Task

pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
BUDGETS = LengthBudgets(targets=(100,), penalty_micro=0)
needs_filter = pytest.mark.skipif(
    not kernel.supported(), reason="the filter needs Linux on x86-64 or aarch64"
)
NEED_MORE = frozenset({"composite", "zebra_puzzles"})
"""Cannot be made by name alone, or not on every machine."""
FREE = (
    "0", "1", "-1", "0.5", "nan", "NAN", "nanj", "1e999", "True", "False", "None", "No", "Yes",
    "[]", "{}", "()", "A", "x", "banana", "1 2 3 4", "0, 0", "[NaN]", "(A)", "oracle_answer",
)  # fmt: skip
"""Answers that need no look at the question."""
ENTRIES = 6


def entries_of(family: str) -> tuple[Any, list[dict[str, Any]]]:
    random.seed(0)
    dataset = reasoning_gym().create_dataset(family, seed=1, size=50)
    return dataset, [dataset[index] for index in range(ENTRIES)]


def graded(family: str, dataset: Any, answer: str, entry: dict[str, Any]) -> int:
    """As both graders do, in this process: every answer here is our own. A scorer that raises pays
    nothing."""
    with contextlib.suppress(Exception):
        if only_data(family, answer):
            return score(family, dataset.score_answer, answer, entry)
    return 0


def free_answers(entry: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """The above, another problem's answer, the question, and a list of nothing as long as gold."""
    yield from FREE
    if other["answer"] is not None:
        yield str(other["answer"])
    yield entry["question"][:4096]
    try:
        size = len(json.loads(str(entry["answer"]).replace("'", '"')))
    except (ValueError, TypeError):
        return
    for nothing in ("NaN", '"NAN"', '"nan"'):
        yield f"[{', '.join([nothing] * size)}]"


def families() -> list[str]:
    reasoning_gym()
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - set(UNFIT) - NEED_MORE)


@pytest.mark.slow
def test_no_family_pays_an_answer_that_looks_at_no_question() -> None:
    """The same text is paid in full on half of a family's problems at most (some ask yes or no)."""
    open_ = {}
    for family in families():
        dataset, entries = entries_of(family)
        paid: Counter[str] = Counter()
        for number, entry in enumerate(entries):
            for place, text in enumerate(free_answers(entry, entries[number - 1])):
                same = text.strip().lower() == str(entry["answer"]).strip().lower()
                if not same and graded(family, dataset, text, entry) >= MICRO:
                    paid[text if place < len(FREE) else f"kind {place}"] += 1
        worst = paid.most_common(1)
        if worst and worst[0][1] > ENTRIES // 2:
            open_[family] = worst[0]
    assert open_ == {}


@pytest.mark.parametrize(
    "family",
    ["puzzle24", "countdown", "coin_flip", "complex_arithmetic", "game_of_life_halting",
     "number_sorting", "simple_integration"],
)  # fmt: skip
def test_gold_answers_are_paid_in_full_where_more_is_asked(family: str) -> None:
    dataset, entries = entries_of(family)
    for entry in entries:
        assert graded(family, dataset, str(entry["answer"]), entry) == MICRO


def test_a_problem_whose_recorded_answer_is_its_own_question_pays_the_one_worked_out() -> None:
    """sympy left these integrals alone, so reasoning-gym's own answer is the integral again."""
    dataset, entries = entries_of("intermediate_integration")
    metadata = {**entries[0]["metadata"], "integrand": "x*cos(2*x)", "variable": "x"}
    entry = {**entries[0], "metadata": metadata}
    for answer, worth in (
        ("x*sin(2*x)/2 + cos(2*x)/4 + C", MICRO),
        ("Integral(x*cos(2*x), x) + C", 0),
        ("x*sin(2*x)/2 + C", 0),
    ):
        assert graded("intermediate_integration", dataset, answer, entry) == worth


@pytest.mark.slow
@needs_filter
def test_other_numbers_than_the_given_are_worth_nothing_to_either_grader() -> None:
    environment, grader = ReasoningGym({"family": "puzzle24", "seed": 1}, BUDGETS), Families()
    try:
        problem, other = environment.problem(0), environment.problem(1)
        task = environment.as_task(0)
        assert task is not None
        for answer, worth in ((problem.answer, MICRO), (other.answer, 0), ("4!*1*1*1", 0)):
            text = f"Answer: {answer}"
            for found in (environment.check(problem, text, 9), grader.grade(task, text)):
                assert (found.task_micro, found.uncertain) == (worth, False), found.reason
    finally:
        grader.close()
        environment.close()


@pytest.mark.parametrize("family", sorted(UNFIT))
def test_an_unfit_family_is_refused_at_the_start_and_its_rows_by_name(family: str) -> None:
    with pytest.raises(UserError, match=f"family {family} is refused: its scorer pays"):
        ReasoningGym({"family": family, "seed": 1}, BUDGETS)
    info = {"answer": "5", "metadata": {"source_dataset": family}}
    with pytest.raises(MalformedError, match=rf"file\.jsonl row 1: .* {family} is refused"):
        Families().require(Task("1", "reasoning_gym", "?", info, where="file.jsonl row 1"))


@pytest.mark.slow
@needs_filter
def test_a_family_that_makes_all_of_its_entries_at_once_is_as_large_as_it_can_be_made() -> None:
    environment = ReasoningGym({"family": "acre", "seed": 1}, BUDGETS)
    try:
        assert len(environment) == SIZES["acre"]
        problem = environment.problem(len(environment) - 1)
        assert environment.check(problem, f"Answer: {problem.answer}", 9).task_micro == MICRO
        with pytest.raises(MalformedError, match="not among the"):
            environment.problem(len(environment))
    finally:
        environment.close()


def test_a_family_without_a_recorded_answer_has_no_gold_and_is_graded_by_its_rules() -> None:
    dataset, entries = entries_of("graph_color")
    assert entries[0]["answer"] is None
    info = {"answer": "", "metadata": {"source_dataset": "graph_color"}}
    task = Task("1", "reasoning_gym", "?", info, where="file.jsonl row 1")
    Families().require(task)
    assert Families().gold(task) is None
    puzzle = entries[0]["metadata"]["puzzle"]
    colors: dict[str, int] = {}
    assert colored(puzzle["vertices"], puzzle["edges"], puzzle["color_options"], colors)
    assert graded("graph_color", dataset, json.dumps(colors), entries[0]) == MICRO


def colored(vertices: list[int], edges: Any, options: list[int], found: dict[str, int]) -> bool:
    """Fills `found` with a coloring; False if there is none."""
    left = [vertex for vertex in vertices if str(vertex) not in found]
    if not left:
        return True
    neighbors = {b if a == left[0] else a for a, b in edges if left[0] in (a, b)}
    for option in options:
        if all(found.get(str(other)) != option for other in neighbors):
            found[str(left[0])] = option
            if colored(vertices, edges, options, found):
                return True
            del found[str(left[0])]
    return False
