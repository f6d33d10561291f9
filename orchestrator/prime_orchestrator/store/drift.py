"""Sums of statistics over a node's accepted files; they show drift that no single file shows.

For each node, setup and statistic: the number of files, and the sums of each file's *share of its
limit* (0 … 1) and of its square. Written in the verdict's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import add_all, one_of, records

_drift = schema.drift.c


@dataclass(frozen=True)
class DriftRow:
    """Sums over `files` accepted files of one node and setup ("plain/1 bfloat16 cpu")."""

    node: Address
    setup: str
    statistic: str
    files: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        """Mean share of the limit."""
        return self.total / self.files


def add(connection: Connection, node: Address, setup: str, shares: Mapping[str, float]) -> None:
    """Adds one accepted file. The caller holds the lock on the node's row."""
    add_files(connection, [(node, setup, shares)])


def add_files(
    connection: Connection, files: Iterable[tuple[Address, str, Mapping[str, float]]]
) -> None:
    """Adds accepted files: (node, setup, shares of the limits). The caller holds the locks on the
    nodes' rows."""
    sums: dict[tuple[Address, str, str], tuple[int, float, float]] = {}
    for node, setup, shares in files:
        for statistic, share in shares.items():
            n, total, squares = sums.get((node, setup, statistic), (0, 0.0, 0.0))
            sums[node, setup, statistic] = (n + 1, total + share, squares + share * share)
    rows = [
        {"node": node, "setup": setup, "statistic": statistic, "files": n, "total": total,
         "squares": squares}
        for (node, setup, statistic), (n, total, squares) in sorted(sums.items())
    ]  # fmt: skip
    add_all(connection, schema.drift, rows)


def forget(connection: Connection, node: Address) -> None:
    """Deletes a node's sums."""
    connection.execute(sa.delete(schema.drift).where(_drift.node == node))


def of_those(connection: Connection, nodes: Collection[Address]) -> list[DriftRow]:
    """Returns the sums of these nodes."""
    query = sa.select(schema.drift).where(one_of(connection, _drift.node, nodes))
    return records(DriftRow, connection.execute(query).mappings().all())


def setups(connection: Connection) -> list[tuple[Address, str]]:
    """Returns each node with each setup of its accepted files."""
    query = sa.select(_drift.node, _drift.setup).distinct()
    return [(Address(node), setup) for node, setup in connection.execute(query)]


def nodes(connection: Connection) -> set[Address]:
    """Returns the nodes with an accepted file."""
    return set(map(Address, connection.execute(sa.select(_drift.node).distinct()).scalars()))


def totals(connection: Connection) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Returns, for each (setup, statistic), the files, totals and squares of all nodes together."""
    query = sa.select(
        _drift.setup,
        _drift.statistic,
        sa.func.sum(_drift.files),
        sa.func.sum(_drift.total),
        sa.func.sum(_drift.squares),
    ).group_by(_drift.setup, _drift.statistic)
    return {
        (setup, statistic): (int(files), float(total), float(squares))
        for setup, statistic, files, total, squares in connection.execute(query)
    }


def every(connection: Connection) -> list[DriftRow]:
    """Returns all sums, ordered by node, setup and statistic."""
    query = sa.select(schema.drift).order_by(_drift.node, _drift.setup, _drift.statistic)
    return records(DriftRow, connection.execute(query).mappings().all())
