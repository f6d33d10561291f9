"""The environment `verifiers`: tasksets of the package `verifiers` (0.4).

Arguments: `environment` (the taskset's id), `size` (how many of its tasks, at most MAX_SIZE). The
package is heavy (about a hundred dependencies), so it is optional and may have its own virtual
environment: `$PRIME_VERIFIERS_PYTHON` names that interpreter; the default is the current one.

Only single-turn text is supported: tasks with tools, containers or judge models are refused. A
taskset's own code runs in a child that is killed on timeout. The operator installed that code, and
it is not confined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.run import LengthBudgets
from prime_envs.base import Environment, Problem, TaskScore
from prime_envs.prompts import with_budget
from prime_envs.subprocess_grader import (
    GradingCrashError,
    GradingRaisedError,
    GradingTimeoutError,
    SubprocessGrader,
)

VARIABLE = "PRIME_VERIFIERS_PYTHON"
MAX_SIZE = 100_000
TIMEOUT = 60.0
SLACK = 8


class VerifiersEnvironment(Environment):
    """See the module's docstring. Raises UserError if the package or the taskset is missing, or the
    taskset cannot be used."""

    name = "verifiers"
    version = 1
    may_give_up = True

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        taskset, size = arguments.get("environment"), arguments.get("size", MAX_SIZE)
        if (
            not isinstance(taskset, str)
            or not isinstance(size, int)
            or not 1 <= size <= MAX_SIZE
            or set(arguments) - {"environment", "size"}
        ):
            raise UserError(
                "The verifiers environment takes `environment` (a taskset's id) and `size` "
                f"(1 to {MAX_SIZE})."
            )
        self._python = os.environ.get(VARIABLE) or sys.executable
        _require_package(self._python)
        self._about = {"id": taskset, "size": size}
        self._child = SubprocessGrader(
            "prime_envs.verifiers_child:answer",
            timeout=TIMEOUT,
            memory_bytes=16 << 30,
            python=self._python,
            path=Path(__file__).resolve().parents[1],
        )
        try:
            found = self._child.call({"do": "describe", **self._about})
        except GradingRaisedError as error:
            raise UserError(
                f"the verifiers environment {taskset!r} cannot be loaded: {error}",
                hint=f"install it into {self._python}",
            ) from error
        if "refused" in found:
            raise UserError(
                f"the verifiers environment {taskset!r} cannot be used: {found['refused']}"
            )
        self._found: dict[str, Any] = found

    def close(self) -> None:
        self._child.close()

    def data_digest(self) -> Digest:
        """Covers the package's version and the digest over all tasks."""
        pinned = {name: self._found[name] for name in ("count", "digest", "version")}
        return encoding.sha256(encoding.canonical_json(pinned))

    def __len__(self) -> int:
        return int(self._found["count"])

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        task = self._child.call({"do": "task", "index": index, **self._about})
        return Problem(str(task["key"])[:256], index, task["prompt"], "")

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return with_budget(problem.prompt, target_length)

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        request = {"do": "score", "index": problem.index, "text": output_text, **self._about}
        try:
            told = self._child.ask(request)
        except GradingTimeoutError:
            return TaskScore(0, "the grader ran out of time", uncertain=True)
        except GradingCrashError as error:
            return TaskScore(0, f"task {problem.index}: {error}", uncertain=True)
        slow = told.cpu_seconds * SLACK > TIMEOUT
        score, parts = told.value["score"], told.value["parts"]
        reason = f"scored {score / 1_000_000:g} by {self._about['id']}"
        return TaskScore(score, reason, uncertain=slow, parts=parts)


def _require_package(python: str) -> None:
    """Raises UserError unless `python` has verifiers 0.4 or later."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('verifiers.v1') is None)"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} cannot be run: {error}", hint=f"mend {VARIABLE}") from error
    if done.returncode != 0:
        raise UserError(
            "this environment needs the package verifiers (0.4 or later), which is not installed "
            f"for {python}",
            hint=f"python -m venv DIR && DIR/bin/pip install 'verifiers>=0.4' && "
            f"export {VARIABLE}=DIR/bin/python",
        )
