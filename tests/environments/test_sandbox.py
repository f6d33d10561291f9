"""Any program ends, returns only what it printed, and changes nothing outside."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_core.errors import UnavailableError
from prime_envs.sandbox import client, kernel
from prime_envs.sandbox.client import Level, Program, ProgramLimits, ProgramOutcome, Sandbox

pytestmark = pytest.mark.skipif(
    not kernel.supported(), reason="the sandbox needs Linux on x86-64 or aarch64"
)
LEVELS: tuple[Level, ...] = ("namespaces", "bubblewrap", "limits")
SHORT = ProgramLimits(
    cpu_seconds=0.4, idle_seconds=2.0, memory_mb=128, output_bytes=1 << 16, threads=8
)


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(available(request.param)) as box:
        run(box, "")
        if box.level != request.param:
            pytest.skip(f"this machine gives programs {box.level} where {request.param} is wanted")
        yield box


def available(level: Level) -> Level:
    """The level; skips the test where this machine lacks its program."""
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not on this machine (apt-get install bubblewrap)")
    return level


def run(
    sandbox: Sandbox, source: str, stdin: str = "", limits: ProgramLimits = SHORT
) -> ProgramOutcome:
    return sandbox.run(Program(source, stdin=stdin), limits)


def test_a_program_reads_its_input_and_its_output_comes_back(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "print(sum(map(int, input().split())), 'ä€😀')", "20 22\n")
    assert (outcome.status, outcome.code, outcome.output) == ("ok", 0, "42 ä€😀\n")
    assert not outcome.uncertain(SHORT)


def test_a_function_is_called_and_its_result_comes_back_as_json(sandbox: Sandbox) -> None:
    program = Program("def f(a, b):\n    return (a, [b])", function="f", arguments=(1, "x"))
    assert sandbox.run(program, SHORT).result == '[1, ["x"]]'
    method = Program("class Solution:\n    def f(self, a):\n        return a", function="f",
                     arguments=(None,))  # fmt: skip
    assert sandbox.run(method, SHORT).result == "null"
    missing = sandbox.run(Program("x = 1", function="f"), SHORT)
    assert missing.status == "failed"
    assert "no function 'f'" in missing.error


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("while True: pass", "cpu"),
        ("import signal\nsignal.signal(24, lambda *a: None)\nwhile True: pass", "cpu"),
        ("x = []\nwhile True: x.append('y' * 1000000)", "failed cpu"),
        ("x = bytearray(10**10)", "failed"),
        ("while True: print('z' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('z' * 1000)", "output"),
        ("import threading\nthreading.Event().wait()", "idle"),
        ("import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()", "idle"),
        ("import os\nos.close(0); os.close(1); os.close(2); os.close(3)\nwhile True: pass", "cpu"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "failed cpu"),
        ("int('9' * 10**7)", "failed"),
        ("9**9**9", "cpu"),
    ],
)
def test_a_program_that_will_not_end_is_ended(sandbox: Sandbox, source: str, status: str) -> None:
    assert run(sandbox, source).status in status.split()
    assert run(sandbox, "print(1)").output == "1\n"


def test_a_thread_bomb_is_stopped(sandbox: Sandbox) -> None:
    bomb = (
        "import threading\nthreading.stack_size(1 << 16)\nwait = threading.Event().wait\n"
        "for i in range(10000):\n"
        "    threading.Thread(target=wait, daemon=True).start()\n    print(i, flush=True)\n"
    )
    outcome = run(sandbox, bomb, limits=ProgramLimits(threads=8, memory_mb=256))
    assert outcome.status in ("failed", "threads")  # counted by the kernel, or by us
    assert outcome.uncertain(SHORT)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.fork()",
        "import os\nassert os.system('true') == 0",
        "import os\nos.execv('/bin/sh', ['sh'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import _posixsubprocess",
        "import subprocess",
        "import multiprocessing",
        "import socket",
        "import _socket",
        "import ctypes",
        "open('/etc/passwd')",
        "open('x', 'w')",
        "import os\nos.open('/proc/self/mem', os.O_RDWR)",
        "import os\nos.mkdir('/tmp/x')",
        "import os\nos.listdir('/')",
        "import os\nos.stat('/etc/passwd')",
        "import os\nos.unlink('/etc/passwd')",
        "import os\nos.chdir('/')",
        "import os\nos.memfd_create('x')",
        "import os\nos.kill(1, 9)",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\nos.setuid(0)",
        "import os\nos.urandom(1)",
        "import os\nos.mkfifo('x')",
        "import os\nos.pipe()",
        "import time\ntime.sleep(1)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
    ],
)
def test_the_kernel_refuses_calls_that_reach_outside(sandbox: Sandbox, source: str) -> None:
    outcome = run(sandbox, f"{source}\nprint('done')")
    assert outcome.status == "failed"
    assert outcome.output == ""
    assert "Error" in outcome.error


def test_raw_system_calls_are_refused_too_where_ctypes_was_found_again(sandbox: Sandbox) -> None:
    source = (
        "import gc\n"
        "libc = [o for o in gc.get_objects() if type(o).__name__ == 'CDLL']\n"
        "print(len(libc), libc and libc[0].syscall(41, 2, 1, 0))\n"  # socket(AF_INET, STREAM)
    )
    outcome = run(sandbox, source)
    if outcome.status == "ok":
        assert outcome.output.split()[0] == "0" or outcome.output.split()[1] == "-1"


def test_nothing_is_reachable_over_the_network(sandbox: Sandbox) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        source = (
            "import sys\nfor name in ('socket', '_socket', 'urllib.request', 'http.client'):\n"
            "    try: __import__(name)\n    except ImportError: print('none')\n"
        )
        assert run(sandbox, source).output == "none\n" * 4
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_descriptors_of_the_server_are_closed_before_the_program_runs(sandbox: Sandbox) -> None:
    source = (
        "import os\nfor d in range(64):\n"
        "    try: os.write(d, b'x')\n    except OSError: continue\n    print(d)\n"
    )
    assert set(run(sandbox, source).output.replace("x", "").split()) == {"1", "2", "3"}


def test_programs_leave_nothing_for_one_another(sandbox: Sandbox, tmp_path: Path) -> None:
    run(sandbox, "import math, builtins, json\nmath.pi = 3\nbuiltins.print = None\njson.x = 1")
    assert run(sandbox, "import math\nprint(math.pi)").output.startswith("3.14")
    assert list(tmp_path.iterdir()) == []


def test_programs_are_the_same_each_time(sandbox: Sandbox) -> None:
    source = "import random\nprint(random.random(), {'a', 'b', 'c'}, hash('x'))"
    assert run(sandbox, source).output == run(sandbox, source).output


def test_every_level_shows_programs_the_same_world() -> None:
    source = (
        "import sys, random\nprint(sorted(m for m in sys.modules), sys.path, sys.argv)\n"
        "print(random.random(), hash('x'), sys.flags.hash_randomization)\n"
        "for f in (lambda: open('/etc/passwd'), lambda: __import__('numpy'), lambda: input()):\n"
        "    try: f()\n    except Exception as e: print(type(e).__name__, e)\n"
    )
    outputs = set()
    for level in LEVELS:
        with Sandbox(available(level)) as box:
            outputs.add(run(box, source).output)
    assert len(outputs) == 1


def test_a_program_that_patches_its_harness_only_changes_what_it_says(sandbox: Sandbox) -> None:
    source = (
        "import json, os, sys, builtins\njson.dumps = lambda *a: '\"forged\"'\n"
        "builtins.compile = None\nsys.exit = None\nos._exit = lambda c: None\n"
        "def f(): return 1\n"
    )
    outcome = sandbox.run(Program(source, function="f"), SHORT)
    assert outcome.status in ("ok", "failed")
    assert run(sandbox, "print(1)").output == "1\n"


def test_exits_and_exceptions_are_distinguished(sandbox: Sandbox) -> None:
    assert run(sandbox, "print(1)\nraise SystemExit").code == 0
    assert run(sandbox, "raise SystemExit(3)").code == 3
    assert run(sandbox, "raise SystemExit('no')").code == 1
    assert run(sandbox, "import os\nos._exit(0)").status == "ok"
    assert run(sandbox, "import os\nos.abort()").code < 0
    failed = run(sandbox, "print('so far')\n1/0")
    assert (failed.status, failed.output) == ("failed", "so far\n")
    assert failed.error.strip() == "ZeroDivisionError: division by zero"


def test_output_of_threads_is_kept_and_waited_for(sandbox: Sandbox) -> None:
    source = "import threading\nt = threading.Thread(target=lambda: print('late'))\nt.start()"
    assert run(sandbox, source, limits=ProgramLimits()).output == "late\n"


def test_the_server_ends_with_its_owner_and_is_started_again_when_it_died() -> None:
    box = Sandbox("namespaces")
    assert run(box, "print(1)").output == "1\n"
    child = box._child
    assert child is not None
    child.kill()
    child.wait()
    assert run(box, "print(2)").output == "2\n"
    box.close()
    assert box._child is None
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_level_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    box = Sandbox("bubblewrap")
    with pytest.raises(UnavailableError, match="bubblewrap"):
        run(box, "print(1)")


def test_bubblewrap_finds_the_server_where_the_project_lies_in_the_folder_that_it_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_TEMPORARY", str(Path(client.__file__).parents[3]))
    with Sandbox(available("bubblewrap")) as box:
        assert run(box, "print(6 * 7)").output == "42\n"
