"""Hardware challenges and proofs of cards, asked for at admission."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import built_once, one_of, one_of_bound, record

_challenges = schema.challenges.c


@dataclass(frozen=True)
class ChallengeRow:
    """`issued_at` and `deadline` in Unix seconds; `hardware` is JSON of Hardware."""

    id: str
    node: Address
    seed: Digest
    size: int
    rounds: int
    issued_at: float
    deadline: int
    hardware: str
    runtime: str
    used: bool = False
    shadow: bool = False
    rate: float | None = None
    place: str | None = None
    site: str | None = None
    cards: str | None = None
    """JSON of api.cards.State for a proof of cards; None for a challenge of `speed`."""


def add(connection: Connection, challenge: ChallengeRow) -> None:
    """Writes a challenge before it is sent."""
    connection.execute(sa.insert(schema.challenges).values(**vars(challenge)))


def open_for(connection: Connection, node: Address, now: float) -> int:
    """Returns the number of unanswered challenges of `node`."""
    query = sa.select(sa.func.count()).where(
        _challenges.node == node, _challenges.used.is_(False), _challenges.deadline >= now
    )
    return connection.execute(query).scalar_one()


def unproven(connection: Connection, node: Address, since: float) -> int:
    """Returns how many proofs of cards the node began since `since` (Unix seconds, at most an hour
    ago) and did not pass: refused, left, or still open."""
    query = sa.select(sa.func.count()).where(
        _challenges.node == node,
        _challenges.cards.is_not(None),
        _challenges.rate.is_(None),
        _challenges.issued_at >= since,
    )
    return connection.execute(query).scalar_one()


def asked_from(connection: Connection, place: str, since: float) -> set[Address]:
    """Returns the accounts that were challenged for shadow work at `place` since `since` (Unix
    seconds, at most an hour ago)."""
    return _asked(connection, _challenges.place == place, since)


def asked_from_site(connection: Connection, site: str, since: float) -> set[Address]:
    """Like `asked_from`, for a wider network."""
    return _asked(connection, _challenges.site == site, since)


def _asked(connection: Connection, here: sa.ColumnElement[bool], since: float) -> set[Address]:
    query = sa.select(_challenges.node).where(here, _challenges.issued_at >= since).distinct()
    return set(map(Address, connection.execute(query).scalars()))


def get(
    connection: Connection, challenge_id: str, *, for_update: bool = False
) -> ChallengeRow | None:
    """Returns the challenge, or None; `for_update`: it cannot change until the transaction ends.
    The id comes from a URL and may hold U+0000, which PostgreSQL refuses as text."""
    if not challenge_id.isalnum():
        return None
    query = sa.select(schema.challenges).where(_challenges.id == challenge_id)
    if for_update:
        query = query.with_for_update()
    return record(ChallengeRow, connection.execute(query).mappings().first())


def use(connection: Connection, challenge_id: str) -> bool:
    """Marks a challenge answered. Returns False if it already was: only one answer counts."""
    done = connection.execute(
        sa.update(schema.challenges)
        .where(_challenges.id == challenge_id, _challenges.used.is_(False))
        .values(used=True)
    )
    return done.rowcount == 1


def set_cards(connection: Connection, challenge_id: str, state: str) -> None:
    """Writes the state of a proof of cards (JSON of api.cards.State)."""
    connection.execute(
        sa.update(schema.challenges).where(_challenges.id == challenge_id).values(cards=state)
    )


def set_rate(connection: Connection, challenge_id: str, rate: float) -> None:
    """Records a correct answer; `rate` in million multiply-adds per second."""
    connection.execute(
        sa.update(schema.challenges).where(_challenges.id == challenge_id).values(rate=rate)
    )


def solved_since(
    connection: Connection, nodes: Collection[Address], since: float
) -> dict[Address, int]:
    """Returns how many challenges issued at `since` or later each node answered correctly; nodes
    with none are omitted."""
    found = connection.execute(_solved(connection), {"nodes": list(nodes), "since": since})
    return {Address(node): int(count) for node, count in found}


@built_once
def _solved(postgresql: bool) -> sa.Select[Any]:
    return (
        sa.select(_challenges.node, sa.func.count())
        .where(
            one_of_bound(postgresql, _challenges.node, "nodes"),
            _challenges.rate.is_not(None),
            _challenges.issued_at >= sa.bindparam("since"),
        )
        .group_by(_challenges.node)
    )


def rates_of(connection: Connection, nodes: Collection[Address]) -> dict[Address, list[float]]:
    """Returns the rates of the correct answers of the given nodes that gave any, newest first.
    Old challenges are forgotten (`forget`)."""
    query = (
        sa.select(_challenges.node, _challenges.rate)
        .where(one_of(connection, _challenges.node, nodes), _challenges.rate.is_not(None))
        .order_by(_challenges.issued_at.desc())
    )
    found: dict[Address, list[float]] = {}
    for node, rate in connection.execute(query):
        found.setdefault(Address(node), []).append(float(rate))
    return found


def forget(connection: Connection, now: float) -> None:
    """Deletes challenges whose deadline passed an hour ago; their result is in the node's row."""
    connection.execute(sa.delete(schema.challenges).where(_challenges.deadline < now - 3600))
