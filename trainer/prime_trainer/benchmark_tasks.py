"""The public benchmarks: how their files are read, what the model is asked, how answers are scored.

    aime24, aime25   the task code of lm-evaluation-harness compares the boxed integer
    gpqa-diamond     its filter reads the choice; the choices are in a seeded order
    gsm8k            its filter reads the last number, its metric compares it
    ifeval           its checkers decide on every instruction
    livecodebench    our sandbox runs the program on all tests; no program runs outside it

The user supplies the files; columns are those of the public datasets. Column names match without
regard to case, spaces and underscores.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from prime_core import encoding, seeds
from prime_core.errors import MalformedError, UserError
from prime_core.run import MICRO
from prime_envs.base import Grade, Problem, TaskScore
from prime_envs.rows import Bounds, read_rows
from prime_envs.subprocess_grader import (
    GraderLimits,
    GradingCrashError,
    GradingTimeoutError,
    SubprocessGrader,
    require_module,
)
from prime_envs.tasks import require_text
from prime_trainer.livecodebench import RULES, Harness, tests_of

VARIABLE = "PRIME_LM_EVAL_PYTHON"
"""Names the interpreter that has lm-evaluation-harness (scripts/setup_lm_eval.sh)."""
BOUNDS = Bounds(line_bytes=256 << 20, rows=100_000)
MAX_TEXT = 1 << 18
CPU_SECONDS = 10.0
MEMORY_BYTES = 8 << 30
"""Address space of the child that scores."""
_DEGREES = re.compile(r"(\d{1,3})\s*(?:\^\\circ|\^\{\\circ\}|°)?")
_GSM8K_ANSWER = re.compile(r"#### -?[\d,]*\.?\d+$")


class Row:
    """One row of a benchmark's file. `where` names file and row."""

    def __init__(self, value: Any, where: str) -> None:
        """Raises MalformedError if `value` is not an object, or has a column twice."""
        if not isinstance(value, dict):
            raise MalformedError(f"{where}: not an object with columns")
        self.where = where
        self._columns = {_plain(name): column for name, column in value.items()}
        if len(self._columns) != len(value):
            raise MalformedError(f"{where}: two columns have the same name")

    def get(self, *names: str) -> Any:
        """The first column of these names that is there, or None."""
        found = (self._columns.get(_plain(name)) for name in names)
        return next((value for value in found if value is not None), None)

    def text(self, *names: str) -> str:
        """Likewise, which must be text that is not blank. Raises MalformedError."""
        value = self.get(*names)
        if not isinstance(value, str) or not value.strip():
            raise MalformedError(f"{self.where}: {names[0]!r} is missing or no text")
        if len(value) > MAX_TEXT:
            raise MalformedError(f"{self.where}: {names[0]!r} has {len(value)} characters")
        require_text(value, f"{self.where}: {names[0]!r}")
        return value


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "")


class Benchmark(ABC):
    """One benchmark. `seed` fixes the order of choices. `close` ends its processes."""

    name: ClassVar[str]
    whole: ClassVar[int]
    """Problems of the published benchmark."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def problem(self, row: Row, number: int) -> Problem:
        """Problem `number` (from 0); `metadata` is what `score` needs. Raises MalformedError."""

    @abstractmethod
    def score(self, problem: Problem, response: str) -> TaskScore:
        """Scores the text after the thinking."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Name and version of what scores."""

    def details(self, grades: Sequence[Grade]) -> dict[str, float]:
        """Further figures of all grades, from 0 to 1, by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends the processes that score."""


def read_problems(benchmark: Benchmark, file: Path, most: int | None = None) -> Iterator[Problem]:
    """Yields the file's first `most` problems (None: all). Errors are raised during iteration:
    UserError for a file that cannot be read, MalformedError naming file and row."""
    rows = islice(read_rows(file, BOUNDS), most)
    for number, (where, value) in enumerate(rows):
        yield benchmark.problem(Row(value, where), number)


