"""Decides which evaluation lease a node gets (store/evaluations.py).

While the pool trains, at most half of its leases are of evaluations. When enough work to train on
is under way, every lease is. The step of an evaluation lease is its policy's version, so its file
is fresh, and judged and paid by the run of that step. Only providers with a record get one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_core.run import RunDefinition
from prime_orchestrator.scheduler import Grant
from prime_orchestrator.store import Connection, evaluations
from prime_orchestrator.store.evaluations import EvaluationRow

TRIES = 4
"""Leases of one block that may end without an accepted file. After them, its problems have no
result."""


@dataclass
class Blocks:
    """The oldest running evaluation as the leases of one transaction see it.

    `free`: first problems of blocks that need a lease, the next one last. `given` and `others`:
    paid leases of the last lease duration that are of evaluations, and those that are not.
    """

    evaluation: EvaluationRow
    run: RunDefinition
    free: list[int] = field(default_factory=list)
    given: int = 0
    others: int = 0

    def next(self, policy_version: int, *, idle: bool) -> Grant | None:
        """Returns the next lease for a node that can load policies up to `policy_version`; None if
        it gets none. `idle`: enough work to train on is under way."""
        version = self.evaluation.policy_version
        if not self.free or policy_version < version or (self.given > self.others and not idle):
            return None
        return Grant(version, version, heldout=self.free[-1])

    def target(self, first: int) -> int:
        """Returns the target length of a block. Blocks use the run's targets in turn."""
        targets = self.run.budgets.targets
        return targets[first // self.run.groups_per_lease % len(targets)]

    def taken(self) -> None:
        """Notes that the next block has its lease."""
        self.free.pop()
        self.given += 1


def blocks_of(
    connection: Connection, evaluation: EvaluationRow, run: RunDefinition, *, now: float
) -> Blocks | None:
    """Returns the blocks of a running evaluation. If no block waits for a lease or a verdict, ends
    the evaluation and returns None. `run`: the one of the evaluation's policy."""
    firsts = range(0, evaluation.problems, run.groups_per_lease)
    known = evaluations.blocks(connection, evaluation.id)
    free = [
        first for first in firsts
        if first not in known or (not known[first].taken and known[first].failed < TRIES)
    ]  # fmt: skip
    waiting = any(known[first].taken and not known[first].accepted for first in known)
    if not free and not waiting:
        evaluations.end(connection, evaluation.id, now=now)
        return None
    given, others = evaluations.given_since(connection, now - run.lease_seconds)
    return Blocks(evaluation, run, free[::-1], given, others)
