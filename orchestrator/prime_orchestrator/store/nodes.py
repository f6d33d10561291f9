"""Admitted nodes: status, last heartbeat, speed and lease record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.node import Hardware, NodeStatus
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import (
    built_once,
    by_number,
    one_of,
    one_of_bound,
    record,
    records,
    update_each,
    upsert,
)

_nodes = schema.nodes.c


@dataclass(frozen=True)
class NodeRow:
    """One row of `nodes`; `last_heartbeat` and `created_at` in Unix seconds."""

    address: Address
    provider: Address | None
    status: NodeStatus
    speed_class: int
    token_rate: float | None
    challenge_rate: float | None
    hardware: str
    runtime: str
    last_heartbeat: float
    policy_version: int | None
    tokens_per_second: int
    created_at: float
    kept: float
    missed: float
    misses: int
    rests_until: float
    instance: str


def get(connection: Connection, address: Address) -> NodeRow | None:
    """Returns the node, or None if it was never admitted."""
    query = sa.select(schema.nodes).where(_nodes.address == address)
    return record(NodeRow, connection.execute(query).mappings().first())


def those(connection: Connection, addresses: Collection[Address]) -> dict[Address, NodeRow]:
    """Returns the given nodes that were ever admitted."""
    query = sa.select(schema.nodes).where(one_of(connection, _nodes.address, addresses))
    rows = records(NodeRow, connection.execute(query).mappings().all())
    return {row.address: row for row in rows}


def lock_row(connection: Connection, address: Address) -> NodeRow | None:
    """Like `get`; the row cannot change until the transaction ends."""
    query = sa.select(schema.nodes).where(_nodes.address == address).with_for_update()
    return record(NodeRow, connection.execute(query).mappings().first())


def lock_rows(connection: Connection, addresses: Collection[Address]) -> dict[Address, NodeRow]:
    """Like `lock_row`, for the given nodes that were ever admitted. They are locked in order, so
    that two processes cannot deadlock."""
    query = (
        sa.select(schema.nodes)
        .where(one_of(connection, _nodes.address, addresses))
        .order_by(_nodes.address)
        .with_for_update()
    )
    rows = connection.execute(query).mappings().all()
    return {row.address: row for row in records(NodeRow, rows)}


def lock_free(connection: Connection, addresses: Collection[Address]) -> dict[Address, NodeRow]:
    """Like `lock_row`, but only for rows that no other transaction holds; never waits."""
    found = connection.execute(_lock_free(connection), {"addresses": list(addresses)})
    return {Address(row.address): NodeRow(*row) for row in found}


@built_once
def _lock_free(postgresql: bool) -> sa.Select[Any]:
    columns = (_nodes[field.name] for field in fields(NodeRow))
    query = sa.select(*columns).where(one_of_bound(postgresql, _nodes.address, "addresses"))
    return query.with_for_update(skip_locked=True)


def active_before(connection: Connection, last_heartbeat: float) -> list[NodeRow]:
    """Returns the active nodes whose last heartbeat is older than `last_heartbeat`."""
    query = sa.select(schema.nodes).where(
        _nodes.status == "active", _nodes.last_heartbeat < last_heartbeat
    )
    return records(NodeRow, connection.execute(query).mappings().all())


def every(connection: Connection, statuses: Iterable[NodeStatus] | None = None) -> list[NodeRow]:
    """Returns all nodes (in the given states), oldest first."""
    query = sa.select(schema.nodes).order_by(_nodes.created_at, _nodes.address)
    if statuses is not None:
        query = query.where(_nodes.status.in_(tuple(statuses)))
    return records(NodeRow, connection.execute(query).mappings().all())


def by_address(connection: Connection) -> list[NodeRow]:
    """Returns all nodes by address, independent of the database's collation."""
    rows = connection.execute(sa.select(schema.nodes)).mappings().all()
    return sorted(records(NodeRow, rows), key=lambda row: row.address)


def latest(connection: Connection, limit: int) -> list[NodeRow]:
    """Returns the `limit` nodes with the newest heartbeats, oldest admission first. Shadow nodes
    come last, since anyone may add some: they displace no other."""
    query = sa.select(schema.nodes).order_by(
        _nodes.status == "shadow", _nodes.last_heartbeat.desc(), _nodes.address
    )
    rows = records(NodeRow, connection.execute(query.limit(limit)).mappings().all())
    return sorted(rows, key=lambda row: (row.created_at, row.address))


def counts(connection: Connection) -> dict[str, int]:
    """Returns the number of nodes by status."""
    query = sa.select(_nodes.status, sa.func.count()).group_by(_nodes.status)
    return {status: int(n) for status, n in connection.execute(query)}


def count_of(connection: Connection, status: NodeStatus) -> int:
    """Returns the number of nodes in this state."""
    query = sa.select(sa.func.count()).where(_nodes.status == status)
    return int(connection.execute(query).scalar_one())


def seated(connection: Connection, account: Address) -> bool:
    """Whether the account is a node with a seat in the pool, or such a node's provider."""
    query = (
        sa.select(_nodes.address)
        .where(
            sa.or_(_nodes.address == account, _nodes.provider == account),
            _nodes.status.in_(("active", "silent")),
        )
        .limit(1)
    )
    return connection.execute(query).first() is not None


