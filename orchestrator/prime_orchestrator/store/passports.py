"""Hardware passports: the newest proof of cards of each node."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.messages import SignedPassport
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import upsert


def put(connection: Connection, passport: SignedPassport) -> None:
    """Writes a node's passport in place of its earlier one."""
    said = passport.passport
    values = {"node": said.node, "cards": said.named, "measured_at": said.measured_at}
    upsert(connection, schema.passports, values | {"body": passport.model_dump_json()})


def get(connection: Connection, node: Address) -> SignedPassport | None:
    """Returns the node's passport, or None if it proved no cards."""
    query = sa.select(schema.passports.c.body).where(schema.passports.c.node == node)
    body = connection.execute(query).scalar()
    return None if body is None else SignedPassport.model_validate_json(body)


def named(
    connection: Connection, nodes: Collection[Address] | None
) -> dict[Address, tuple[str, int]]:
    """Returns what those of the nodes (None: of all) that proved cards have, such as "8 x h200",
    and when it was measured, in Unix seconds."""
    table = schema.passports.c
    query = sa.select(table.node, table.cards, table.measured_at)
    if nodes is not None:
        query = query.where(table.node.in_(list(nodes)))
    return {Address(node): (str(cards), int(at)) for node, cards, at in connection.execute(query)}
