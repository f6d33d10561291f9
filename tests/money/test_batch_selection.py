"""A surplus of groups, and the rule that chooses among them; the scheduler asks for as much."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prime_core.batch import FreeGroup, choose
from prime_core.encoding import sha256
from prime_orchestrator.scheduler import SchedulingRules, Supply, first_lacking


def group(number: int, reward_micro: int, version: int = 0, informative: bool = True) -> FreeGroup:
    name = sha256(f"submission {number}".encode())
    return FreeGroup(name, 0, version, 4, informative, 4 * reward_micro, 1.0, name, 10, name)


def rewards(chosen: tuple[FreeGroup, ...] | None) -> list[int]:
    assert chosen is not None
    return sorted(g.reward_micro_sum // g.rows for g in chosen)


def test_by_difficulty_the_middling_groups_are_taken_and_never_one_without_difference() -> None:
    free = [group(i, r) for i, r in enumerate((50_000, 450_000, 950_000, 520_000, 800_000))]
    free.append(group(9, 500_000, informative=False))
    found = choose(
        free, step=0, groups_per_batch=2, max_staleness=2, surplus=3, selection="difficulty"
    )
    assert rewards(found) == [450_000, 520_000]


def test_the_difficulty_of_a_group_leaves_out_rows_that_were_not_graded() -> None:
    hard, partly = group(1, 300_000), replace(group(2, 250_000), ungraded=2)  # 0.5 of two rows
    found = choose((hard, partly), step=0, groups_per_batch=1, max_staleness=0,
                   selection="difficulty")  # fmt: skip
    assert found == (partly,)


def test_a_batch_waits_until_its_surplus_lies_ready() -> None:
    free = [group(i, 500_000) for i in range(4)]
    assert choose(free, step=0, groups_per_batch=3, max_staleness=2, surplus=2) is None
    assert choose(free, step=0, groups_per_batch=3, max_staleness=2, surplus=1) is not None


@given(
    st.lists(st.tuples(st.integers(0, 1_000_000), st.integers(0, 3)), max_size=20),
    st.integers(1, 6), st.integers(0, 5), st.sampled_from(["arrival", "difficulty"]), st.randoms(),
)  # fmt: skip
def test_the_choice_is_full_without_repetition_and_the_orders_play_no_part(
    pool: list[tuple[int, int]], size: int, surplus: int, selection: str, shuffle: random.Random
) -> None:
    free = [group(i, reward, version) for i, (reward, version) in enumerate(pool)]
    rules = {"step": 3, "groups_per_batch": size, "max_staleness": 2, "surplus": surplus}
    chosen = choose(free, selection=selection, **rules)  # type: ignore[arg-type]
    fit = [g for g in free if 3 - g.policy_version <= 2]
    if len(fit) < size + surplus:
        assert chosen is None
        return
    assert chosen is not None
    assert len({g.submission_digest for g in chosen}) == size
    shuffle.shuffle(free)
    assert choose(free, selection=selection, **rules) == chosen  # type: ignore[arg-type]
    if selection == "difficulty":
        off = [abs(g.reward_micro_sum - 4 * 500_000) for g in fit]
        taken = [abs(g.reward_micro_sum - 4 * 500_000) for g in chosen]
        assert sorted(taken) == sorted(off)[:size]


def test_the_scheduler_asks_for_the_surplus_too_but_no_more() -> None:
    rules = SchedulingRules(groups_per_batch=4, groups_per_lease=2, max_staleness=0, surplus=2)
    for groups, lacking in ((5, 0), (6, None)):
        supply = Supply(next_step=0, latest_version=0, free=((0, groups),))
        assert first_lacking(supply, rules) == lacking
    # What one batch leaves over serves the next.
    rules = SchedulingRules(groups_per_batch=4, groups_per_lease=2, max_staleness=1, surplus=2)
    supply = Supply(next_step=0, latest_version=0, free=((0, 9),))
    assert first_lacking(supply, rules) == 1
    supply = Supply(next_step=0, latest_version=0, free=((0, 10),))
    assert first_lacking(supply, rules) is None
