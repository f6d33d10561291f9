"""What an answer or a dataset's row does to its grader: nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_core.errors import MalformedError
from prime_core.run import MICRO, LengthBudgets
from prime_envs.environments.reasoning_gym import ReasoningGym
from prime_envs.environments.tasks import TaskDataset
from prime_envs.graders.answers import last_json_object
from prime_envs.graders.base import grader_class
from prime_envs.graders.families import answers_in
from prime_envs.graders.formats import RULES
from prime_envs.reasoning import EVALUATED, only_data
from prime_envs.sandbox import kernel
from prime_envs.subprocess_grader import GradingRaisedError, SubprocessGrader
from prime_envs.tasks import MAX_DEPTH, Task, load_json

BUDGETS = LengthBudgets(targets=(100,), penalty_micro=0)
needs_filter = pytest.mark.skipif(
    not kernel.supported(), reason="the filter needs Linux on x86-64 or aarch64"
)
TOUCH = "__import__('os').system('touch {}')"


def family_task(family: str, metadata: dict[str, Any]) -> Task:
    info = {"answer": "5", "metadata": {"source_dataset": family, **metadata}}
    return Task("1", "reasoning_gym", "?", info, where="file.jsonl row 1")


# --- programs as answers, programs in rows -------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "answer", "shown"),
    [
        ("countdown", "29 + 3*(7 - 4)/2", True),
        ("puzzle24", "8*(5*1 - 2)", True),
        ("simple_integration", "7*X**9 - 2*sin(X) + C", True),
        ("intermediate_integration", "3*x**3*sin(3*x) + C", True),
        ("polynomial_multiplication", "-38000*z**9 + 64*z", True),
        ("spiral_matrix", "1 2 3 4", True),
        ("spiral_matrix", "[1, 2, 3]", True),
        ("string_insertion", "ADBEAACE", True),
        ("string_insertion", "['A', 'D']", True),
        ("n_queens", "_ Q _ _\n_ _ _ Q\nQ _ _ _\n_ _ Q _", True),
        ("gcd", "__import__('os')", True),  # never evaluated
        ("countdown", "__import__('os').system('true')", False),
        ("countdown", "max(29, 3)", False),
        ("countdown", "(lambda: 5)()", False),
        ("countdown", "S('5')", False),
        ("countdown", "x.__class__", False),
        ("countdown", "f'{x}'", False),
        ("countdown", "[y for y in (1, 2)]", False),
        ("countdown", "exp(5, evaluate=x)", False),
        ("countdown", "5! + open", False),
        ("string_insertion", "oracle_answer", False),
        ("spiral_matrix", "entry['answer']", False),
        ("binary_matrix", "(y := 5)", False),
        ("number_sorting", "eval ('5') !", False),
        ("countdown", "(x - x)*(29 + 3) + x/x + x/x", False),  # any number, of none that is given
        ("countdown", "5 # 29 3", False),
        ("puzzle24", "-cos(pi) + 0*29", False),
        ("simple_integration", "Integral(2*x, x)", False),  # the question itself
        ("intermediate_integration", "3*Integral(x**3*cos(3*x), x) + C", False),
        ("puzzle24", "4!*1*1*1", False),  # sums of the given numbers, and nothing else
        ("puzzle24", "2**3*3*1", False),
        ("countdown", "29//3", False),
        ("countdown", "2.9 * 3", False),  # a 2 and a 9
        ("countdown", "[5 + 3][0]", False),
        ("countdown", "(29 + 3) *\n 4 - -2", True),
        ("number_sorting", "['-69', '4.5', '1e3']", True),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("simple_integration", "exp('5 + x')", False),  # sympy evaluates a function's text
        ("simple_integration", "exp('print(5)')", False),
        ("simple_integration", r"exp('\160\162\151\156\164(5)')", False),
        ("simple_integration", r"exp('\160\162\151\156\164(5)') + 0!", False),
        ("simple_integration", "exp(b'5')", False),
    ],
)
def test_a_scorer_that_evaluates_is_shown_data_and_arithmetic_only(
    family: str, answer: str, shown: bool
) -> None:
    assert only_data(family, answer) is shown


def test_every_family_that_evaluates_answers_is_known() -> None:
    import inspect

    pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
    from reasoning_gym.factory import DATASETS

    words = ("eval(", "exec(", "parse_expr(", "sympify(")
    found = {
        name
        for name, (kind, _config) in DATASETS.items()
        if any(word in inspect.getsource(kind.score_answer) for word in words)
    }
    assert found <= EVALUATED


@pytest.mark.slow
@needs_filter
@pytest.mark.parametrize("walled", [True, False])
def test_an_answer_that_is_a_program_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walled: bool
) -> None:
    """Nor does it where the first wall, the look at the answer, is not there."""
    pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
    if not walled:
        monkeypatch.setattr("prime_envs.environments.reasoning_gym.only_data", lambda *_: True)
    mark = tmp_path / "was-here"
    environment = ReasoningGym({"family": "spiral_matrix", "seed": 1}, BUDGETS)
    try:
        problem = environment.problem(0)
        score = environment.check(problem, "Answer: " + TOUCH.format(mark), 5)
        assert score.task_micro == 0
        assert environment.check(problem, f"Answer: {problem.answer}", 5).task_micro == MICRO
    finally:
        environment.close()
    assert not mark.exists()


@pytest.mark.slow
@needs_filter
def test_an_answer_that_is_a_program_in_text_earns_nothing() -> None:
    """It would change the scorer that grades it: every answer would be right."""
    pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
    program = """eval("setattr(__import__('sympy'), 'simplify', lambda e: 0)") or Integer(0)"""
    spelled = "".join(f"\\{ord(letter):03o}" for letter in program)
    environment = ReasoningGym({"family": "simple_integration", "seed": 1}, BUDGETS)
    try:
        for answer in (f'exp("{spelled}")', f'exp("{spelled}") + 0!'):
            score = environment.check(environment.problem(0), f"Answer: {answer}", 5)
            assert (score.task_micro, score.uncertain) == (0, False)
    finally:
        environment.close()


@pytest.mark.slow
@needs_filter
def test_a_row_that_is_a_program_starts_nothing(tmp_path: Path) -> None:
    """`bitwise_arithmetic` evaluates what the row calls its problem."""
    pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
    mark = tmp_path / "was-here"
    grader = grader_class("reasoning_gym")()
    try:
        task = family_task("bitwise_arithmetic", {"problem": TOUCH.format(mark)})
        assert grader.grade(task, "Answer: 0x1").task_micro < MICRO
        # two integrations that load parts of sympy late are scored all the same
        task = family_task("simple_integration", {"integrand": "2*x", "variable": "x"})
        for answer, worth in (("x**2 + C", MICRO), ("sin(x) + C", 0), ("17", 0)):
            score = grader.grade(task, f"Answer: {answer}")
            assert (score.task_micro == MICRO, score.uncertain) == (worth == MICRO, False)
    finally:
        grader.close()
    assert not mark.exists()


CONFINED = """
import os, socket
from prime_envs.grading_child import MAX_ANSWER_BYTES
def target(request):
    here = os.getpid()
    def scored():
        try:
            if request == "open": open("/etc/passwd")
            if request == "start": os.posix_spawn("/bin/true", ["true"], {})
            if request == "connect": socket.socket()
            if request == "signal": os.kill(os.getppid(), 0)
            if request == "late":
                try:
                    import wave
                except ImportError:
                    pass
            if request == "talk":
                for d in range(3, 64):
                    try: os.write(d, b'{"answer": 5, "cpu_seconds": 0}\\n')
                    except OSError: pass
            if request == "flood": return "x" * (MAX_ANSWER_BYTES + 1)
        except OSError as error:
            return type(error).__name__
        return "done"
    return scored
