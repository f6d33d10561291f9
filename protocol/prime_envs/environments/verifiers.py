"""The environment `verifiers`: tasksets of the package `verifiers` (0.4).

Arguments: `environment` (the taskset's id), `size` (how many of its tasks, at most MAX_SIZE). The
package is heavy (about a hundred dependencies), so it is optional and may have its own virtual
environment: `$PRIME_VERIFIERS_PYTHON` names that interpreter; the default is the current one.

Single-turn tasks, tasks with toolsets, and tasks whose own `vf.Env` talks with one model. Toolsets
and environments are steps of a conversation (`[conversation]` with `tools = []`; calls are
"hermes-1"), which run confined (verifiers_child.py): a step is a pure function of the task and the
model's turns. What cannot be repeated is refused: containers, judge models, several models, code
that imports clocks or the network. Scoring plays the row confined, as its steps, and gives the
rewards its trace. Rewards run in a fork of a child that is killed on timeout; the operator
installed that code, and rewards are not confined.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from prime_core import encoding
from prime_core.errors import MalformedError, UserError
from prime_core.ids import Digest
from prime_core.run import Conversation, LengthBudgets
from prime_envs.base import Environment, Problem, TaskScore
from prime_envs.prompts import with_budget
from prime_envs.subprocess_grader import (
    GraderLimits,
    GradingCrashError,
    GradingTimeoutError,
    SubprocessGrader,
    require_module,
)
from prime_envs.tasks import require_text
from prime_envs.tools import Observation, first_call

VARIABLE = "PRIME_VERIFIERS_PYTHON"
MAX_SIZE = 100_000
TIMEOUT = 60.0
START_TIMEOUT = 600.0
"""Seconds for importing the taskset and reading its tasks."""
MEMORY_BYTES = 8 << 30
"""Address space of the child and of each step. A task's container must hold as much, so that a
MemoryError in the child decides, and not the kernel."""
SLACK = 8
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
log = logging.getLogger(__name__)


class VerifiersEnvironment(Environment):
    """See the module's docstring. Raises UserError if the package or the taskset is missing, or the
    taskset cannot be used."""

    name = "verifiers"
    version = 3
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
            GraderLimits(TIMEOUT, START_TIMEOUT, MEMORY_BYTES),
            fork=True,
            confined=True,
            warm=("prime_envs.verifiers_child:warm", taskset, size),
            python=self._python,
        )
        try:
            found = self._child.call({"do": "describe", **self._about})
        except GradingCrashError as error:
            raise UserError(
                f"the verifiers environment {taskset!r} cannot be loaded: {error}",
                hint=f"install it into {self._python}",
            ) from error
        if "refused" in found:
            raise UserError(
                f"the verifiers environment {taskset!r} cannot be used: its {found['refused']}"
            )
        self._found: dict[str, Any] = found

    def close(self) -> None:
        self._child.close()

    def data_digest(self) -> Digest:
        """Covers the versions of Python and of all packages of the interpreter, the taskset's
        code, and the digest over all tasks."""
        names = ("count", "digest", "code", "version", "installed")
        pinned = {name: self._found[name] for name in names}
        return encoding.sha256(encoding.canonical_json(pinned))

    def __len__(self) -> int:
        return int(self._found["count"])

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        task = self._child.call({"do": "task", "index": index, **self._about})
        return Problem(str(task["key"])[:256], index, task["prompt"], "")

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return with_budget(problem.prompt, target_length)

    def require(self, conversation: Conversation | None) -> None:
        name, tools, talks = self._about["id"], self._found["tools"], self._found["talks"]
        if (tools or talks) and conversation is None:
            raise UserError(
                f"the verifiers environment {name!r} has conversations, and the run has none",
                hint='add [conversation] with turns, tools = [] and calls = "hermes-1"',
            )
        if conversation is None:
            return
        if not tools and not talks and not conversation.tools:
            raise UserError(
                f"the verifiers environment {name!r} says nothing after a turn, and there are no "
                "tools",
                hint='name tools, as in tools = ["calculator-1"], or leave out [conversation]',
            )
        if (tools or talks) and conversation.tools:
            raise UserError(
                f"the verifiers environment {name!r} answers turns by itself, so the run cannot "
                f"have the tool {conversation.tools[0]!r}",
                hint="set conversation.tools = []",
            )
        if tools and conversation.calls != "hermes-1":
            raise UserError(
                f"the tools of the verifiers environment {name!r} take named arguments",
                hint='set conversation.calls = "hermes-1"',
            )

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        if self.conversation is None or self.conversation.tools:
            return super().observe(problem, turns)
        where = f"{self._about['id']}, task {problem.index}, turn {len(turns) - 1}"
        try:
            found = self._child.ask(self._request("step", problem, turns))
        except GradingTimeoutError as error:
            log.warning("%s: %s", where, error)
            return Observation("", exact=False, limit="reached")
        except GradingCrashError as error:
            log.warning("%s: %s", where, error)
            return Observation("", exact=False, limit="reached")
        said = found.value["said"]
        if said is None:
            return None
        try:
            require_text(said, where)
        except MalformedError as error:
            log.warning("%s", error)
            return Observation("", exact=False, limit="reached")
        slow = found.cpu_seconds * SLACK > TIMEOUT
        exact = not slow and not _ADDRESS.search(said)
        return Observation(said, exact=exact, limit="near" if slow else "")

    @property
    def tools_may_give_up(self) -> bool:
        return self.conversation is not None

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        return self.check_turns(problem, [output_text], output_tokens)

    def check_turns(self, problem: Problem, turns: Sequence[str], output_tokens: int) -> TaskScore:
        try:
            played = self._child.ask(self._request("play", problem, turns))
            about = {"index": problem.index, **self._about}
            reply = self._child.ask({"do": "score", "played": played.value, **about})
        except GradingTimeoutError:
            return TaskScore(0, "the grader ran out of time", uncertain=True)
        except GradingCrashError as error:
            return TaskScore(0, f"task {problem.index}: {error}", uncertain=True)
        slow = max(played.cpu_seconds, reply.cpu_seconds) * SLACK > TIMEOUT
        score, parts = reply.value["score"], reply.value["parts"]
        reason = f"scored {score / 1_000_000:g} by {self._about['id']}"
        return TaskScore(score, reason, uncertain=slow, parts=parts)

    def _request(self, do: str, problem: Problem, turns: Sequence[str]) -> dict[str, Any]:
        """A request about a row, with the calls that its turns make."""
        own = self.conversation if self._found["tools"] else None
        calls = [None if own is None else first_call(turn, own) for turn in turns]
        played = [
            {
                "text": turn,
                "call": None
                if call is None
                else {"problem": call.problem}
                if call.problem
                else {"name": call.tool, "arguments": dict(call.arguments)},
            }
            for turn, call in zip(turns, calls, strict=True)
        ]
        return {"do": do, "index": problem.index, "turns": played, **self._about}


def _require_package(python: str) -> None:
    """Raises UserError unless `python` has verifiers 0.4 or later."""
    require_module(
        python,
        "verifiers.v1",
        VARIABLE,
        "this environment needs the package verifiers (0.4 or later)",
        f"python -m venv DIR && DIR/bin/pip install 'verifiers>=0.4' && "
        f"export {VARIABLE}=DIR/bin/python",
    )
