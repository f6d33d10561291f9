"""Sealed batches, written once in the transaction that takes their groups and never changed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.batch import SignedBatch
from prime_core.ids import Digest
from prime_orchestrator.store import policies, schema
from prime_orchestrator.store.rows import insert_new, record, records

_batches = schema.batches.c


@dataclass(frozen=True)
class BatchRow:
    """One row of `batches`; `body` is JSON of SignedBatch."""

    step: int
    digest: Digest
    body: str
    rows: int
    mean_reward_micro: int
    staleness_max: int
    sealed_at: float

    def signed(self) -> SignedBatch:
        """Returns the batch as the manager signed it."""
        return SignedBatch.model_validate_json(self.body)


@dataclass(frozen=True)
class BatchSummary:
    """A row of `batches` without its body, which lists every file."""

    step: int
    rows: int
    mean_reward_micro: int
    staleness_max: int
    sealed_at: float


def add(connection: Connection, batch: BatchRow) -> bool:
    """Writes a sealed batch. Returns False if its step has one."""
    return insert_new(connection, schema.batches, vars(batch))


def get(connection: Connection, step: int) -> BatchRow | None:
    """Returns the sealed batch of `step`, or None."""
    query = sa.select(schema.batches).where(_batches.step == step)
    return record(BatchRow, connection.execute(query).mappings().first())


def first_from(connection: Connection, step: int) -> BatchRow | None:
    """Returns the sealed batch of the lowest number from `step` on, or None."""
    query = sa.select(schema.batches).where(_batches.step >= step).order_by(_batches.step).limit(1)
    return record(BatchRow, connection.execute(query).mappings().first())


def next_step(connection: Connection) -> int:
    """Returns the number of the batch that is sealed next. Batches are sealed in order.

    The number is never below the newest policy's version. The two differ only after a trainer
    published policies of batches that it had to train again (docs/adr/0014).
    """
    highest = connection.execute(sa.select(sa.func.max(_batches.step))).scalar()
    version = policies.latest_version(connection)
    return max(0 if highest is None else int(highest) + 1, version or 0)


def trained_below(connection: Connection) -> int:
    """Returns the step below which sealed batches count as trained: the newest policy's version.

    Batch s makes policy s + 1. After a crash the trainer gives later versions to policies of
    batches that it trains again (docs/adr/0014), so a batch may then count a little too early.
    """
    return policies.latest_version(connection) or 0


def latest(connection: Connection, limit: int) -> list[BatchSummary]:
    """Returns the newest batches, oldest first."""
    columns = (_batches[field.name] for field in fields(BatchSummary))
    query = sa.select(*columns).order_by(_batches.step.desc()).limit(limit)
    return records(BatchSummary, connection.execute(query).mappings().all())[::-1]