class _Library:
    """The scorers of lm-evaluation-harness, in the interpreter that has it."""

    def __init__(self, task: str) -> None:
        """Raises UserError if the package or its data is missing."""
        python = os.environ.get(VARIABLE) or sys.executable
        hint = f"scripts/setup_lm_eval.sh installs it; then export {VARIABLE}=FOLDER/bin/python"
        require_module(
            python, "lm_eval.tasks", VARIABLE, "this benchmark needs the package lm_eval", hint
        )
        self._task = task
        self._child = SubprocessGrader(
            "prime_envs.lm_eval_child:answer",
            GraderLimits(CPU_SECONDS, 600.0, MEMORY_BYTES),
            fork=True,
            confined=True,
            warm=("prime_envs.lm_eval_child:warm", task),
            python=python,
        )
        try:
            self.about: dict[str, Any] = self._child.call({"task": "describe", "of": task})
        except GradingCrashError as error:
            first = str(error).partition("\n")[0][:200]
            raise UserError(f"lm_eval of {python} cannot score: {first}", hint=hint) from error

    def score(self, **request: Any) -> TaskScore:
        """An answer that the library fails on scores 0 and counts as `ungraded`."""
        try:
            found = self._child.call({"task": self._task, **request})
        except (GradingTimeoutError, GradingCrashError) as error:
            return TaskScore(0, str(error)[:200], uncertain=True, parts={"ungraded": 1})
        return TaskScore(found["micro"], found["reason"], parts=found["parts"])

    def versions(self) -> dict[str, str]:
        return {"lm_eval": self.about["version"]}

    def close(self) -> None:
        self._child.close()


class _ByLibrary(Benchmark):
    """A benchmark that lm-evaluation-harness scores."""

    task: ClassVar[str]

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.library = _Library(self.task)

    def versions(self) -> dict[str, str]:
        return self.library.versions()

    def close(self) -> None:
        self.library.close()


class Aime(_ByLibrary):
    """Columns: `problem` (or `question`), and `answer`, an integer from 0 to 999."""

    task = "aime"
    whole = 30

    def problem(self, row: Row, number: int) -> Problem:
        asked, answer = row.text("problem", "question"), row.get("answer")
        if isinstance(answer, int) and not isinstance(answer, bool):
            answer = str(answer)
        read = _DEGREES.fullmatch(answer.strip()) if isinstance(answer, str) else None
        if read is None:
            raise MalformedError(f"{row.where}: 'answer' is not an integer from 0 to 999")
        prompt = (
            f"{asked}\n\nReason step by step, and put your final answer within \\boxed{{}}. "
            "It is an integer from 0 to 999."
        )
        return Problem(str(number), number, prompt, str(int(read[1])))

    def score(self, problem: Problem, response: str) -> TaskScore:
        spellings = sorted({problem.answer, problem.answer.zfill(2), problem.answer.zfill(3)})
        return self.library.score(response=response, answers=spellings)


class Aime24(Aime):
    name = "aime24"


class Aime25(Aime):
    name = "aime25"


class GpqaDiamond(_ByLibrary):
    """Columns: `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`."""

    name = "gpqa-diamond"
    task = "gpqa"
    whole = 198

    def problem(self, row: Row, number: int) -> Problem:
        asked = row.text("Question").strip()
        answers = [
            row.text("Correct Answer").strip(),
            *(row.text(f"Incorrect Answer {n}").strip() for n in (1, 2, 3)),
        ]
        drawn = b"prime/choices/v1" + self.seed.to_bytes(8, "big") + number.to_bytes(4, "big")
        order = seeds.problem_indices(encoding.sha256(drawn), 4, 4)
        choices = [answers[index] for index in order]
        lines = [f"({letter}) {text}" for letter, text in zip("ABCD", choices, strict=True)]
        prompt = (
            f"What is the correct answer to this question: {asked}\n\nChoices:\n"
            + "\n".join(lines)
            + '\n\nReason step by step, and end with "The answer is (X)", where X is the letter of '
            "the correct choice."
        )
        letter = f"({'ABCD'[order.index(0)]})"
        return Problem(str(number), number, prompt, letter, {"choices": choices})

    def score(self, problem: Problem, response: str) -> TaskScore:
        choices = problem.metadata["choices"]
        return self.library.score(response=response, choices=choices, letter=problem.answer)


class Gsm8k(_ByLibrary):
    """Columns: `question`, and `answer`, which ends in `#### N`."""

    name = "gsm8k"
    task = "gsm8k"
    whole = 1319

    def problem(self, row: Row, number: int) -> Problem:
        asked, answer = row.text("question").strip(), row.text("answer").strip()
        if _GSM8K_ANSWER.search(answer) is None:
            raise MalformedError(f"{row.where}: 'answer' does not end in '#### ' and a number")
        prompt = f"{asked}\n\nReason step by step, and end with the answer, a number."
        return Problem(str(number), number, prompt, answer)

    def score(self, problem: Problem, response: str) -> TaskScore:
        return self.library.score(response=response, target=problem.answer)


