"""Ends the appointment of validators that abstain too often.

Counted are the newest WINDOW files that a validator was assigned since its appointment and gave an
opinion on or abstained from, if any validator gave an opinion on the file: a file that no one can
judge counts against no one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prime_core.ids import Address
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import chain, intents, jobs
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)

WINDOW = 256
LEAST = 16
"""Fewest abstentions that end an appointment."""
SHARE = 4
"""More than one abstention in so many files ends it."""


def abstains_too_often(abstained: int, files: int) -> bool:
    """Whether so many abstentions among so many of a validator's files end its appointment."""
    return abstained >= LEAST and abstained * SHARE > files


def end_appointments(
    store: Store, context: PoolContext, quorum: Callable[[], int], now: Callable[[], float]
) -> list[Address]:
    """Queues the dismissal of validators that abstain too often, as long as as many as the pool's
    `quorum` (read only if needed) stay appointed. Validators whose dismissal was queued before do
    not count as staying. Returns those that are to be dismissed.

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
    due = [one for one, counts in counted.items() if abstains_too_often(*counts)]
    if not due:
        return []
    least = quorum()  # may ask the chain: not within a transaction
    with store.begin() as connection:
        known = {one: f"{one}:{block}" for one, (block, _) in since.items()}
        stay = {one for one in since if not intents.get(connection, f"dismiss:{known[one]}")}
        due = [one for one in due if one in stay][: max(0, len(stay) - least)]
        for validator in due:
            abstained, files = counted[validator]
            log.error(
                "%s abstained from %d of its latest %d files: its appointment ends",
                *(validator, abstained, files),
            )
            intents.queue_intent(
                connection, kind="dismiss", key=known[validator],
                payload={"validator": validator}, now=now(),
            )  # fmt: skip
    return due
