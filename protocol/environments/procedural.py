"""reasoning-gym's procedural families (Apache-2.0) as environments.

Problem i is the family's entry i under the run's dataset seed; the family's own scorer runs in a
killable child, because some of them parse or evaluate what the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version as installed_version
from typing import Any

from protocol.core import encoding
from protocol.core.errors import UserError
from protocol.core.ids import Digest
from protocol.core.run import MICRO, LengthBudgets
from protocol.environments.base import Environment, Problem, TaskScore
from protocol.environments.prompts import with_budget
from protocol.environments.reasoning import reasoning_gym
from protocol.environments.subprocess_grader import (
    GradingCrashError,
    GradingTimeoutError,
    SubprocessGrader,
)
from protocol.environments.tasks import Task

ENDING = "End with a line `Answer:` and your answer."
SIZE = 1_000_000
"""Entries are made on demand, so a family is as large as we say."""
MAX_ANSWER_CHARACTERS = 8192
CPU_SECONDS = 5.0
SLACK = 8
"""A grade that took more than 1/SLACK of the limit may fail on a machine that much slower."""


@lru_cache(maxsize=16)
def _dataset(family: str, seed: int) -> Any:
    return reasoning_gym().create_dataset(family, seed=seed, size=SIZE)


def warm_up() -> None:
    """Loads the families once, before the child's first fork."""
    reasoning_gym()


def score_answer(request: dict[str, Any]) -> int:
    """Runs in the child: {family, seed, index, answer} → score in millionths."""
    dataset = _dataset(request["family"], request["seed"])
    score = float(dataset.score_answer(request["answer"], dataset[request["index"]]))
    return round(min(1.0, max(0.0, score)) * MICRO)


class ReasoningGym(Environment):
    """Arguments: `family` (a reasoning-gym dataset name), `seed`.

    The answer is what follows the last `Answer:`; without one, the last line that is not empty.
    """

    name = "reasoning_gym"
    version = 1
    may_give_up = True

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        family, seed = arguments.get("family"), arguments.get("seed", 0)
        if not isinstance(family, str) or not isinstance(seed, int) or len(arguments) > 2:
            raise UserError("The reasoning_gym environment takes `family` (text) and `seed`.")
        self._family, self._seed = family, seed
        try:
            self._data = _dataset(family, seed)
        except ValueError as error:
            raise UserError(f"reasoning-gym has no family {family!r}: {error}.") from error
        here = "protocol.environments.procedural"
        self._grader = SubprocessGrader(
            f"{here}:score_answer", timeout=CPU_SECONDS, fork=True, warm=f"{here}:warm_up"
        )

    def close(self) -> None:
        """Ends the grading child."""
        self._grader.close()

    def data_digest(self) -> Digest:
        """The library's version and the text of the first problems."""
        sample = [[self._data[i]["question"], str(self._data[i]["answer"])] for i in range(8)]
        version = installed_version("reasoning_gym")
        return encoding.sha256(encoding.canonical_json({"library": version, "sample": sample}))

    def __len__(self) -> int:
        return SIZE

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        entry = self._data[index]
        name = f"{self._family}-{self._seed}-{index}"
        return Problem(name, index, entry["question"], str(entry["answer"]))

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return f"{with_budget(problem.prompt, target_length)} {ENDING}\n"

    def as_task(self, index: int) -> Task | None:
        """The entry for the grader of the task type `reasoning_gym`; None where a family's entries
        hold what JSON does not."""
        problem = self.problem(index)
        entry = self._data[index]
        try:
            metadata = json.loads(json.dumps(entry["metadata"], allow_nan=False))
        except (TypeError, ValueError):
            return None
        return Task(
            problem_id=problem.problem_id,
            task_type="reasoning_gym",
            prompt=f"{problem.prompt}\n\n{ENDING}",
            verification_info={"answer": problem.answer, "metadata": metadata},
            source=f"reasoning-gym {self._family}",
            gold_standard_solution=problem.answer,
            metadata={},
        )

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        _head, found, tail = output_text.rpartition("Answer:")
        lines = [line.strip() for line in output_text.splitlines() if line.strip()]
        answer = tail.strip() if found else (lines[-1] if lines else "")
        if not answer:
            return TaskScore(0, "no answer")
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return TaskScore(0, f"an answer of {len(answer)} characters")
        request = {
            "family": self._family,
            "seed": self._seed,
            "index": problem.index,
            "answer": answer,
        }
        try:
            told = self._grader.ask(request)
        except GradingTimeoutError:
            return TaskScore(0, "the grader ran out of time", uncertain=True)
        except GradingCrashError as error:
            return TaskScore(0, f"problem {problem.problem_id}: {error}", uncertain=True)
        slow = told.cpu_seconds * SLACK > CPU_SECONDS
        reason = f"scored {told.value / MICRO:g} by {self._family}"
        return TaskScore(told.value, reason, uncertain=slow)
