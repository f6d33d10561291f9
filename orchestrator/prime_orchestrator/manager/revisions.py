"""Revisions of a running pool's run definition: announced, then final, then in force.

    POST /v1/revisions  the manager's file and first step  ──► stored, its digest queued
    chain tick          the digest is in a final block     ──► final: leases of its steps name it

A step whose revision is announced but not final gets no leases, so the run of a step follows from
the chain alone, for nodes, validators, auditors and rewards alike. A revision that the chain
refused is deleted.
"""

from __future__ import annotations

import logging
from functools import lru_cache

from prime_chain.contracts import Contracts
from prime_core.errors import ConflictError, NotFoundError
from prime_core.ids import Digest
from prime_core.messages import RevisionRequest, RunList, RunRevision
from prime_core.revisions import RunHistory, check_revision
from prime_core.run import RunDefinition
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.depth import Confirmed, Depths
from prime_orchestrator.store import Connection, Store, batches, chain, intents, leases, lock, runs

log = logging.getLogger(__name__)

_parsed = lru_cache(maxsize=64)(RunDefinition.parse)


def history(connection: Connection, context: PoolContext) -> RunHistory:
    """Returns the pool's run and its final revisions."""
    return history_of(connection, context.run)


def history_of(connection: Connection, first: RunDefinition) -> RunHistory:
    """Like `history`, given the pool's first definition."""
    final = [row for row in runs.every(connection) if row.final]
    return RunHistory(first, tuple((row.from_step, _parsed(row.body)) for row in final))


def current(connection: Connection, context: PoolContext) -> RunDefinition:
    """Returns the run of the step that is sealed next."""
    return history(connection, context).at(batches.next_step(connection))


def next_run(connection: Connection, context: PoolContext) -> RunDefinition:
    """Returns the newest definition, announced or final. Nodes prepare for it."""
    rows = runs.every(connection)
    return newest_run(rows[-1].body if rows else None, context)


def newest_run(body: bytes | None, context: PoolContext) -> RunDefinition:
    """Returns the definition of these bytes; None: the pool's first one."""
    return context.run if body is None else _parsed(body)


def waits_for(connection: Connection, step: int) -> str:
    """Returns why leases of a step cannot be issued yet: a revision that may apply to it is not
    final, or its file is missing. Empty if they can be issued."""
    rows = runs.every(connection)
    for row in rows:
        if row.from_step <= step and not row.final:
            return f"run revision {row.digest} from step {row.from_step} is not final on chain yet"
    known = {(row.from_step, row.digest) for row in rows}
    for event in chain.events(connection, "RunRevised"):
        args = event.arguments()
        named = (int(args["from_step"]), Digest(args["run_digest"]))
        if named[0] <= step and named not in known:
            return (
                f"the chain names run revision {named[1]} from step {named[0]}, whose file is not "
                "here: the operator gives it by orchestrator run revise"
            )
    return ""


def announce(
    store: Store, context: PoolContext, request: RevisionRequest, now: float
) -> RunRevision:
    """Stores a revision from the manager and queues its digest for the chain. Repeating it is
    harmless; one that the chain refused is tried again.

    Raises MalformedError if it is not a run definition, PolicyError if it changes what cannot be
    revised, ConflictError if its first step is already leased or not after the last revision's.
    """
    raw = request.run.encode()
    run = RunDefinition.parse(raw, exact=True)
    digest = run.digest()
    with store.begin() as connection:
        lock(connection, "leases")  # no lease of the step is issued meanwhile
        rows = runs.every(connection)
        known = next((row for row in rows if row.from_step == request.from_step), None)
        if known is not None and known.digest == digest:
            return revision_of(known)
        check_revision(context.run, run)
        last = rows[-1].from_step if rows else 0
        if request.from_step <= last:
            raise ConflictError(f"a revision starts after step {last}, not at {request.from_step}")
        leased = leases.highest_step(connection)
        on_chain = any(
            (int(args["from_step"]), args["run_digest"]) == (request.from_step, digest)
            for args in (event.arguments() for event in chain.events(connection, "RunRevised"))
        )
        if leased is not None and request.from_step <= leased and not on_chain:
            raise ConflictError(
                f"step {request.from_step} is leased already: revise from step {leased + 1} on"
            )
        row = runs.RunRow(request.from_step, digest, raw, final=False, announced_at=now)
        runs.add(connection, row)
        if not on_chain:
            intent = intents.queue_intent(
                connection,
                kind="revise",
                key=row.key,
                payload={"run_digest": digest, "from_step": request.from_step},
                now=now,
            )
            intents.requeue_failed(connection, intent, now, not_before=now)
    log.info("run revision %s from step %d is announced", digest, request.from_step)
    return revision_of(row)


def revision_of(row: runs.RunRow) -> RunRevision:
    """Returns the revision of a stored row as the API lists it."""
    return RunRevision(run_digest=row.digest, from_step=row.from_step, final=row.final)


def listing(connection: Connection, context: PoolContext) -> RunList:
    """Returns the pool's first definition and its revisions, ordered by step."""
    rows = runs.every(connection)
    return RunList(first=context.run.digest(), revisions=tuple(revision_of(row) for row in rows))


def raw_of(connection: Connection, context: PoolContext, digest: Digest) -> bytes:
    """Returns the bytes of one definition. Raises NotFoundError if it is not one of the pool's."""
    if digest == context.run.digest():
        return context.run.raw()
    for row in runs.every(connection):
        if row.digest == digest:
            return row.body
    raise NotFoundError(f"no revision of the pool's run has digest {digest}")


def settle_revisions(store: Store, contracts: Contracts) -> None:
    """Marks revisions final whose event is in a final block; deletes those that the chain refused.
    Raises UnavailableError if no endpoint answers."""
    with store.read() as connection:
        waiting = [row for row in runs.every(connection) if not row.final]
        if not waiting:
            return
        blocks = {
            (int(args["from_step"]), args["run_digest"]): event.block
            for event in chain.events(connection, "RunRevised")
            for args in (event.arguments(),)
        }
        refused = [
            row
            for row in waiting
            if (intent := intents.get(connection, f"revise:{row.key}")) is not None
            and intent.status == "failed"
        ]
    depths = Depths(contracts)
    for row in waiting:
        block = blocks.get((row.from_step, row.digest))
        if block is not None and depths.meets(Confirmed("payout", block)):
            with store.begin() as connection:
                runs.set_final(connection, row.from_step)
            log.info("run revision %s holds from step %d", row.digest, row.from_step)
        elif block is None and row in refused:
            with store.begin() as connection:
                runs.forget(connection, row.from_step)
            log.error("the chain refused run revision %s: it is forgotten", row.digest)
