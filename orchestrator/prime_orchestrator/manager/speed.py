"""Relative speed of nodes, which decides the target lengths they prefer.

    rate    median of accepted tokens per second from lease to submission (`rates_of`), over the
            node's latest files, once there are LEAST_FILES; until then the best of its latest
            hardware challenges
    ratio   rate ÷ median rate of the pool's live nodes, comparing rates of the same kind
    class   1 + number of `speed.ratios_micro` reached; a class based on accepted files changes
            only if the ratio passes a border by MARGIN

Load and clock speed common to all nodes cancel out in the ratio. A class affects neither admission
nor pay nor stake. The rate also sets how many leases a node holds at once (standing.Slots).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from prime_core.ids import Address
from prime_core.messages import MOST_SLOTS
from prime_core.run import MICRO, RunDefinition
from prime_orchestrator.store import Connection, challenges, nodes, submissions
from prime_orchestrator.store.nodes import NodeRow

log = logging.getLogger(__name__)

LEAST_FILES = 3
"""Accepted files needed to compute a node's rate from them."""
LATEST_FILES = 8
CHALLENGES = 3
"""Number of latest hardware challenges; the best one counts."""
AGAIN_SECONDS = 1200.0
"""A node without enough accepted files is measured again after this many seconds."""
MARGIN = 0.2
"""Share of a border by which a ratio must pass it before the class changes."""
TURN_SECONDS = 20.0
"""A node that holds its address's turn without answering loses it after this many seconds."""
PATIENCE_SECONDS = 40.0
"""A node that has waited this long for its turn is measured without one."""


def class_of(ratio: float, ratios_micro: Sequence[int], current: int | None = None) -> int:
    """Returns the class for `ratio` (rate ÷ the pool's median), given the current class."""
    reached = 1 + sum(ratio * MICRO >= border for border in ratios_micro)
    if current is None or reached == current:
        return reached
    factor = 1 + MARGIN if reached > current else 1 - MARGIN
    settled = 1 + sum(ratio * MICRO >= factor * border for border in ratios_micro)
    return max(current, settled) if reached > current else min(current, settled)


def rates_of(files: Sequence[tuple[int, float, float]]) -> list[float]:
    """Returns the node's tokens per second while it made each file.

    With several leases open, a file's own tokens ÷ its time is only a part of the node's speed, and
    the time between two files may be anything. So each file's tokens count as made evenly over its
    own time, and a rate counts all files made in that time. The tokens are verified and no token
    counts twice in a rate, so holding more leases alone does not raise it. Files that are not
    accepted or not listed lower it. For a node with one lease at a time it is tokens ÷ time.

    Args:
        files: (tokens, when its lease was given, when it was received), times in seconds.
    """
    made = [(tokens, begin, max(end, begin + 1e-3)) for tokens, begin, end in files]
    return [
        sum(
            tokens * max(0.0, min(end, last) - max(begin, first)) / (end - begin)
            for tokens, begin, end in made
        )
        / (last - first)
        for _, first, last in made
    ]


@dataclass
class PoolRates:
    """Rates that speed classes are computed from: of live nodes (`nodes.live_rates`), and of the
    challenges of the nodes to be classed, newest first."""

    live: dict[Address, tuple[float | None, float | None]]
    solved: Mapping[Address, Sequence[float]]
    _medians: dict[int, float | None] = field(default_factory=dict)

    @classmethod
    def read(cls, connection: Connection, among: Collection[Address]) -> PoolRates:
        """Reads the pool's rates, and what `refresh` needs of the nodes in `among`."""
        return cls(nodes.live_rates(connection), challenges.rates_of(connection, among))

    def set(self, node: Address, rates: tuple[float | None, float | None]) -> None:
        """Notes a node's new rates."""
        if node in self.live:
            self.live[node] = rates
            self._medians.clear()

    def median(self, kind: int) -> float | None:
        """Returns the median of the live nodes' token rates (0) or challenge rates (1); None if
        there are none."""
        if kind not in self._medians:
            known = [rate for rates in self.live.values() if (rate := rates[kind]) is not None]
            self._medians[kind] = statistics.median(known) if known else None
        return self._medians[kind]


