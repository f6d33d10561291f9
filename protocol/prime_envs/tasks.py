"""One task of a dataset, in the columns of GENESYS and SYNTHETIC-1, strictly parsed.

Columns: `problem_id, source, task_type, prompt, gold_standard_solution, verification_info,
metadata`. INTELLECT-2's variant is also accepted: no `source`, `verification_info` and `metadata`
as JSON text, and further columns such as `solve_rate_…`, which are kept under metadata. Graders
check the parts of `verification_info` that they need (graders/base.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prime_core.errors import MalformedError

MAX_ID = 256
MAX_DEPTH = 64
MAX_PROMPT = 1 << 18
MAX_SOLUTION = 1 << 20
COLUMNS = frozenset({
    "problem_id", "source", "task_type", "prompt", "gold_standard_solution", "verification_info",
    "metadata",
})  # fmt: skip
_TEXT_LIMITS = {"problem_id": MAX_ID, "source": 1024, "task_type": 64, "prompt": MAX_PROMPT}


@dataclass(frozen=True)
class Task:
    """A row of a dataset. `where` names its file and row, for use in messages."""

    problem_id: str
    task_type: str
    prompt: str
    verification_info: Mapping[str, Any]
    source: str = ""
    gold_standard_solution: str | None = None
    metadata: Mapping[str, Any] | None = None
    where: str = ""

    def plain(self) -> dict[str, Any]:
        """The row as plain data, in the form that a grader's program receives."""
        return {
            "problem_id": self.problem_id,
            "source": self.source,
            "task_type": self.task_type,
            "prompt": self.prompt,
            "gold_standard_solution": self.gold_standard_solution,
            "verification_info": dict(self.verification_info),
            "metadata": dict(self.metadata or {}),
        }


def parse_task(row: Any, where: str) -> Task:
    """Parses a row. Raises MalformedError naming `where` and the column."""
    if not isinstance(row, dict):
        raise MalformedError(f"{where}: not an object with columns")
    text = {name: _text(row, name, limit, where) for name, limit in _TEXT_LIMITS.items()}
    solution = row.get("gold_standard_solution")
    if solution is not None and (not isinstance(solution, str) or len(solution) > MAX_SOLUTION):
        raise MalformedError(f"{where}: gold_standard_solution is not text, or too long")
    info = _object(row, "verification_info", where)
    if not info:
        raise MalformedError(f"{where}: verification_info is missing: the task has no answer")
    metadata = _object(row, "metadata", where)
    metadata.update({name: value for name, value in row.items() if name not in COLUMNS})
    return Task(
        problem_id=text["problem_id"],
        source=text["source"],
        task_type=text["task_type"],
        prompt=text["prompt"],
        gold_standard_solution=solution,
        verification_info=info,
        metadata=metadata,
        where=where,
    )


def _text(row: dict[str, Any], name: str, limit: int, where: str) -> str:
    value = row.get(name)
    if name == "source" and value is None:
        return ""
    if name == "problem_id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise MalformedError(f"{where}: {name} is missing or no text")
    if len(value) > limit:
        raise MalformedError(f"{where}: {name} has {len(value)} characters, at most {limit}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedError(f"{where}: {name} is not valid text ({error.reason})") from error
    return value


def _object(row: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """A column that holds an object or its JSON text; {} if it is absent or null."""
    value = row.get(name)
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = load_json(value, f"{where}: {name}")
        require_text(value, f"{where}: {name}")
    if not isinstance(value, dict):
        raise MalformedError(f"{where}: {name} is neither an object nor JSON text of one")
    return value


def load_json(text: str | bytes, what: str) -> Any:
    """Parses JSON without NaN and infinities, at most MAX_DEPTH deep, so that later traversal
    cannot overflow the stack. Raises MalformedError whose message begins with `what`."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("a number is out of range")
        return number

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError as error:
        raise MalformedError(f"{what} is nested too deeply") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise MalformedError(f"{what} is not JSON: {error}") from error
    if _openings(text) > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise MalformedError(f"{what} is nested too deeply")
    return value


def _openings(text: str | bytes) -> int:
    """Upper bound on the nesting depth of the text."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{")
    return text.count("[") + text.count("{")


def _deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than `depth` deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [container for container in level if isinstance(container, dict | list)]
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return True


def require_text(value: Any, where: str) -> None:
    """Raises MalformedError if a text in `value` contains an unpaired surrogate: JSON can express
    one, but it cannot be encoded as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise MalformedError(f"{where} holds invalid text ({error.reason})") from error
