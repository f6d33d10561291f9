"""Recent shares of each target length in leases, accepted files and trained groups.

The scheduler picks targets by `counts_of`; status, page and warnings show `shares_of`. A target
starves while its share of the accepted leases, or of the groups in batches, is below half of its
minimum (`budgets.min_share`) over the window. It is expiring while its leases expire more than
twice as often as those of the other targets: nodes may be dropping what they do not like.
"""

from __future__ import annotations

import logging

from prime_core.messages import TargetShare
from prime_core.run import MICRO, RunDefinition
from prime_orchestrator import scheduler
from prime_orchestrator.scheduler import TargetCounts
from prime_orchestrator.store import Connection, batches, groups, leases

log = logging.getLogger(__name__)

BATCHES = 8
"""Latest trained batches whose groups count as recently trained."""
ENOUGH = 4
"""How many times the smallest share must fit into the total before a target can starve."""


def counts_of(
    connection: Connection, run: RunDefinition, *, now: float, shadow: bool = False
) -> dict[int, TargetCounts]:
    """Returns the latest leases by target length, in the form `scheduler.pick_target` takes."""
    found = leases.latest_by_target(
        connection,
        scheduler.window(run.budgets),
        shadow=shadow,
        now=now,
        younger_than=now - run.lease_seconds / 2,
    )
    return {target: TargetCounts(*counts) for target, counts in found.items()}


def shares_of(connection: Connection, run: RunDefinition, now: float) -> tuple[TargetShare, ...]:
    """Returns the shares of every target of the run, ascending: leases requested and accepted
    within the scheduler's window, groups of the latest BATCHES trained batches, and groups of
    sealed batches that are not trained yet."""
    counts = counts_of(connection, run, now=now)
    first_sealed = batches.trained_below(connection)
    trained = groups.by_target(connection, first_sealed - BATCHES, first_sealed)
    sealed = groups.by_target(connection, first_sealed, batches.next_step(connection))
    least = run.budgets.min_share
    accepted = sum(count.accepted for count in counts.values())
    in_batches = sum(trained.values()) + sum(sealed.values())

    def expiring(target: int, count: TargetCounts) -> bool:
        others = [other for at, other in counts.items() if at != target]
        late, asked = sum(other.expired for other in others), sum(other.asked for other in others)
        if count.expired < ENOUGH or 4 * count.expired <= count.asked:
            return False
        return not asked or count.expired * asked > 2 * late * count.asked

    def below(part: int, whole: int) -> bool:
        return whole * least >= ENOUGH * MICRO and 2 * part * MICRO < least * whole

    return tuple(
        TargetShare(
            target=target,
            asked=(count := counts.get(target, TargetCounts())).asked,
            accepted=count.accepted,
            trained=(done := trained.get(target, 0)),
            sealed=(waiting := sealed.get(target, 0)),
            expired=count.expired,
            expiring=expiring(target, count),
            starving=below(count.accepted, accepted) or below(done + waiting, in_batches),
        )
        for target in run.budgets.targets
    )


def warn(connection: Connection, run: RunDefinition, now: float) -> None:
    """Logs each target that starves or whose leases expire."""
    for share in shares_of(connection, run, now):
        if share.expiring:
            log.warning(
                "target %d is dropped: %d of its latest %d leases expired, more than twice the "
                "share of the other targets",
                share.target,
                share.expired,
                share.asked,
            )
        if share.starving:
            log.warning(
                "target %d starves: %d of its latest leases accepted, %d of its groups in the "
                "latest %d trained batches and %d in sealed ones; its least share is %.3g",
                share.target,
                share.accepted,
                share.trained,
                BATCHES,
                share.sealed,
                run.budgets.min_share / MICRO,
            )
