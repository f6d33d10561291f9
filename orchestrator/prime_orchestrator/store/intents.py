"""Intents: transactions to send to the chain, recorded before they are sent.

The same fact gives the same id, so queueing it twice is harmless. After that, only the outbox of a
lane (the sending account) sends it and records its status.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new, record, records

_intents = schema.intents.c
MAX_JOINS = 16
"""Most joins per round: each costs a chain query."""


@dataclass(frozen=True)
class IntentRow:
    """Status: queued, sent, confirmed, failed. `payload` is JSON."""

    id: str
    lane: str
    kind: str
    payload: str
    status: str
    error: str | None
    tx_hash: str | None
    block: int | None
    created_at: float
    updated_at: float

    def arguments(self) -> dict[str, Any]:
        """Returns the payload, parsed."""
        parsed: dict[str, Any] = json.loads(self.payload)
        return parsed


def enqueue(
    connection: Connection,
    intent_id: str,
    *,
    lane: str,
    kind: str,
    payload: Mapping[str, Any],
    now: float,
) -> bool:
    """Queues an intent; returns False if the id exists already."""
    values = {
        "id": intent_id,
        "lane": lane,
        "kind": kind,
        "payload": json.dumps(payload, sort_keys=True),
        "status": "queued",
        "created_at": now,
        "updated_at": now,
    }
    return insert_new(connection, schema.intents, values)


def get(connection: Connection, intent_id: str) -> IntentRow | None:
    """Returns the intent, or None."""
    query = sa.select(schema.intents).where(_intents.id == intent_id)
    return record(IntentRow, connection.execute(query).mappings().first())


def pending(
    connection: Connection, lane: str, statuses: Iterable[str] = ("queued",), limit: int = 100
) -> list[IntentRow]:
    """Returns intents of a lane in the given states, oldest first, followed by at most MAX_JOINS
    joins, least recently updated first. Anyone may request an invite, so joins must not block other
    intents."""
    mine = sa.select(schema.intents).where(
        _intents.lane == lane, _intents.status.in_(tuple(statuses))
    )
    others = mine.where(_intents.kind != "join").order_by(_intents.created_at, _intents.id)
    joins = mine.where(_intents.kind == "join").order_by(_intents.updated_at, _intents.id)
    found: list[IntentRow] = []
    for query in (others.limit(limit), joins.limit(min(MAX_JOINS, limit))):
        found += records(IntentRow, connection.execute(query).mappings().all())
    return found


def update(
    connection: Connection,
    intent_id: str,
    status: str,
    *,
    now: float,
    tx_hash: str | None = None,
    block: int | None = None,
    error: str | None = None,
) -> None:
    """Writes an intent's new state; None leaves hash, block or error unchanged."""
    values: dict[str, Any] = {"status": status, "updated_at": now}
    given = {"tx_hash": tx_hash, "block": block, "error": error}
    values |= {name: value for name, value in given.items() if value is not None}
    connection.execute(sa.update(schema.intents).where(_intents.id == intent_id).values(**values))


def mined_between(connection: Connection, after: int, until: int) -> list[IntentRow]:
    """Returns confirmed intents whose transaction is in blocks after + 1 … until."""
    query = sa.select(schema.intents).where(
        _intents.status == "confirmed", _intents.block > after, _intents.block <= until
    )
    return records(IntentRow, connection.execute(query).mappings().all())


def latest_sent(connection: Connection, limit: int) -> list[IntentRow]:
    """Returns the last intents that have a transaction, oldest first."""
    query = (
        sa.select(schema.intents)
        .where(_intents.tx_hash.is_not(None))
        .order_by(_intents.updated_at.desc(), _intents.id)
        .limit(limit)
    )
    return records(IntentRow, connection.execute(query).mappings().all())[::-1]


def counts(connection: Connection) -> dict[str, int]:
    """Returns the number of intents by status."""
    query = sa.select(_intents.status, sa.func.count()).group_by(_intents.status)
    return {status: int(n) for status, n in connection.execute(query)}
