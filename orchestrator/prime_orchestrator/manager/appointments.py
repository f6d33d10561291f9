"""Ends the appointment of validators that abstain too often, or whose acceptance names other rows
than their secret of an epoch draws (draws.compare_acceptances). Of the latter, epochs count that
began after the appointment.

Of abstentions, the newest WINDOW files count that a validator was assigned since its appointment
and gave an opinion on or abstained from, if any validator gave an opinion on the file: a file that
no one can judge counts against no one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prime_core.ids import Address
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import chain, draws, intents, jobs
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)

WINDOW = 256
LEAST = 16
"""Fewest abstentions that end an appointment."""
SHARE = 4
"""More than one abstention in SHARE files ends it."""


def abstains_too_often(abstained: int, files: int) -> bool:
    """Whether `abstained` of a validator's latest `files` end its appointment."""
    return abstained >= LEAST and abstained * SHARE > files


def end_appointments(
    store: Store, context: PoolContext, quorum: Callable[[], int], now: Callable[[], float]
) -> list[Address]:
    """Queues the dismissal of validators that abstain too often or contradict their draws, as long
    as as many as the pool's `quorum` (read only if needed) stay appointed. Validators whose
    dismissal was queued before do not count as staying. Returns those that are to be dismissed.

    Raises UnavailableError if `quorum` cannot be read.
    """
    pool = context.pool
    with store.read() as connection:
        since = chain.appointed_at(connection, pool)
        suspects = jobs.abstaining(connection, LEAST) & set(since)
        counted = {
            validator: jobs.latest_files(connection, validator, since[validator][1], WINDOW)
            for validator in sorted(suspects)
        }
        contradicted = draws.mismatches(connection)
    reasons = {
        validator: f"it abstained from {abstained} of its latest {files} files"
        for validator, (abstained, files) in counted.items()
        if abstains_too_often(abstained, files)
    }
    for validator, epoch, why in contradicted:
        if validator in since and epoch * context.run.epoch_seconds >= since[validator][1]:
            reasons[validator] = f"it contradicts its draw: {why}"
    if not reasons:
        return []
    least = quorum()  # may ask the chain: not within a transaction
    with store.begin() as connection:
        known = {one: f"{one}:{block}" for one, (block, _) in since.items()}
        stay = {one for one in since if not intents.get(connection, f"dismiss:{known[one]}")}
        lying = {validator for validator, _, _ in contradicted}
        due = sorted(stay & reasons.keys(), key=lambda one: (one not in lying, one))
        due = due[: max(0, len(stay) - least)]
        for validator in due:
            log.error("the appointment of %s ends: %s", validator, reasons[validator])
            intents.queue_intent(
                connection, kind="dismiss", key=known[validator],
                payload={"validator": validator}, now=now(),
            )  # fmt: skip
    return due
