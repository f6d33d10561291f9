"""Folders that a person names, made at the edge of every program."""

from __future__ import annotations

import tempfile
from pathlib import Path

from protocol.core.errors import UserError


def make_folder(path: Path) -> Path:
    """`path`, made with its parents if it is not there. Raises UserError if it cannot be made or
    takes no files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # permission bits do not tell of read-only mounts
            pass
    except OSError as error:
        taken = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is in the way" if taken else error.strerror or str(error)
        raise UserError(
            f"the folder {path} cannot be used: {why}", hint="name one that you may write to"
        ) from error
    return path
