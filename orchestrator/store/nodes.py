"""Nodes: who was admitted, in which state, last heard when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.store import schema
from orchestrator.store.rows import record, records, upsert
from protocol.core.ids import Address
from protocol.core.node import Hardware, NodeStatus

_nodes = schema.nodes.c


@dataclass(frozen=True)
class NodeRow:
    """One row of `nodes`; `last_heartbeat` and `created_at` in Unix seconds."""

    address: Address
    provider: Address | None
    status: NodeStatus
    speed_class: int
    hardware: str
    runtime: str
    last_heartbeat: float
    policy_version: int | None
    tokens_per_second: int
    created_at: float


def get(connection: Connection, address: Address) -> NodeRow | None:
    """The node, or None if it was never admitted."""
    query = sa.select(schema.nodes).where(_nodes.address == address)
    return record(NodeRow, connection.execute(query).mappings().first())


def lock_row(connection: Connection, address: Address) -> NodeRow | None:
    """Like `get`; the row cannot change until the transaction ends."""
    query = sa.select(schema.nodes).where(_nodes.address == address).with_for_update()
    return record(NodeRow, connection.execute(query).mappings().first())


def every(connection: Connection, statuses: Iterable[NodeStatus] | None = None) -> list[NodeRow]:
    """All nodes (of the given states), oldest first."""
    query = sa.select(schema.nodes).order_by(_nodes.created_at, _nodes.address)
    if statuses is not None:
        query = query.where(_nodes.status.in_(tuple(statuses)))
    return records(NodeRow, connection.execute(query).mappings().all())


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
    speed_class: int,
    hardware: Hardware,
    runtime: str,
    now: float,
    status: NodeStatus = "admitted",
) -> None:
    """Writes a newly admitted (or shadow) node, or admits one again that had left."""
    upsert(
        connection,
        schema.nodes,
        {
            "address": address,
            "provider": None,
            "status": status,
            "speed_class": speed_class,
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


def set_member(
    connection: Connection, address: Address, *, provider: Address, speed_class: int
) -> None:
    """Copies what the chain says of a member: its provider and class (indexer)."""
    connection.execute(
        sa.update(schema.nodes)
        .where(_nodes.address == address)
        .values(provider=provider, speed_class=speed_class)
    )


def heard(
    connection: Connection,
    address: Address,
    *,
    policy_version: int | None,
    tokens_per_second: int,
    runtime: str,
) -> None:
    """Writes what a heartbeat said of the machine."""
    connection.execute(
        sa.update(schema.nodes)
        .where(_nodes.address == address)
        .values(policy_version=policy_version, tokens_per_second=tokens_per_second, runtime=runtime)
    )
