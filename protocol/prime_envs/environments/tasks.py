"""The environment `tasks`: tasks from a file, pinned by digest.

Arguments: `sha256` of the file; its location: `url`, `path`, or neither (sources.py); `bad_rows`:
"stop" (default; the first bad row is an error) or "skip" (bad rows are omitted and listed in
`skipped`). Each row is graded by its task_type (graders/base.py). The length budget follows the
prompt, worded as in prompts.py.

Problems are ordered by the SHA-256 of their ids, so that the held-out tail is a fair sample. The
digest covers the graders, but not the file's location.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prime_core import encoding
from prime_core.errors import MalformedError, UserError
from prime_core.ids import Digest
from prime_core.run import LengthBudgets
from prime_envs.base import OF_THIS_MACHINE, Environment, Problem, TaskScore
from prime_envs.graders.base import BUILT_IN, Grader, grader_class
from prime_envs.prompts import with_budget
from prime_envs.rows import Bounds, read_lines
from prime_envs.sources import locate
from prime_envs.tasks import Task, load_json, parse_task, require_text

PLACES = frozenset({"url", "path"})
"""Arguments that give the file's location, not its content."""


class TaskDataset(Environment):
    """See the module's docstring. The constructor raises UserError, UntrustedError,
    UnavailableError or MalformedError (naming file and row)."""

    name = "tasks"
    version = 1
    may_give_up = True
    arguments_known = frozenset({"sha256", "url", "path", "bad_rows"})

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        unknown = sorted(set(arguments) - self.arguments_known)
        if unknown:
            raise UserError(f"The {self.name} environment has no argument {unknown[0]!r}.")
        text = {name: str(arguments.get(name, "")) for name in ("sha256", "url", "path")}
        self._bad_rows = arguments.get("bad_rows", "stop")
        if self._bad_rows not in ("stop", "skip"):
            raise UserError(f"bad_rows is {self._bad_rows!r}; expected 'stop' or 'skip'.")
        self._sha256 = text["sha256"].lower()
        self._graders: dict[str, Grader] = {}
        self.skipped: list[str] = []
        """One message per omitted row, with file and row."""
        self._rows: list[tuple[str, bytes]] = []
        self._load(locate(text["sha256"], path=text["path"], url=text["url"]))

    def grader(self, task_type: str) -> Grader:
        """Returns the grader of a task type, created once. Raises UserError if there is none."""
        if task_type not in self._graders:
            self._graders[task_type] = grader_class(task_type)()
            self.plugin = self.plugin or task_type not in BUILT_IN
        return self._graders[task_type]

    def lines(self, path: Path) -> Iterable[tuple[str, bytes]]:
        """(where, JSON text) of the file's tasks."""
        return read_lines(path, Bounds())

    def _load(self, path: Path) -> None:
        seen: dict[str, str] = {}
        found: list[tuple[bytes, str, bytes]] = []
        for where, line in self.lines(path):
            try:
                task = self._checked(line, where)
                earlier = seen.get(task.problem_id)
                if earlier is not None:
                    raise MalformedError(
                        f"{where}: problem_id {task.problem_id!r} is that of {earlier}"
                    )
            except MalformedError as error:
                if self._bad_rows == "stop":
                    raise
                self.skipped.append(str(error))
                continue
            seen[task.problem_id] = where
            order = hashlib.sha256(task.problem_id.encode()).digest()
            found.append((order, where, zlib.compress(line, 1)))
        if not found:
            raise MalformedError(f"{path.name} holds no task that can be used")
        self._rows = [(where, line) for _order, where, line in sorted(found)]

    def _checked(self, line: bytes, where: str) -> Task:
        row = load_json(line, where)
        task = parse_task(row, where)
        if b"\\u" in line:
            require_text(row, where)
        try:
            grader = self.grader(task.task_type)
        except UserError as error:
            raise MalformedError(f"{where}: {error}") from error
        try:
            grader.require(task)
        except OF_THIS_MACHINE:
            raise
        except Exception as error:
            if not self.plugin:
                raise
            raise MalformedError(f"{where}: its grader raised {error!r}") from error
        return task

    def task(self, index: int) -> Task:
        """Task number `index`. Raises MalformedError outside [0, len)."""
        self._require_index(index)
        where, line = self._rows[index]
        return parse_task(json.loads(zlib.decompress(line)), where)

    def as_task(self, index: int) -> Task:
        return self.task(index)

    def digest(self) -> Digest:
        """Like every environment's, but without the file's location."""
        kept = {name: value for name, value in self.arguments.items() if name not in PLACES}
        return encoding.sha256(
            encoding.canonical_json(
                {
                    "name": self.name,
                    "version": self.version,
                    "arguments": kept,
                    "data": self.data_digest(),
                }
            )
        )

    def data_digest(self) -> Digest:
        """Covers the file's digest, and version and pins of every grader that its rows need."""
        graders: dict[str, Any] = {
            name: {"version": grader.version, "pins": dict(grader.pins())}
            for name, grader in self._graders.items()
        }
        return encoding.sha256(encoding.canonical_json({"file": self._sha256, "graders": graders}))

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        task = self.task(index)
        return Problem(
            problem_id=task.problem_id,
            index=index,
            prompt=task.prompt,
            answer=task.gold_standard_solution or "",
            metadata={"task_type": task.task_type, "source": task.source, "where": task.where},
        )

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return with_budget(problem.prompt, target_length)

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        task = self.task(problem.index)
        return self.grader(task.task_type).grade(task, output_text)

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()
