"""Contributed environments that wait for the operator, as files in a folder.

    bundles/<digest>.jsonl    the packed environment, named by its SHA-256
    records/<digest>.json     who made it, what the check found, and what the operator decided

A folder, not the store: contributions come before there is a pool, are few, and are carried about
by people. A record is replaced in one step, so a killed command leaves the old or the new one. The
record is the truth; a bundle without one (a command was killed between the two) is submitted again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from prime_core.errors import ConflictError, FatalError, NotFoundError, PolicyError, UserError
from prime_core.ids import Digest
from prime_core.signing import DigestField, Strict

MAX_WAITING = 1000

Status = Literal["waiting", "approved", "refused"]


class Record(Strict):
    """One contribution. Times in Unix seconds; `file` is the digest that a run pins as `sha256`."""

    file: DigestField
    name: str
    version: int
    description: str
    author: str
    license: str
    tasks: int = Field(ge=1)
    has_code: bool
    status: Status = "waiting"
    submitted: int
    decided: int = 0
    reviewer: str = ""
    note: str = ""


class Queue:
    """The queue in `folder`, made when something is put into it."""

    def __init__(self, folder: Path) -> None:
        self._bundles = folder / "bundles"
        self._records = folder / "records"

    def bundle(self, file: str) -> Path:
        """Where the packed environment lies."""
        return self._bundles / f"{file[2:]}.jsonl"

    def submit(self, packed: bytes, record: Record) -> Record:
        """Puts a packed environment in. Raises ConflictError if it was submitted before (it says
        what became of it), PolicyError if too many wait."""
        if self._path(record.file).exists():
            known = self.get(record.file)
            raise ConflictError(
                f"{known.name} {known.file[:12]}… was submitted and is {known.status}"
            )
        if sum(known.status == "waiting" for known in self.records()) >= MAX_WAITING:
            raise PolicyError(f"{MAX_WAITING} environments wait already; review some first")
        for folder in (self._bundles, self._records):
            folder.mkdir(parents=True, exist_ok=True)
        if "0x" + hashlib.sha256(packed).hexdigest() != record.file:
            raise FatalError("a record names other bytes than those submitted")
        _replace(self.bundle(record.file), packed)
        self._write(record)
        return record

    def records(self) -> list[Record]:
        """All contributions, oldest first."""
        found = [self._read(path) for path in self._records.glob("*.json")]
        return sorted(found, key=lambda record: (record.submitted, record.file))

    def get(self, start: str) -> Record:
        """The one whose digest begins with `start` (0x may be left out). Raises NotFoundError, or
        UserError if several do."""
        wanted = start.lower().removeprefix("0x")
        found = [record for record in self.records() if record.file[2:].startswith(wanted)]
        if not found:
            raise NotFoundError(f"no environment whose digest begins with {start!r} was submitted")
        if len(found) > 1:
            raise UserError(
                f"{len(found)} environments have digests that begin with {start!r}",
                hint="give more of it",
            )
        return found[0]

    def decide(
        self, start: str, status: Literal["approved", "refused"], *, by: str, note: str, now: int
    ) -> Record:
        """The operator's word on a waiting one. Raises ConflictError if it was decided before."""
        record = self.get(start)
        if record.status != "waiting":
            raise ConflictError(f"{record.name} was {record.status} by {record.reviewer} before")
        decided = record.model_copy(
            update={"status": status, "reviewer": by, "note": note, "decided": now}
        )
        self._write(decided)
        return decided

    def _path(self, file: Digest | str) -> Path:
        return self._records / f"{file[2:]}.json"

    def _write(self, record: Record) -> None:
        _replace(self._path(record.file), record.model_dump_json(indent=1).encode())

    def _read(self, path: Path) -> Record:
        try:
            return Record.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise FatalError(f"{path} is no record of this queue: {error}") from error


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
