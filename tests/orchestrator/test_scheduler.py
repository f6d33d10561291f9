"""The scheduler's rules as properties, and a simulated pool that it keeps fed."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_core.ids import Address
from prime_core.node import NodeStatus
from prime_core.run import LengthBudgets
from prime_orchestrator.manager.speed import TURN_SECONDS, Turns, class_of
from prime_orchestrator.scheduler import (
    Asker,
    Grant,
    SchedulingRules,
    Supply,
    TargetCounts,
    Wait,
    decide,
    first_lacking,
    pick_target,
    window,
)

RULES = SchedulingRules(groups_per_batch=8, groups_per_lease=2, max_staleness=2)


@st.composite
def rules(draw: st.DrawFn) -> SchedulingRules:
    return SchedulingRules(
        groups_per_batch=draw(st.integers(1, 40)),
        groups_per_lease=draw(st.integers(1, 8)),
        max_staleness=draw(st.integers(0, 4)),
    )


@st.composite
def supplies(draw: st.DrawFn) -> Supply:
    latest = draw(st.one_of(st.none(), st.integers(0, 10)))
    pairs = st.lists(st.tuples(st.integers(0, latest or 0), st.integers(0, 30)), max_size=4)
    informative = draw(st.integers(0, 300))
    return Supply(
        next_step=draw(st.integers(0, 13)),
        latest_version=latest,
        free=tuple(draw(pairs)),
        under_way=tuple(draw(pairs)),
        informative=(informative, informative + draw(st.integers(0, 300))),
    )


ASKERS = st.builds(
    Asker,
    st.sampled_from(["admitted", "active", "silent", "quarantined", "ejected", "left"]),
    st.integers(0, 12),
)


@given(ASKERS, supplies(), rules())
def test_a_grant_goes_to_an_active_node_and_is_fresh_when_trained(
    asker: Asker, supply: Supply, limits: SchedulingRules
) -> None:
    choice = decide(asker, supply, limits)
    if isinstance(choice, Grant):
        assert asker.status == "active"
        assert supply.latest_version is not None
        assert choice.policy_version <= min(asker.policy_version, supply.latest_version)
        assert 0 <= choice.step - choice.policy_version <= limits.max_staleness
        assert choice.step >= supply.next_step
        assert choice.step <= supply.latest_version + limits.max_staleness
        assert choice.policy_version >= supply.latest_version - limits.max_staleness
    else:
        assert choice.reason


@given(ASKERS, supplies(), rules())
def test_more_supply_never_calls_for_an_earlier_batch(
    asker: Asker, supply: Supply, limits: SchedulingRules
) -> None:
    before = first_lacking(supply, limits)
    if supply.latest_version is None:
        assert before is None
        return
    more = Supply(
        next_step=supply.next_step,
        latest_version=supply.latest_version,
        free=(*supply.free, (supply.latest_version, limits.groups_per_batch)),
        under_way=supply.under_way,
        informative=supply.informative,
    )
    after = first_lacking(more, limits)
    assert after is None or (before is not None and after >= before)


@given(rules(), st.integers(0, 10), st.integers(0, 4), st.integers(0, 300), st.integers(0, 300))
def test_leases_under_way_are_bounded_by_the_lead(
    limits: SchedulingRules, latest: int, ahead: int, informative: int, other: int
) -> None:
    """However many nodes ask, work stops being given out once the batches within reach of the
    newest policy are expected to fill."""
    lead = max(0, limits.max_staleness + 1 - ahead)
    supply = Supply(latest + ahead, latest, informative=(informative, informative + other))
    need, each = lead * limits.groups_per_batch, limits.groups_per_lease * supply.share
    bound = math.ceil(need / each - 1e-6)
    granted = 0
    while isinstance(decide(Asker("active", latest), supply, limits), Grant):
        granted += 1
        assert granted <= bound
        supply = replace(supply, under_way=((latest, granted),))
    assert granted == bound


@pytest.mark.parametrize("status", ["admitted", "silent", "quarantined", "ejected", "left"])
def test_only_active_nodes_get_work(status: NodeStatus) -> None:
    choice = decide(Asker(status, 0), Supply(0, 0), RULES)
    assert choice == Wait(f"the node is {status}")


def test_nothing_is_made_before_the_first_policy() -> None:
    assert isinstance(decide(Asker("active", 0), Supply(0, None), RULES), Wait)


def test_a_worker_with_too_old_a_policy_waits() -> None:
    assert decide(Asker("active", 2), Supply(5, 5), RULES) == Wait("policy 2 is too old; load 5")
    assert decide(Asker("active", 3), Supply(5, 5), RULES) == Grant(5, 3)


def test_a_worker_ahead_of_the_store_works_with_the_newest_known_policy() -> None:
    assert decide(Asker("active", 9), Supply(5, 5), RULES) == Grant(5, 5)


def test_an_old_policy_serves_only_the_batches_it_is_fresh_for() -> None:
    filled = Supply(5, 5, free=((5, 8),))
    assert decide(Asker("active", 4), filled, RULES) == Grant(6, 4)
    assert isinstance(decide(Asker("active", 3), filled, RULES), Wait)


def test_what_a_batch_leaves_over_serves_the_next_while_fresh() -> None:
    assert first_lacking(Supply(5, 5, free=((5, 16),)), RULES) == 7
    assert first_lacking(Supply(5, 5, free=((3, 16),)), RULES) == 6
    assert first_lacking(Supply(5, 5, free=((2, 16),)), RULES) == 5


def test_batches_take_the_oldest_groups_first() -> None:
    """8 old groups fill batch 5, so the 8 new ones are there for batch 6."""
    assert first_lacking(Supply(5, 5, free=((5, 8), (3, 8))), RULES) == 7


def test_no_node_works_further_ahead_than_staleness_allows() -> None:
    full = Supply(5, 5, free=((5, 24),))
    assert isinstance(decide(Asker("active", 5), full, RULES), Wait)
    assert decide(Asker("active", 6), Supply(6, 6, free=((5, 16),)), RULES) == Grant(8, 6)


def test_uninformative_groups_call_for_more_leases() -> None:
    """4 leases of 2 groups fill 8 only if nearly every group is informative."""
    under_way = ((5, 4),)
    assert first_lacking(Supply(5, 5, (), under_way, (100_000, 100_000)), RULES) in (5, 6)
    assert first_lacking(Supply(5, 5, (), under_way, (0, 1000)), RULES) == 5
    assert Supply(5, 5, informative=(0, 100_000)).share == 0.1
    assert Supply(5, 5).share == pytest.approx(0.7)


@dataclass
class Worker:
    """A node of the simulation: `speed` in leases a tick; `kind`: what becomes of its leases."""

    speed_class: int
    speed: float
    kind: str  # works, lets them run out, hands in what is rejected
    alive: bool = True


@st.composite
def crews(draw: st.DrawFn) -> list[Worker]:
    """One to eight nodes of any classes and speeds, in any order; at least half of them work."""
    workers = draw(
        st.lists(
            st.builds(Worker, st.integers(1, 3), st.sampled_from([0.05, 0.2, 1.0]),
                      st.just("works")),
            min_size=1, max_size=5,
        )
    )  # fmt: skip
    others = draw(
        st.lists(
            st.builds(Worker, st.integers(1, 3), st.sampled_from([0.05, 0.2, 1.0]),
                      st.sampled_from(["runs out", "rejected"])),
            max_size=len(workers),
        )
    )  # fmt: skip
    return draw(st.permutations([*workers, *others]))


@st.composite
def length_budgets(draw: st.DrawFn) -> LengthBudgets:
    targets = tuple(sorted(draw(st.sets(st.integers(1, 99), min_size=1, max_size=6))))
    some = st.lists(st.sampled_from(targets), min_size=1, unique=True).map(tuple)
    by_class = draw(st.dictionaries(st.sampled_from(["1", "2", "3"]), some))
    share = draw(st.one_of(st.none(), st.integers(50_000, 500_000 // len(targets))))
    return LengthBudgets(targets=targets, by_class=by_class, min_share_micro=share, penalty_micro=0)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(crews(), length_budgets(), st.integers(0, 10**6))
def test_no_target_starves_with_any_set_of_nodes(
    crew: list[Worker], budgets: LengthBudgets, seed: int
) -> None:
    """Every target keeps its least share of the accepted leases in a long run, and no node that
    asks goes without a lease: slow ones, fast ones, one alone, with nodes that take leases and let
    them run out, hand in what is rejected, or die half-way."""
    rng = random.Random(seed)
    leases: list[list[Any]] = []  # [target, state, tick at which it was given]
    held: dict[int, list[Any]] = {}
    latest: defaultdict[int, list[list[Any]]] = defaultdict(list)
    life, run = 40, 700
    mortal = [w for w in crew if w.kind == "works"][1:]
    for tick in range(run):
        if tick == run // 3 and mortal:
            rng.choice(mortal).alive = False
        for number, worker in enumerate(crew):
            if number in held:
                lease = held[number]
                old = tick - lease[2] >= life
                if not worker.alive or (worker.kind == "runs out" and not old):
                    continue
                if rng.random() < worker.speed or old:
                    lease[1] = {"works": "accepted", "rejected": "rejected"}.get(
                        worker.kind, "expired"
                    )
                    del held[number]
            elif worker.alive:
                recent = leases[-window(budgets) :]
                tally = {target: [0, 0, 0] for target in budgets.targets}
                for asked, state, given in recent:
                    count = tally[asked]
                    count[0] += 1
                    count[1] += state == "open" and tick - given < life / 2
                    count[2] += state == "accepted"
                counts = {target: TargetCounts(*count) for target, count in tally.items()}
                own = reversed(latest[number][-2:])
                failed = [one[0] for one in takewhile(lambda one: one[1] != "accepted", own)]
                target = pick_target(worker.speed_class, counts, budgets, failed)
                assert target in budgets.targets
                leases.append([target, "open", tick])
                held[number] = leases[-1]
                latest[number].append(leases[-1])
    accepted = Counter(lease[0] for lease in leases if lease[1] == "accepted")
    whole = sum(accepted.values())
    slack = 2 * len(crew) + 2  # held when it ended or died, and rounding to whole leases
    for target in budgets.targets:
        assert accepted[target] >= 0.95 * whole * budgets.min_share / 1e6 - slack


def test_a_class_is_a_preference_and_the_least_share_comes_first() -> None:
    budgets = LengthBudgets(
        targets=(2, 6, 10, 14), by_class={"1": (2, 6), "2": (2, 6, 10, 14)}, penalty_micro=0
    )

    def after(*accepted: int) -> dict[int, TargetCounts]:
        return {
            target: TargetCounts(count, 0, count)
            for target, count in zip(budgets.targets, accepted, strict=True)
        }

    assert pick_target(1, {}, budgets) in (2, 6)
    assert pick_target(1, after(10, 9, 9, 9), budgets) == 6  # of its own, the least served
    assert pick_target(2, after(10, 9, 9, 3), budgets) == 14
    assert pick_target(1, after(20, 20, 20, 1), budgets) == 14  # it would starve otherwise
    assert pick_target(1, after(20, 20, 20, 10), budgets) in (2, 6)
    # the fast nodes keep a target well above the least, so that slow ones need not
    assert pick_target(2, after(20, 2, 20, 11), budgets) == 6
    # dropping a lease brings the same length back; a target that no node completes takes two
    # thirds of the work at most
    hopeless = after(20, 20, 20, 0) | {14: TargetCounts(asked=80)}
    assert pick_target(1, hopeless, budgets) == 14
    assert pick_target(1, hopeless, budgets, failed=[14]) == 14
    assert pick_target(1, after(10, 9, 9, 9), budgets, failed=[10]) == 10
    assert pick_target(1, hopeless, budgets, failed=[14, 6]) == 14
    assert pick_target(1, hopeless, budgets, failed=[14, 14]) in (2, 6)
    assert pick_target(2, hopeless, budgets, failed=[14, 14]) != 14


@given(st.floats(0.01, 100), st.integers(1, 3), st.floats(1e-3, 1e3))
def test_a_machines_load_changes_no_class(ratio: float, current: int, load: float) -> None:
    """Rates count as shares of the pool's median; near a border a class stays as it is."""
    ratios = (500_000, 1_500_000)
    pool = [load * rate for rate in (ratio, 1.0, 1.0)]
    median = sorted(pool)[1]
    on_border = any(math.isclose(ratio, border, rel_tol=1e-9) for border in (0.5, 1.5))
    assert on_border or class_of(pool[0] / median, ratios) == class_of(ratio, ratios)
    found = class_of(ratio, ratios, current)
    for border, between in ((0.5, {1, 2}), (1.5, {2, 3})):
        if 0.81 * border < ratio < 1.19 * border and current in between:
            assert found == current
    assert class_of(ratio, (), None) == 1


