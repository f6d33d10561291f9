"""Contributed environments: a folder written by its author, packed into one file with a digest.

    environment.toml    name, version, description, author, license
    tasks.jsonl         tasks (tasks.py); `gold_standard_solution` and `wrong_answers` tell the
                        check which answers score 1 and 0
    grader.py           the grader for the task type `custom` (CustomGrader); else absent

The packed file is JSON lines: a header with the grader's source, then the tasks. A run pins it as
`crowd` with `sha256` and `url` or `path`. Its only code is grader.py, which runs only in the
sandbox.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from prime_core import encoding
from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.run import MICRO, LengthBudgets
from prime_core.signing import Strict
from prime_envs.base import TaskScore
from prime_envs.environments.tasks import TaskDataset
from prime_envs.graders.base import Grader
from prime_envs.rows import Bounds, read_lines
from prime_envs.sandbox.client import Program, ProgramLimits, Sandbox
from prime_envs.tasks import Task, load_json, require_text

CUSTOM = "custom"
BOUNDS = Bounds(
    file_bytes=64 << 20, unpacked_bytes=256 << 20, line_bytes=4 << 20, rows=100_001, memory_mb=2048
)
FILES = ("environment.toml", "tasks.jsonl", "grader.py")
MAX_ABOUT = 1 << 14
"""Bytes of environment.toml: reading TOML may take time and memory that grow with the square."""
ABOUT = """\
name = "{name}"
version = 1
description = "Say what a model learns from it."
author = "Your name or address"
license = "CC-BY-4.0"
"""

TASKS = """\
{"problem_id": "vowels-1", "task_type": "custom", "source": "made by hand", "prompt": "How many vowels has the word `orchestra`? End with a line `Answer: NUMBER`.", "gold_standard_solution": "o, e, a: three.\\nAnswer: 3", "verification_info": {"count": 3}, "wrong_answers": ["Answer: 4", "Answer: 3 or 4", "3"]}
{"problem_id": "vowels-2", "task_type": "custom", "source": "made by hand", "prompt": "How many vowels has the word `queue`? End with a line `Answer: NUMBER`.", "gold_standard_solution": "u, e, u, e: four.\\nAnswer: 4", "verification_info": {"count": 4}, "wrong_answers": ["Answer: 2"]}
{"problem_id": "vowels-3", "task_type": "custom", "source": "made by hand", "prompt": "How many vowels has the word `rhythm`? End with a line `Answer: NUMBER`.", "gold_standard_solution": "None.\\nAnswer: 0", "verification_info": {"count": 0}, "wrong_answers": ["Answer: 1"]}
"""  # noqa: E501

GRADER = '''\
"""Grades one answer. Pure: the same task and answer always give the same result.

