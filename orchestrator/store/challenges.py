"""Hardware challenges given out at admission."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.store import schema
from orchestrator.store.rows import record
from protocol.core.ids import Address, Digest

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


def add(connection: Connection, challenge: ChallengeRow) -> None:
    """Writes a challenge before it is sent."""
    connection.execute(sa.insert(schema.challenges).values(**vars(challenge)))


def open_for(connection: Connection, node: Address, now: float) -> int:
    """Challenges of `node` that still wait for an answer."""
    query = sa.select(sa.func.count()).where(
        _challenges.node == node, _challenges.used.is_(False), _challenges.deadline >= now
    )
    return connection.execute(query).scalar_one()


def get(connection: Connection, challenge_id: str) -> ChallengeRow | None:
    """The challenge, or None."""
    query = sa.select(schema.challenges).where(_challenges.id == challenge_id)
    return record(ChallengeRow, connection.execute(query).mappings().first())


def use(connection: Connection, challenge_id: str) -> bool:
    """Marks a challenge answered. False if it already was: it counts once, right or wrong."""
    done = connection.execute(
        sa.update(schema.challenges)
        .where(_challenges.id == challenge_id, _challenges.used.is_(False))
        .values(used=True)
    )
    return done.rowcount == 1


def forget(connection: Connection, now: float) -> None:
    """Drops challenges whose deadline passed an hour ago."""
    connection.execute(sa.delete(schema.challenges).where(_challenges.deadline < now - 3600))
