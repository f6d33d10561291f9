"""What the answer to each heartbeat says of the pool, in one statement."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema

_policies, _runs = schema.policies.c, schema.runs.c
_QUERY = sa.select(
    sa.select(sa.func.max(_policies.version)).scalar_subquery(),
    sa.select(_runs.body).order_by(_runs.from_step.desc()).limit(1).scalar_subquery(),
    sa.exists().where(schema.chain_events.c.name == "PoolEnded"),
    sa.exists().where(schema.evaluations.c.ended_at.is_(None)),
)


@dataclass(frozen=True)
class PoolFacts:
    """`latest_version`: None before the first policy; `newest_run`: the bytes of the newest
    revision, None without one; `maybe_ended`: whether the store has the end of any pool;
    `evaluates`: whether an evaluation goes on."""

    latest_version: int | None
    newest_run: bytes | None
    maybe_ended: bool
    evaluates: bool


def read(connection: Connection) -> PoolFacts:
    """Returns the facts as they are now."""
    return PoolFacts(*connection.execute(_QUERY).one())
