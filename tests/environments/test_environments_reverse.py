"""The demo's task: pinned data, held-out words apart, rewards exact in integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import run_definition

from prime_core.errors import MalformedError, PolicyError, UserError
from prime_core.run import EnvironmentRef, LengthBudgets, LengthForm, RunDefinition
from prime_envs.base import Environment
from prime_envs.environments.reverse import Reverse, word_list
from prime_envs.registry import environment_for, environment_ref, load_environment

TARGETS = (2, 6, 10, 14)


def budgets(form: LengthForm = "clip", penalty_micro: int = 150_000) -> LengthBudgets:
    return LengthBudgets(targets=TARGETS, penalty_micro=penalty_micro, form=form)


@pytest.fixture(scope="module")
def reverse() -> Reverse:
    return Reverse({}, budgets())


def run_with(ref: EnvironmentRef) -> RunDefinition:
    return run_definition(environment=ref, max_output_tokens=40, budgets=budgets())


def test_no_word_appears_twice_so_heldout_words_are_never_trained_on() -> None:
    words = word_list(3, 5)
    assert len(set(words)) == len(words) > 10_000
    assert all(word.isascii() and word.islower() and 3 <= len(word) <= 5 for word in words)


def test_the_heldout_tail_is_a_fair_sample_of_lengths() -> None:
    words = word_list(3, 5)
    share = [sum(len(w) == 5 for w in part) / len(part) for part in (words[:-256], words[-256:])]
    assert abs(share[0] - share[1]) < 0.1


def test_prompt_asks_for_the_dots_in_two_digits(reverse: Reverse) -> None:
    problem = reverse.problem(0)
    assert reverse.prompt_text(problem, 6) == f"06|{problem.prompt}>"
    assert problem.answer == problem.prompt[::-1]


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("......={a}", 1_000_000),
        ("......={a}\n", 1_000_000),
        (".....={a}", 850_000),
        ("........={a}", 700_000),
        ("={a}", 100_000),
        (".............={a}", 0),  # 7 dots off: 1 − 1.05 is clipped at zero
        ("......={a}x", 0),
        ("......={w}", 0),
        ("......={a}\n\n", 0),
        ("......={a}={a}", 0),
        (" ......={a}", 0),
        ("......={A}", 0),
        ("......", 0),
        ("", 0),
    ],
)
def test_reward_is_for_the_exact_word_less_each_dot_off(
    reverse: Reverse, output: str, reward: int
) -> None:
    problem = next(p for p in map(reverse.problem, range(99)) if p.prompt != p.answer)
    text = output.format(a=problem.answer, w=problem.prompt, A=problem.answer.upper())
    grade = reverse.grade(problem, 6, text, len(text))
    assert grade.reward_micro == reward
    assert grade.score == reward / 1e6


@given(st.text(alphabet=".=abxyz\n", max_size=60), st.sampled_from(TARGETS))
def test_any_text_is_graded_within_bounds_and_the_same_each_time(text: str, target: int) -> None:
    environment = Reverse({}, budgets())
    problem = environment.problem(7)
    first = environment.grade(problem, target, text, len(text))
    assert 0 <= first.reward_micro <= 1_000_000
    assert environment.grade(problem, target, text, len(text)) == first


def test_an_endless_answer_is_graded_in_bounded_time(reverse: Reverse) -> None:
    grade = reverse.grade(reverse.problem(0), 6, "." * 50_000_000, 40)
    assert grade.reward_micro == 0


def test_the_digest_pins_words_arguments_and_version(
    reverse: Reverse, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = "0x77563e26919548f0f96e6efbff39efd3df74de2dde96ff3e5970a3bca2ffa1fd"
    assert Reverse({"shortest": 3, "longest": 5}, budgets()).digest() == pinned
    others = {
        Reverse({"shortest": 3, "longest": 6}, budgets()).digest(),
        reverse.digest(),
        pinned,
    }
    monkeypatch.setattr(Reverse, "version", 2)
    others.add(reverse.digest())
    assert len(others) == 4


@pytest.mark.parametrize("arguments", [{"shortest": 0}, {"longest": "five"}, {"words": 3}])
def test_wrong_arguments_are_refused_in_one_sentence(arguments: dict[str, int | str]) -> None:
    with pytest.raises(UserError, match="reverse environment"):
        Reverse(arguments, budgets())


def test_a_problem_outside_the_list_is_malformed(reverse: Reverse) -> None:
    for index in (-1, len(reverse)):
        with pytest.raises(MalformedError):
            reverse.problem(index)


def test_a_run_accepts_only_the_environment_that_it_pins() -> None:
    ref = environment_ref("reverse", {}, budgets(), train_size=100, heldout_size=10)
    assert isinstance(environment_for(run_with(ref)), Environment)
    other = ref.model_copy(update={"digest": "0x" + "11" * 32})
    with pytest.raises(PolicyError, match="install the version"):
        environment_for(run_with(other))
    greedy = ref.model_copy(update={"train_size": 10**6})
    with pytest.raises(PolicyError, match="problems"):
        environment_for(run_with(greedy))


def test_an_unknown_environment_names_those_that_are_known() -> None:
    with pytest.raises(UserError, match="reverse"):
        load_environment("no_such_thing", {}, budgets())
