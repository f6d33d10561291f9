"""A contributed grader: a Python function that runs in a new sandboxed program for every answer.

    def grade(task, answer):            # task: the row as a dict; answer: the model's text
        return {"score": 0.0 … 1.0, "reason": "…", "parts": {"name": 3}}

It has only the rights of a sandboxed program (sandbox/client.py), so its author need not be
trusted: the worst it can do is grade badly, which `orchestrator env check` tests for.
"""

from __future__ import annotations

import math
import platform
from typing import Any

from prime_core.errors import MalformedError, UnavailableError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.base import Grader
from prime_envs.sandbox.client import Limits, Program, Sandbox
from prime_envs.tasks import Task, load_json

MAX_SOURCE = 1 << 18
MAX_PARTS = 16
LIMITS = Limits(cpu_seconds=4.0, memory_mb=256, output_bytes=1 << 16)


class CustomGrader(Grader):
    """`source`: the source of grader.py."""

    version = 1

    def __init__(self, source: str) -> None:
        self._source = source
        self._sandbox = Sandbox()

    def close(self) -> None:
        self._sandbox.close()

    def pins(self) -> dict[str, str]:
        return {"python": ".".join(platform.python_version_tuple()[:2])}

    def require(self, task: Task) -> None:
        if not (task.gold_standard_solution or "").strip():
            raise MalformedError(
                f"{task.where}: gold_standard_solution is missing: the task has no answer"
            )

    def gold(self, task: Task) -> str | None:
        return task.gold_standard_solution

    def grade(self, task: Task, output_text: str) -> TaskScore:
        program = Program(self._source, function="grade", arguments=(task.plain(), output_text))
        try:
            outcome = self._sandbox.run(program, LIMITS)
        except UnavailableError as error:
            return TaskScore(0, f"{task.where}: {error}", uncertain=True)
        if outcome.status != "ok":
            last = outcome.error.strip().splitlines()[-1:] or [outcome.status]
            return TaskScore(0, f"{task.where}: the grader failed: {last[0][:200]}", uncertain=True)
        try:
            score = _score(load_json(outcome.result, "the grader's answer"))
        except MalformedError as error:
            return TaskScore(0, f"{task.where}: {error}", uncertain=True)
        slow = outcome.uncertain(LIMITS)
        return TaskScore(score.task_micro, score.reason, uncertain=slow, parts=score.parts)


def _score(answer: Any) -> TaskScore:
    if not isinstance(answer, dict) or not {"score", "reason"} <= set(answer) <= {
        "score", "reason", "parts",
    }:  # fmt: skip
        raise MalformedError("the grader's answer is not {score, reason, parts}")
    score, reason, parts = answer["score"], answer["reason"], answer.get("parts", {})
    if not isinstance(score, int | float) or not math.isfinite(score) or not 0 <= score <= 1:
        raise MalformedError(f"the grader's score is {score!r}, not a number from 0 to 1")
    if not isinstance(reason, str) or not isinstance(parts, dict) or len(parts) > MAX_PARTS:
        raise MalformedError("the grader's reason or parts are of the wrong kind")
    if any(type(value) is not int or abs(value) > 1 << 53 for value in parts.values()):
        raise MalformedError("the grader's parts are not whole numbers")
    return TaskScore(round(score * MICRO), reason[:500], parts=parts)
