"""Pure assignment of work to nodes that ask for it.

Which batch (`decide`):

    supply  = accepted, informative, fresh groups in no batch
            + leases under way × groups per lease × the share of groups that turn out informative
    demand  = the unsealed batches that work made now may still serve, in order

A node gets the first batch that the supply does not fill. A node that holds leases gets another
only if one is left for each idle node (`Supply.reserved`): when little work is needed, it goes to
as many nodes as possible. An open lease is returned to its node before anything else, and an
expired one costs more time than any choice of the next is worth (manager/standing.py). Leases under
way are weighted by the share of leases their nodes kept.

Which target length (`pick_target`), by the expected share of each target among the latest leases:

    below its minimum        any node that asks gets it
    below 1.5 × its minimum  the nodes that prefer it get it before anything else
    otherwise                the least served of the targets that the asker's class prefers
    after a failed lease of the asker's own: the same target again, once (`pick_target`)

Nothing here reads a clock or a store; `leasing.py` collects the inputs and carries out the
decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prime_core.node import NodeStatus
from prime_core.run import LEAST_SHARE, MICRO, LengthBudgets

ENOUGH = "enough work is under way; the trainer has to catch up"
NEWCOMERS = "nodes without an accepted file hold their share of the work that is under way"
PRIOR_SHARE = 0.7
PRIOR_WEIGHT = 64
"""The prior of the informative share is 70 %, with the weight of 64 observed groups."""
MIN_SHARE = 0.1
"""However uninformative groups are, at most 10 times the need is under way."""


@dataclass(frozen=True)
class SchedulingRules:
    """Sizes in groups and staleness in publications, from the run definition."""

    groups_per_batch: int
    groups_per_lease: int
    max_staleness: int
    surplus: int = 0
    """Groups that must be available in addition to those that a batch takes."""


@dataclass(frozen=True)
class Supply:
    """The pool at one moment. `free` and `under_way` are (policy version, number) pairs of free
    informative groups and of leases that may still bring groups."""

    next_step: int
    """The first batch not yet sealed."""
    latest_version: int | None
    free: tuple[tuple[int, int], ...] = ()
    under_way: tuple[tuple[int, float], ...] = ()
    informative: tuple[int, int] = (0, 0)
    """(informative, all) among the recently accepted groups."""
    newcomers: int = 0
    """Leases held by nodes whose provider has no record."""

    @property
    def share(self) -> float:
        """Expected share of informative groups, in [MIN_SHARE, 1]."""
        informative, observed = self.informative
        share = (informative + PRIOR_SHARE * PRIOR_WEIGHT) / (observed + PRIOR_WEIGHT)
        return max(MIN_SHARE, share)

    def reserved(self, leases: int) -> Supply:
        """The supply as if `leases` more were under way with the latest policy."""
        if not leases or self.latest_version is None:
            return self
        return replace(self, under_way=(*self.under_way, (self.latest_version, float(leases))))


@dataclass(frozen=True)
class Asker:
    """The node that asks. `policy_version` is the newest that it can load."""

    status: NodeStatus
    policy_version: int
    proven: bool = True
    """Whether its provider has a record of kept leases, or no other has one."""


@dataclass(frozen=True)
class Grant:
    """Make a lease for batch `step` with policy `policy_version`. `heldout`: the first
    held-out problem of an evaluation lease (api/evaluating.py); None: a lease to train on."""

    step: int
    policy_version: int
    heldout: int | None = None


@dataclass(frozen=True)
class Wait:
    """No lease now; `reason` is a plain sentence."""

    reason: str


def decide(asker: Asker, supply: Supply, rules: SchedulingRules) -> Grant | Wait:
    """Returns what a node without an open lease gets.

    A lease for step s is made with a policy v where v ≤ s ≤ v + max_staleness, so its groups are
    fresh when batch s is trained (on policy s).
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
    if not asker.proven and supply.newcomers >= newcomers_room(supply, rules):
        return Wait(NEWCOMERS)
    version = min(asker.policy_version, supply.latest_version)
    if step > version + rules.max_staleness:
        return Wait(f"policy {version} is too old for batch {step}; load {supply.latest_version}")
    if step < version:
        return Wait(f"batch {step} waits for groups of policy {step} or older")
    return Grant(step=step, policy_version=version)


def newcomers_room(supply: Supply, rules: SchedulingRules) -> int:
    """Returns how many leases nodes without a record may hold while others have one: half of the
    leases that fill every batch within reach of a policy, at least one."""
    groups = (rules.max_staleness + 1) * (rules.groups_per_batch + rules.surplus)
    return max(1, int(groups / (rules.groups_per_lease * supply.share) / 2))


def first_lacking(supply: Supply, rules: SchedulingRules) -> int | None:
    """Returns the first unsealed step whose batch the expected supply does not fill, or None.

    Batches take the oldest policy's groups first, as `manager.batches` does; the rest is available
    to the next batch while it is fresh.
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


def _expected_groups(supply: Supply, rules: SchedulingRules) -> dict[int, float]:
    expected: dict[int, float] = {}
    for version, groups in supply.free:
        expected[version] = expected.get(version, 0.0) + groups
    for version, leases in supply.under_way:
        more = leases * rules.groups_per_lease * supply.share
        expected[version] = expected.get(version, 0.0) + more
    return expected


@dataclass(frozen=True)
class TargetCounts:
    """Leases of one target length among the latest of the pool."""

    asked: int = 0
    """All of them, regardless of outcome."""
    under_way: int = 0
    """Held by a node, or submitted and not judged."""
    accepted: int = 0
    expired: int = 0
    """Without a file, by the node's fault."""

    @property
    def expected(self) -> float:
        """Accepted leases, plus those under way times the acceptance rate of this target."""
        ended = self.asked - self.under_way
        return self.accepted + self.under_way * (self.accepted + 1) / (ended + 1)


def window(budgets: LengthBudgets) -> int:
    """Returns how many of the latest leases `pick_target` considers."""
    return max(32 * len(budgets.targets), 8 * MICRO // max(budgets.min_share, LEAST_SHARE))


def pick_target(
    speed_class: int,
    counts: Mapping[int, TargetCounts],
    budgets: LengthBudgets,
    failed: Sequence[int] = (),
) -> int:
    """Returns the target length for a lease to a node of `speed_class`.

    Args:
        counts: by target length, of the latest `window(budgets)` leases. Missing ones count 0.
        failed: targets of the node's own latest leases that produced no accepted or pending file,
            newest first, back to the latest lease that did.

    After a failed lease, a node gets the same target again: dropping a lease gives no choice. After
    two in a row it gets the target of its class with the most accepted leases. A target that no
    node completes then takes at most two thirds of each node's work, and other nodes' failures keep
    no target from a node that completes it.
    """
    preferred = budgets.preferred(speed_class)
    known = {target: counts.get(target, TargetCounts()) for target in budgets.targets}
    if failed and failed[0] in known and (len(failed) == 1 or failed[0] != failed[1]):
        return failed[0]
    if failed:
        return max(preferred, key=lambda target: (known[target].accepted, -target))
    whole = sum(count.expected for count in known.values()) + 1
    least = budgets.min_share / MICRO

    def lacking(targets: tuple[int, ...], share: float) -> list[int]:
        return [target for target in targets if known[target].expected < share * whole - 0.5]

    candidates = (
        lacking(budgets.targets, least) or lacking(preferred, 1.5 * least) or list(preferred)
    )
    return min(candidates, key=lambda target: (known[target].expected, -target))
