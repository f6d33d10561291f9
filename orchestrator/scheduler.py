"""Who makes what next: pure assignment of work to nodes that ask.

    supply  = accepted, informative, fresh groups in no batch
            + leases under way × groups a lease × the share of groups that turn out informative
    demand  = the unsealed batches that work made now may still serve, in order

A node gets the first batch that its supply does not fill. An unfulfilled lease comes back to its
node before anything else, so that dropping one gains nothing. Nothing here reads a clock or a
store; `orchestrator.leasing` gathers the view and performs the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.core.node import NodeStatus

ENOUGH = "enough work is under way; the trainer has to catch up"
PRIOR_SHARE = 0.7
PRIOR_WEIGHT = 64
"""The informative share is first taken to be 70 %, with the weight of 64 observed groups."""
MIN_SHARE = 0.1
"""However uninformative groups are, no more than 10 times the need is ever under way."""


@dataclass(frozen=True)
class Rules:
    """From the run definition: sizes in groups, staleness in publications."""

    groups_per_batch: int
    groups_per_lease: int
    max_staleness: int
    surplus: int = 0
    """Groups that must lie ready beyond those that a batch takes."""


@dataclass(frozen=True)
class Supply:
    """The pool at one moment. `free` and `under_way` are (policy version, number) pairs of free
    informative groups and of leases that may still bring groups."""

    next_step: int
    """The first batch not yet sealed."""
    latest_version: int | None
    free: tuple[tuple[int, int], ...] = ()
    under_way: tuple[tuple[int, int], ...] = ()
    informative: tuple[int, int] = (0, 0)
    """(informative, all) among the groups accepted lately."""

    @property
    def share(self) -> float:
        """Expected share of informative groups, in [MIN_SHARE, 1]."""
        informative, observed = self.informative
        share = (informative + PRIOR_SHARE * PRIOR_WEIGHT) / (observed + PRIOR_WEIGHT)
        return max(MIN_SHARE, share)


@dataclass(frozen=True)
class Asker:
    """The node that asks. `policy_version` is the newest that it can load."""

    status: NodeStatus
    policy_version: int


@dataclass(frozen=True)
class Grant:
    """Make a lease for batch `step` with policy `policy_version`."""

    step: int
    policy_version: int


@dataclass(frozen=True)
class Wait:
    """Nothing now; `reason` in plain words."""

    reason: str


def decide(asker: Asker, supply: Supply, rules: Rules) -> Grant | Wait:
    """What a node without an open lease gets.

    A lease for step s is made by a policy v with v ≤ s ≤ v + max_staleness, so its groups are fresh
    when batch s is trained (on policy s).
    """
    if asker.status != "active":
        return Wait(f"the node is {asker.status}")
    if supply.latest_version is None:
        return Wait("no policy is published yet")
    if asker.policy_version < supply.latest_version - rules.max_staleness:
        return Wait(f"policy {asker.policy_version} is too old; load {supply.latest_version}")
    step = first_lacking(supply, rules)
    if step is None:
        return Wait(ENOUGH)
    version = min(asker.policy_version, supply.latest_version)
    if step > version + rules.max_staleness:
        return Wait(f"policy {version} is too old for batch {step}; load {supply.latest_version}")
    if step < version:
        return Wait(f"batch {step} waits for groups of policy {step} or older")
    return Grant(step=step, policy_version=version)


def first_lacking(supply: Supply, rules: Rules) -> int | None:
    """The first unsealed step whose batch the expected supply does not fill, or None.

    Batches take the oldest policy's groups first, as `orchestrator.batches` does; what one leaves
    over is there for the next while it is fresh.
    """
    if supply.latest_version is None:
        return None
    expected = _expected_groups(supply, rules)
    for step in range(supply.next_step, supply.latest_version + rules.max_staleness + 1):
        fresh = [v for v in sorted(expected) if v <= step <= v + rules.max_staleness]
        if sum(expected[v] for v in fresh) < rules.groups_per_batch + rules.surplus - 1e-9:
            return step
        need = float(rules.groups_per_batch)
        for version in fresh:
            taken = min(need, expected[version])
            expected[version] -= taken
            need -= taken
    return None


def _expected_groups(supply: Supply, rules: Rules) -> dict[int, float]:
    expected: dict[int, float] = {}
    for version, groups in supply.free:
        expected[version] = expected.get(version, 0.0) + groups
    for version, leases in supply.under_way:
        more = leases * rules.groups_per_lease * supply.share
        expected[version] = expected.get(version, 0.0) + more
    return expected


def speed_class(mmacs_per_second: int, thresholds: Sequence[int]) -> int:
    """Class = 1 + number of thresholds (million multiply-adds a second) reached."""
    return 1 + sum(mmacs_per_second >= threshold for threshold in thresholds)
