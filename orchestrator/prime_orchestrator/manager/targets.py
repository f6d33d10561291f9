"""Recent shares of each target length in leases, accepted files and trained groups.

The scheduler picks targets by `counts_of`; status, page and warnings show `shares_of`. A target
starves while its share of the accepted leases, or of the groups in batches, is below half of its
minimum (`budgets.min_share`) over the window. It is expiring while its leases expire more than
twice as often as those of the other targets: nodes may be dropping what they do not like.
`difficulties_of` tells whether they drop by difficulty: the groups of expired leases are issued
again to other providers, and their rewards then are compared with those of all other groups.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from prime_core.messages import TargetShare
from prime_core.run import MICRO, RunDefinition
from prime_orchestrator import scheduler
from prime_orchestrator.scheduler import TargetCounts
from prime_orchestrator.store import Connection, batches, groups, leases
from prime_orchestrator.store.groups import RewardSums

log = logging.getLogger(__name__)

BATCHES = 8
"""Latest trained batches whose groups count as recently trained."""
ENOUGH = 4
"""How many times the smallest share must fit into the total before a target can starve."""
NEWEST = 4096
"""Newest groups whose rewards are compared."""
FEWEST = 16
"""Groups of each kind from which their rewards are compared."""
KEPT_SECONDS = 60.0
ERRORS = 4.0
"""Standard errors from which two mean rewards differ."""


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


@dataclass(frozen=True)
class Difficulty:
    """Rewards of a target's newest groups: of those that expired leases had before (`again`), and
    of all others (`first`)."""

    target: int
    again: RewardSums
    first: RewardSums

    @property
    def errors(self) -> float:
        """By how many standard errors the mean reward of `again` is above that of `first` (below:
        negative). 0 if one of them has fewer than FEWEST groups, or all groups have one reward."""
        one, other = self.again, self.first
        if min(one.groups, other.groups) < FEWEST:
            return 0.0
        count = one.groups + other.groups
        mean = (one.total + other.total) / count
        variance = (one.squares + other.squares) / count - mean * mean
        if variance <= 1e-12:
            return 0.0
        error = math.sqrt(variance * (1 / one.groups + 1 / other.groups))
        return (one.total / one.groups - other.total / other.groups) / error


def difficulties_of(connection: Connection) -> list[Difficulty]:
    """Returns the rewards of each target that has groups of expired leases among the newest."""
    sums = groups.reward_sums(connection, NEWEST)
    return [
        Difficulty(target, found, sums.get((target, False), RewardSums(0, 0.0, 0.0)))
        for (target, again), found in sorted(sums.items())
        if again
    ]


class KeptDifficulties:
    """`difficulties_of`, read at most every KEPT_SECONDS."""

    def __init__(self) -> None:
        self._kept: list[Difficulty] = []
        self._at = -math.inf

    def of(self, connection: Connection, now: float) -> list[Difficulty]:
        if not 0 <= now - self._at < KEPT_SECONDS:
            self._kept, self._at = difficulties_of(connection), now
        return self._kept


def warn(connection: Connection, run: RunDefinition, now: float) -> None:
    """Logs each target that starves, or whose leases expire more than others or by difficulty."""
    for one in difficulties_of(connection):
        if abs(one.errors) >= ERRORS:
            log.warning(
                "the problems of target %d that nodes drop are %s than others: their %d groups, "
                "made by other providers, have a mean reward of %.3g; the other %d have %.3g",
                one.target,
                "easier" if one.errors > 0 else "harder",
                one.again.groups,
                one.again.total / one.again.groups,
                one.first.groups,
                one.first.total / one.first.groups,
            )
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
