"""The state of the pool for the lease requests of one transaction.

Values common to all requests are read once, when first needed. Values of single nodes are read in
one statement for all of them. A granted lease updates these values as if they were read again,
except that the window of the latest leases (`counts`) does not drop its oldest. The transaction
holds the lock "leases".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

from prime_core.errors import FatalError
from prime_core.ids import Address, Digest
from prime_core.revisions import RunHistory
from prime_core.run import RunDefinition
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.classes import held_by_enough
from prime_orchestrator.api.evaluating import Blocks, blocks_of
from prime_orchestrator.manager import revisions, standing, targets
from prime_orchestrator.manager.funding import Funding, funding
from prime_orchestrator.manager.members import Coverage
from prime_orchestrator.manager.uncalibrated import Quota, QuotaDueError
from prime_orchestrator.scheduler import Supply, TargetCounts
from prime_orchestrator.store import (
    Connection,
    batches,
    challenges,
    evaluations,
    exact_classes,
    groups,
    leases,
    measurements,
    nodes,
    policies,
    submissions,
)
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.measurements import MeasurementRow
from prime_orchestrator.store.nodes import NodeRow
from prime_orchestrator.store.policies import PolicyRow

RECENT_GROUPS = 256
"""Number of latest groups from which the informative share is computed."""
TRIES = 4
"""Leases issued for the same groups before they are dropped."""


def supply_of(connection: Connection, backend: Backend) -> Supply:
    """Returns the pool as the scheduler sees it.

    Leases older than half their duration do not count as under way, so that another node can
    replace a straggler.
    """
    run, now = backend.context.run, backend.now()
    step = batches.next_step(connection)
    under_way = leases.under_way(
        connection, now=now, younger_than=now - run.lease_seconds / 2, proven=standing.PROVEN
    )
    return Supply(
        next_step=step,
        latest_version=policies.latest_version(connection),
        free=tuple(groups.free_counts(connection, oldest_version=step - run.max_staleness)),
        under_way=tuple(under_way.groups),
        informative=groups.informative_share(connection, RECENT_GROUPS),
        newcomers=under_way.newcomers,
    )


class PoolView:
    """See the top of this module. `now` in Unix seconds; `nodes` and `open` (open leases, oldest
    first) are of the accounts that ask."""

    def __init__(
        self,
        connection: Connection,
        backend: Backend,
        now: float,
        accounts: Collection[Address],
        *,
        reads_quota: bool,
    ) -> None:
        """`reads_quota`: whether `quota` reads what is not kept, or raises QuotaDueError."""
        self.connection = connection
        self._reads_quota = reads_quota
        self.backend = backend
        self.now = now
        self.nodes = nodes.those(connection, accounts)
        self.open = leases.open_among(connection, accounts)
        self._counts: dict[tuple[Digest, bool], dict[int, TargetCounts]] = {}
        self._indices: dict[int, int] = {}
        self._waits: dict[int, str] = {}
        self._policies: dict[int, PolicyRow] = {}
        self._granted: list[LeaseRow] = []

    # ── read once ──

    @cached_property
    def supply(self) -> Supply:
        return supply_of(self.connection, self.backend)

    @cached_property
    def idle(self) -> int:
        """How many active nodes have no open lease and may get one."""
        self.write()  # nodes that were just granted a lease are not idle
        count = leases.idle_nodes(self.connection, self.now, list(self.quota().troubles))
        self.backend.idle.note(count, self.now)
        return count

    def quota(self, asks: NodeRow | None = None) -> Quota:
        """The quota of cards without limits. `asks`: an active node, which it has to know."""
        backend = self.backend
        kept = backend.quota.kept(self.run, self.now, asks)
        if kept is not None:
            return kept
        if not self._reads_quota:
            raise QuotaDueError(self.run, asks)
        return backend.quota.of(self.connection, backend.objects, self.run, self.now, asks)

    @property
    def idle_lately(self) -> int:
        """Like `idle`, but may be a recent, cached count (api/idle.py). Use it to refuse a lease,
        not to grant one."""
        count = self.backend.idle.recently(self.now)
        return self.idle if count is None else count

    @cached_property
    def any_proven(self) -> bool:
        """Whether any active node's provider has a record."""
        return nodes.any_proven(self.connection, standing.PROVEN)

    @cached_property
    def history(self) -> RunHistory:
        return revisions.history(self.connection, self.backend.context)

    @cached_property
    def run(self) -> RunDefinition:
        """The run of the step that is sealed next."""
        return self.history.at(batches.next_step(self.connection))

    @cached_property
    def slots(self) -> standing.Slots:
        return self.backend.slots(self.run)

    @cached_property
    def money(self) -> Funding | None:
        return funding(self.connection)

    @cached_property
    def draws(self) -> Digest | None:
        """The draw list of new leases; None if no validator has committed."""
        backend = self.backend
        return backend.draws.current(self.connection, backend.objects, backend.context, self.now)

    @cached_property
    def blocks(self) -> Blocks | None:
        """The blocks of the oldest running evaluation; None if there is none."""
        found = evaluations.running(self.connection)
        if found is None:
            return None
        run = self.history.at(found.policy_version)
        return blocks_of(self.connection, found, run, now=self.now)

    @cached_property
    def any_expired(self) -> bool:
        """Whether any lease's groups are to be issued again."""
        since = self.now - TRIES * self.backend.context.run.lease_seconds
        return bool(leases.to_issue_again(self.connection, (), since=since, tries=TRIES))

    def waits_for(self, step: int) -> str:
        """Returns `revisions.waits_for`."""
        if step not in self._waits:
            self._waits[step] = revisions.waits_for(self.connection, step)
        return self._waits[step]

    def policy(self, version: int) -> PolicyRow:
        """Returns a published policy. Raises FatalError if the store does not hold it."""
        if version not in self._policies:
            row = policies.get(self.connection, version)
            if row is None:
                raise FatalError(f"policy {version} is missing from the store")
            self._policies[version] = row
        return self._policies[version]

    def counts(self, run: RunDefinition, *, shadow: bool) -> dict[int, TargetCounts]:
        """Returns `targets.counts_of`."""
        key = run.digest(), shadow
        if key not in self._counts:
            self.write()
            self._counts[key] = targets.counts_of(self.connection, run, now=self.now, shadow=shadow)
        return self._counts[key]

    def next_index(self, step: int) -> int:
        """Returns the first unused lease index of `step`."""
        if step not in self._indices:
            self._indices[step] = leases.next_index(self.connection, step)
        return self._indices[step]

    # ── of the accounts that ask ──

    @cached_property
    def _siblings(self) -> dict[Address, list[NodeRow]]:
        providers = {row.provider for row in self.nodes.values() if row.provider is not None}
        return nodes.of_providers(self.connection, providers)

    @cached_property
    def _everyone(self) -> dict[Address, NodeRow]:
        siblings = (row for own in self._siblings.values() for row in own)
        return self.nodes | {row.address: row for row in siblings}

    @cached_property
    def _held(self) -> dict[Address, int]:
        return leases.held_by(self.connection, self._everyone, self.now)

    @cached_property
    def proofs(self) -> dict[Address, MeasurementRow]:
        """What is asked of the nodes' cards; nothing in a run without `cards`."""
        if self.run.cards is None:
            return {}
        return measurements.of(self.connection, self.nodes)

    @cached_property
    def coverage(self) -> Coverage | None:
        """What providers' stake covers; None if the run sets no bound."""
        return Coverage.read(self.connection, self.run, self._everyone.values())

    @cached_property
    def solved(self) -> dict[Address, list[float]]:
        """The rates of the challenges that the nodes solved, newest first."""
        return challenges.rates_of(self.connection, self.nodes)

    @cached_property
    def with_failures(self) -> frozenset[Address]:
        """The nodes for which `leases.newest_of` may find a failed lease."""
        return leases.with_failures(self.connection, self.nodes)

    @cached_property
    def _tallies(self) -> dict[Address, dict[str, int]]:
        return submissions.tallies_of(self.connection, self.nodes)

    @cached_property
    def _classes(self) -> dict[tuple[Address, int], Digest]:
        return exact_classes.of_accounts(self.connection, self.nodes)

    @cached_property
    def _held_classes(self) -> frozenset[Digest]:
        """The nodes' classes that enough live validators announced and that are not suspect. Only
        validators whose draws new leases name can judge their files."""
        if self.draws is None or not self._classes:
            return frozenset()
        listed = self.backend.draws.named(self.backend.objects, self.draws)
        named = {signed.validator for signed in listed.commitments}
        sound = exact_classes.without_suspects(
            self.connection, {*self._classes.values()}, Digest(self.run.calibration)
        )
        return held_by_enough(self.connection, sound, named, self.now)

    def exact_class(self, node: NodeRow, version: int) -> Digest | None:
        """Returns the exact class that a lease of the node with this policy names; None if none."""
        found = self._classes.get((node.address, version))
        return found if found is not None and found in self._held_classes else None

    def own(self, node: NodeRow) -> list[NodeRow]:
        """Returns every node of the same provider, in any state."""
        return [node] if node.provider is None else self._siblings[node.provider]

    def held(self, node: NodeRow) -> int:
        """Returns how many open paid leases before their deadline the node's provider holds."""
        return sum(self._held.get(one.address, 0) for one in self.own(node))

    def ended(self, node: NodeRow, status: str) -> int:
        """Returns how many of the node's files ended with this status, with shadow ones."""
        return self._tallies.get(node.address, {}).get(status, 0)

    # ── grants ──

    def grant(self, row: LeaseRow, node: NodeRow) -> None:
        """Notes a new lease, which `write` stores."""
        self._granted.append(row)
        if not row.shadow and not self.open.get(node.address):
            self.__dict__.pop("idle", None)
        self.open.setdefault(node.address, []).append(row)
        self._indices[row.step] = row.lease_index + 1
        if not row.shadow:
            self._held[node.address] = self._held.get(node.address, 0) + 1
        if row.evaluation is not None and self.blocks is not None:
            self.blocks.taken()
            return
        if self.blocks is not None and not row.shadow:
            self.blocks.others += 1
        for (_, shadow), counts in self._counts.items():
            if shadow == row.shadow:
                before = counts.get(row.target, TargetCounts())
                counts[row.target] = replace(
                    before, asked=before.asked + 1, under_way=before.under_way + 1
                )
        if row.shadow:
            return
        own = self.own(node)
        kept, missed = sum(one.kept for one in own), sum(one.missed for one in own)
        weight = 0.0 if node.misses else (kept + 1.0) / (kept + missed + 1.0)
        self.supply = replace(
            self.supply,
            under_way=(*self.supply.under_way, (row.policy_version, weight)),
            newcomers=self.supply.newcomers + (not standing.proven(own)),
        )

    def write(self) -> None:
        """Writes the leases that were granted since the last call."""
        leases.add(self.connection, self._granted)
        self._granted.clear()
