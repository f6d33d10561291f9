"""Sums of statistics over a node's accepted files; they show drift that no single file shows.

For each node, setup, kind of file (manager.history.kind_of) and statistic: the number of files, and
the sums of each file's *share of its limit* (0 … 1) and of its square. Written in the verdict's
transaction.

Old files fade: at MOST_FILES files of a node, setup and statistic, over all kinds, their number and
sums are halved. Means stay, and a file's weight is at most 1, so standard errors that count files
by these numbers are at least as large as the true ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import add_all, one_of, records

MOST_FILES = 2_000
"""Files at which a node's sums are halved. With more, a difference too small for a lie, as between
two honest processors, exceeds any number of standard errors in the end, and a node can hide more
lies behind its honest files. With fewer, a node can lie in a larger share of its files."""

_drift = schema.drift.c


@dataclass(frozen=True)
class DriftRow:
    """Sums over `files` accepted files of one node, setup ("plain/1 bfloat16 cpu") and kind."""

    node: Address
    setup: str
    kind: str
    statistic: str
    files: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        """Mean share of the limit."""
        return self.total / self.files

    @property
    def variance(self) -> float:
        """Variance of the files' shares, without what rounding alone may cause."""
        found = self.squares / self.files - self.mean * self.mean
        return found if found > 1e-12 * self.squares / self.files else 0.0


def add(
    connection: Connection, node: Address, setup: str, shares: Mapping[str, float], kind: str = ""
) -> None:
    """Adds one accepted file. The caller holds the lock on the node's row."""
    add_files(connection, [(node, setup, kind, shares)])


def add_files(
    connection: Connection, files: Iterable[tuple[Address, str, str, Mapping[str, float]]]
) -> None:
    """Adds accepted files: (node, setup, kind, shares of the limits). The caller holds the locks on
    the nodes' rows."""
    sums: dict[tuple[Address, str, str, str], tuple[int, float, float]] = {}
    for node, setup, kind, shares in files:
        for statistic, share in shares.items():
            n, total, squares = sums.get((node, setup, kind, statistic), (0, 0.0, 0.0))
            sums[node, setup, kind, statistic] = (n + 1, total + share, squares + share * share)
    rows = [
        {"node": node, "setup": setup, "kind": kind, "statistic": statistic, "files": n,
         "total": total, "squares": squares}
        for (node, setup, kind, statistic), (n, total, squares) in sorted(sums.items())
    ]  # fmt: skip
    add_all(connection, schema.drift, rows)
    _halve(connection, {node for node, *_ in sums})


def _halve(connection: Connection, nodes: Collection[Address]) -> None:
    """Halves the sums of these nodes that have MOST_FILES files or more. Kinds of one file go."""
    by = (_drift.node, _drift.setup, _drift.statistic)
    full = (
        sa.select(*by)
        .where(one_of(connection, _drift.node, nodes))
        .group_by(*by)
        .having(sa.func.sum(_drift.files) >= MOST_FILES)
    )
    for found in connection.execute(full).all():
        these = sa.and_(*(column == value for column, value in zip(by, found, strict=True)))
        connection.execute(sa.delete(schema.drift).where(these, _drift.files < 2))
        half = _drift.files // 2
        changed = {"files": half} | {
            column.name: column * half / _drift.files for column in (_drift.total, _drift.squares)
        }
        connection.execute(sa.update(schema.drift).where(these).values(changed))


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


def totals(connection: Connection) -> dict[tuple[str, str, str], tuple[int, float, float]]:
    """Returns, for each (setup, kind, statistic), the files, totals and squares of all nodes
    together."""
    query = sa.select(
        _drift.setup,
        _drift.kind,
        _drift.statistic,
        sa.func.sum(_drift.files),
        sa.func.sum(_drift.total),
        sa.func.sum(_drift.squares),
    ).group_by(_drift.setup, _drift.kind, _drift.statistic)
    return {
        (setup, kind, statistic): (int(files), float(total), float(squares))
        for setup, kind, statistic, files, total, squares in connection.execute(query)
    }


def every(connection: Connection) -> list[DriftRow]:
    """Returns all sums, ordered by node, setup, statistic and kind."""
    by = (_drift.node, _drift.setup, _drift.statistic, _drift.kind)
    query = sa.select(schema.drift).order_by(*by)
    return records(DriftRow, connection.execute(query).mappings().all())