def admit(
    connection: Connection,
    address: Address,
    *,
    speed_class: int = 1,
    hardware: Hardware,
    runtime: str,
    now: float,
    status: NodeStatus = "admitted",
) -> None:
    """Writes a newly admitted (or shadow) node, or readmits one that had left."""
    upsert(
        connection,
        schema.nodes,
        {
            "address": address,
            "provider": None,
            "status": status,
            "speed_class": speed_class,
            "token_rate": None,
            "challenge_rate": None,
            "hardware": hardware.model_dump_json(),
            "runtime": runtime,
            "last_heartbeat": now,
            "policy_version": None,
            "tokens_per_second": 0,
            "created_at": now,
        },
    )


def set_status(
    connection: Connection, address: Address, status: NodeStatus, *, last_heartbeat: float
) -> None:
    """Writes the outcome of `lifecycle.step_node`."""
    connection.execute(
        sa.update(schema.nodes)
        .where(_nodes.address == address)
        .values(status=status, last_heartbeat=last_heartbeat)
    )


def set_statuses(connection: Connection, rows: Sequence[NodeRow]) -> None:
    """Writes the statuses of nodes. The caller has locked the rows."""
    update_each(connection, schema.nodes, rows, ("status",))


def set_member(connection: Connection, address: Address, *, provider: Address) -> None:
    """Sets a member's provider according to the chain (used by the indexer)."""
    connection.execute(
        sa.update(schema.nodes).where(_nodes.address == address).values(provider=provider)
    )


def set_rates(
    connection: Connection,
    address: Address,
    *,
    token_rate: float | None,
    challenge_rate: float | None,
) -> None:
    """Writes the node's measured rates (prime_orchestrator/manager/speed.py)."""
    connection.execute(
        sa.update(schema.nodes)
        .where(_nodes.address == address)
        .values(token_rate=token_rate, challenge_rate=challenge_rate)
    )


def set_class(connection: Connection, address: Address, speed_class: int) -> None:
    """Writes the node's speed class."""
    connection.execute(
        sa.update(schema.nodes).where(_nodes.address == address).values(speed_class=speed_class)
    )


def note_kept(connection: Connection, addresses: Sequence[Address], memory: float) -> None:
    """Counts a fulfilled lease of each of these nodes, of which one may come several times; the
    previous counts are multiplied by `memory`."""
    for number, some in by_number(addresses).items():
        left, new = memory**number, sum(memory**at for at in range(number))
        statement = sa.update(schema.nodes).where(one_of(connection, _nodes.address, some))
        connection.execute(
            statement.values(kept=_nodes.kept * left + new, missed=_nodes.missed * left, misses=0)
        )


def note_missed(
    connection: Connection,
    address: Address,
    memory: float,
    *,
    misses: int = 0,
    rests_until: float | None = None,
) -> None:
    """Counts a lease that failed through the node's fault. If it expired, `rests_until` is given,
    and `misses` is the new number of expiries in a row."""
    changed: dict[str, Any] = {
        "kept": _nodes.kept * memory,
        "missed": _nodes.missed * memory + 1.0,
    }
    if rests_until is not None:
        changed |= {"misses": misses, "rests_until": rests_until}
    connection.execute(sa.update(schema.nodes).where(_nodes.address == address).values(**changed))


def owner_column() -> sa.ColumnElement[str]:
    """Returns the account accountable for a node: its provider, or the node itself if the chain
    names none."""
    return sa.func.coalesce(_nodes.provider, _nodes.address)


def any_proven(connection: Connection, proven: float) -> bool:
    """Whether the nodes of any active node's provider kept at least `proven` leases together."""
    alone = sa.select(_nodes.address).where(_nodes.status == "active", _nodes.kept >= proven)
    if connection.execute(alone.limit(1)).first() is not None:  # by an index
        return True
    active = sa.func.max(sa.case((_nodes.status == "active", 1), else_=0))
    together = (
        sa.select(owner_column())
        .group_by(owner_column())
        .having(sa.func.sum(_nodes.kept) >= proven, active == 1)
    )
    return connection.execute(together.limit(1)).first() is not None


def of_providers(
    connection: Connection, providers: Collection[Address]
) -> dict[Address, list[NodeRow]]:
    """Returns every node of these providers, in any state, by provider."""
    query = sa.select(schema.nodes).where(one_of(connection, _nodes.provider, providers))
    found: dict[Address, list[NodeRow]] = {}
    for row in records(NodeRow, connection.execute(query).mappings().all()):
        assert row.provider is not None
        found.setdefault(row.provider, []).append(row)
    return found


def live_rates(connection: Connection) -> Sequence[tuple[float | None, float | None]]:
    """Returns (token rate, challenge rate) of every node that is admitted or active."""
    query = sa.select(_nodes.token_rate, _nodes.challenge_rate).where(
        _nodes.status.in_(("admitted", "active"))
    )
    return [(tokens, challenge) for tokens, challenge in connection.execute(query).all()]


def store_heartbeats(connection: Connection, rows: Sequence[NodeRow]) -> None:
    """Writes what heartbeats changed: status, time and the reported machine state."""
    names = (
        "status", "last_heartbeat", "policy_version", "tokens_per_second", "runtime", "instance",
    )  # fmt: skip
    update_each(connection, schema.nodes, rows, names)
