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
from prime_core.ids import Digest
from prime_core.revisions import RunHistory
from prime_core.run import RunDefinition
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.depth import Buried, Depths
from prime_orchestrator.store import Connection, Store, batches, chain, intents, runs

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
    return _parsed(rows[-1].body) if rows else context.run


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
        if block is not None and depths.meets(Buried("payout", block)):
            with store.begin() as connection:
                runs.set_final(connection, row.from_step)
            log.info("run revision %s holds from step %d", row.digest, row.from_step)
        elif block is None and row in refused:
            with store.begin() as connection:
                runs.forget(connection, row.from_step)
            log.error("the chain refused run revision %s: it is forgotten", row.digest)
