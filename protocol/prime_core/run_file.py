"""Reads run definition files."""

from __future__ import annotations

from pathlib import Path

from prime_core.errors import MalformedError, UserError
from prime_core.given import read_given
from prime_core.run import MAX_RUN_BYTES, RunDefinition

_HINT = "give the file that the pool was made with by --run; make one with: orchestrator run new"


def read_run(path: Path, *, exact: bool = False) -> RunDefinition:
    """Reads a run definition; `exact` as in `RunDefinition.parse`. Raises UserError if the file
    cannot be read or parsed."""
    raw = read_given(path, "run definition", _HINT, limit=MAX_RUN_BYTES)
    try:
        return RunDefinition.parse(raw, exact=exact)
    except MalformedError as error:
        raise UserError(f"{path} is not a run definition: {error}", hint=_HINT) from error
