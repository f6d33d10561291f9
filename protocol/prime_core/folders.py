"""Creation, locking and syncing of folders."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_core.errors import UserError


def make_folder(path: Path) -> Path:
    """Creates `path` and its parents if missing, and returns it. Raises UserError if it cannot be
    created or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # permission bits do not reveal read-only mounts
            pass
    except OSError as error:
        taken = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is in the way" if taken else error.strerror or str(error)
        raise UserError(
            f"the folder {path} cannot be used: {why}", hint="name one that you may write to"
        ) from error
    return path


def sync(path: Path) -> None:
    """Writes a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held_alone(folder: Path, who: str, option: str = "--data") -> Iterator[None]:
    """Holds an exclusive lock on `folder`. The lock is released when the process ends, even by a
    crash. Raises UserError, naming the holder and the `option` that names the folder, if another
    `who` has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "?"
            raise UserError(
                f"another {who} (process {holder}) works in {folder}",
                hint=f"end it first, or name another {option} for this one",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
