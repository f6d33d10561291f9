"""Each node's record of kept and missed leases.

    kept      the file was accepted
    missed    the lease expired, or its file ended void or rejected by the node's own fault

Both decay: each ending multiplies the previous counts by MEMORY. A record has four uses:

    supply    an open lease counts as the share of leases that its provider's nodes kept, and as
              nothing while the node's latest lease expired (store.leases.under_way)
    rest      a node whose lease expired gets none for one lease duration after the deadline, twice
              as long after each further one, up to LONGEST durations; an accepted file resets it
    slots     a provider may hold one open lease per seat, less one for each of its resting nodes,
              seated or not: replacing a resting node with a fresh seat gains nothing
    newcomers while others have a record, providers without one hold at most half of the lead

Apart from the record, work at risk sets a provider's slots (`members.Coverage`): what its
nodes hold, have handed in and may still lose is worth at most its stake times the run's factor.

A lease that expires because the orchestrator was away is excused: it leaves no record.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from prime_core.ids import Address
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.verdict import POOLS_FAULT, Outcome, Reason
from prime_orchestrator.store import leases, nodes
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.nodes import NodeRow

MEMORY = 15 / 16
LONGEST = 4
"""Longest rest of a node, in lease durations."""
PROVEN = 0.5
"""Kept leases, after decay, from which a provider is not a newcomer."""
NOT_ITS_FAULT = POOLS_FAULT | {Reason.LATE, Reason.NONE}


def expire(
    connection: Connection, lease: LeaseRow, lease_seconds: float, *, excused: bool = False
) -> None:
    """Ends an open lease without a file, and records the miss on its node unless it is excused."""
    ended, _ = step_lease(LeaseState(lease.status, lease.deadline), "tick", float("inf"))
    leases.set_status(connection, lease.digest, ended.status, excused=excused)
    node = nodes.get(connection, lease.node)
    if node is None or excused:
        return
    rest = min(LONGEST, 2**node.misses) * lease_seconds
    nodes.note_missed(connection, lease.node, MEMORY, rests_until=lease.deadline + rest)


def judged(connection: Connection, node: Address, outcome: Outcome, reason: Reason) -> None:
    """Records a verdict on the node that made the file."""
    if outcome is Outcome.ACCEPTED:
        nodes.note_kept(connection, node, MEMORY)
    elif outcome is Outcome.REJECTED or reason not in NOT_ITS_FAULT:
        nodes.note_missed(connection, node, MEMORY)


def proven(own: Sequence[NodeRow]) -> bool:
    """Whether the provider of these nodes is not a newcomer."""
    return sum(node.kept for node in own) >= PROVEN


def slots(own: Sequence[NodeRow], now: float) -> int:
    """Returns how many open leases the provider of these nodes may hold."""
    seated = sum(node.status in ("active", "silent") for node in own)
    return max(0, seated - sum(node.rests_until > now for node in own))
