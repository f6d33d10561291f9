"""How long nodes wait for their next request while there is no work for them."""

from __future__ import annotations

from dataclasses import dataclass

WAIT_MS = 500
"""Minimum time before a node asks again."""
MOST_WAIT_MS = 60_000
IDLE_ASK_MS = 5
"""Milliseconds of waiting per idle node while enough work is under way. It limits all idle nodes
together to about 200 requests a second. A new policy ends the wait."""
COUNT_AGAIN = 10
"""Idle nodes are counted so many times in one wait."""


def wait_ms(idle: int) -> int:
    """Returns how long each of so many idle nodes waits."""
    return min(MOST_WAIT_MS, max(WAIT_MS, IDLE_ASK_MS * idle))


@dataclass
class IdleCount:
    """The last count of idle nodes. Counting reads all nodes, so refusals use a count again, the
    longer the larger it is, which limits the time spent on counting. Where nodes wait for the
    minimum time only, every refusal counts. Used by one thread at a time."""

    nodes: int = 0
    at: float = 0.0
    """Unix seconds."""

    def note(self, nodes: int, at: float) -> None:
        """Keeps a new count."""
        self.nodes, self.at = nodes, at

    def lately(self, now: float) -> int | None:
        """Returns the last count, or None if it is too old."""
        seconds = (wait_ms(self.nodes) - WAIT_MS) / 1000 / COUNT_AGAIN
        return self.nodes if 0 <= now - self.at < seconds else None
