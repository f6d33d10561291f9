"""A node whose files end void one after another waits before its next lease, longer each time.

A void file costs its node nothing, but validators read it, and where it declares a set-up that
nobody calibrated they replay it: without a pause, made-up files would keep them busy for ever. A
set-up that does not fit, or a broken worker, is the usual cause, and its owner hears it. What is
void by the pool's fault, or for a slow machine, does not count, and one accepted file ends it. Nor
does such a node get a lease while a file of its waits to be judged: else it handed in many more
before the next of them counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.verdict import Reason
from prime_orchestrator.manager.standing import NOT_ITS_FAULT
from prime_orchestrator.store import submissions

PATIENCE = 4
"""So many void files in a row change nothing."""
MOST = 12
"""How far back is looked."""
POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Pause:
    """No lease before `until` (Unix seconds), after `files` void ones, the last by `reason`; where
    `until` has passed, none before the files that wait are judged."""

    files: int
    reason: Reason
    until: float

    def retry_after(self, now: float) -> float:
        """Seconds until it is worth asking again, a minute at most."""
        return min(60.0, self.until - now if self.until > now else POLL_SECONDS)

    def sentence(self, now: float) -> str:
        """For the node's owner."""
        when = f"in {self.until - now:.0f} s" if self.until > now else "once its files are judged"
        return (
            f"its last {self.files} files were void ({self.reason.name}): the next lease is given "
            f"{when}; see prime-node verify FILE"
        )


def pause_of(
    connection: Connection, node: Address, now: float, lease_seconds: float
) -> Pause | None:
    """The pause that a node is in: an eighth of a lease's life after PATIENCE void files in a row,
    twice as long with each further one, up to four lives."""
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
