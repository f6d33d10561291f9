"""The length reward in its three forms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.environments.lengths import length_reward

tasks = st.integers(0, 1_000_000)
lengths = st.integers(0, 100_000)
penalties = st.integers(0, 1_000_000)


def test_exact_is_the_ancestors_formula() -> None:
    # r_task − 0.0003·|2000 − 1500| (arXiv 2505.07291)
    reward = length_reward(1_000_000, target=2000, actual=1500, penalty_micro=300, form="exact")
    assert reward == 850_000


@given(tasks, lengths, lengths, penalties)
def test_exact_and_clip_peak_at_the_target_and_agree_above_zero(
    task: int, target: int, actual: int, penalty: int
) -> None:
    exact = length_reward(task, target=target, actual=actual, penalty_micro=penalty, form="exact")
    clip = length_reward(task, target=target, actual=actual, penalty_micro=penalty, form="clip")
    assert clip == max(0, exact)
    assert exact <= task
    at = length_reward(task, target=target, actual=target, penalty_micro=penalty, form="exact")
    assert at == task
    mirrored = 2 * target - actual
    again = length_reward(task, target=target, actual=mirrored, penalty_micro=penalty, form="exact")
    assert again == exact


@given(tasks, lengths, lengths, penalties)
def test_max_never_pays_a_longer_answer_more(
    task: int, target: int, actual: int, penalty: int
) -> None:
    one = length_reward(task, target=target, actual=actual, penalty_micro=penalty, form="max")
    two = length_reward(task, target=target, actual=actual + 1, penalty_micro=penalty, form="max")
    assert 0 <= two <= one <= task