"""


@needs_filter
def test_a_confined_grader_can_only_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "confined_target.py").write_text(CONFINED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with SubprocessGrader("confined_target:target", fork=True, confined=True) as grader:
        assert grader.call("nothing") == "done"
        for request in ("open", "start", "connect", "signal"):
            assert grader.call(request) == "PermissionError"
        with pytest.raises(GradingRaisedError, match="loads wave only when it grades"):
            grader.call("late")
        with pytest.raises(Exception, match="without end"):
            grader.call("flood")
        assert grader.call("nothing") == "done"


@needs_filter
def test_no_confined_process_can_have_another_one_signalled() -> None:
    """fcntl(2) can name any process of the same user as the owner of a pipe's signals."""
    script = (
        "import fcntl, os, sys\n"
        "from prime_envs.sandbox import kernel\n"
        "read, write = os.pipe()\n"
        "kernel.allow_only_computing()\n"
        "fcntl.fcntl(read, fcntl.F_GETFL)\n"
        "fcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK)\n"
        "refused = 0\n"
        "for command, value in ((fcntl.F_SETOWN, os.getppid()), (10, 9), (15, 0),\n"
        "                       (fcntl.F_SETFL, os.O_ASYNC)):\n"
        "    try: fcntl.fcntl(read, command, value)\n"
        "    except OSError: refused += 1\n"
        "os.write(1, b'%d' % refused)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"4"), done.stderr


# --- the same everywhere -------------------------------------------------------------------------


@pytest.mark.slow
@needs_filter
@pytest.mark.parametrize("family", ["isomorphic_strings", "list_functions"])
def test_problems_do_not_depend_on_a_process_hash_seed_or_its_generators(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one walks a set of text, the other draws from the global generator."""
    pytest.importorskip("reasoning_gym", reason="pip install 'prime-open[families]'")
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        environment = ReasoningGym({"family": family, "seed": 1}, BUDGETS)
        try:
            found.append([environment.problem(index) for index in range(12)])
            # asked out of order, and by somebody who starts in the middle, they are the same
            environment._entry.cache_clear()
            assert environment.problem(7) == found[-1][7]
        finally:
            environment.close()
    assert found[0] == found[1]


def test_a_grading_child_sees_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_WALLET_PASSWORD", "secret")
    with SubprocessGrader("os:getenv") as grader:
        assert grader.call("PRIME_WALLET_PASSWORD") is None
        assert grader.call("PATH") == os.environ["PATH"]
        assert grader.call("PYTHONHASHSEED") == "0"


# --- walls of text: these hang where a search begins again at every letter ------------------------


def test_walls_of_text_are_read_in_one_pass() -> None:
    wall = 1 << 20
    keeps = RULES["sentences"][1]
    assert not keeps("a" * wall, {"least": 1})
    assert keeps("It is 3.14. Is it?! Yes.\n", {"least": 3, "most": 3})
    assert answers_in("<answer>" * (wall // 8)) == []
    assert answers_in("<answer>1</answer> or <answer>2</answer>") == ["1", "2"]


# --- rows that are too deep, or no text ----------------------------------------------------------


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_json_nested_deeper_than_the_bound_is_malformed() -> None:
    assert load_json(nested(MAX_DEPTH), "it") is not None
    assert load_json(json.dumps([{"a": [1]}] * 100), "it") is not None
    for depth in (MAX_DEPTH + 1, 400, 980, 5000):
        with pytest.raises(MalformedError, match="nested too deeply"):
            load_json(nested(depth), "it")
        assert last_json_object(f'{{"code_output": {nested(depth)}}}') is None


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ('{"code_output": ' + nested(400) + "}", "row 1 is nested too deeply"),
        ('"{\\"code_output\\": ' + nested(400) + '}"', "verification_info is nested too deeply"),
        ('{"code_output": "\\ud800"}', "row 1 holds invalid text"),
        ('{"code_output": "a", "\\udfff": 1}', "row 1 holds invalid text"),
    ],
)
def test_a_row_that_would_end_its_reader_is_named(tmp_path: Path, info: str, said: str) -> None:
    row = '{"problem_id": "1", "task_type": "code_output_prediction", "prompt": "?", '
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{row}"verification_info": {info}}}\n')
    sha256 = "0x" + hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(MalformedError, match=said):
        TaskDataset({"sha256": sha256, "path": str(file)}, BUDGETS)
