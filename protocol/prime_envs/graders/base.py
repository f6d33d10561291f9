"""The grader interface, and the table of graders by task type.

A grader takes a task and a model's text and returns score, parts and reason (`TaskScore`). It is a
pure function of the two: a validator that regrades gets exactly the same result, or the result is
`uncertain` because a time or memory limit decided, and then no one is accused. It cannot hang its
caller: untrusted text is parsed or run in a process that can be killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import ClassVar

from prime_core.errors import UserError
from prime_core.plugins import loaded
from prime_envs.base import TaskScore
from prime_envs.tasks import Task

ENTRY_POINT_GROUP = "prime_open.graders"
"""Plugins register their Grader class here, under the task type that it grades."""

BUILT_IN = {
    "verifiable_math": "prime_envs.graders.mathematics:Mathematics",
    "verifiable_code": "prime_envs.graders.code:PythonCode",
    "prime_rl_code": "prime_envs.graders.code:PythonCode",
    "code_output_prediction": "prime_envs.graders.prediction:OutputPrediction",
    "complex_json_output": "prime_envs.graders.prediction:JsonOutput",
    "reasoning_gym": "prime_envs.graders.families:Families",
    "format_following": "prime_envs.graders.formats:FormatFollowing",
    "harbor": "prime_envs.graders.harbor:Harbor",
}


class Grader(ABC):
    """Grades one kind of task. Created once for many tasks; `close` ends its processes."""

    version: ClassVar[int]
    """Incremented manually with every change that can affect a score."""

    def close(self) -> None:  # noqa: B027 - most graders start nothing
        """Ends child processes; a later `grade` restarts them."""

    @abstractmethod
    def require(self, task: Task) -> None:
        """Raises MalformedError, beginning with task.where, unless the task can be graded."""

    @abstractmethod
    def grade(self, task: Task, output_text: str) -> TaskScore:
        """Scores one answer to a task that `require` accepted."""

    @abstractmethod
    def gold(self, task: Task) -> str | None:
        """An answer that must score 1; None if the task does not contain one."""

    def pins(self) -> Mapping[str, str]:
        """Versions of dependencies that affect scores; part of the environment's digest."""
        return {}


def grader_class(task_type: str) -> type[Grader]:
    """The class that grades `task_type`. Raises UserError if there is none, or it is a plugin that
    cannot be loaded."""
    if task_type in BUILT_IN:
        module, _, attribute = BUILT_IN[task_type].partition(":")
        grader = getattr(import_module(module), attribute)
    else:
        found = entry_points(group=ENTRY_POINT_GROUP, name=task_type)
        if not found:
            known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})
            raise UserError(
                f"There is no grader for the task type {task_type!r}; known are {', '.join(known)}."
            )
        grader = loaded(next(iter(found)))
    if not (isinstance(grader, type) and issubclass(grader, Grader)):
        raise UserError(f"The plugin that grades {task_type!r} is not a Grader class.")
    return grader
