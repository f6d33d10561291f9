"""When each node first reported each policy."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_all_new

_arrivals = schema.arrivals.c


def note(connection: Connection, node: Address, version: int, *, now: float) -> None:
    """Records that the node has this version; only the first time counts."""
    note_all(connection, [(node, version)], now=now)


def note_all(connection: Connection, said: Sequence[tuple[Address, int]], *, now: float) -> None:
    """Like `note`, for many (node, version) pairs."""
    rows = [{"version": version, "node": node, "at": now} for node, version in said]
    insert_all_new(connection, schema.arrivals, rows)


def of(connection: Connection, version: int) -> list[float]:
    """Returns the arrival times of a version (Unix seconds), ascending, one per node."""
    query = sa.select(_arrivals.at).where(_arrivals.version == version).order_by(_arrivals.at)
    return [float(at) for at in connection.execute(query).scalars()]


def forget(connection: Connection, before: int) -> None:
    """Deletes arrivals of versions below `before`."""
    connection.execute(sa.delete(schema.arrivals).where(_arrivals.version < before))
