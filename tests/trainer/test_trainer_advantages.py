"""Advantages: three forms, each a fixed linear picture of the rewards of one group."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_trainer.advantages import AdvantageForm, group_advantages

FORMS: tuple[AdvantageForm, ...] = ("mean_std", "mean", "leave_one_out")
groups = st.lists(
    st.integers(-2_000_000, 2_000_000).map(lambda x: x / 1e6), min_size=2, max_size=32
)


@given(groups, st.sampled_from(FORMS))
def test_advantages_sum_to_zero_and_keep_the_order(
    rewards: list[float], form: AdvantageForm
) -> None:
    found = group_advantages(rewards, form)
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(found[a] <= found[b] for a, b in pairwise(order))


@given(groups)
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    for number, value in enumerate(group_advantages(rewards, "leave_one_out")):
        others = rewards[:number] + rewards[number + 1 :]
        assert value == pytest.approx(rewards[number] - statistics.fmean(others), abs=1e-9)


@given(groups)
def test_mean_std_divides_by_the_sample_deviation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    for reward, value in zip(rewards, group_advantages(rewards, "mean_std"), strict=True):
        assert value == pytest.approx((reward - mean) / (std + 1e-6), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, math.nan], [math.inf, 0.0]])
def test_a_group_that_cannot_be_compared_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(rewards, "mean")