def test_nodes_behind_one_address_are_measured_one_at_a_time_and_none_blocks_the_rest() -> None:
    turns = Turns()
    a, b, c = (Address(f"0x{n:040x}") for n in (1, 2, 3))
    assert turns.take("x", a, 0.0)
    assert not turns.take("x", b, 1.0)
    assert turns.take("y", c, 1.0)  # elsewhere
    turns.done(a)
    assert turns.take("x", b, 1.5)
    # a takes a turn, stays silent and asks again and again: b's waits end all the same
    turns.done(b)
    assert turns.take("x", a, 2.0)
    got = None
    for tick in range(3, 100):
        turns.take("x", a, float(tick))
        if turns.take("x", b, float(tick)):
            got = tick
            break
    assert got is not None
    assert got <= 2 + TURN_SECONDS + 1


@dataclass
class Pool:
    """A toy pool: nodes take leases, files are judged, batches sealed, policies published."""

    limits: SchedulingRules
    rng: random.Random
    latest: int = 0
    next_step: int = 0
    free: Counter[int] = field(default_factory=Counter)
    under_way: Counter[int] = field(default_factory=Counter)
    judged: list[bool] = field(default_factory=list)
    leases: int = 0

    def supply(self) -> Supply:
        recent = self.judged[-256:]
        return Supply(
            self.next_step,
            self.latest,
            tuple(self.free.items()),
            tuple(self.under_way.items()),
            (sum(recent), len(recent)),
        )

    def ask(self, version: int) -> Grant | None:
        choice = decide(Asker("active", version), self.supply(), self.limits)
        if isinstance(choice, Wait):
            return None
        self.leases += 1
        self.under_way[choice.policy_version] += 1
        return choice

    def finish(self, grant: Grant, share: float) -> None:
        self.under_way[grant.policy_version] -= 1
        for _ in range(self.limits.groups_per_lease):
            informative = self.rng.random() < share
            self.judged.append(informative)
            if informative:
                self.free[grant.policy_version] += 1

    def seal(self) -> None:
        """Seals the next batch if it is full and near enough, as the manager does."""
        step = self.next_step
        fit = [v for v in sorted(self.free) if 0 <= step - v <= self.limits.max_staleness]
        if sum(self.free[v] for v in fit) < self.limits.groups_per_batch:
            return
        need = self.limits.groups_per_batch
        for version in fit:
            taken = min(need, self.free[version])
            self.free[version] -= taken
            need -= taken
        self.next_step += 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.2, 1.0), rules())
def test_a_pool_under_this_scheduler_goes_on_and_wastes_little(
    seed: int, nodes: int, share: float, limits: SchedulingRules
) -> None:
    pool = Pool(limits, random.Random(seed))
    working: dict[int, Grant] = {}
    ticks = 0
    while pool.latest < 12:
        ticks += 1
        assert ticks < 20_000, f"stuck at batch {pool.next_step} with {pool.supply()}"
        for node in range(nodes):
            if node in working:
                if pool.rng.random() < 0.5:
                    pool.finish(working.pop(node), share)
            elif grant := pool.ask(pool.latest):
                working[node] = grant
        pool.seal()
        if pool.next_step > pool.latest:  # the trainer trains batch `latest` on policy `latest`
            pool.latest += 1
    # a batch may cost one lease more than it needs; twice that covers the luck of the draw
    made = pool.leases * limits.groups_per_lease * share
    batch = limits.groups_per_batch + limits.groups_per_lease
    lead, in_hand = limits.max_staleness + 2, nodes * limits.groups_per_lease
    assert made <= 2 * (pool.next_step + lead) * batch + in_hand
