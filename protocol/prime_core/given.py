"""Reads and writes the files that a user names on a command line or in settings."""

from __future__ import annotations

import errno
import tomllib
from pathlib import Path
from typing import Any

from prime_core.errors import UserError

_PIECE = 1 << 20


def read_given(
    path: Path,
    what: str,
    hint: str,
    *,
    limit: int = 1 << 30,
    empty: bool = False,
    missing: str = "",
) -> bytes:
    """Returns the contents of a file, at most `limit` bytes. `what` names it in prose.

    Raises UserError, with `hint` as what to type next (`missing`, if given, where there is no such
    file), if there is no such file, it is a folder, it cannot be read, is too large, or is empty
    (unless it may be `empty`). Memory grows with the file, not with `limit`.
    """
    raw = bytearray()
    try:
        with path.open("rb") as file:
            while piece := file.read(min(_PIECE, limit + 1 - len(raw))):
                raw += piece
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} at {path}", hint=missing or hint) from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a {what}", hint=hint) from error
    except OSError as error:
        raise UserError(f"the {what} {path} cannot be read: {error.strerror}", hint=hint) from error
    if not raw and not empty:
        raise UserError(f"the {what} {path} is empty", hint=hint)
    if len(raw) > limit:
        raise UserError(f"{path} is not a valid {what}: it exceeds {limit} bytes", hint=hint)
    return bytes(raw)


def parse_toml(raw: bytes, source: Path, hint: str) -> dict[str, Any]:
    """Parses the contents of the TOML file `source`. Raises UserError with `hint` as what to type
    next."""
    try:
        return tomllib.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not text in UTF-8", hint=hint) from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise UserError(f"{source} is not TOML: {error}", hint=hint) from error


def write_given(path: Path, content: bytes) -> None:
    """Writes the file of an option --out. Raises UserError if there is no such folder, or it may
    not be written; OSError if the disk is full (see command_line.run)."""
    try:
        path.write_bytes(content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{path} cannot be written: {error.strerror}", hint="name another file with --out"
        ) from error
