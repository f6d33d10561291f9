"""Reading a run definition: the one file whose exact bytes name a pool's run."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from protocol.core import encoding
from protocol.core.errors import MalformedError, UserError
from protocol.core.run import RunDefinition

MAX_RUN_BYTES = 1 << 20
_HINT = "give the file that the pool was made with by --run; make one with: orchestrator run new"


def parse_run(raw: bytes) -> RunDefinition:
    """A run definition from canonical JSON (a last newline is passed over).

    Raises MalformedError if it is none, or says the same in other bytes than its digest's.
    """
    if len(raw) > MAX_RUN_BYTES:
        raise MalformedError(f"more than {MAX_RUN_BYTES} bytes are no run definition")
    try:
        run = RunDefinition.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = f"{where}: {first['msg']}" if where else first["msg"]
        raise MalformedError(f"it is no run definition: {said}") from error
    if encoding.sha256(raw.strip()) != run.digest():
        raise MalformedError("it is no run definition in canonical form")
    return run


def read_run(path: Path) -> RunDefinition:
    """The run definition in a file. Raises UserError if it cannot be read or is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_RUN_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"the run definition {path} cannot be read: {error.strerror}", hint=_HINT
        ) from error
    try:
        return parse_run(raw)
    except MalformedError as error:
        raise UserError(f"{path}: {error}", hint=_HINT) from error
