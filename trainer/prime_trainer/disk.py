"""Converts all kinds of disk write errors into one error type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_core.errors import UnavailableError


@contextmanager
def writing(what: str, where: Path) -> Iterator[None]:
    """Raises UnavailableError if a disk error (full, missing, no permission) occurs within the
    block.

    safetensors and torch use their own exceptions: DCP collects every rank's failure in a
    CheckpointException, and torch's zip writer turns a short write into RuntimeError. A
    CheckpointException with any other cause is a bug and passes through.
    """
    try:
        yield
    except OSError as error:
        raise _refused(what, where, error) from error
    except BaseException as error:  # CheckpointException is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException

        if isinstance(error, SafetensorError):
            raise _refused(what, where, error) from error
        if not isinstance(error, CheckpointException):
            raise
        causes = [cause for cause, _ in error.failures.values()]
        if not causes or not all(isinstance(c, OSError | RuntimeError) for c in causes):
            raise
        refusals = [cause for cause in causes if isinstance(cause, OSError)]
        raise _refused(what, where, (refusals or causes)[0]) from error


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file that grows line by line, and cuts off an incomplete last one, so
    that the next line can be added. A missing file has no lines. Raises OSError; UnicodeDecodeError
    if it is not UTF-8."""
    raw = path.read_bytes() if path.exists() else b""
    end = raw.rfind(b"\n") + 1
    lines = raw[:end].decode().split("\n")[:-1]
    if end < len(raw):
        with path.open("r+b") as file:
            file.truncate(end)
    return lines


def _refused(what: str, where: Path, cause: BaseException) -> UnavailableError:
    why = (isinstance(cause, OSError) and cause.strerror) or str(cause).partition("\n")[0]
    return UnavailableError(
        f"{what} could not be written to {where}: {why}; free some space (or correct the folder's "
        "permissions) and start again: training goes on from the last checkpoint"
    )