Runs in a sandbox: no files, no network, the standard library's pure parts. Delete this file if all
your tasks have a task type that is graded already (verifiable_math, verifiable_code, ...).
"""

import re


def grade(task, answer):
    """`task` is the row of tasks.jsonl as a dict; `answer` is what the model wrote."""
    lines = [line for line in answer.splitlines() if line.startswith("Answer:")]
    if len(lines) != 1 or answer.strip().splitlines()[-1] != lines[0].strip():
        return {"score": 0.0, "reason": "it does not end with its one line `Answer:`"}
    number = re.fullmatch(r"Answer: ([0-9]{1,3})", lines[0].strip())
    if number is None:
        return {"score": 0.0, "reason": "the answer is not a number"}
    right = int(number[1]) == task["verification_info"]["count"]
    return {"score": float(right), "reason": "counted" if right else "miscounted"}
'''


MAX_SOURCE = 1 << 18
MAX_PARTS = 16
LIMITS = ProgramLimits(cpu_seconds=4.0, memory_mb=256, output_bytes=1 << 16)


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
    require_text([reason, parts], "the grader's answer")
    return TaskScore(round(score * MICRO), reason[:500], parts=parts)


class Header(Strict):
    """The first line of a packed environment."""

    format: str = Field(default="prime-environment/v1", pattern=r"^prime-environment/v1$")
    name: str = Field(pattern=r"^[a-z][a-z0-9-]{1,62}$")
    version: int = Field(ge=1)
    description: str = Field(min_length=1, max_length=2000)
    author: str = Field(min_length=1, max_length=200)
    license: str = Field(min_length=1, max_length=100)
    grader: str = Field(default="", max_length=MAX_SOURCE)
    """Source of grader.py."""


class CrowdEnvironment(TaskDataset):
    """A packed environment. Same arguments as `tasks`."""

    name = "crowd"
    version = 1

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        self._header: Header | None = None
        super().__init__(arguments, budgets)

    @property
    def header(self) -> Header:
        """The environment's header."""
        assert self._header is not None
        return self._header

    def lines(self, path: Path) -> Iterable[tuple[str, bytes]]:
        rows = iter(read_lines(path, BOUNDS))
        where, first = next(rows, (f"{path.name} row 1", b"null"))
        self._header = read_header(first, where)
        return rows

    def grader(self, task_type: str) -> Grader:
        if task_type != CUSTOM:
            return super().grader(task_type)
        if CUSTOM not in self._graders:
            if not self.header.grader:
                raise UserError("the task type 'custom' needs a grader.py, and there is none")
            self._graders[CUSTOM] = CustomGrader(self.header.grader)
        return self._graders[CUSTOM]


def read_header(line: bytes, where: str) -> Header:
    """Parses the header line. Raises MalformedError."""
    value = load_json(line, where)
    try:
        return Header.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        raise MalformedError(
            f"{where} is not a header of a packed environment: {field}: {first['msg']}"
        ) from error


def pack(folder: Path) -> bytes:
    """Packs the folder into one file; the same folder gives the same bytes. Raises UserError and
    MalformedError, both naming file and row."""
    strange = [p.name for p in _listed(folder) if p.name not in (*FILES, "README.md")]
    if strange:
        raise UserError(f"{folder / strange[0]} does not belong there", hint=" ".join(FILES))
    about = folder / "environment.toml"
    try:
        values = tomllib.loads(_text(about, MAX_ABOUT))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise UserError(f"{about} cannot be read as TOML: {error}") from error
    source = folder / "grader.py"
    if source.exists():
        values["grader"] = _text(source, 4 * MAX_SOURCE)
    try:
        header = Header.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        raise UserError(f"{about}: {field}: {first['msg']}") from error
    lines = [encoding.canonical_json(header.model_dump(mode="json"))]
    for where, line in read_lines(folder / "tasks.jsonl", BOUNDS):
        # parsed only so that errors name the original file; floats keep their text
        load_json(line, where)
        lines.append(line.strip())
    packed = b"\n".join(itertools.chain(lines, [b""]))
    if len(packed) > BOUNDS.file_bytes:
        raise MalformedError(
            f"{folder} packs into {len(packed)} bytes, at most {BOUNDS.file_bytes}"
        )
    return packed


def _text(path: Path, most: int) -> str:
    """A file's text. Raises UserError if it cannot be read, is not UTF-8 or has more than `most`
    bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UserError(f"{path} has more than {most} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith((".", "__pycache__")))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def open_packed(path: Path) -> CrowdEnvironment:
    """Opens a packed environment, accepting any digest. Raises the same errors as
    CrowdEnvironment."""
    from prime_envs.sources import file_digest

    budgets = LengthBudgets(targets=(1000,), penalty_micro=0)
    return CrowdEnvironment({"sha256": file_digest(path), "path": str(path)}, budgets)


def write_template(folder: Path, name: str) -> list[Path]:
    """Writes the template into a new folder. Raises UserError if it exists."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from error
    contents = {
        "environment.toml": ABOUT.format(name=name),
        "tasks.jsonl": TASKS,
        "grader.py": GRADER,
    }
    for file, text in contents.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in contents]
