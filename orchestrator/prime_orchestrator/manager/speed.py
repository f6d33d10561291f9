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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from prime_core.ids import Address
from prime_core.messages import MOST_SLOTS
from prime_core.run import MICRO, RunDefinition
from prime_orchestrator.store import Connection, challenges, nodes, on_commit, submissions
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
SMALL_POOL = 100
"""Up to this number of live nodes, the medians are read each time."""
KEPT_SECONDS = 0.001
"""In a larger pool, they are kept for this many seconds per live node beyond SMALL_POOL. Reading
them then takes less than 1 % of a core at any size."""


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
class Medians:
    """Caches the median rates of the pool's live nodes. Computing them reads all live nodes.

    In a pool of more than SMALL_POOL live nodes they are up to KEPT_SECONDS × (nodes - SMALL_POOL)
    old: 9.9 s at 10,000 nodes. In a smaller one they are read each time. Each API process keeps its
    own. Threads may share them.
    """

    _kept: tuple[tuple[float | None, float | None], float, float] | None = None
    """The medians, when they were read (Unix seconds), and for how many seconds they are kept."""

    def read(self, connection: Connection, now: float) -> tuple[float | None, float | None]:
        """Returns the medians of the token rates and of the challenge rates; None where no live
        node has such a rate."""
        if (kept := self._kept) is not None:
            medians, at, seconds = kept
            if 0 <= now - at < seconds:
                return medians
        live = nodes.live_rates(connection)
        medians = _median(tokens for tokens, _ in live), _median(solved for _, solved in live)
        self._kept = medians, now, KEPT_SECONDS * (len(live) - SMALL_POOL)
        return medians


def _median(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None


def refresh(
    connection: Connection,
    run: RunDefinition,
    node: NodeRow,
    medians: Medians,
    *,
    solved: Sequence[float],
    now: float,
    accepted: int = LEAST_FILES,
) -> int:
    """Computes the node's rate and class, writes what changed and returns the class. The rate is
    exact; the medians that it is compared with may be some seconds old (`Medians`).

    A class based only on challenges has no margin, because the first node is measured when there is
    no pool to compare it with.

    Args:
        solved: the rates of the node's challenges, newest first.
        now: in Unix seconds.
        accepted: an upper bound on the node's accepted files, shadow ones included; its files are
            not read if they are fewer than LEAST_FILES.
    """
    tokens: list[float] = []
    if accepted >= LEAST_FILES:
        files = submissions.latest_accepted(connection, node.address, LATEST_FILES + MOST_SLOTS)
        tokens = rates_of(files)[:LATEST_FILES]
    rate = statistics.median(tokens) if len(tokens) >= LEAST_FILES else None
    best = max(solved[:CHALLENGES], default=node.challenge_rate)
    if (rate, best) != (node.token_rate, node.challenge_rate):
        nodes.set_rates(connection, node.address, token_rate=rate, challenge_rate=best)
    own = best if rate is None else rate
    if own is None:
        return node.speed_class
    median = medians.read(connection, now)[rate is None]
    median = own if median is None else median
    if median <= 0:
        return node.speed_class
    current = node.speed_class if rate is not None else None
    found = class_of(own / median, run.speed.ratios_micro, current)
    if found != node.speed_class:
        on_commit(connection, log.info, "node %s is of speed class %d now", node.address, found)
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
