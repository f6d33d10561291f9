"""Revisions of the pool's run: the bytes of each, its first step, and whether it is final on chain.

The pool's first definition is not stored here; it comes from PoolContext.run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import records

_runs = schema.runs.c
_EVERY = sa.select(schema.runs).order_by(_runs.from_step)


@dataclass(frozen=True)
class RunRow:
    """One revision. `body`: the file's bytes; `final`: its digest is in a final block."""

    from_step: int
    digest: Digest
    body: bytes
    final: bool
    announced_at: float

    @property
    def key(self) -> str:
        """Key of the intent that puts the revision on chain."""
        return f"{self.from_step}:{self.digest}"


def every(connection: Connection) -> list[RunRow]:
    """Returns all revisions, ordered by step."""
    return records(RunRow, connection.execute(_EVERY).mappings().all())


def add(connection: Connection, row: RunRow) -> None:
    """Writes an announced revision."""
    connection.execute(sa.insert(schema.runs).values(**asdict(row)))


def set_final(connection: Connection, from_step: int) -> None:
    connection.execute(
        sa.update(schema.runs).where(_runs.from_step == from_step).values(final=True)
    )


def forget(connection: Connection, from_step: int) -> None:
    """Removes a revision that the chain refused."""
    connection.execute(sa.delete(schema.runs).where(_runs.from_step == from_step))
