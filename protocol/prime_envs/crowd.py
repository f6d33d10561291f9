"""Contributed environments: a folder written by its author, packed into one file with a digest.

    environment.toml    name, version, description, author, license
    tasks.jsonl         tasks (tasks.py); `gold_standard_solution` and `wrong_answers` tell the
                        check which answers score 1 and 0
    grader.py           the grader for the task type `custom` (graders/custom.py); else absent

The packed file is JSON lines: a header with the grader's source, then the tasks. A run pins it as
`crowd` with `sha256` and `url` or `path`. Its only code is grader.py, which runs only in the
sandbox.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from prime_core import encoding
from prime_core.errors import MalformedError, UserError
from prime_core.run import LengthBudgets
from prime_core.signing import Strict
from prime_envs.dataset import TaskDataset
from prime_envs.graders.base import Grader
from prime_envs.graders.custom import MAX_SOURCE, CustomGrader
from prime_envs.rows import Bounds, read_lines
from prime_envs.tasks import load_json

CUSTOM = "custom"
BOUNDS = Bounds(
    file_bytes=64 << 20, unpacked_bytes=256 << 20, line_bytes=4 << 20, rows=100_001, memory_mb=2048
)
FILES = ("environment.toml", "tasks.jsonl", "grader.py")


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
            f"{where} is no header of a packed environment: {field}: {first['msg']}"
        ) from error


def pack(folder: Path) -> bytes:
    """Packs the folder into one file; the same folder gives the same bytes. Raises UserError and
    MalformedError, both naming file and row."""
    strange = [p.name for p in _listed(folder) if p.name not in (*FILES, "README.md")]
    if strange:
        raise UserError(f"{folder / strange[0]} does not belong there", hint=" ".join(FILES))
    about = folder / "environment.toml"
    try:
        values = tomllib.loads(about.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{about} cannot be read as TOML: {error}") from error
    source = folder / "grader.py"
    if source.exists():
        try:
            values["grader"] = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read: {error}") from error
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


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith((".", "__pycache__")))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def open_packed(path: Path, budgets: LengthBudgets | None = None) -> CrowdEnvironment:
    """Opens a packed environment, accepting any digest. Raises the same errors as
    CrowdEnvironment."""
    from prime_envs.sources import file_digest

    budgets = budgets or LengthBudgets(targets=(1000,), penalty_micro=0)
    return CrowdEnvironment({"sha256": file_digest(path), "path": str(path)}, budgets)
