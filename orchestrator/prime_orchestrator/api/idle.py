"""How long an idle node waits before it asks for a lease again."""

from __future__ import annotations

from dataclasses import dataclass

WAIT_MS = 500
"""Minimum time before a node asks again."""
MOST_WAIT_MS = 60_000
IDLE_ASK_MS = 5
"""Milliseconds of waiting per idle node while enough work is under way. It limits all idle nodes
together to about 200 requests a second. A new policy ends the wait."""
COUNT_AGAIN = 10
"""A count of idle nodes is valid for this fraction (1/N) of the wait that it leads to."""


def wait_ms(idle: int) -> int:
    """Returns the milliseconds that each of `idle` nodes waits."""
    return min(MOST_WAIT_MS, max(WAIT_MS, IDLE_ASK_MS * idle))


@dataclass
class IdleCount:
    """Caches the number of idle nodes, because counting them reads all nodes.

    A larger count stays valid longer. A count for which nodes wait only WAIT_MS is not reused. Not
    safe for use from several threads.
    """

    nodes: int = 0
    at: float = 0.0
    """Unix seconds."""

    def note(self, nodes: int, at: float) -> None:
        """Stores a new count, taken at Unix time `at`."""
        self.nodes, self.at = nodes, at

    def recently(self, now: float) -> int | None:
        """Returns the cached count, or None if it has expired."""
        seconds = (wait_ms(self.nodes) - WAIT_MS) / 1000 / COUNT_AGAIN
        return self.nodes if 0 <= now - self.at < seconds else None
