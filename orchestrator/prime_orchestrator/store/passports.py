"""Hardware passports: the newest proof of cards of each node, and of their memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.messages import SignedMemory, SignedPassport
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import upsert


@dataclass(frozen=True)
class CardsRow:
    """What a passport names, such as "8 x h200", when it was measured, in Unix seconds, and the
    memory of each card in MiB: claimed, and proved (0: only claimed)."""

    cards: str = ""
    measured_at: int = 0
    claimed_memory_mb: int = 0
    proved_memory_mb: int = 0


def put(connection: Connection, passport: SignedPassport, memory: SignedMemory | None) -> None:
    """Writes a node's passport in place of its earlier one. `memory`: what the same proof found of
    its memory."""
    said = passport.passport
    values = {
        "node": said.node,
        "cards": said.named,
        "measured_at": said.measured_at,
        "claimed_memory_mb": said.claimed_memory_mb,
        "proved_memory_mb": 0 if memory is None else memory.memory.proved_memory_mb,
        "body": passport.model_dump_json(),
        "memory": None if memory is None else memory.model_dump_json(),
    }
    upsert(connection, schema.passports, values)


def get(connection: Connection, node: Address) -> SignedPassport | None:
    """Returns the node's passport, or None if it proved no cards."""
    query = sa.select(schema.passports.c.body).where(schema.passports.c.node == node)
    body = connection.execute(query).scalar()
    return None if body is None else SignedPassport.model_validate_json(body)


def memory(connection: Connection, node: Address) -> SignedMemory | None:
    """Returns what the node proved of its cards' memory, or None if it is only claimed."""
    query = sa.select(schema.passports.c.memory).where(schema.passports.c.node == node)
    body = connection.execute(query).scalar()
    return None if body is None else SignedMemory.model_validate_json(body)


def named(connection: Connection, nodes: Collection[Address] | None) -> dict[Address, CardsRow]:
    """Returns the proven cards by node (`nodes` None: of all)."""
    table = schema.passports.c
    query = sa.select(
        table.node, table.cards, table.measured_at, table.claimed_memory_mb, table.proved_memory_mb
    )
    if nodes is not None:
        query = query.where(table.node.in_(list(nodes)))
    return {Address(node): CardsRow(*values) for node, *values in connection.execute(query)}
