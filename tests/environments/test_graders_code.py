"""Programs: what passes the tests is paid; what takes the grader in is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.errors import MalformedError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.code import (
    MAX_TESTS,
    PythonCode,
    may_vary,
    same_output,
    same_value,
    unit_tests,
)
from prime_envs.sandbox import kernel
from prime_envs.sandbox.client import ProgramLimits, Sandbox
from prime_envs.tasks import Task, parse_task

pytestmark = pytest.mark.skipif(
    not kernel.supported(), reason="the sandbox needs Linux on x86-64 or aarch64"
)
LIMITS = ProgramLimits(cpu_seconds=0.5, idle_seconds=2.0, memory_mb=128, output_bytes=1 << 16)
DOUBLE = {
    "language": "python",
    "test_cases": [
        {"type": "stdin_stdout", "input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 21, -7)
    ],
}
ADD = {"test_cases": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})}
RIGHT = "print(2 * int(input()))"


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def grader(request: pytest.FixtureRequest) -> Iterator[PythonCode]:
    made = PythonCode(Sandbox(request.param), LIMITS)
    yield made
    made.close()


def task(info: dict[str, Any], solution: str | None = None) -> Task:
    row = {
        "problem_id": "1", "task_type": "verifiable_code", "prompt": "?",
        "verification_info": info, "gold_standard_solution": solution,
    }  # fmt: skip
    return parse_task(row, "file.jsonl row 1")


def grade(grader: PythonCode, source: str, info: dict[str, Any] | None = None) -> TaskScore:
    return grader.grade(task(info or DOUBLE), f"Here:\n```python\n{source}\n```\n")


def test_a_right_program_scores_one_in_every_form_of_tests(grader: PythonCode) -> None:
    columns = {"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]}
    forms = [DOUBLE, columns, {"test_cases": columns}, {"test_cases": json.dumps(columns)}]
    for form in forms:
        score = grade(grader, RIGHT, form)
        assert (score.task_micro, score.uncertain) == (MICRO, False), score.reason
        assert score.parts["passed"] == score.parts["tests"]
    assert grade(grader, "def add(a, b):\n    return a + b", ADD).task_micro == MICRO
    method = (
        "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b"
    )
    assert grade(grader, method, ADD).task_micro == MICRO
    leet = {"test_cases": [{"type": "function_call", "fn_name": "add", "input": "[1]\n[2]",
                            "output": "[1, 2]"}]}  # fmt: skip
    assert grade(grader, "def add(a, b): return a + b", leet).task_micro == MICRO


def test_the_gold_solution_is_graded_like_any_answer(grader: PythonCode) -> None:
    gold = grader.gold(task(DOUBLE, RIGHT))
    assert gold is not None
    assert grader.grade(task(DOUBLE), gold).task_micro == MICRO


TRICKS = {
    "another answer": "print(3 * int(input()))",
    "no output": "pass",
    "both answers": "n = int(input())\nprint(2 * n)\nprint(3 * n)",
    "every answer": "for n in range(-100, 100): print(n)",
    "reads the test file": (
        "import os, glob\n"
        "for p in ['tests.json', '/tmp', '.', '/proc/self/fd', '/proc/self/mem', __file__]:\n"
        "    print(open(p).read())"
    ),
    "looks for the expected output in its caller": (
        "import sys\nf = sys._getframe()\nwhile f.f_back:\n    f = f.f_back\n"
        "    print(f.f_locals.get('expected'), f.f_globals.get('request'))"
    ),
    "looks for the expected output in memory": (
        "import gc\nfor o in gc.get_objects():\n"
        "    if isinstance(o, dict) and 'output' in o: print(o['output'])"
    ),
    "exits at once": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "aborts": "import os\nos.abort()",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "patches print": (
        "import builtins\nbuiltins.print = lambda *a: None\nbuiltins.all = lambda *a: True"
    ),
    "patches the harness": (
        "import sys\nm = sys.modules.get('prime_envs.sandbox.server')\n"
        "m = m or sys.modules['__main__']\nm._failure = lambda *a: ''\n"
        "m.same_output = lambda *a: True"
    ),
    "is equal to everything": (
        "class A(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n"
        "print(A('x'))"
    ),
    "prints a verdict": 'print(\'{"status": "ok", "passed": 3}\')',
    "writes to every descriptor": (
        "import os\nfor d in range(64):\n    try: os.write(d, b'4')\n    except OSError: pass"
    ),
    "drowns the grader": "while True: print('42' * 1000)",
    "prints from a thread too late": (
        "import threading\nthreading.Thread(target=lambda: print(42), daemon=True).start()\n"
        "import os\nos._exit(0)"
    ),
    "never ends": "while True: pass",
    "waits forever": "import threading\nthreading.Event().wait()",
    "eats the memory": "x = [0]\nwhile True: x = x * 2",
    "nests without end": "def f(n): return f(n + 1)\nf(0)",
    "raises after the answer": "print(2 * int(input()))\nraise ValueError('late')",
    "raises SystemExit with an answer": "raise SystemExit(2 * int(input()))",
    "writes the answer to standard error": "import sys\nsys.stderr.write(str(2 * int(input())))",
    "is no program": "this is no Python",
    "holds a NUL": "print(1)\x00",
    "foreign digits": "print(''.join(chr(0xFF10 + int(c)) for c in str(2 * abs(int(input())))))",
    "spaced digits": "print(' '.join(str(2 * int(input()))))",
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_scores_nothing(grader: PythonCode, name: str) -> None:
    only_21 = {"test_cases": [{"type": "stdin_stdout", "input": "21\n", "output": "42\n"}]}
    assert grade(grader, TRICKS[name], only_21).task_micro == 0
    assert grade(grader, RIGHT).task_micro == MICRO  # the grader lives on


@pytest.mark.parametrize(
    "source",
    [
        "class A(int):\n    def __eq__(self, o): return True\ndef add(a, b): return A(0)",
        "class A:\n    def __eq__(self, o): return True\ndef add(a, b): return A()",
        "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
        "def add(a, b): return True",
        "def add(a, b): return [a + b]",
        "def add(a, b): return str(a + b)",
        "def add(a, b): return float('nan')",
        "import os\nos.write(3, b'3')\nos._exit(0)\ndef add(a, b): return 0",
        "import os\ndef add(a, b):\n    os.write(3, b'3')\n    return a + b",
        "def add(*a): raise SystemExit(0)",
        "x = 1",
    ],
)
def test_a_result_that_is_no_answer_scores_nothing(grader: PythonCode, source: str) -> None:
    assert grade(grader, source, ADD).task_micro == 0


def test_only_the_last_block_after_the_thinking_counts(grader: PythonCode) -> None:
    right, wrong = f"```python\n{RIGHT}\n```", "```python\nprint(1)\n```"
    scores = {
        f"{wrong}\n{right}": MICRO,
        f"{right}\n{wrong}": 0,
        f"<think>{right}</think> no code": 0,
        f"<think>{wrong}</think>{right}": MICRO,
        f"<think>{right}": 0,
        f"```cpp\nint main\n```\ntext\n{right}": MICRO,
        f"```\n{RIGHT}\n```": MICRO,
        f"```python\n{RIGHT}": 0,
        RIGHT: 0,
        "": 0,
    }
    for text, worth in scores.items():
        assert grader.grade(task(DOUBLE), text).task_micro == worth, text


def test_limits_of_time_are_marked_and_plain_failures_are_not(grader: PythonCode) -> None:
    assert grade(grader, "while True: pass").uncertain
    assert not grade(grader, "print(1)").uncertain
    assert not grade(grader, "raise ValueError").uncertain
    busy = "s = 0\nfor i in range(2 * 10**6): s += i\nprint(2 * int(input()))"
    assert grade(grader, busy).uncertain  # it passes, but a much slower machine might not let it


def test_the_same_program_gets_the_same_score_parts_and_reason(grader: PythonCode) -> None:
    other = PythonCode(Sandbox("limits"), LIMITS)
    try:
        for source in (
            RIGHT,
            "print(1)",
            "1/0",
            "import random\nprint(random.random())",
            "open('x')",
        ):
            assert grade(grader, source) == grade(other, source)
    finally:
        other.close()


@pytest.mark.parametrize(
    ("source", "varies"),
    [
        ("import math, sys\nprint(math.pi, sys.stdin.read())", False),
        ("import time\nprint(time.time())", True),
        ("from datetime import datetime\nprint(datetime.now())", True),
        ("print(id(1))", True),
        ("print(getattr(1, 'x' + 'y'))", True),
        ("__import__('time')", True),
        ("print(().__class__)", True),
        ("import random\nrandom.seed()", True),
        ("import random\nprint(random.Random().random())", True),
        ("class A:\n    def __init__(self): self.x = 1\nif __name__ == '__main__': A()", False),
        ("class A: pass\nfor a in {A(), A()}: print(a.x)", True),
        ("class A: pass\na = A()\nprint(len(set([a])))", True),
        ("class A: pass\nprint([A()])", False),
        ("class S:\n    def f(self): return {1, 2}\nprint(S().f())", False),
        ("print({int, str})", True),
        ("kinds = [int, str]\nfor kind in set(kinds): print(kind(1))", True),
        ("def f(x): return x\ndef g(x): return -x\nprint([h(1) for h in {f, g}])", True),
        ("f = lambda x: x\ns = set()\ns.add((1, f))", True),
        ("s = set()\ns.add(lambda: 1)", True),
        ("class A:\n    def f(self): return {self.f, self.g}", True),
        ("class A: pass\ns = set()\ns.add(A)", True),
        ("a = {1, None}\nprint(*a)", sys.version_info < (3, 12)),
        ("def f(x=None): return {x, 1}\nprint(f())", sys.version_info < (3, 12)),
        ("class A: pass\nprint(len(set(map(A, '12'))))", True),
        ("print(int, None)", False),
        ("class A: pass\ndef f(x): return {x}\nprint(f(x=A()))", True),
        ("@lru_cache(None)\ndef f(x): return {x}\nprint(f(type(1) in (int, str)))", False),
        ("def f(max, node): return {max, node.next}\nprint(f(1, 2))", False),
        ("a = set(map(int, input().split()))\nprint(sorted(a, key=lambda x: -x))", False),
        ("f = lambda x: x + 1\nprint({f(1), f(2)})", False),
        (
            "def f(x: int | None) -> list[int]:\n    if x is None: raise ValueError\n"
            "    return [y for y in {x, 2} if isinstance(y, (int, float))]\nprint(f(1))",
            False,
        ),
        ("list = [1]\nsum = 0\nfor x in set(list): sum += x\nprint(sum)", False),
        ("try: print({int(x) for x in input()})\nexcept (ValueError, KeyError): print(1)", False),
        ("not python (", False),
    ],
)
def test_programs_that_may_vary_are_known(source: str, varies: bool) -> None:
    assert may_vary(source) is varies


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there, None has the same hash everywhere")
def test_a_set_of_what_a_test_gives_may_hold_none(grader: PythonCode) -> None:
    source = "def f(values): return [x for x in values if x] or len(set(values))"
    for values, uncertain in (([3, None], True), ([3, 4], False)):
        info = {"test_cases": [{"fn_name": "f", "input": [values], "output": values[:1]}]}
        score = grader.grade(task(info), f"```python\n{source}\n```")
        assert score.uncertain is uncertain, score


@pytest.mark.parametrize(
    "info",
    [
        {"language": "rust", "test_cases": [{"input": "", "output": ""}]},
        {"test_cases": []},
        {"test_cases": "not json"},
        {"test_cases": [{"input": "1"}]},
        {"test_cases": [{"type": "function_call", "fn_name": "a b", "input": [], "output": 1}]},
        {"test_cases": [{"type": "function_call", "fn_name": "f", "input": 3, "output": 1}]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [1], "outputs": [2]},
        {"language": "python"},
        {"test_cases": "[" * 100000},
    ],
)
def test_a_task_without_usable_tests_is_refused_with_file_and_row(info: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match=r"file\.jsonl row 1"):
        unit_tests(task(info))


def test_many_tests_are_thinned_out_evenly_and_the_same_each_time() -> None:
    info = {"inputs": [str(n) for n in range(500)], "outputs": [str(n) for n in range(500)]}
    chosen = [test.stdin for test in unit_tests(task(info))]
    assert len(set(chosen)) == MAX_TESTS
    assert (chosen[0], chosen[-1]) == ("0", "499")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_every_json_value_equals_itself(value: Any) -> None:
    assert same_value(json.loads(json.dumps(value)), value)


def test_outputs_are_compared_by_lines_and_decimals_with_a_millionth() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert same_output("0.3333333", "0.33333333")
    assert not same_output("1 2", "1\n2")
    assert not same_output("nan", "0.5")
    assert not same_output("1_0.0", "10.0")
    assert not same_output("10", "1 0")
    assert not same_output("", "0")
