"""Sends intents: transactions that an account has queued for the chain.

`intents.py` queues an intent in the same database transaction as its cause. `run_outbox_tick`
converts the intents of one lane (the sending account) into calls, passes them to that account's
Sender, and copies their status back. While the RPC is down, the rows wait.

    queued ──► sent ──► confirmed          stays queued until its requirements are deep enough
       └─────────┴────► failed (with the decoded error) ──► queued after a rest, if still wanted
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_chain.client import Call
from prime_chain.contracts import Contracts
from prime_chain.journal import Intent
from prime_chain.sender import Sender
from prime_core import ids
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import ConflictError
from prime_core.ids import Digest
from prime_core.node import Invite
from prime_core.signing import Statement
from prime_core.verdict import Outcome, SignedOpinion
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import roots
from prime_orchestrator.manager.depth import Depths, Need, need_of
from prime_orchestrator.manager.requeue import requeue_wanted
from prime_orchestrator.store import intents as store_intents
from prime_orchestrator.store import opinions, schema, submissions
from prime_orchestrator.store.engine import Store
from prime_orchestrator.store.intents import IntentRow

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Statement)


def run_outbox_tick(
    store: Store,
    context: PoolContext,
    contracts: Contracts,
    sender: Sender,
    now: Callable[[], float],
) -> int:
    """Runs one round for the lane `sender.address`; returns how many of its intents are unfinished.

    Requeues failed intents that are still wanted, submits queued ones, polls the chain once, and
    copies the results back. If the process is killed at any point, the next round completes the
    work: submitting twice is harmless (same id, same call), and the store follows the sender's
    journal.
    """
    requeue_wanted(store, sender.address, now)
    _hand_over(store, context, contracts, sender, now())
    sender.tick()
    return _copy_back(store, sender, now())


def _hand_over(
    store: Store, context: PoolContext, contracts: Contracts, sender: Sender, now: float
) -> None:
    with store.read() as connection:
        queued = store_intents.pending(connection, sender.address)
        # A sent intent that the journal lacks was lost with an older journal: submit it again.
        sent = store_intents.pending(connection, sender.address, ("sent",))
        lost = [row for row in sent if sender.status(row.id) is None]
        ready: list[tuple[IntentRow, Call | ConflictError]] = []
        needs: dict[str, Need | None] = {}
        for row in [*lost, *queued]:
            try:
                call = build_call(connection, context, contracts, row.kind, row.arguments())
            except ConflictError as error:
                ready.append((row, error))
                continue
            if call is not None:
                ready.append((row, call))
                needs[row.id] = need_of(connection, context, row.kind, row.arguments())
    depths = Depths(contracts)
    for row, outcome in ready:
        if not depths.meets(needs.get(row.id)):
            continue
        failure = str(outcome) if isinstance(outcome, ConflictError) else None
        if isinstance(outcome, Call):
            try:
                if sender.submit(row.id, outcome).status == "failed":
                    sender.retry(row.id)
            except ConflictError as error:
                failure = str(error)
        with store.begin() as connection:
            status = "failed" if failure else "sent"
            store_intents.update(connection, row.id, status, now=now, error=failure)
        if failure:
            log.error("intent %s failed: %s", row.id, failure)


def _copy_back(store: Store, sender: Sender, now: float) -> int:
    reopened = {intent.id for intent in sender.open_intents()}
    with store.read() as connection:
        rows = store_intents.pending(connection, sender.address, ("sent",), limit=1000)
        if reopened:  # a reorganization removed a mined transaction
            rows += [
                row
                for name in sorted(reopened)
                if (row := store_intents.get(connection, name)) is not None
                and row.status == "confirmed"
            ]
        waiting = len(store_intents.pending(connection, sender.address, limit=1000))
    open_count = waiting
    for row in rows:
        found = sender.status(row.id)
        if found is None:
            continue
        status = "sent" if found.status == "queued" else found.status
        open_count += status == "sent"
        tx_hash = _hash_of(found)
        if (status, tx_hash, found.block) == (row.status, row.tx_hash, row.block):
            continue
        error = str(found.error) if found.error is not None else None
        with store.begin() as connection:
            store_intents.update(
                connection,
                row.id,
                status,
                now=now,
                tx_hash=tx_hash,
                block=found.block,
                error=error,
            )
        if status == "failed":
            log.error("intent %s failed: %s", row.id, error)
        elif status == "confirmed":
            log.info("intent %s is confirmed in block %s (%s)", row.id, found.block, tx_hash)
    return open_count


def _hash_of(intent: Intent) -> Digest | None:
    if intent.tx_hash is not None:
        return intent.tx_hash
    return intent.hashes[-1] if intent.hashes else None


def build_call(
    connection: Connection,
    context: PoolContext,
    contracts: Contracts,
    kind: str,
    payload: Mapping[str, Any],
) -> Call | None:
    """Returns the call for an intent, or None while it must wait.

    Raises ConflictError if it can never be sent.
    """
    pool = context.pool
    match kind:
        case "join":
            signature = ids.signature(payload["signature"])
            return contracts.pools.join(_statement(Invite, payload["invite"]), signature)
        case "policy":
            signature = ids.signature(payload["signature"])
            statement = _statement(PolicyStatement, payload["statement"])
            return contracts.pools.publish_policy(statement, signature)
        case "root":
            return contracts.work.post_root(
                pool,
                ids.digest(payload["root"]),
                int(payload["count"]),
                ids.digest(payload["leaves_object"]),
            )
        case "reward_root":
            return contracts.rewards.post_reward_root(
                pool,
                int(payload["epoch"]),
                ids.digest(payload["root"]),
                int(payload["cumulative_total"]),
                ids.digest(payload["object"]),
            )
        case "eject":
            return contracts.pools.eject(pool, ids.address(payload["node"]))
        case "revise":
            digest = ids.digest(payload["run_digest"])
            return contracts.pools.revise(pool, digest, int(payload["from_step"]))
        case "execute":
            return contracts.slasher.execute(ids.digest(payload["submission_digest"]))
        case "propose":
            digest = ids.digest(payload["submission_digest"])
            return _propose(connection, contracts, pool, digest)
    raise ConflictError(f"no transaction is known for intents of kind {kind!r}")


def _propose(
    connection: Connection, contracts: Contracts, pool: int, digest: Digest
) -> Call | None:
    slashes = schema.slashes
    slash = connection.execute(
        sa.select(slashes).where(slashes.c.submission_digest == digest)
    ).first()
    row = submissions.get(connection, digest)
    if slash is None or row is None or slash.status != "queued":
        raise ConflictError(f"the slash for submission {digest} is proposed or given up already")
    found = roots.proof_of(connection, digest)
    if found is None:
        return None  # its root is not confirmed yet
    seq, proof = found
    agreeing = quorum_of(connection, contracts, pool, digest)
    if agreeing is None:
        return None
    signed = row.signed()
    return contracts.slasher.propose(signed.submission, signed.signature, seq, proof, agreeing)


def quorum_of(
    connection: Connection, contracts: Contracts, pool: int, digest: Digest
) -> list[SignedOpinion] | None:
    """Returns a quorum of opinions under one law that reject a submission, in the order the
    contract requires; None while there are too few. Raises UnavailableError."""
    by_law: dict[Digest, list[tuple[int, SignedOpinion]]] = {}
    for row in opinions.of(connection, digest):
        if row.outcome is not Outcome.REJECTED:
            continue
        found = contracts.pools.validator_of(pool, row.validator)
        if found is not None and found.on:
            said = row.signed()
            by_law.setdefault(said.opinion.law, []).append((found.number, said))
    quorum = contracts.pools.judgement_of(pool).quorum
    for agreeing in by_law.values():
        if len(agreeing) >= quorum:
            chosen = sorted(agreeing, key=lambda one: one[0])[:quorum]
            return [said for _, said in chosen]
    return None


def _statement(kind: type[S], value: Any) -> S:
    return kind.model_validate_json(json.dumps(value))
