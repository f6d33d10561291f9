"""Requeues failed intents that are still wanted, after a rest.

A transaction may fail for a temporary cause: an endpoint behind the chain, missing stake, or an
earlier intent that failed. The sender dry-runs each one, so an intent that can never succeed costs
an occasional call, not a fee. settlement.py requeues `reward_root`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core import ids
from prime_core.ids import Address
from prime_orchestrator.manager.intents import requeue_failed
from prime_orchestrator.store import chain, nodes, schema
from prime_orchestrator.store.engine import Store
from prime_orchestrator.store.intents import IntentRow
from prime_orchestrator.store.rows import records

REST_SECONDS = 15.0
"""Seconds that a failed intent rests before it is retried."""
KINDS = ("root", "policy", "propose", "execute", "eject", "join")
_AT_ONCE = 1000


def requeue_wanted(store: Store, lane: Address, now: Callable[[], float]) -> int:
    """Requeues the lane's failed intents that are still wanted and have rested; returns how many.
    Idempotent: a queued intent is no longer failed."""
    moment = now()
    table = schema.intents
    query = (
        sa.select(table)
        .where(
            table.c.lane == lane,
            table.c.status == "failed",
            table.c.kind.in_(KINDS),
            table.c.updated_at <= moment - REST_SECONDS,
        )
        # Newest first: intents that are no longer wanted sink and never block the others.
        .order_by(table.c.updated_at.desc(), table.c.id)
        .limit(_AT_ONCE)
    )
    with store.read() as connection:
        rows = records(IntentRow, connection.execute(query).mappings().all())
        again = sorted(row.id for row in rows if _wanted(connection, row, moment))
    if not again:
        return 0
    with store.begin() as connection:
        return sum(
            requeue_failed(connection, name, moment, not_before=moment - REST_SECONDS)
            for name in again
        )


def _wanted(connection: Connection, row: IntentRow, now: float) -> bool:
    """Whether the intent's purpose is neither fulfilled nor obsolete."""
    payload = row.arguments()
    match row.kind:
        case "root":
            roots = schema.roots.c
            query = sa.select(roots.id).where(
                roots.root == payload["root"], roots.chain_seq.is_(None)
            )
            return connection.execute(query).first() is not None
        case "policy":
            version = int(payload["statement"]["version"])
            return not chain.events(connection, "PolicyPublished", subject=version)
        case "propose" | "execute":
            slashes = schema.slashes.c
            query = sa.select(slashes.submission_digest).where(
                slashes.submission_digest == payload["submission_digest"],
                slashes.status == ("queued" if row.kind == "propose" else "proposed"),
            )
            return connection.execute(query).first() is not None
        case "eject":
            node = nodes.get(connection, ids.address(payload["node"]))
            return node is not None and node.status in ("active", "silent", "quarantined")
        case "join":
            invite = payload["invite"]
            node = nodes.get(connection, ids.address(invite["node"]))
            open_still = now <= int(invite["deadline"])
            return open_still and node is not None and node.status == "admitted"
    return False


def forget_unsent(connection: Connection, block: int) -> list[str]:
    """Drops unsent reward roots that depend on blocks above `block` after the chain rolled back to
    it, so that their epochs are settled again. Returns their intent ids."""
    intents, reward_roots = schema.intents, schema.reward_roots
    waiting = connection.execute(
        sa.select(intents.c.id, intents.c.payload).where(
            intents.c.kind == "reward_root", intents.c.status == "queued"
        )
    ).all()
    dropped = []
    for row in waiting:
        payload = json.loads(row.payload)
        if int(payload["as_of_block"]) <= block:
            continue
        connection.execute(
            sa.delete(reward_roots).where(
                reward_roots.c.epoch == payload["epoch"],
                reward_roots.c.object == payload["object"],
                reward_roots.c.claimable_at.is_(None),
            )
        )
        connection.execute(sa.delete(intents).where(intents.c.id == row.id))
        dropped.append(str(row.id))
    return dropped
