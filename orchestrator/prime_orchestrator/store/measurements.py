"""Repeated proofs of nodes' cards: what is asked of each node, and how its earlier ones ended.

Writers hold the lock "measurements".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import one_of, records, upsert

LOCK = "measurements"
OUTCOMES = ("passed", "refused", "unanswered", "ignored")
_rows = schema.measurements.c
_nodes = schema.nodes.c


@dataclass(frozen=True)
class MeasurementRow:
    """One row of `measurements`; times in Unix seconds."""

    node: Address
    asked_at: float | None = None
    again_at: float | None = None
    knows: int = 0
    failures: int = 0
    trouble: str = ""
    passed: int = 0
    refused: int = 0
    unanswered: int = 0
    ignored: int = 0

    @property
    def awaited(self) -> bool:
        """Whether the node knows that its proof is due."""
        return self.asked_at is not None and bool(self.knows)


def of(connection: Connection, nodes: Collection[Address]) -> dict[Address, MeasurementRow]:
    """Returns the rows of the given nodes that were ever asked."""
    query = sa.select(schema.measurements).where(one_of(connection, _rows.node, nodes))
    found = records(MeasurementRow, connection.execute(query).mappings().all())
    return {row.node: row for row in found}


def get(connection: Connection, node: Address) -> MeasurementRow | None:
    """Returns the node's row, or None if it was never asked."""
    return of(connection, [node]).get(node)


def put(connection: Connection, row: MeasurementRow) -> None:
    """Writes a row in place of the node's earlier one."""
    upsert(connection, schema.measurements, vars(row))


def asked(connection: Connection) -> list[MeasurementRow]:
    """Returns the rows of the nodes whose proof is due."""
    query = sa.select(schema.measurements).where(_rows.asked_at.is_not(None))
    return records(MeasurementRow, connection.execute(query).mappings().all())


def due_again(connection: Connection, now: float) -> list[MeasurementRow]:
    """Returns the rows of the active nodes that are to be asked again by now, longest due first."""
    query = (
        sa.select(schema.measurements)
        .join(schema.nodes, _nodes.address == _rows.node)
        .where(_rows.again_at <= now, _nodes.status == "active")
        .order_by(_rows.again_at, _rows.node)
    )
    return records(MeasurementRow, connection.execute(query).mappings().all())


def drawable(connection: Connection) -> list[Address]:
    """Returns the active nodes with a passport that are neither asked nor to be asked again at a
    set time."""
    passports = schema.passports.c
    set_time = sa.exists().where(
        _rows.node == _nodes.address,
        sa.or_(_rows.asked_at.is_not(None), _rows.again_at.is_not(None)),
    )
    query = (
        sa.select(_nodes.address)
        .join(schema.passports, passports.node == _nodes.address)
        .where(_nodes.status == "active", ~set_time)
        .order_by(_nodes.address)
    )
    return [Address(node) for node in connection.execute(query).scalars()]


def end_all(connection: Connection) -> None:
    """Asks no node any more, and forgets why nodes get no lease."""
    connection.execute(
        sa.update(schema.measurements)
        .where(
            sa.or_(_rows.asked_at.is_not(None), _rows.again_at.is_not(None), _rows.trouble != "")
        )
        .values(asked_at=None, again_at=None, failures=0, trouble="")
    )


def troubles(connection: Connection, nodes: Collection[Address] | None) -> dict[Address, str]:
    """Returns by node (`nodes` None: of all) why it gets no lease. Nodes that may get one are
    omitted."""
    query = sa.select(_rows.node, _rows.trouble).where(_rows.trouble != "")
    if nodes is not None:
        query = query.where(one_of(connection, _rows.node, nodes))
    return {Address(node): str(trouble) for node, trouble in connection.execute(query)}


def totals(connection: Connection) -> dict[str, int]:
    """Returns how many measurements ended in each way."""
    sums = [sa.func.coalesce(sa.func.sum(_rows[name]), 0) for name in OUTCOMES]
    return dict(zip(OUTCOMES, map(int, connection.execute(sa.select(*sums)).one()), strict=True))
