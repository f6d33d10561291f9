"""Bounded reading of JSONL and Parquet rows, one by one; every error names file and row.

Parquet is converted to JSON lines by a child process with limited memory, time and output, so that
a file that expands beyond the limits ends the child, not us.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_core.errors import MalformedError, UserError
from prime_envs.tasks import load_json

MAX_SECONDS = 900.0


@dataclass(frozen=True)
class Bounds:
    """Limits of one file: bytes on disk, bytes as JSON lines, bytes per line, rows, and MiB of
    memory for unpacking Parquet."""

    file_bytes: int = 8 << 30
    unpacked_bytes: int = 16 << 30
    line_bytes: int = 16 << 20
    rows: int = 2_000_000
    memory_mb: int = 4096


def read_rows(path: Path, bounds: Bounds | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each row; `where` is "NAME row N", counted from 1. Errors are raised
    during iteration. A row that is not JSON raises MalformedError; `read_lines` returns the raw
    rows. Raises UserError (no such file, unknown kind), MalformedError."""
    for where, line in read_lines(path, bounds or Bounds()):
        yield where, load_json(line, where)


def read_lines(path: Path, bounds: Bounds) -> Iterator[tuple[str, bytes]]:
    """Yields (where, JSON text) for each row. Raises UserError, MalformedError."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if size > bounds.file_bytes:
        raise MalformedError(f"{path.name} has {size} bytes, at most {bounds.file_bytes}")
    if path.suffix == ".jsonl":
        yield from _lines(path, path.name, bounds)
    elif path.suffix == ".parquet":
        with tempfile.TemporaryDirectory(prefix="prime-rows-") as folder:
            unpacked = Path(folder) / "rows.jsonl"
            _unpack(path, unpacked, bounds)
            yield from _lines(unpacked, path.name, bounds)
    else:
        raise UserError(f"{path} is neither .jsonl nor .parquet", hint="rename or convert it")


def _lines(path: Path, name: str, bounds: Bounds) -> Iterator[tuple[str, bytes]]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(bounds.line_bytes + 1):
            if not line.strip():
                continue
            number += 1
            where = f"{name} row {number}"
            if len(line) > bounds.line_bytes:
                raise MalformedError(f"{where} is longer than {bounds.line_bytes} bytes")
            if number > bounds.rows:
                raise MalformedError(f"{name} has more than {bounds.rows} rows")
            yield where, line


def _unpack(source: Path, target: Path, bounds: Bounds) -> None:
    command = [
        sys.executable, "-m", "prime_envs.parquet_child", str(source), str(target),
        str(bounds.memory_mb), str(bounds.unpacked_bytes), str(bounds.line_bytes),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=MAX_SECONDS, check=False, text=True
        )
    except subprocess.TimeoutExpired as error:
        raise MalformedError(f"{source.name} took more than {MAX_SECONDS:g} s to unpack") from error
    if done.returncode == 0:
        return
    said = done.stdout.strip().splitlines()[-1:]
    reached = _count_lines(target) if target.exists() else 0
    if done.returncode == 65 and said:
        raise MalformedError(f"{source.name} {said[0]}")
    raise MalformedError(
        f"{source.name} row {reached + 1} or after: unpacking it took more than "
        f"{bounds.memory_mb} MiB of memory, or it is not a sound Parquet file"
    )


def _count_lines(path: Path) -> int:
    """Counts lines in chunks, because the file may be very large."""
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
