"""reasoning-gym's procedural families (Apache-2.0) as environments.

Problem i is the family's entry i under the run's dataset seed, graded by the family's own scorer.
Both run only in a child process (subprocess_grader.py):

- entries, because some families iterate over sets of text or use the global random generators:
  only a fixed hash seed and a generator reseeded for each entry give every machine the same problem
- scores, because some scorers evaluate the model's text: the child can only compute, and
  reasoning.py decides which answers these scorers are shown
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import version as installed_version
from typing import Any

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.run import MICRO, LengthBudgets
from prime_envs.base import Environment, Problem, TaskScore
from prime_envs.prompts import with_budget
from prime_envs.reasoning import (
    SIZES,
    START_SECONDS,
    only_data,
    reasoning_gym,
    rehearse,
    require_fit,
    require_reasoning_gym,
    score,
)
from prime_envs.subprocess_grader import (
    GraderLimits,
    GradingCrashError,
    GradingTimeoutError,
    SubprocessGrader,
)
from prime_envs.tasks import Task

ENDING = "End with a line `Answer:` and your answer."
SIZE = 1_000_000
"""Entries are generated on demand, so a family can have any size (except for those in SIZES)."""
MAX_ANSWER_CHARACTERS = 8192
CPU_SECONDS = 5.0
SLACK = 8
"""A grade that took more than 1/SLACK of the limit may fail on a machine that is SLACK times
slower."""
KEPT_ENTRIES = 256
"""Cache size; a batch's samples of one problem arrive consecutively."""


class ReasoningGym(Environment):
    """Arguments: `family` (a reasoning-gym dataset name), `seed`.

    The answer is the text after the last `Answer:`, or the last nonempty line if there is none.
    """

    name = "reasoning_gym"
    version = 3
    may_give_up = True

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        family, seed = arguments.get("family"), arguments.get("seed", 0)
        if not isinstance(family, str) or not isinstance(seed, int) or len(arguments) > 2:
            raise UserError("The reasoning_gym environment takes `family` (text) and `seed`.")
        require_fit(family)
        require_reasoning_gym()
        self._family, self._seed = family, seed
        here = "prime_envs.environments.reasoning_gym"
        self._grader = SubprocessGrader(
            f"{here}:work",
            GraderLimits(CPU_SECONDS, START_SECONDS),
            fork=True,
            confined=True,
            warm=(f"{here}:warm_up", family, seed),
        )
        self._entry = lru_cache(maxsize=KEPT_ENTRIES)(self._made)
        try:
            self._entry(0)
        except (GradingCrashError, GradingTimeoutError) as error:
            self._grader.close()
            raise UserError(f"reasoning-gym has no family {family!r} for us: {error}") from error

    def close(self) -> None:
        """Ends the child."""
        self._grader.close()

    def data_digest(self) -> Digest:
        """Covers the library's version and the text of the first problems."""
        sample = [[self._entry(i)["question"], self._entry(i)["answer"]] for i in range(8)]
        version = installed_version("reasoning_gym")
        return encoding.sha256(encoding.canonical_json({"library": version, "sample": sample}))

    def __len__(self) -> int:
        return size_of(self._family)

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        entry = self._entry(index)
        name = f"{self._family}-{self._seed}-{index}"
        return Problem(name, index, entry["question"], entry["answer"])

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return f"{with_budget(problem.prompt, target_length)} {ENDING}\n"

    def question(self, problem: Problem) -> str:
        return f"{problem.prompt}\n\n{ENDING}"

    def as_task(self, index: int) -> Task | None:
        """The entry for the grader of the task type `reasoning_gym`; None if its metadata cannot be
        stored as JSON."""
        problem = self.problem(index)
        metadata = self._entry(index)["metadata"]
        if metadata is None:
            return None
        return Task(
            problem_id=problem.problem_id,
            task_type="reasoning_gym",
            prompt=self.question(problem),
            verification_info={"answer": problem.answer, "metadata": metadata},
            source=f"reasoning-gym {self._family}",
            gold_standard_solution=problem.answer or None,
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
        if not only_data(self._family, answer):
            return TaskScore(0, "the answer is a program, or not what was asked for")
        try:
            reply = self._grader.ask({"index": problem.index, "answer": answer})
        except GradingTimeoutError:
            return TaskScore(0, "the grader ran out of time", uncertain=True)
        except GradingCrashError as error:
            return TaskScore(0, f"problem {problem.problem_id}: {error}", uncertain=True)
        slow = reply.cpu_seconds * SLACK > CPU_SECONDS
        reason = f"scored {reply.value / MICRO:g} by {self._family}"
        return TaskScore(reply.value, reason, uncertain=slow)

    def _made(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self._grader.call({"index": index})
        return found


def size_of(family: str) -> int:
    """Number of entries of a family."""
    return SIZES.get(family, SIZE)


# --- in the child --------------------------------------------------------------------------------

_family: tuple[Any, str, int] | None = None


def warm_up(family: str, seed: int) -> None:
    """Loads the family once, before the child's first fork."""
    global _family
    import numpy as np

    random.seed(0)
    np.random.seed(0)
    dataset = reasoning_gym().create_dataset(family, seed=seed, size=size_of(family))
    rehearse(dataset)
    _family = (dataset, family, seed)


def work(request: dict[str, Any]) -> Callable[[], Any]:
    """{index} → function that returns the entry; {index, answer} → function that returns the score
    in millionths."""
    import numpy as np

    assert _family is not None
    dataset, family, seed = _family
    index = request["index"]
    random.seed(f"{seed}/{index}")
    np.random.seed(index)
    entry = dataset[index]
    if "answer" not in request:
        gold = "" if entry["answer"] is None else str(entry["answer"])  # some have none
        plain = {"question": entry["question"], "answer": gold}
        return lambda: {**plain, "metadata": _plain(entry["metadata"])}

    return lambda: score(family, dataset.score_answer, request["answer"], entry)


def _plain(metadata: Any) -> Any:
    """Converts to plain JSON data; None if impossible."""
    try:
        return json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError):
        return None
