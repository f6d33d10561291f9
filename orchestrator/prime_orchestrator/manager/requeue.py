"""Failed intents that are wanted still: they rest, then go back into the queue.

A transaction may fail for a passing cause (an endpoint behind the chain, a stake not yet there, a
predecessor that failed first). The sender tries each on a dry run, so that one which can never
succeed costs a question now and then, not a fee. `reward_root` is put back by settlement.py.
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
"""How long a failed intent rests before it is tried again."""
KINDS = ("root", "policy", "propose", "execute", "eject", "join")
_AT_ONCE = 1000


def requeue_wanted(store: Store, lane: Address, now: Callable[[], float]) -> int:
    """Queues again those of the lane's failed intents whose purpose stands and which have rested;
    returns how many. Done twice, it changes nothing: what is queued is failed no longer."""
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
        # the newest first: what nobody wants any more sinks, and never stands in the way
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
    """Whether what the intent is for has neither happened nor become pointless."""
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
    """The chain went back to `block`: drops reward roots of later facts that were not yet sent, so
    that their epochs are settled anew; returns their intents."""
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
