"""Each node's record of kept and missed leases.

    kept      the file was accepted
    missed    the lease expired, or its file ended void or rejected by the node's own fault

Both decay: each ending multiplies the previous counts by MEMORY. A record has four uses:

    supply    an open lease counts as the share of leases that its provider's nodes kept, and as
              nothing while the node's latest lease expired (store.leases.under_way)
    rest      a node whose lease expired gets none for one lease duration after the deadline, twice
              as long after each further one, up to LONGEST durations; an accepted file resets it.
              Leases that were open together count once: the rest costs all slots of the node
    slots     a node may hold as many open leases as it makes in a third of a lease's time
              (`Slots`), one while its latest lease expired. A provider may hold those of its seats,
              less those of its resting nodes, seated or not: replacing a resting node with a fresh
              seat gains nothing
    newcomers while others have a record, providers without one hold at most half of the lead

Apart from the record, work at risk sets a provider's slots (`members.Coverage`): what its
nodes hold, have handed in and may still lose is worth at most its stake times the run's factor.

A lease that was open while the orchestrator was away, or while its object store or the store's
public address failed, is excused if it expires: it leaves no record.

A node whose files keep ending void is paused, longer each time (`pause_of`). A void file costs its
node nothing, but validators read it, and replay it if it declares a setup that was never
calibrated. Without a pause, made-up files could keep them busy indefinitely. The usual cause is a
wrong setup or a broken worker, and the node's owner sees the reason. Files that are void through
the pool's fault or a slow machine do not count, and one accepted file resets the count. A paused
node also gets no lease while one of its files waits for judgement; otherwise it could submit many
more before the next one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from prime_core.ids import Address
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.logs import fields
from prime_core.run import RunDefinition
from prime_core.verdict import POOLS_FAULT, Outcome, Reason
from prime_orchestrator.store import Connection, leases, nodes, on_commit, submissions
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.nodes import NodeRow

log = logging.getLogger(__name__)

MEMORY = 15 / 16
LONGEST = 4
"""Longest rest of a node, in lease durations."""
PROVEN = 0.5
"""Kept leases, after decay, from which a provider is not a newcomer."""
LEASE_SLOTS = 4
"""Most leases that a node holds open at once, by default."""
TIME_SHARE = 3
"""A node's open leases must take it at most a lease's time divided by this."""
NOT_ITS_FAULT = POOLS_FAULT | {Reason.LATE, Reason.NONE}
VOID_FILES = 4
"""Consecutive void files before a pause."""
ENDINGS = 12
"""Number of latest files examined."""
POLL_SECONDS = 5.0


def expire(
    connection: Connection, lease: LeaseRow, lease_seconds: float, *, excused: bool = False
) -> None:
    """Ends an open lease without a file, and records the miss on its node unless it is excused."""
    ended = step_lease(LeaseState(lease.status, lease.deadline), "tick", float("inf"))
    leases.set_status(connection, lease.digest, ended.status, excused=excused)
    status = "excused" if excused else ended.status
    about = fields(
        kind="lease", status=status, lease=lease.digest, node=lease.node, step=lease.step,
        policy=lease.policy_version,
    )  # fmt: skip
    on_commit(
        connection, log.info, "lease %s of %s ended without a file: %s",
        lease.digest, lease.node, status, extra=about,
    )  # fmt: skip
    node = nodes.get(connection, lease.node)
    if node is None or excused:
        return
    together = lease.created_at < node.rests_until  # it was open when an earlier one expired
    before = max(0, node.misses - 1) if together else node.misses
    rest = min(LONGEST, 2**before) * lease_seconds
    until = max(node.rests_until, lease.deadline + rest)
    nodes.note_missed(connection, lease.node, MEMORY, misses=before + 1, rests_until=until)


def judged(connection: Connection, node: Address, outcome: Outcome, reason: Reason) -> None:
    """Records a verdict on the node that made the file."""
    if outcome is Outcome.ACCEPTED:
        nodes.note_kept(connection, [node], MEMORY)
    elif outcome is Outcome.REJECTED or reason not in NOT_ITS_FAULT:
        nodes.note_missed(connection, node, MEMORY)


def kept(connection: Connection, files: Sequence[Address]) -> None:
    """Records accepted files, each by the node that made it."""
    nodes.note_kept(connection, files, MEMORY)


def proven(own: Sequence[NodeRow]) -> bool:
    """Whether the provider of these nodes is not a newcomer."""
    return sum(node.kept for node in own) >= PROVEN


@dataclass(frozen=True)
class Slots:
    """How many leases nodes may hold open, of `run`, each at most `most`; those in `single` hold
    one."""

    run: RunDefinition
    most: int = LEASE_SLOTS
    single: frozenset[Address] = frozenset()

    def at_speed(self, node: NodeRow) -> int:
        """Returns how many leases of the longest target length the node makes at its measured speed
        in a third of a lease's time, at least one. One for a node in shadow, or without a record of
        its own."""
        single = node.status == "shadow" or node.address in self.single
        if single or node.token_rate is None or node.kept < PROVEN:
            return 1
        longest = min(max(self.run.budgets.targets), self.run.max_output_tokens)
        seconds = self.run.rows_per_lease * longest / max(node.token_rate, 1e-9)
        return max(1, min(self.most, int(self.run.lease_seconds / (TIME_SHARE * seconds))))

    def of(self, node: NodeRow) -> int:
        """Returns how many leases the node may hold. One while its latest lease expired."""
        return 1 if node.misses else self.at_speed(node)

    def of_provider(self, own: Sequence[NodeRow], now: float) -> int:
        """Returns how many leases the provider of these nodes may hold."""
        slots = 0
        for node in own:
            seated, rests = node.status in ("active", "silent"), node.rests_until > now
            if seated and not rests:
                slots += self.of(node)
            elif rests and not seated:
                slots -= self.at_speed(node)
        return max(0, slots)


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
    """Returns the node's pause, or None: an eighth of a lease's duration after VOID_FILES void
    files in a row, doubling with each further one, up to four durations."""
    void: list[tuple[Reason, float]] = []
    for status, number, judged_at in submissions.newest_endings(connection, node, ENDINGS):
        reason = Reason(number)
        if status != "void":
            break
        if reason not in NOT_ITS_FAULT:
            void.append((reason, judged_at))
    if len(void) < VOID_FILES:
        return None
    length = min(4.0, 2.0 ** (len(void) - VOID_FILES) / 8) * lease_seconds
    reason, at = void[0]
    if at + length <= now and not submissions.waits(connection, node):
        return None
    return Pause(len(void), reason, at + length)
