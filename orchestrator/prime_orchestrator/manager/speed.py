"""How fast nodes are, relative to one another: what decides which target lengths they prefer.

    rate    median of accepted tokens per second from lease to submission, over the node's latest
            files, once there are LEAST_FILES; until then the best of its latest hardware challenges
    ratio   rate ÷ median rate of the pool's live nodes, each kind of rate among its own
    class   1 + number of `speed.ratios_micro` reached; one that rests on accepted files changes
            only MARGIN beyond a border

A machine's load, and the clock's, fall out of the ratio. A class decides no admission, no pay and
no stake.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.run import MICRO, RunDefinition
from prime_orchestrator.store import challenges, nodes, submissions
from prime_orchestrator.store.nodes import NodeRow

log = logging.getLogger(__name__)

LEAST_FILES = 3
"""Accepted files from which a node's rate is taken from them."""
LATEST_FILES = 8
CHALLENGES = 3
"""Hardware challenges whose best counts."""
AGAIN_SECONDS = 1200.0
"""After so long without enough accepted files a node is measured again."""
MARGIN = 0.2
"""Share of a border by which a ratio must pass it before a class changes."""
TURN_SECONDS = 20.0
"""A node that holds its address's turn and does not answer loses it after so long."""
PATIENCE_SECONDS = 40.0
"""A node that has waited for its turn so long is measured without one."""


def class_of(ratio: float, ratios_micro: Sequence[int], current: int | None = None) -> int:
    """The class of a node with `ratio` (rate ÷ the pool's median) that is in `current` now."""
    reached = 1 + sum(ratio * MICRO >= border for border in ratios_micro)
    if current is None or reached == current:
        return reached
    factor = 1 + MARGIN if reached > current else 1 - MARGIN
    settled = 1 + sum(ratio * MICRO >= factor * border for border in ratios_micro)
    return max(current, settled) if reached > current else min(current, settled)


def refresh(connection: Connection, run: RunDefinition, node: NodeRow) -> int:
    """Takes the node's rate and class from the store as it is now, writes them, returns the class.
    A class that rests on challenges alone has no margin: the first node is measured when there is
    no pool to compare it with."""
    tokens = submissions.latest_rates(connection, node.address, LATEST_FILES)
    rate = statistics.median(tokens) if len(tokens) >= LEAST_FILES else None
    best = max(challenges.latest_rates(connection, node.address, CHALLENGES), default=None)
    if best is None:
        best = node.challenge_rate
    nodes.set_rates(connection, node.address, token_rate=rate, challenge_rate=best)
    pool = nodes.live_rates(connection)
    own, others = (rate, [r for r, _ in pool]) if rate is not None else (best, [r for _, r in pool])
    median = statistics.median([r for r in others if r is not None] or [own or 0.0])
    if own is None or median <= 0:
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
    """Those of the nodes that should solve one more challenge: they have too few, or old ones, and
    too few accepted files."""
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
    """Who of the nodes behind one address is measured now: one at a time, so that none slows the
    others down. In memory: an orchestrator beside this one gives turns of its own."""

    _holders: dict[str, tuple[Address, float]] = field(default_factory=dict)
    _waiting: dict[Address, tuple[float, float]] = field(default_factory=dict)

    def take(self, address: str, node: Address, now: float) -> bool:
        """Whether `node` may be measured now. It holds the turn until `done`, TURN_SECONDS at
        most; a silent holder stands behind every node that waits."""
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
        """The node has answered, or needs no turn any more."""
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
