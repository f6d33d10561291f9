"""Sends what the manager decided: turns waiting intents into calls and hands them to the sender.

    waiting ── its facts are deep enough, its call can be built ──► queued ──► sent ──► confirmed
       ▲                                                                        └────► failed
       └──────────────── after a rest, if it is still wanted ◄─────────────────────────────┘

An intent is recorded in the database transaction that decides its cause (store/intents.py). Its row
is also the sender's. While no RPC answers, the rows wait. Some facts must be deep on
chain first (depth.py).

A transaction may fail for a temporary cause: an endpoint behind the chain,
missing stake, or an earlier intent that failed. The sender dry-runs each one, so an intent that can
never succeed costs an occasional call, not a fee. settlement.py requeues `reward_root`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from prime_chain.client import Call
from prime_chain.contracts import Contracts
from prime_chain.sender import Sender
from prime_core import ids
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import ConflictError
from prime_core.ids import Digest
from prime_core.node import Invite
from prime_core.signing import Statement
from prime_core.verdict import Outcome, SignedOpinion
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.depth import Depths, Need, need_of
from prime_orchestrator.store import (
    Connection,
    chain,
    nodes,
    opinions,
    rewards,
    roots,
    slashes,
    submissions,
)
from prime_orchestrator.store import intents as store_intents
from prime_orchestrator.store.engine import Store
from prime_orchestrator.store.intents import UNFINISHED, IntentRow, requeue_failed

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Statement)

REST_SECONDS = 15.0
"""Seconds that a failed intent rests before it is retried."""
KINDS = ("root", "policy", "propose", "execute", "eject", "join", "dismiss")
_AT_ONCE = 1000


def run_transactions_tick(
    store: Store,
    context: PoolContext,
    contracts: Contracts,
    sender: Sender,
    now: Callable[[], float],
) -> int:
    """Runs one round; returns how many intents were unfinished before the chain was asked.

    Requeues failed intents that are still wanted, builds the calls of waiting ones, and polls the
    chain once. If the process is killed at any point, the next round completes the work: submitting
    twice is harmless (same id, same call).
    """
    requeue_wanted(store, context, now)
    _hand_over(store, context, contracts, sender, now())
    with store.read() as connection:
        counts = store_intents.counts(connection)
    sender.tick()
    return sum(counts.get(status, 0) for status in UNFINISHED)


def _hand_over(
    store: Store, context: PoolContext, contracts: Contracts, sender: Sender, now: float
) -> None:
    """Gives the sender each waiting intent whose call can be built and whose facts are deep."""
    ready: list[tuple[str, Call, Need | None]] = []
    later: list[str] = []
    never: list[tuple[str, str]] = []
    with store.read() as connection:
        for row in store_intents.pending(connection):
            try:
                call = build_call(connection, context, contracts, row.kind, row.arguments())
            except ConflictError as error:
                never.append((row.id, str(error)))
                continue
            if call is None:
                later.append(row.id)
            else:
                need = need_of(connection, context, row.kind, row.arguments())
                ready.append((row.id, call, need))
    depths = Depths(contracts)
    for intent, call, need in ready:
        if depths.meets(need):
            sender.build(intent, call)
        else:
            later.append(intent)
    if later or never:
        with store.begin() as connection:
            store_intents.postpone(connection, later, now=now)
            for intent, why in never:
                store_intents.fail(connection, intent, why, now=now)
                log.error("intent %s failed: %s", intent, why)


def requeue_wanted(store: Store, context: PoolContext, now: Callable[[], float]) -> int:
    """Requeues failed intents that are still wanted and have rested; returns how many. Idempotent:
    a waiting intent is no longer failed."""
    moment = now()
    rested = moment - REST_SECONDS
    with store.read() as connection:
        rows = store_intents.failed_of(connection, KINDS, rested, _AT_ONCE)
        again = sorted(row.id for row in rows if _wanted(connection, context, row, moment))
    if not again:
        return 0
    with store.begin() as connection:
        return sum(requeue_failed(connection, name, moment, not_before=rested) for name in again)


def _wanted(connection: Connection, context: PoolContext, row: IntentRow, now: float) -> bool:
    """Whether the intent's purpose is neither fulfilled nor obsolete."""
    payload = row.arguments()
    match row.kind:
        case "root":
            root = roots.get(connection, ids.digest(payload["root"]))
            return root is not None and root.chain_seq is None
        case "policy":
            version = int(payload["statement"]["version"])
            return not chain.events(connection, "PolicyPublished", subject=version)
        case "propose" | "execute":
            slash = slashes.get(connection, ids.digest(payload["submission_digest"]))
            wanted = "queued" if row.kind == "propose" else "proposed"
            return slash is not None and slash.status == wanted
        case "eject":
            node = nodes.get(connection, ids.address(payload["node"]))
            return node is not None and node.status in ("active", "silent", "quarantined")
        case "dismiss":
            return ids.address(payload["validator"]) in chain.appointed(connection, context.pool)
        case "join":
            invite = payload["invite"]
            if now > int(invite["deadline"]):
                return False
            node = nodes.get(connection, ids.address(invite["node"]))
            return node is not None and node.status == "admitted"
    return False


def forget_unsent(connection: Connection, block: int) -> list[str]:
    """Drops unsent reward roots that depend on blocks above `block` after the chain rolled back to
    it, so that their epochs are settled again. Returns their intent ids."""
    dropped = []
    for row in store_intents.waiting_of(connection, "reward_root"):
        payload = row.arguments()
        if int(payload["as_of_block"]) <= block:
            continue
        root = rewards.root_of(connection, int(payload["epoch"]))
        if root is not None and root.claimable_at is None and root.object == payload["object"]:
            rewards.drop_root(connection, root.epoch)
        dropped.append(row.id)
    store_intents.forget_waiting(connection, dropped)
    return dropped


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
        case "dismiss":
            return contracts.pools.set_validator(pool, ids.address(payload["validator"]), False)
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
    slash = slashes.get(connection, digest)
    row = submissions.get(connection, digest)
    if slash is None or row is None or slash.status != "queued":
        raise ConflictError(f"the slash for submission {digest} is proposed or given up already")
    found = roots.proof_of(connection, digest)
    if found is None:
        return None  # its root is not confirmed yet
    seq, proof = found
    signed = row.signed()
    agreeing = quorum_of(connection, contracts, pool, digest, signed.submission.valid_until)
    if agreeing is None:
        return None
    return contracts.slasher.propose(signed.submission, signed.signature, seq, proof, agreeing)


def quorum_of(
    connection: Connection, contracts: Contracts, pool: int, digest: Digest, valid_until: int
) -> list[SignedOpinion] | None:
    """Returns a quorum of opinions under one law that reject a submission, in the order the
    contract requires; None while there are too few. `valid_until`: the submission's. Raises
    UnavailableError."""
    by_law: dict[Digest, list[tuple[int, SignedOpinion]]] = {}
    for row in opinions.of(connection, digest):
        if row.outcome is not Outcome.REJECTED:
            continue
        found = contracts.pools.validator_of(pool, row.validator)
        if found is not None and found.on and found.counts_from <= valid_until:
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
