"""The grader port, and the table of graders by task type.

A grader gets a task and the text a model wrote, and answers with score, parts and reason
(`TaskScore`). It is a pure function of the two: a validator that grades again gets the very same,
or both know that a limit of time or memory decided (`uncertain`), and then nobody is accused.
It cannot hang its caller: whatever parses or runs foreign text does so in a process that is killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import ClassVar

from prime_core.errors import UserError
from prime_envs.base import TaskScore
from prime_envs.tasks import Task

ENTRY_POINT_GROUP = "prime_open.graders"
"""A plugin names its Grader class here under the task type that it grades."""

BUILT_IN = {
    "verifiable_math": "prime_envs.graders.mathematics:Mathematics",
    "verifiable_code": "prime_envs.graders.code:PythonCode",
    "prime_rl_code": "prime_envs.graders.code:PythonCode",
    "code_output_prediction": "prime_envs.graders.prediction:OutputPrediction",
    "complex_json_output": "prime_envs.graders.prediction:JsonOutput",
    "reasoning_gym": "prime_envs.graders.families:Families",
    "format_following": "prime_envs.graders.formats:FormatFollowing",
}


class Grader(ABC):
    """Grades one kind of task. Made once for many tasks; `close` ends its processes."""

    version: ClassVar[int]
    """Raised by hand with every change that can alter a score."""

    def close(self) -> None:  # noqa: B027 - most graders start nothing
        """Ends what runs beside us; a later `grade` starts it again."""

    @abstractmethod
    def require(self, task: Task) -> None:
        """Raises MalformedError, beginning with task.where, unless the task can be graded."""

    @abstractmethod
    def grade(self, task: Task, output_text: str) -> TaskScore:
        """The worth of one answer to a task that `require` accepted."""

    @abstractmethod
    def gold(self, task: Task) -> str | None:
        """An answer that must score 1; None if the task does not hold one."""

    def pins(self) -> Mapping[str, str]:
        """Versions, beyond our own, on which scores depend; part of the environment's digest."""
        return {}


def grader_class(task_type: str) -> type[Grader]:
    """The class that grades `task_type`. Raises UserError if there is none."""
    if task_type in BUILT_IN:
        module, _, attribute = BUILT_IN[task_type].partition(":")
        loaded = getattr(import_module(module), attribute)
    else:
        found = entry_points(group=ENTRY_POINT_GROUP, name=task_type)
        if not found:
            known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})
            raise UserError(
                f"There is no grader for the task type {task_type!r}; known are {', '.join(known)}."
            )
        loaded = next(iter(found)).load()
    if not (isinstance(loaded, type) and issubclass(loaded, Grader)):
        raise UserError(f"The plugin that grades {task_type!r} is not a Grader class.")
    return loaded
