"""Queues intents: transactions that an account will send to the chain, recorded before they are
sent.

An intent's id is derived from the fact it reports, so a fact queues one intent however often it is
reported. Queue it in the transaction that decides the fact; `outbox.py` sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address
from prime_orchestrator.store import intents as store_intents
from prime_orchestrator.store import schema

IntentKind = Literal[
    "join", "root", "policy", "reward_root", "eject", "propose", "execute", "revise"
]
"""Payloads (JSON; digests, addresses and signatures as text, wei as decimal text):

join           {"invite": Invite, "signature"}                        id join:<node>:<deadline>
policy         {"statement": PolicyStatement, "signature"}            id policy:<version>
root           {"root", "count", "leaves_object"}                     id root:<root>
reward_root    {"epoch", "root", "cumulative_total", "object", "as_of_block"}
                                                                 id reward_root:<epoch>:<object>
eject          {"node"}                                               id eject:<node>:<why>
propose        {"submission_digest"}                                  id propose:<digest>
execute        {"submission_digest"}                                  id execute:<digest>
revise         {"run_digest", "from_step"}                            id revise:<step>:<digest>
"""


def queue_intent(
    connection: Connection,
    *,
    lane: Address,
    kind: IntentKind,
    key: str,
    payload: Mapping[str, Any],
    now: float,
) -> str:
    """Queues the intent "<kind>:<key>" on `lane` unless it exists already; returns its id.

    Call it inside the transaction that decides the fact.
    """
    intent = f"{kind}:{key}"
    store_intents.enqueue(connection, intent, lane=lane, kind=kind, payload=payload, now=now)
    return intent


def requeue_failed(connection: Connection, intent: str, now: float, *, not_before: float) -> bool:
    """Requeues a failed intent if it failed before `not_before`, since its cause may be gone.
    Returns whether it did."""
    table = schema.intents
    done = connection.execute(
        sa.update(table)
        .where(table.c.id == intent, table.c.status == "failed", table.c.updated_at <= not_before)
        .values(status="queued", error=None, updated_at=now)
    )
    return bool(done.rowcount)
