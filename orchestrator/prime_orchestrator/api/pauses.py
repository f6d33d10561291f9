"""Pauses a node whose files keep ending void, longer each time.

A void file costs its node nothing, but validators read it, and replay it if it declares a set-up
that was never calibrated. Without a pause, made-up files could keep them busy indefinitely. The
usual cause is a wrong set-up or a broken worker, and the node's owner sees the reason. Files that
are void through the pool's fault or a slow machine do not count, and one accepted file resets the
count. A paused node also gets no lease while one of its files waits for judgement; otherwise it
could submit many more before the next one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.verdict import Reason
from prime_orchestrator.manager.standing import NOT_ITS_FAULT
from prime_orchestrator.store import submissions

PATIENCE = 4
"""Consecutive void files before a pause."""
MOST = 12
"""Number of latest files examined."""
POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Pause:
    """No lease before `until` (Unix seconds), after `files` void ones, the last for `reason`. Once
    `until` has passed, none before the waiting files are judged."""

    files: int
    reason: Reason
    until: float

    def retry_after(self, now: float) -> float:
        """Returns the seconds to wait before asking again, at most a minute."""
        return min(60.0, self.until - now if self.until > now else POLL_SECONDS)

    def sentence(self, now: float) -> str:
        """Returns the explanation for the node's owner."""
        when = f"in {self.until - now:.0f} s" if self.until > now else "once its files are judged"
        return (
            f"its last {self.files} files were void ({self.reason.name}): the next lease is given "
            f"{when}; see prime-node verify FILE"
        )


def pause_of(
    connection: Connection, node: Address, now: float, lease_seconds: float
) -> Pause | None:
    """Returns the node's pause, or None: an eighth of a lease's duration after PATIENCE consecutive
    void files, doubling with each further one, up to four durations."""
    void: list[tuple[Reason, float]] = []
    for status, number, judged_at in submissions.newest_endings(connection, node, MOST):
        reason = Reason(number)
        if status != "void":
            break
        if reason not in NOT_ITS_FAULT:
            void.append((reason, judged_at))
    if len(void) < PATIENCE:
        return None
    length = min(4.0, 2.0 ** (len(void) - PATIENCE) / 8) * lease_seconds
    reason, at = void[0]
    if at + length <= now and not submissions.waits(connection, node):
        return None
    return Pause(len(void), reason, at + length)
