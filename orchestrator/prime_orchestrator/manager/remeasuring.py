"""Admitted nodes prove their cards again at random times, in runs with `cards`.

    drawn ──► asked (heartbeat) ──► the node knows, delivers its leases, proves ──► passed
                    │                             │                            └──► refused
                    └── never says so: ignored    └── no proof in time: unanswered

Each tick draws each active node that has a passport with the same chance, so the past says nothing
about the next time. At most one active node in SHARE is asked at once, so none in a pool of fewer.

A node that says that it knows gets no new lease until its proof has ended; one that does not, such
as an older one, works on. A passed proof gives a new passport. A refused one, or MOST_UNANSWERED in
a row that did not come, cost the node nothing but further leases, until it passes: it is asked
again after a pause that doubles. Nothing here accuses a node or touches its stake. Time during
which the orchestrator was away does not count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from prime_core.ids import Address
from prime_core.run import RunDefinition
from prime_orchestrator.store import Connection, Store, lock, measurements, nodes, on_commit
from prime_orchestrator.store.measurements import LOCK, MeasurementRow

log = logging.getLogger(__name__)

EVERY_SECONDS = 86_400.0
"""Mean time between two measurements of a node, by default."""
SHARE = 4
PROOF_SECONDS = 900
"""Time for the proof, after a lease's time for the leases that are open."""
MOST_UNANSWERED = 3
FIRST_PAUSE, LONGEST_PAUSE = 600.0, 6 * 3600.0
AWAITED = (
    "the pool is measuring this node's cards again; it gets new leases after it has delivered its "
    "open ones and passed"
)
UNANSWERED = (
    f"this node did not prove its cards in time, {MOST_UNANSWERED} times in a row; it gets no "
    "lease until it passes. See the agent's log and prime-node doctor"
)
IGNORED = (
    f"this node was asked {MOST_UNANSWERED} times in a row to prove its cards again, and did not "
    "confirm it; it gets no lease until it passes: install a newer prime-node"
)


def chance(seconds: float, period: float) -> float:
    """Returns the probability of at least one draw within `seconds`, if draws are a Poisson process
    with one every `period` seconds on average."""
    return -math.expm1(-seconds / period)


def draw(
    eligible: Sequence[Address], share: float, random: Callable[[int], bytes]
) -> list[Address]:
    """Draws each node with the chance `share`; the drawn ones come in random order."""
    numbers = [(int.from_bytes(random(8)), node) for node in eligible]
    return [node for number, node in sorted(numbers) if number < share * 2**64]


def tick(
    connection: Connection,
    run: RunDefinition,
    period: float,
    random: Callable[[int], bytes],
    *,
    now: float,
    elapsed: float,
    up_since: float,
) -> None:
    """Ends what was not answered in time, and asks nodes. `period` is the mean time in seconds
    between two measurements of a node, 0: never; `elapsed` the seconds since the last tick;
    `up_since` (Unix seconds) when this orchestrator began to answer."""
    lock(connection, LOCK)
    if run.cards is None or period <= 0:
        measurements.end_all(connection)
        return
    under_way = 0
    for row in measurements.asked(connection):
        started = max(row.asked_at or 0.0, up_since)
        if now >= _end(started, run):
            measurements.put(connection, _unanswered(row, now))
            warning = "node %s did not prove its cards again in time"
            on_commit(connection, log.warning, warning, row.node)
        else:
            under_way += not row.trouble
    room = nodes.count_of(connection, "active") // SHARE - under_way
    for row in measurements.due_again(connection, now):
        if row.trouble or room > 0:  # a node in trouble has no leases to lose
            _ask(connection, row, now)
            room -= not row.trouble
    if room > 0:
        drawn = draw(measurements.drawable(connection), chance(elapsed, period), random)
        known = measurements.of(connection, drawn[:room])
        for node in drawn[:room]:
            _ask(connection, known.get(node, MeasurementRow(node)), now)


def _end(asked_at: float, run: RunDefinition) -> float:
    return asked_at + run.lease_seconds + PROOF_SECONDS


def _ask(connection: Connection, row: MeasurementRow, now: float) -> None:
    on_commit(connection, log.info, "the cards of node %s are to be measured again", row.node)
    measurements.put(connection, replace(row, asked_at=now, again_at=None))


def _unanswered(row: MeasurementRow, now: float) -> MeasurementRow:
    failed = _failed(row, now)
    if failed.failures >= MOST_UNANSWERED and not row.trouble:
        failed = replace(failed, trouble=UNANSWERED if row.knows else IGNORED)
    if row.knows:
        return replace(failed, unanswered=row.unanswered + 1)
    return replace(failed, ignored=row.ignored + 1)


def _failed(row: MeasurementRow, now: float) -> MeasurementRow:
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(row.failures, 16))
    return replace(row, asked_at=None, again_at=now + pause, failures=row.failures + 1)


def passed(connection: Connection, node: Address) -> None:
    """Closes the measurement of a node that proved its cards; the node gets leases again."""
    if measurements.get(connection, node) is None:
        return
    lock(connection, LOCK)
    row = measurements.get(connection, node) or MeasurementRow(node)
    asked = row.asked_at is not None
    on_commit(connection, log.info, "node %s proved its cards again", node)
    measurements.put(
        connection,
        replace(
            row, asked_at=None, again_at=None, failures=0, trouble="", passed=row.passed + asked
        ),
    )


def refused(store: Store, node: Address, why: str, now: float) -> None:
    """Records why a node failed a measurement; it gets no lease until it passes. Does nothing if no
    measurement of the node is open."""
    with store.begin() as connection:
        lock(connection, LOCK)
        row = measurements.get(connection, node)
        if row is None or not row.awaited:
            return
        trouble = f"this node's cards were measured again: {why}"
        failed = _failed(row, now)
        measurements.put(connection, replace(failed, trouble=trouble, refused=row.refused + 1))


def note_known(connection: Connection, row: MeasurementRow) -> MeasurementRow:
    """Records that the node acknowledged the request; returns the new row."""
    lock(connection, LOCK)
    known = replace(measurements.get(connection, row.node) or row, knows=1)
    measurements.put(connection, known)
    return known


def due_by(row: MeasurementRow | None, run: RunDefinition) -> int | None:
    """Returns the deadline of the node's proof in Unix seconds; None if none is requested."""
    return None if row is None or row.asked_at is None else int(_end(row.asked_at, run))


def why_no_lease(row: MeasurementRow | None) -> str:
    """Returns why the node gets no new lease; empty if it may get one."""
    if row is None:
        return ""
    return row.trouble or (AWAITED if row.awaited else "")
