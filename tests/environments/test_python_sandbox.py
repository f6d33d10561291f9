"""The tool python-2: what programs answer, what they cannot reach, and that limits are counts.

The first use on a machine compiles the interpreter, in one to three minutes."""

from __future__ import annotations

import ast
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_core.errors import UnavailableError, UserError
from prime_core.run import Conversation
from prime_envs import python_wasm, tools
from prime_envs.python_wasm import run
from prime_envs.sandbox import kernel
from prime_envs.subprocess_grader import SubprocessGrader
from prime_envs.tools import Observation, answer, load_tools

CONVERSATION = Conversation(turns=6, tools=("python-2",), calls="fence-1")
COUNTED = Observation("", exact=True, limit="reached")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def last(*programs: str) -> Observation:
    return run([{"input": program} for program in programs])


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("print(93843 * 62308)", "5847169644"),
        ("x = [i * i for i in range(4)]\nx", "[0, 1, 4, 9]"),
        ("x = 1", "(no output)"),
        ("print('a')\n1 / 0", "a\nerror: ZeroDivisionError: division by zero"),
        ("def f(:", "error: SyntaxError: invalid syntax"),
        ("import datetime\nprint(datetime.date.today())", "2020-01-01"),
        ("def f(n):\n    return f(n + 1)\nf(0)",
         "error: RecursionError: maximum recursion depth exceeded"),
        ("bytearray(10**9)", "error: MemoryError"),
        ("import math\nprint(math.sin(1e22))", "-0.8522008497671888"),
        ("import numpy as np\nprint(np.arange(4.0) @ np.arange(4.0))", "14.0"),
        ("import sympy\nx = sympy.Symbol('x')\nprint(sympy.factor(x**2 - 1))", "(x - 1)*(x + 1)"),
        ("import scipy.stats\nprint(scipy.stats.norm.cdf(0))", "0.5"),
        ("x" * 9000, "error: a program has at most 8192 characters"),
    ],
)  # fmt: skip
def test_a_program_prints_or_has_a_value(program: str, text: str) -> None:
    assert last(program) == Observation(text)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print(open('/etc/passwd').read())", "FileNotFoundError"),
        ("open('/tmp/a', 'w')", "FileNotFoundError"),
        ("open('/usr/local/lib/python315.zip', 'r+b').write(b'x')", "OSError"),
        ("open('/usr/local/lib/../../../etc/passwd')", "FileNotFoundError"),
        ("import subprocess\nsubprocess.run(['true'])", "OSError"),
        ("import os\nos.fork()", "AttributeError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "AttributeError"),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
        ("input()", "EOFError"),
    ],
)
def test_a_program_reaches_nothing_of_the_machine(program: str, error: str) -> None:
    assert last(program).text.startswith(f"error: {error}")


@pytest.mark.skipif(not kernel.supported(), reason="the system-call filter needs Linux")
def test_the_interpreter_s_process_can_only_compute() -> None:
    last("1")
    child = python_wasm._child()._child
    assert child is not None
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert "Seccomp:\t2" in status


def test_each_process_gives_the_same_answer() -> None:
    program = """
import os, random, time, uuid
import numpy as np
time.sleep(5)
print(time.time(), time.monotonic(), random.random(), os.urandom(4), hash("a"), id(object()),
      {"a", "b", "c"}, uuid.uuid4(), os.environ, os.stat("/usr/local/lib/python315.zip"),
      np.random.default_rng().normal(), np.exp(np.linspace(0, 1, 99)).sum().hex())
"""
    first = last(program)
    assert first.text.startswith("1577836805.")
    assert last(program) == first
    tools.close()
    assert last(program) == first, "another process"


def test_names_stay_for_the_rows_next_program_and_for_no_other_row() -> None:
    assert last("import random\nx = random.random()", "x") == last(
        "import random", "random.random()"
    )
    assert last("x").text == "error: NameError: name 'x' is not defined"
    assert last("x = 1", "1 / 0", "x").text == "1"
    assert last("x = 1\nexit()", "x").text == "error: NameError: name 'x' is not defined"
    turns = ["```python\ny = 6\n```", "so\n```\nprint(y * 7)\n```"]
    assert answer(turns, CONVERSATION, None) == Observation("42")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        "import time\nwhile True: time.time()",
        "import os\nwhile True: os.urandom(1 << 20)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_a_limit_is_a_count_and_ends_the_row(program: str) -> None:
    assert last("print(1)", program) == COUNTED
    assert last("print(1)") == Observation("1"), "the next row is a new one"


def test_output_is_cut_and_memory_is_bounded() -> None:
    assert last("print('x' * 10**7)").text == "x" * python_wasm.OUTPUT_BYTES
    assert last("x = []\nwhile True: x.append('a' * 10**6)").text.startswith("error: ")


