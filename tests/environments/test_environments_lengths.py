"""The length reward in its three forms."""

from __future__ import annotations

import statistics
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_envs.lengths import (
    TOLERANCE,
    balanced_targets,
    budgets_from,
    file_seconds,
    length_reward,
)
from prime_envs.prompts import think_for, with_budget
from prime_node.worker.rollout_builder import Job, Options, RolloutBuilder
from prime_orchestrator.cli.run import define
from prime_verify.build import plan_rows

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


def test_the_wording_is_in_one_place_and_names_the_target() -> None:
    assert think_for(2000) == "Think for 2000 tokens before giving a response."
    assert with_budget("What is 1 + 1?", 2000) == f"What is 1 + 1?\n\n{think_for(2000)}"


def test_a_node_four_times_slower_is_asked_for_a_quarter() -> None:
    chosen = balanced_targets(range(1000, 11_000, 1000), {1: Fraction(1), 2: Fraction(4)})
    assert chosen == {"1": (1000, 2000, 3000), "2": (6000, 7000, 8000, 9000, 10_000)}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=10, unique=True),
    st.lists(st.fractions(Fraction(1, 4), 8, max_denominator=16), min_size=1, max_size=4),
    st.integers(0, 500),
)
def test_files_of_all_classes_take_about_equally_long_or_the_menu_is_refused(
    menu: list[int], speeds: list[Fraction], answer: int
) -> None:
    by_class = dict(enumerate(speeds, start=1))
    try:
        chosen = balanced_targets(menu, by_class, answer_tokens=answer)
    except UserError:
        assume(False)
    times = [file_seconds(chosen[str(n)], s, answer) for n, s in by_class.items()]
    assert max(times) <= TOLERANCE * min(times)
    assert all(targets and set(targets) <= set(menu) for targets in chosen.values())


def test_one_class_gets_the_whole_menu_and_equals_get_the_same() -> None:
    assert balanced_targets([3, 1, 2, 2], {1: Fraction(5)}) == {"1": (1, 2, 3)}
    same = balanced_targets([1, 2, 3], {1: Fraction(2), 2: Fraction(2)})
    assert same["1"] == same["2"] == (1, 2, 3)


@pytest.mark.parametrize(
    ("menu", "speeds"),
    [
        ([], {1: Fraction(1)}),
        ([1, 2], {}),
        ([1, 2], {1: Fraction(0)}),
        ([-1, 2], {1: Fraction(1)}),
        ([0], {1: Fraction(1)}),
        (list(range(1, 99)), {1: Fraction(1)}),
        ([1000], {1: Fraction(1), 2: Fraction(4)}),
    ],
)
def test_what_cannot_be_balanced_is_refused(menu: list[int], speeds: dict[int, Fraction]) -> None:
    with pytest.raises(UserError):
        balanced_targets(menu, speeds)


def _values(budgets: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": {"name": "reverse", "train_size": 100, "heldout_size": 10},
        "budgets": budgets, "name": "b", "max_output_tokens": 60, "samples_per_group": 2,
        "groups_per_lease": 8, "groups_per_batch": 8, "task": {"image": "process"},
        "price_per_unit": 1, "stake_per_seat": 10_000, "slash_amount": 1,
    }  # fmt: skip


MODEL = Path(__file__).resolve().parents[2] / "devnet" / "model"
MENU = {"menu": list(range(4, 49, 4)), "speeds": {"1": 1, "2": 4}, "penalty_micro": 0}


def test_a_runs_toml_may_name_menu_and_speeds_instead_of_classes() -> None:
    run = define(_values(dict(MENU)), Path("run.toml"), MODEL)
    chosen = balanced_targets(range(4, 49, 4), {1: Fraction(1), 2: Fraction(4)})
    assert run.budgets.by_class == chosen
    assert budgets_from({"targets": [3]}) == {"targets": [3]}
    for wrong in ({"menu": [1]}, {"menu": [1], "speeds": {"1": 1}, "by_class": {}},
                  {"menu": ["x"], "speeds": {"1": 1}}, {"menu": [1], "speeds": [1]}):  # fmt: skip
        with pytest.raises(UserError, match="budgets"):
            budgets_from(wrong)


class _Paced(RolloutBuilder):
    """A worker on a clock of the test's own: a token takes a thousandth of a second, and each row
    is as long as its lease asks. Leases, plan, budgets and slowing down are the real ones."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def make(self, job: Job, engine: Any) -> bytes:
        plan = plan_rows(
            job.signed.lease, job.lease_digest, self.run, self.environment, self.tokenizer
        )
        self.now += sum(row.target_length for row in plan) / 1000
        return self.file


@pytest.mark.slow
def test_files_of_a_node_slowed_fourfold_take_as_long_as_the_others(tmp_path: Path) -> None:
    from prime_verify.calibrate import synthetic_lease
    from prime_verify.engines import load_engine

    run = define(_values(dict(MENU)), Path("run.toml"), MODEL)
    engine = load_engine(MODEL, threads=1)
    medians = {}
    for speed_class, throttle in ((1, 4.0), (2, 1.0)):
        builder = _paced(tmp_path, run, engine, throttle)
        seconds = []
        for number in range(15):
            signed = synthetic_lease(run, number, policy_version=0).signed
            asked = run.budgets.preferred(speed_class)
            target = asked[number % len(asked)]
            lease = signed.lease.model_copy(update={"target": target})
            digest = Digest(encoding.sha256(f"{number}{speed_class}".encode()))
            seconds.append(
                builder.build(Job(signed.model_copy(update={"lease": lease}), digest)).seconds
            )
        medians[speed_class] = statistics.median(seconds)
    assert max(medians.values()) <= 1.25 * min(medians.values())


@pytest.mark.slow
def test_a_slowed_node_with_several_leases_makes_one_file_at_a_time(tmp_path: Path) -> None:
    from prime_verify.calibrate import synthetic_lease
    from prime_verify.engines import load_engine

    run = define(_values(dict(MENU)), Path("run.toml"), MODEL)
    builder = _paced(tmp_path, run, load_engine(MODEL, threads=1), 4.0)
    second, at_once = threading.Event(), []

    def make(job: Job, engine: Any) -> bytes:
        if made:
            second.set()
        made.append(job.lease_digest)
        return builder.file

    made: list[Digest] = []
    builder.make = make  # type: ignore[method-assign]
    builder._sleep = lambda _seconds: at_once.append(second.wait(0.5 if len(made) == 1 else 0))
    jobs = [
        Job(synthetic_lease(run, n, policy_version=0).signed, Digest(encoding.sha256(bytes([n]))))
        for n in range(2)
    ]
    threads = [threading.Thread(target=builder.build, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(job.lease_digest for job in jobs)
    assert at_once == [False, True], "the second file was begun while the first one slept"


def _paced(folder: Path, run: Any, engine: Any, throttle: float) -> Any:
    builder: Any = _Paced(run, Options(folder, folder, folder, throttle=throttle))
    builder._clock, builder._sleep = builder.clock, lambda _seconds: None
    builder.tokenizer = engine.tokenizer
    builder.file = _one_file(run, engine)
    builder.engines.engine = lambda *_: engine
    return builder


def _one_file(run: Any, engine: Any) -> bytes:
    """Any sound rollout file: the worker counts the tokens of what it made."""
    from prime_envs.registry import environment_for
    from prime_verify.build import build_rollout_file
    from prime_verify.calibrate import synthetic_lease

    honest = synthetic_lease(run, 0, policy_version=0)
    return build_rollout_file(honest.signed, honest.lease_digest, run, engine, environment_for(run))
