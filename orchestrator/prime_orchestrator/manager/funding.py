"""Stops leases while the pool owes more than its bond and free funds (prime_core.settlement).

    owed     accepted files, files without a verdict, and validators' fees since the newest settled
             epoch, at the prices of the files' revisions; and earlier files that an open slash
             holds. A root reserves what it forfeits as it reserves what it pays
    money    bond + free funds on chain, at the block up to which the store holds the events

The manager's loop compares them; the API reads the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf

from pydantic import BaseModel, ConfigDict

from prime_chain.amounts import prime
from prime_chain.contracts import Rewards
from prime_core.ids import Address
from prime_core.settlement import is_short, settled_until
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import revisions
from prime_orchestrator.manager.depth import has_state
from prime_orchestrator.manager.settlement import chain_clock
from prime_orchestrator.store import Connection, meta, rewards, submissions
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)
CHECK_SECONDS = 15.0
REST, LONGEST_REST = 20, 120.0
"""A sum of what the pool owes is used REST times as long as it took, at most LONGEST_REST seconds:
it reads all unsettled files, which takes seconds where there are a million."""
_FUNDING = "funding"
"""Key in `meta`: JSON of Funding."""


class Funding(BaseModel):
    """What the pool owes and what it can pay with, in wei, as compared at `at` (Unix seconds)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    owed: int
    money: int
    at: float

    def objection(self) -> str:
        """Returns why no lease is given; empty if leases are given."""
        if not is_short(self.owed, self.money):
            return ""
        return (
            f"the pool gives no lease: it owes {prime(self.owed)}, more than its bond and free "
            f"funds, {prime(self.money)}; leases go on once the manager adds funds (orchestrator "
            "pool fund) or a reward root settles what it owes"
        )


@dataclass
class OwedSum:
    """What the pool owes, as last summed by this process."""

    owed: int = 0
    until: float = -inf
    """When it is to be summed again, by `clock`."""
    clock: Callable[[], float] = time.monotonic

    def current(self, sum_again: Callable[[], int], *, stopped: bool) -> int:
        """Returns the sum, made again if it is time or if the pool gives no leases (`stopped`)."""
        began = self.clock()
        if stopped or began >= self.until:
            self.owed = sum_again()
            ended = self.clock()
            rest = min(REST * (ended - began), LONGEST_REST)
            self.until = ended + rest if rest > CHECK_SECONDS else -inf
        return self.owed


def funding(connection: Connection) -> Funding | None:
    """Returns the latest comparison; None before the first."""
    found = meta.get(connection, _FUNDING)
    return None if found is None else Funding.model_validate_json(found)


def compare_funding(
    store: Store,
    context: PoolContext,
    rewards: Rewards,
    planted: Collection[Address],
    now: Callable[[], float],
    summed: OwedSum,
) -> None:
    """Compares what the pool owes with its money every CHECK_SECONDS, and logs a change. `planted`:
    nodes that are not paid. Raises UnavailableError if the chain cannot be read."""
    moment = now()
    with store.read() as connection:
        before, clock = funding(connection), chain_clock(connection)
        recent = before is not None and 0 <= moment - before.at < CHECK_SECONDS
        if clock is None or recent:
            return
        stopped = before is not None and bool(before.objection())
        owed = summed.current(lambda: owed_by(connection, context, planted), stopped=stopped)
    if not has_state(rewards.client, clock.block):
        return  # still catching up
    pool = context.pool
    money = rewards.funds(pool, clock.block).free + rewards.bond_of(pool, clock.block)
    found = Funding(owed=owed, money=money, at=moment)
    with store.begin() as connection:
        meta.put(connection, _FUNDING, found.model_dump_json())
    why = found.objection()
    if bool(why) != stopped:
        log.warning("%s", why or "the pool gives leases again: its money covers what it owes")


def owed_by(connection: Connection, context: PoolContext, planted: Collection[Address]) -> int:
    """Returns what the pool owes and may owe for files handed in, in wei."""
    newest = rewards.newest_root(connection, confirmed=True)
    since = settled_until(None if newest is None else newest.epoch, context.run.epoch_seconds)
    history, owed = revisions.history(connection, context), 0
    for some in submissions.unsettled(connection, since, planted):
        run = history.at(some.step)
        owed += some.opinions * run.price_per_judged_file
        if some.status == "accepted":
            owed += run.worth(some.units, some.prompt_units)
        elif some.status == "submitted":
            owed += some.files * run.unjudged_worth(run.rows_per_lease * some.target)
    return owed + rewards.held_before(connection, since)
