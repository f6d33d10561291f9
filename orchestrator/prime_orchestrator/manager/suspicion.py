"""Finds exact classes that are at fault themselves: files of several providers differ in them.

A class is suspect from the moment at which, within WINDOW_SECONDS, files of LEAST_PROVIDERS or more
providers differed from their proof passes with nothing else against them, and these are more than
one in SHARE of the providers whose files of the class were judged. Until the run has another
calibration:

    leases    none names the class
    files     one that differs ends void by the pool's fault (UNAVAILABLE); others go on
    slashes   those that rest on its proof passes are given up if they are not proposed yet; the
              manager executes none that is

Providers are counted, not files, so that no account weighs more than its one stake. A party with a
quarter of the class's providers can make it suspect; it gains nothing for its own files, which
could have gone without a class (docs/adr/0019).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prime_core.ids import Digest
from prime_core.logs import fields
from prime_core.verdict import Reason
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import revisions
from prime_orchestrator.manager.members import derive_node
from prime_orchestrator.manager.settlement import CHAIN_LOCK, refresh_credits
from prime_orchestrator.store import Connection, exact_classes, leases, slashes, submissions
from prime_orchestrator.store.engine import Store, lock, on_commit

log = logging.getLogger(__name__)

WINDOW_SECONDS = 7 * 24 * 3600.0
LEAST_PROVIDERS = 3
SHARE = 4
ONLY_DIFFERS = frozenset({Reason.WRONG_PROOF_PASS, Reason.UNPROVEN_MISMATCH})
"""Verdicts with nothing but a mismatch against the file."""


def too_many(differing: int, providers: int) -> bool:
    """Whether so many of a class's providers differ that the class is at fault."""
    return differing * SHARE > providers


def is_suspect(connection: Connection, key: Digest, calibration: Digest, now: float) -> bool:
    """Whether a class is suspect under a calibration, after a file of it differed."""
    if key in exact_classes.suspects(connection, calibration):
        return True
    since = now - WINDOW_SECONDS
    providers, differing = exact_classes.providers_since(connection, key, since)
    if differing < LEAST_PROVIDERS or not too_many(differing, providers):
        return False
    on_commit(
        connection, log.error,
        "exact class %s is suspect: files of %d of its %d providers differ from their proof "
        "passes. No lease names it until the run has another calibration (orchestrator classes)",
        key, differing, providers,
    )  # fmt: skip
    exact_classes.suspect(connection, key, calibration, now=now)
    return True


def give_up_slashes(store: Store, context: PoolContext, now: Callable[[], float]) -> list[Digest]:
    """Cancels slashes that rest on the proof passes of a suspect class and are not proposed; their
    nodes go on. Returns the submissions."""
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)  # the indexer stores proposals
        given_up = []
        for row in slashes.queued_for(connection, int(Reason.WRONG_PROOF_PASS)):
            if not _rests_on_suspect(connection, context, row.submission_digest):
                continue
            on_commit(
                connection, log.error, "the slash for %s is given up: its class is suspect",
                row.submission_digest,
                extra=fields(
                    kind="slash", status="cancelled", submission=row.submission_digest,
                    node=row.node, reason=Reason(row.reason).name,
                ),
            )  # fmt: skip
            slashes.change(connection, row.submission_digest, status="cancelled")
            refresh_credits(connection, row.node)
            derive_node(connection, context, row.node, now())
            given_up.append(row.submission_digest)
    return given_up


def may_execute(connection: Connection, context: PoolContext, leaf: Digest) -> bool:
    """Whether the manager executes the slash for a submission."""
    row = slashes.get(connection, leaf)
    if row is None or row.reason != Reason.WRONG_PROOF_PASS:
        return True
    return not _rests_on_suspect(connection, context, leaf)


def _rests_on_suspect(connection: Connection, context: PoolContext, leaf: Digest) -> bool:
    """Whether the class of a submission's lease is suspect under the calibration of its run."""
    row = submissions.get(connection, leaf)
    lease = None if row is None else leases.get(connection, row.lease_digest)
    signed = None if lease is None else lease.signed()
    name = None if signed is None else signed.numeric_class()
    if signed is None or name is None:
        return False
    run = revisions.history(connection, context).of_lease(signed.lease)
    found = exact_classes.without_suspects(connection, [name], Digest(run.calibration))
    return not found
