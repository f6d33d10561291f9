"""How far the stored events were compared with the contracts (see manager/completeness.py)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection

from prime_orchestrator.store import meta

_KEY = "events_checked"


class Turn(BaseModel):
    """The place in a round over subjects of one kind, which are compared a few at a time in the
    order of their names. `after`: the last one compared. `began` and `before`: the blocks at which
    this round and the previous one began."""

    model_config = ConfigDict(extra="forbid", strict=True)

    after: str = ""
    began: int = 0
    before: int = 0


class Progress(BaseModel):
    """`at`: Unix seconds of the last comparison. `block`: the one at which the facts of the whole
    pool were last found equal. `elsewhere`: open proposals of a validator that are not the pool's.
    `unexplained`: the difference that the last comparison could not resolve.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    at: float = -1.0
    block: int = 0
    turns: dict[str, Turn] = {}
    elsewhere: dict[str, int] = {}
    unexplained: str = ""


def load(connection: Connection) -> Progress:
    """Returns the stored progress; that of a new store if there is none."""
    return Progress.model_validate_json(meta.get(connection, _KEY) or "{}")


def save(connection: Connection, progress: Progress) -> None:
    """Stores the progress."""
    meta.put(connection, _KEY, progress.model_dump_json())


def go_back(connection: Connection, block: int) -> None:
    """Forgets comparisons of blocks above `block`, which left the chain."""
    progress = load(connection)
    progress.block = min(progress.block, block)
    for turn in progress.turns.values():
        turn.began, turn.before = min(turn.began, block), min(turn.before, block)
    save(connection, progress)