def refresh(
    connection: Connection,
    run: RunDefinition,
    node: NodeRow,
    rates: PoolRates,
    *,
    accepted: int = LEAST_FILES,
) -> int:
    """Computes the node's rate and class from the store, writes what changed and returns the class.
    A class based only on challenges has no margin, because the first node is measured when there is
    no pool to compare it with. `accepted`: an upper bound on the node's accepted files, shadow ones
    included; its files are not read if they are fewer than LEAST_FILES."""
    tokens: list[float] = []
    if accepted >= LEAST_FILES:
        files = submissions.latest_accepted(connection, node.address, LATEST_FILES + MOST_SLOTS)
        tokens = rates_of(files)[:LATEST_FILES]
    rate = statistics.median(tokens) if len(tokens) >= LEAST_FILES else None
    best = max(rates.solved.get(node.address, ())[:CHALLENGES], default=node.challenge_rate)
    if (rate, best) != (node.token_rate, node.challenge_rate):
        nodes.set_rates(connection, node.address, token_rate=rate, challenge_rate=best)
        rates.set(node.address, (rate, best))
    own, median = (rate, rates.median(0)) if rate is not None else (best, rates.median(1))
    median = own if median is None else median
    if own is None or median is None or median <= 0:
        return node.speed_class
    current = node.speed_class if rate is not None else None
    found = class_of(own / median, run.speed.ratios_micro, current)
    if found != node.speed_class:
        log.info("node %s is of speed class %d now", node.address, found)
        nodes.set_class(connection, node.address, found)
    return found


def want_challenges(
    connection: Connection, rows: Collection[NodeRow], now: float
) -> frozenset[Address]:
    """Returns the nodes that should solve another challenge: they have too few or only old ones,
    and too few accepted files."""
    asked = [
        row
        for row in rows
        if row.status in ("admitted", "active", "shadow") and row.token_rate is None
    ]
    if not asked:
        return frozenset()
    addresses = {row.address for row in asked}
    solved = challenges.solved_since(connection, addresses, now - AGAIN_SECONDS)
    return frozenset(
        row.address
        for row in asked
        if solved.get(row.address, 0) < (CHALLENGES if now - row.created_at < AGAIN_SECONDS else 1)
    )


@dataclass
class Turns:
    """Lets the nodes behind one address be measured one at a time, so that they do not slow each
    other down. Kept in memory; each orchestrator process keeps its own."""

    _holders: dict[str, tuple[Address, float]] = field(default_factory=dict)
    _waiting: dict[Address, tuple[float, float]] = field(default_factory=dict)

    def take(self, address: str, node: Address, now: float) -> bool:
        """Whether `node` may be measured now. It holds the turn until `done`, at most TURN_SECONDS;
        a silent holder goes behind every waiting node."""
        self._forget(now)
        holder = self._holders.get(address)
        since, _ = self._waiting.get(node, (now, now))
        free = holder is None or now >= holder[1]
        if holder is not None and holder[0] == node:
            free = not any(other != node for other in self._waiting)
        if not free and now - since < PATIENCE_SECONDS:
            self._waiting[node] = (since, now)
            return False
        self._waiting.pop(node, None)
        self._holders[address] = (node, now + TURN_SECONDS)
        return True

    def done(self, node: Address) -> None:
        """Releases the turn of a node that has answered or no longer needs one."""
        for address, (holder, _) in list(self._holders.items()):
            if holder == node:
                del self._holders[address]

    def _forget(self, now: float) -> None:
        """Drops nodes that no longer ask, and turns that ended long ago."""
        for node, (_, asked) in list(self._waiting.items()):
            if now - asked > TURN_SECONDS:
                del self._waiting[node]
        for address, (_, until) in list(self._holders.items()):
            if now > until + PATIENCE_SECONDS:
                del self._holders[address]