def test_a_native_stack_that_overflows_accuses_no_one() -> None:
    """Its size is the compiler's business, so machines may differ."""
    program = "import sys\nsys.setrecursionlimit(10**8)\ndef f(n): return f(n + 1)\nf(0)"
    assert last(program) == Observation("", exact=False, limit="reached")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import os\nlibrary = '/usr/local/lib/python315.zip'\n"
         "f = [os.open(library, os.O_RDONLY) for _ in range(10**5)]",
         "error: OSError: [Errno 33]"),
        ("import os\nos.open('a' * 10**8, os.O_RDONLY)", "error: FileNotFoundError"),
        ("import select\np = select.poll()\nfor i in range(63): p.register(i, 1)\n"
         "for i in range(10**5): p.poll(0)", ""),
    ],
)  # fmt: skip
def test_the_host_works_no_longer_than_a_row_may_cost(program: str, text: str) -> None:
    """Each had the host work for minutes, or copy hundreds of megabytes, within the counts."""
    found = last(program)
    assert found == COUNTED if not text else found.text.startswith(text)


def test_memory_that_the_machine_refuses_accuses_no_one() -> None:
    """Its program sees a MemoryError that programs on other machines do not see."""
    ask = r"""
import resource
from prime_envs import python_wasm
python_wasm._sandbox = python_wasm._Sandbox(python_wasm.cache_folder())  # without the filter
for program in ("print(1)", "bytearray(300 << 20)\nprint(1)"):
    before = python_wasm.answer([program])
    python_wasm.answer(["1"])  # the instance of before is gone
    used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (200 << 20), resource.RLIM_INFINITY))
    print(before, python_wasm.answer([program]), sep="\n")
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    said = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [(one["text"], one["exact"]) for one in said] == [
        ("1", True), ("1", False), ("1", True), ("error: MemoryError", False),
    ]  # fmt: skip


def test_a_child_that_is_killed_is_asked_again_once() -> None:
    last("1")
    child = python_wasm._child()
    killed: list[int] = []

    def kill(*_: Any) -> bytes:
        assert child._child is not None
        killed.append(child._child.pid)
        child._child.kill()
        return SubprocessGrader._read_line(child, *_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_read_line", lambda *a: (patch.undo(), kill(*a))[1])
        assert last("print(2)") == Observation("2")
    assert len(killed) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_read_line", kill)
        with pytest.raises(UnavailableError, match="ended without an answer"):
            last("print(3)")
    assert len(killed) == 3
    assert last("print(3)") == Observation("3")


STEPS = st.sampled_from([
    "import random, time\nx = random.random()", "x", "x = 'y' * 10**6", "print(time.time())",
    "1 / 0",
    "exit()", "def f(n): return f(n + 1)\nf(0)", "import os\nprint(os.urandom(3))", "z" * 9000,
])  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(STEPS, min_size=2, max_size=5))
def test_going_on_in_an_instance_is_the_same_as_running_again(programs: list[str]) -> None:
    """A validator asks turn by turn, an auditor may ask for the last turn alone."""
    grown = [last(*programs[:count]) for count in range(1, len(programs) + 1)]
    last("another row")
    assert last(*programs) == grown[-1]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_no_program_makes_the_tool_raise(program: str) -> None:
    assert last(program).exact


def test_another_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_tools(CONVERSATION)
    with pytest.raises(UserError, match=r"is not the file that python-2 is made of"):
        python_wasm._pinned_bytes(python_wasm.LIBRARY[0], "00" * 32)
    monkeypatch.setitem(python_wasm.PINNED, "wasmtime", "0.0.1")
    with pytest.raises(UserError, match=r"needs wasmtime 0\.0\.1; 49\.0\.0 is installed"):
        load_tools(CONVERSATION)


def test_native_code_that_others_could_write_is_not_loaded(tmp_path: Path) -> None:
    sandbox: Any = python_wasm._Sandbox.__new__(python_wasm._Sandbox)
    place = tmp_path / "code.cwasm"
    place.write_bytes(b"code")
    place.chmod(0o666)
    with pytest.raises(PermissionError, match="can be written by others"):
        sandbox._stored(place)


def test_damaged_native_code_is_not_loaded(tmp_path: Path) -> None:
    """Its answers would be wrong, and the same in each process."""
    place = tmp_path / "code.cwasm"
    python_wasm._store(place, b"code" * 10**6)
    assert python_wasm._is_intact(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o644, "the image's user is not who compiled it"
    with place.open("r+b") as file:
        file.seek(1000)
        file.write(b"x")
    assert not python_wasm._is_intact(place)
    place.write_bytes(b"")
    assert not python_wasm._is_intact(place)


def test_a_user_without_a_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(python_wasm.CACHE, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match="has no home") as found:
        python_wasm.cache_folder()
    assert found.value.hint == "name a folder by PRIME_TOOL_CACHE"
