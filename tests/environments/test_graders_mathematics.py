r"""Mathematics: the answer is paid, and nothing that merely looks like one."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.errors import MalformedError
from prime_core.run import MICRO
from prime_envs.graders.mathematics import Mathematics, read_numeral, same_number
from prime_envs.tasks import Task, parse_task


@pytest.fixture(scope="module")
def grader() -> Iterator[Mathematics]:
    made = Mathematics()
    yield made
    made.close()


def task(gold: object) -> Task:
    row = {
        "problem_id": "1", "task_type": "verifiable_math", "prompt": "?",
        "verification_info": {"ground_truth": gold},
    }  # fmt: skip
    return parse_task(row, "file.jsonl row 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "5"), ("5", "x=5"), ("5", "5.0"), ("5", "+5"), ("-3", "−3"), ("5", r"5 \text{ cm}"),
        ("90^\\circ", "90"), ("1,234", "1234"), ("1234", r"1{,}234"), ("0.5", r"50\%"),
        (r"\frac12", "0.5"), (r"\frac{1}{2}", "1/2"), (r"1\frac{1}{2}", "3/2"),
        ("1/3", "0.333333"), (r"12 \times 10^{3}", "12000"), (r"\$13", "13"), ("$12$", "12"),
        ("A", "(A)"), (r"\text{(B)}", "B"), (r"\text{Monday}", "monday"), ("yes", r"\text{Yes}"),
        (r"\sqrt{8}", r"2\sqrt{2}"), ("x^2-1", "(x-1)(x+1)"), (r"2\pi", "2π"),
        (r"\{1,2\}", "2, 1"), ("(1,2)", "(1,2)"), ("y=2x+1", "2x+1"), ("2^{10}", "1024"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (7, "7"),
        (r"\boxed{7}", "7"),
    ],
)  # fmt: skip
def test_the_answer_however_it_is_written_scores_one(
    grader: Mathematics, gold: object, answer: str
) -> None:
    score = grader.grade(task(gold), f"so it is $\\boxed{{{answer}}}$.")
    assert (score.task_micro, score.uncertain) == (MICRO, False), score.reason


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("5", r"\boxed{4}"),
        ("5", ""),
        ("5", "5"),
        ("5", r"\boxed{}"),
        ("5", r"\boxed{5} or \boxed{4}"),
        ("5", r"\boxed{5} and \boxed{5}"),
        ("5", r"\boxed{\boxed{5}}"),
        ("5", r"\boxed{4} \boxed{5"),
        ("5", r"\fbox{4} \boxed{5}"),
        ("5", r"\boxed{3, 5}"),
        ("5", r"\boxed{3 \text{ or } 5}"),
        ("5", r"\boxed{5 \lor 3}"),
        ("5", r"\boxed{\{5, 3\}}"),
        ("5", r"\boxed{\{5\}}"),
        ("5", r"\boxed{[5, 5]}"),
        ("5", r"\boxed{(4, 6)}"),
        ("5", r"\boxed{x \in \{5\}}"),
        ("5", r"\boxed{(-\infty, \infty)}"),
        ("5", r"\boxed{\pm 5}"),
        ("5", r"\boxed{5 \pm 0}"),
        ("5", r"\boxed{1=2=3=4=5}"),
        ("5", r"\boxed{3=5}"),
        ("5", r"\boxed{5 \text{ (not 4)}}"),
        ("5", r"\boxed{5; 3}"),
        ("5", "\\boxed{５}"),
        ("5", "\\boxed{٥}"),
        ("5", r"\boxed{x}"),
        ("5", r"\boxed{\max(5, 3)}"),
        ("5", r"\boxed{\int_0^5 1 dx}"),
        ("5", r"\boxed{\sum_{i=1}^{5} 1}"),
        ("5", r"\boxed{2+3}"),
        ("120", r"\boxed{5!}"),
        ("5", r"\boxed{5}</think>"),
        ("5", r"<think> \boxed{5}"),
        ("5", r"\boxed{5}</think> so the answer is \boxed{4}"),
        ("5", r"\boxed{5000001/1000000}"),
        ("5", r"\boxed{5.0000000001}"),
        ("5", r"\boxed{5 \quad 3}"),
        ("5", r"\boxed{5 \\ 3}"),
        ("5", r"\boxed{5\ne 4}"),
        ("5", r"\boxed{\begin{cases}5\\3\end{cases}}"),
        ("5", r"\boxed{5\%}"),
        ("5", r"\boxed{5}{4} \boxed{}"),
        (r"\sqrt{2}", r"\boxed{\substack{\sqrt{2}\\3}}"),
        (r"\sqrt{2}", r"\boxed{\frac{0}{0}}"),
        ("0.0000001", r"\boxed{0.0}"),
        ("B", r"\boxed{A or B}"),
        ("B", r"\boxed{A, B, C, D}"),
        (r"\text{Monday}", r"\boxed{\text{Monday or Tuesday}}"),
        (r"\sqrt{2}", r"\boxed{\sqrt{2} \text{ or } \sqrt{3}}"),
        (r"\sqrt{2}", r"\boxed{\{\sqrt{2}\}}"),
        (r"\sqrt{2}", r"\boxed{[\sqrt{2}, \sqrt{2}]}"),
        (r"\sqrt{2}", r"\boxed{x = y = \sqrt{2}}"),
        (r"\sqrt{2}", r"\boxed{x}"),
        ("(1,2)", r"\boxed{\{1, 2\}}"),
        (r"\{1,2\}", r"\boxed{\{1,2,3\}}"),
        (r"\frac{n(n+1)}{2}", r"\boxed{\sum_{i=1}^n i}"),
        ("x^2", r"\boxed{9^{9^{9^{9}}}}"),
        ("x^2", r"\boxed{(x+1)^{100000000}}"),
        ("x^2", "\\boxed{" + "(" * 300 + "x" + ")" * 300 + "}"),
        ("x^2", "\\boxed{__import__('os').system('true')}"),
        ("x^2", "\\boxed{" * 20000),
        ("x^2", "\\boxed{x^2\x00}"),
    ],
)
def test_hedges_tricks_and_wrong_answers_score_nothing(
    grader: Mathematics, gold: str, text: str
) -> None:
    score = grader.grade(task(gold), text)
    assert score.task_micro == 0, score.reason
    assert score.reason
    assert not score.uncertain


@pytest.mark.slow
def test_an_answer_that_hangs_is_killed_without_an_accusation_and_two_processes_agree(
    grader: Mathematics,
) -> None:
    other = Mathematics(cpu_seconds=1.0)
    try:
        bomb = r"\boxed{(x+y+z+w+1)^{9999}(x-1)^{9999}}"
        score = other.grade(task("x^{2}"), bomb)
        assert (score.task_micro, score.uncertain) == (0, True)
        for text in (r"\boxed{(x-1)(x+1)}", r"\boxed{x^2}", r"\boxed{x^2-1} \boxed{1}", "none"):
            one, two = grader.grade(task("x^2-1"), text), other.grade(task("x^2-1"), text)
            assert (one.task_micro, one.reason) == (two.task_micro, two.reason)
    finally:
        other.close()


@pytest.mark.parametrize(
    "info",
    [
        {"ground_truth": ""},
        {"ground_truth": None},
        {"x": 1},
        {"ground_truth": True},
        {"ground_truth": "1" * 9999},
    ],
)
def test_a_task_without_an_answer_is_refused_with_file_and_row(
    grader: Mathematics, info: dict[str, object]
) -> None:
    row = {"problem_id": "1", "task_type": "verifiable_math", "prompt": "?",
           "verification_info": info}  # fmt: skip
    with pytest.raises(MalformedError, match=r"file\.jsonl row 3"):
        grader.require(parse_task(row, "file.jsonl row 3"))


@given(st.integers(-(10**30), 10**30))
def test_every_integer_is_read_back(number: int) -> None:
    for text in (str(number), f"{number:,}", f"{number}.0"):
        read = read_numeral(text)
        assert read is not None
        assert read.exact == number


@given(st.fractions(), st.fractions())
def test_fractions_are_equal_only_if_they_are(one: Fraction, two: Fraction) -> None:
    texts = [f"\\frac{{{f.numerator}}}{{{f.denominator}}}" for f in (one, two)]
    numbers = [read_numeral(text) for text in texts]
    assert numbers[0] is not None
    assert numbers[1] is not None
    assert same_number(numbers[0], numbers[1]) == (one == two)


@given(st.text(alphabet=r"0123456789.,-+/\{}frac^%$ xe", max_size=40))
def test_any_text_is_a_number_or_none_and_never_an_error(text: str) -> None:
    read_numeral(text)
