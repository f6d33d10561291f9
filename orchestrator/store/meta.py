"""Small facts under names: when the chain was last seen, who revoked sessions, when we last ran."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.store import schema
from orchestrator.store.rows import upsert

CHAIN_SEEN_AT = "chain_seen_at"
"""Unix seconds (decimal text) of the indexer's last good look at the chain."""


def get(connection: Connection, key: str) -> str | None:
    """The value under `key`, or None."""
    table = schema.meta.c
    return connection.execute(sa.select(table.value).where(table.key == key)).scalar()


def put(connection: Connection, key: str, value: str) -> None:
    """Sets the value under `key`."""
    upsert(connection, schema.meta, {"key": key, "value": value})
