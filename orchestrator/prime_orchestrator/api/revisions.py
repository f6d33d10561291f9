"""Announces revisions of the pool's run and lists them; manager/revisions.py says what holds."""

from __future__ import annotations

import logging

from prime_core.errors import ConflictError, NotFoundError
from prime_core.ids import Digest
from prime_core.messages import RevisionRequest, RunList, RunRevision
from prime_core.revisions import check_revision
from prime_core.run import RunDefinition
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.store import chain, leases, lock, runs
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.runs import RunRow

log = logging.getLogger(__name__)


def announce(backend: Backend, request: RevisionRequest) -> RunRevision:
    """Stores a revision from the manager and queues its digest for the chain. Repeating it is
    harmless.

    Raises MalformedError if it is not a run definition, PolicyError if it changes what cannot be
    revised, ConflictError if its first step is already leased or not after the last revision's.
    """
    raw = request.run.encode()
    run = RunDefinition.parse(raw, exact=True)
    digest, now = run.digest(), backend.now()
    with backend.store.begin() as connection:
        lock(connection, "leases")  # no lease of the step is issued meanwhile
        rows = runs.every(connection)
        known = next((row for row in rows if row.from_step == request.from_step), None)
        if known is not None and known.digest == digest:
            return revision_of(known)
        check_revision(backend.context.run, run)
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
        row = RunRow(request.from_step, digest, raw, final=False, announced_at=now)
        runs.add(connection, row)
        if not on_chain:
            queue_intent(
                connection,
                kind="revise",
                key=row.key,
                payload={"run_digest": digest, "from_step": request.from_step},
                now=now,
            )
    log.info("run revision %s from step %d is announced", digest, request.from_step)
    return revision_of(row)


def revision_of(row: RunRow) -> RunRevision:
    return RunRevision(run_digest=row.digest, from_step=row.from_step, final=row.final)


def listing(backend: Backend) -> RunList:
    """Returns the pool's first definition and its revisions, ordered by step."""
    with backend.store.read() as connection:
        rows = runs.every(connection)
    return RunList(
        first=backend.context.run.digest(), revisions=tuple(revision_of(row) for row in rows)
    )


def raw_of(backend: Backend, digest: Digest) -> bytes:
    """Returns the bytes of one definition. Raises NotFoundError if it is not one of the pool's."""
    if digest == backend.context.run.digest():
        return backend.context.run.raw()
    with backend.store.read() as connection:
        for row in runs.every(connection):
            if row.digest == digest:
                return row.body
    raise NotFoundError(f"no revision of the pool's run has digest {digest}")