class IfEval(_ByLibrary):
    """Columns: `prompt`, `instruction_id_list`, and `kwargs`: one object for each instruction."""

    name = "ifeval"
    task = "ifeval"
    whole = 541

    def problem(self, row: Row, number: int) -> Problem:
        prompt, names, kwargs = (
            row.text("prompt"), row.get("instruction_id_list"), row.get("kwargs"),
        )  # fmt: skip
        if not isinstance(names, list) or not names:
            raise MalformedError(f"{row.where}: 'instruction_id_list' is missing or no list")
        for name in names:
            if name not in self.library.about["instructions"]:
                raise MalformedError(f"{row.where}: there is no instruction {str(name)[:80]!r}")
        if (
            not isinstance(kwargs, list)
            or len(kwargs) != len(names)
            or not all(isinstance(one, dict) for one in kwargs)
        ):
            raise MalformedError(f"{row.where}: 'kwargs' is not one object for each instruction")
        doc = {
            "key": number, "prompt": prompt, "instruction_id_list": names, "kwargs": kwargs,
        }  # fmt: skip
        return Problem(str(number), number, prompt, "", {"doc": doc})

    def score(self, problem: Problem, response: str) -> TaskScore:
        return self.library.score(response=response, doc=problem.metadata["doc"])

    def details(self, grades: Sequence[Grade]) -> dict[str, float]:
        def total(part: str) -> int:
            return sum(grade.parts.get(part, 0) for grade in grades)

        instructions = max(1, total("instructions"))
        return {
            "prompt_strict": total("task_micro") / MICRO / len(grades),
            "prompt_loose": total("loose_micro") / MICRO / len(grades),
            "instruction_strict": total("followed") / instructions,
            "instruction_loose": total("followed_loosely") / instructions,
        }


class LiveCodeBench(Benchmark):
    """Columns: `question_content`, `starter_code`, `public_test_cases`, `private_test_cases`, and
    `metadata` with `func_name` where tests are calls. A test is {input, output, testtype}; a list
    of them may be JSON text, and the private ones the dataset's packed text (base64, zlib, pickle).
    Scored by the benchmark's own rules (livecodebench.py)."""

    name = "livecodebench-v5"
    whole = 880

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._harness = Harness()

    def problem(self, row: Row, number: int) -> Problem:
        asked, starter = row.text("question_content", "question"), row.get("starter_code") or ""
        if not isinstance(starter, str) or len(starter) > MAX_TEXT:
            raise MalformedError(f"{row.where}: 'starter_code' is not text, or too long")
        how = (
            "Complete this starter code, and give the whole program in one fenced block at the "
            f"end:\n\n```python\n{starter}\n```"
            if starter.strip()
            else "Read from standard input and write to standard output. Give the whole program in "
            "one fenced block at the end:\n\n```python\n# your program\n```"
        )
        columns = ("public_test_cases", "private_test_cases", "metadata")
        metadata = {"where": row.where, **{name: row.get(name) for name in columns}}
        prompt = f"Write a Python program that solves this problem.\n\n{asked}\n\n{how}"
        tests_of(metadata, row.where)  # they are unpacked again for each answer: they are large
        return Problem(str(number), number, prompt, "", metadata)

    def score(self, problem: Problem, response: str) -> TaskScore:
        tests = tests_of(problem.metadata, str(problem.metadata["where"]))
        return self._harness.score(tests, response)

    def versions(self) -> dict[str, str]:
        python = ".".join(platform.python_version_tuple()[:2])
        return {"LiveCodeBench's rules": RULES, "prime-open sandbox": f"python {python}"}

    def close(self) -> None:
        self._harness.close()


BENCHMARKS: Mapping[str, type[Benchmark]] = {
    kind.name: kind for kind in (Aime24, Aime25, GpqaDiamond, Gsm8k, IfEval, LiveCodeBench)
}


def open_benchmark(task: str, seed: int) -> Benchmark:
    """The benchmark of that name. Raises UserError if there is none, or what scores it is missing;
    `seed` must be below 2^64."""
    if task not in BENCHMARKS:
        raise UserError(
            f"there is no benchmark {task!r}", hint=f"--task is one of {', '.join(BENCHMARKS)}"
        )
    return BENCHMARKS[task](seed)
