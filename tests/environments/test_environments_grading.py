"""A grader cannot hang, exhaust or confuse its caller."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from prime_core.run import LengthBudgets
from prime_envs.environments.reasoning_gym import ReasoningGym
from prime_envs.subprocess_grader import (
    Answered,
    GraderLimits,
    GradingCrashError,
    GradingRaisedError,
    GradingTimeoutError,
    SubprocessGrader,
)

BUDGETS = LengthBudgets(targets=(100,), penalty_micro=0)


@pytest.mark.slow
def test_a_grader_that_hangs_is_killed_and_the_next_call_answers() -> None:
    with SubprocessGrader("time:sleep", GraderLimits(call_seconds=3)) as grader:
        with pytest.raises(GradingTimeoutError):
            grader.call(3600)
        child = grader._child
        assert child is None  # killed and waited for
        assert grader.call(0) is None


def test_a_grader_that_dies_is_a_crash_and_the_next_call_answers() -> None:
    with SubprocessGrader("os:_exit") as grader, pytest.raises(GradingCrashError):
        grader.call(3)
    with SubprocessGrader("builtins:abs") as grader:
        with pytest.raises(GradingCrashError):
            grader.call("not a number")  # the traceback ends the child
        assert grader.call(-5) == 5


def test_a_memory_hog_ends_at_its_limit() -> None:
    with (
        SubprocessGrader("builtins:bytearray", GraderLimits(memory_bytes=1 << 30)) as grader,
        pytest.raises(GradingCrashError),
    ):
        grader.call(8 << 30)


def test_what_a_grader_prints_is_no_answer() -> None:
    with SubprocessGrader("builtins:print") as grader:
        assert grader.call('"1.0"\n1') is None
        assert grader.call("again") is None


def test_closing_ends_the_child() -> None:
    grader = SubprocessGrader("builtins:len")
    assert grader.call("four") == 4
    child = grader._child
    assert child is not None
    grader.close()
    assert child.returncode is not None


def test_another_interpreter_sees_this_package_and_none_of_our_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    with SubprocessGrader("os:getenv", python=python) as grader:
        shown = grader.call("PYTHONPATH")
        assert [path.name for path in Path(shown).iterdir()] == ["prime_envs"]
    with (
        SubprocessGrader("importlib:import_module", python=python, fork=True) as grader,
        pytest.raises(GradingRaisedError, match="No module named 'pydantic'"),
    ):
        grader.call("pydantic")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["basic_arithmetic", "spell_backward", "gcd"])
def test_gold_answers_score_one_and_wrong_ones_less(family: str) -> None:
    environment = ReasoningGym({"family": family, "seed": 3}, BUDGETS)
    try:
        for index in (0, 17, 999_999):
            problem = environment.problem(index)
            right = environment.grade(problem, 100, f"so\nAnswer: {problem.answer}", 10)
            wrong = environment.grade(problem, 100, "Answer: no idea at all", 10)
            silent = environment.grade(problem, 100, "", 1)
            assert right.parts["task_micro"] == 1_000_000
            assert wrong.parts["task_micro"] < 500_000
            assert silent.parts["task_micro"] == 0
            assert not right.uncertain
    finally:
        environment.close()


@pytest.mark.slow
def test_problems_are_the_same_in_every_process_and_seeds_differ() -> None:
    one = ReasoningGym({"family": "gcd", "seed": 1}, BUDGETS)
    two = ReasoningGym({"family": "gcd", "seed": 2}, BUDGETS)
    assert one.problem(5) == ReasoningGym({"family": "gcd", "seed": 1}, BUDGETS).problem(5)
    assert one.problem(5) != two.problem(5)
    assert one.digest() != two.digest()


@pytest.mark.slow
def test_a_grader_out_of_time_is_marked_uncertain() -> None:
    environment = ReasoningGym({"family": "gcd", "seed": 1}, BUDGETS)
    environment._grader = _Slow()
    try:
        grade = environment.grade(environment.problem(0), 100, "Answer: 1", 5)
    finally:
        environment.close()
    assert grade.uncertain
    assert grade.parts["task_micro"] == 0


class _Slow(SubprocessGrader):
    """Asks its child to sleep for every answer."""

    def __init__(self) -> None:
        super().__init__("time:sleep", GraderLimits(call_seconds=0.3))

    def ask(self, request: object) -> Answered:
        return super().ask(3600)
