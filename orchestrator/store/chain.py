"""The read copy of chain facts. Only the indexer writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.store import schema
from orchestrator.store.rows import insert_new, records, upsert
from protocol.core.ids import Address, Digest

_events = schema.chain_events.c
_cursors = schema.cursors.c


@dataclass(frozen=True)
class EventRow:
    """One confirmed event; `args` is JSON, `block_time` the block's Unix time."""

    block_hash: Digest
    log_index: int
    block: int
    block_time: int
    tx_hash: Digest
    name: str
    args: str

    def arguments(self) -> dict[str, Any]:
        """The event's arguments, parsed."""
        parsed: dict[str, Any] = json.loads(self.args)
        return parsed


def add_event(
    connection: Connection,
    *,
    block_hash: Digest,
    log_index: int,
    block: int,
    block_time: int,
    tx_hash: Digest,
    name: str,
    args: Mapping[str, Any],
) -> bool:
    """Writes an event; False if it is known already."""
    values = {
        "block_hash": block_hash,
        "log_index": log_index,
        "block": block,
        "block_time": block_time,
        "tx_hash": tx_hash,
        "name": name,
        "args": json.dumps(args, sort_keys=True),
    }
    return insert_new(connection, schema.chain_events, values)


def events(connection: Connection, name: str, *, contains: str = "") -> list[EventRow]:
    """Events of a name, oldest first; `contains` keeps those whose arguments hold the text."""
    query = sa.select(schema.chain_events).where(_events.name == name)
    if contains:
        query = query.where(_events.args.contains(contains, autoescape=True))
    query = query.order_by(_events.block, _events.log_index)
    return records(EventRow, connection.execute(query).mappings().all())


def retract(connection: Connection, from_block: int) -> list[EventRow]:
    """Removes and returns the events of `from_block` and later (a reorganisation)."""
    query = (
        sa.select(schema.chain_events)
        .where(_events.block >= from_block)
        .order_by(_events.block, _events.log_index)
    )
    gone = records(EventRow, connection.execute(query).mappings().all())
    connection.execute(sa.delete(schema.chain_events).where(_events.block >= from_block))
    return gone


def cursor(connection: Connection, name: str) -> tuple[int, Digest] | None:
    """(block, its hash) up to which a reader has read, or None before its first block."""
    query = sa.select(_cursors.block, _cursors.block_hash).where(_cursors.name == name)
    row = connection.execute(query).first()
    return None if row is None else (int(row.block), Digest(row.block_hash))


def set_cursor(connection: Connection, name: str, block: int, block_hash: Digest) -> None:
    """Moves a reader's cursor."""
    upsert(connection, schema.cursors, {"name": name, "block": block, "block_hash": block_hash})


def revoked_before(connection: Connection, account: Address) -> int:
    """The newest `RevokedBefore` time that the chain shows for `account`; 0 if none."""
    times = [
        int(arguments["at"])
        for event in events(connection, "RevokedBefore", contains=account)
        if (arguments := event.arguments())["node"] == account
    ]
    return max(times, default=0)


def pool_ended(connection: Connection, pool: int) -> bool:
    """True once the chain shows that `pool` has ended."""
    return any(event.arguments()["pool"] == pool for event in events(connection, "PoolEnded"))
