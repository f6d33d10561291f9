"""Small facts by key: when the chain was last read, which pool this is, what signs URLs."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new, upsert

SERVES = "serves"
"""Which pool the database belongs to: `<chain id>/<Pools contract>/<pool>`."""
RUN = "run"
"""The bytes of the pool's first run definition, as text."""
CHAIN_SEEN_AT = "chain_seen_at"
"""Unix seconds (decimal text) of the indexer's last successful read of the chain."""
CHAIN_READ = "chain_read"
"""Present once the indexer has read the chain up to its newest confirmed block."""
CHAIN_GAPS = "chain_gaps"
"""How many times events were missing from RPC endpoints' answers."""
URL_SECRET = "url_secret"  # noqa: S105 (a key)
"""Hex of the secret that signs URLs of an object folder. Backups and exports leave it out."""


def get(connection: Connection, key: str) -> str | None:
    """Returns the value under `key`, or None."""
    table = schema.meta.c
    return connection.execute(sa.select(table.value).where(table.key == key)).scalar()


def put(connection: Connection, key: str, value: str) -> None:
    """Sets the value under `key`."""
    upsert(connection, schema.meta, {"key": key, "value": value})


def put_once(connection: Connection, key: str, value: str) -> str:
    """Sets the value under `key` unless there is one; returns the value that is there now. Of
    several processes that call it at once, all get the same value."""
    insert_new(connection, schema.meta, {"key": key, "value": value})
    table = schema.meta.c
    return str(connection.execute(sa.select(table.value).where(table.key == key)).scalar_one())


def under(connection: Connection, prefix: str) -> list[tuple[str, str]]:
    """Returns every key that begins with `prefix`, with its value."""
    table = schema.meta.c
    query = sa.select(table.key, table.value).where(table.key.startswith(prefix, autoescape=True))
    return [(row.key, row.value) for row in connection.execute(query)]


def drop(connection: Connection, key: str) -> None:
    """Removes `key`."""
    connection.execute(sa.delete(schema.meta).where(schema.meta.c.key == key))
