"""Small facts by key: when the chain was last read, who revoked sessions, which pool this is."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import upsert

SERVES = "serves"
"""Which pool the database belongs to: `<chain id>/<Pools contract>/<pool>`."""
RUN = "run"
"""The bytes of the pool's first run definition, as text."""
CHAIN_SEEN_AT = "chain_seen_at"
"""Unix seconds (decimal text) of the indexer's last successful read of the chain."""
CHAIN_GAPS = "chain_gaps"
"""How many times events were missing from RPC endpoints' answers."""


def get(connection: Connection, key: str) -> str | None:
    """Returns the value under `key`, or None."""
    table = schema.meta.c
    return connection.execute(sa.select(table.value).where(table.key == key)).scalar()


def put(connection: Connection, key: str, value: str) -> None:
    """Sets the value under `key`."""
    upsert(connection, schema.meta, {"key": key, "value": value})


def under(connection: Connection, prefix: str) -> list[tuple[str, str]]:
    """Returns every key that begins with `prefix`, with its value."""
    table = schema.meta.c
    query = sa.select(table.key, table.value).where(table.key.startswith(prefix, autoescape=True))
    return [(row.key, row.value) for row in connection.execute(query)]


def drop(connection: Connection, key: str) -> None:
    """Removes `key`."""
    connection.execute(sa.delete(schema.meta).where(schema.meta.c.key == key))
