"""Where grading may use up a limit of time, no one is graded whose text the replay refutes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prime_core.verdict import Outcome, Reason
from prime_engine.base import Generation, GenerationRequest


@pytest.fixture
def graded(world: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answers graded from now on, in an environment whose grader may give up."""
    kind, calls = type(world.environment), []
    check = kind.check

    def counted(self: Any, problem: Any, text: str, tokens: int) -> Any:
        calls.append(problem.index)
        return check(self, problem, text, tokens)

    monkeypatch.setattr(kind, "may_give_up", True)
    monkeypatch.setattr(kind, "check", counted)
    return calls


def _made_up(plan: list, engine: Any) -> list[Generation]:
    requests = [GenerationRequest(row.prompt_tokens, 24, row.noise_seed ^ 1) for row in plan]
    return engine.generate(requests, 1.0)


def test_made_up_answers_keep_no_grader_busy(world: Any, graded: list[int]) -> None:
    file = world.made(300, generate=_made_up)
    graded.clear()  # its author graded it
    found = world.judge(file)
    assert found.reason is Reason.WRONG_SAMPLING
    assert not graded


def test_a_setup_without_judges_keeps_no_grader_busy(world: Any, graded: list[int]) -> None:
    file = world.made(300, generate=_made_up, metadata={"device": "another"})
    graded.clear()
    assert world.judge(file).reason is Reason.UNCALIBRATED
    assert not graded


def test_an_accepted_file_is_graded_all_the_same(world: Any, graded: list[int]) -> None:
    file = world.honest(300)
    graded.clear()
    found = world.judge(file)
    assert found.outcome is Outcome.ACCEPTED
    assert len(graded) == len(found.table) == world.run.rows_per_lease
    assert found.units == sum(row.output_tokens for row in found.table) > 0


def test_a_tampered_reward_is_rejected_after_the_replay_too(world: Any, graded: list[int]) -> None:
    def tampered(rows: list, plan: list, generations: list) -> list:
        return [replace(rows[0], reward=rows[0].reward + 0.5), *rows[1:]]

    found = world.judge(world.made(300, change=tampered))
    assert found.reason is Reason.TAMPERED_REWARD
    assert not found.rows_drawn, "it is evidence by itself"
    assert not found.table
    assert found.units == 0
