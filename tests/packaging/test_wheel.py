"""The wheel: equal from any tree, complete, and enough for every program with its extra alone."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_envs import python_wasm

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "devnet" / "model"
TRAIN = (
    *("local", ROOT / "docs/examples/run-devnet.toml", "--model", MODEL, "--out", "trained"),
    *("--steps", 1, "--threads", 1, "--evaluate-every", 0),
)
DOCTOR = ("doctor", "--orchestrator", "http://127.0.0.1:9", "--rpc", "http://127.0.0.1:9")
INSTALL = 'set -euo pipefail; . "$1/scripts/installer.sh"; shift; install_into "$@"'
PYTHON_TOOL = """
from prime_envs.python_tool import require_monty, run
require_monty()
print("answer", run([{"code": "x = 6"}, {"code": "print(x * 7)"}]).text)
"""
PYTHON_SANDBOX = """
from prime_envs.python_wasm import require_python, run
require_python()
print("answer", run([{"code": "x = 6"}, {"code": "print(x * 7)"}]).text)
"""
SEARCH_TOOL = """
from prime_envs.search import SearchIndex
print(SearchIndex([("Tea", "green leaves"), ("Sea", "blue water")]).search("water"))
"""
S3 = """
import time
from prime_core.storage.s3 import S3Store
print(S3Store("pool", endpoint="http://127.0.0.1:9").signed_get("file", int(time.time()) + 60))
"""
TRACES = """
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
from prime_core import tracing
tracing.start("program")
print("exports", tracing.on())
"""
WANDB = """
import os
os.environ["WANDB_MODE"] = "offline"
from prime_trainer.observe import Tracker
run = Tracker("wandb", "pool", {})
run.step(1, 0.0, {"reward": 0.5})
run.close()
print("logged")
"""
PROGRAMS = [
    ("node,torch", "prime-node", ("doctor", "--runtime", "process")),
    ("trainer,families", "trainer", TRAIN),
    ("orchestrator", "orchestrator", ("store", "migrate", "--data", "store")),
]
"""Those with torch first, and after test_verify and test_validator: it is installed once."""
PARTS = [
    ("rollout-base", "prime-broadcast", ("diff", MODEL, MODEL), "identical True"),
    ("rollout-base,python-tool", "python", ("-c", PYTHON_TOOL), "answer 42"),
    ("rollout-base,python-sandbox", "python", ("-c", PYTHON_SANDBOX), "answer 42"),
    ("rollout-base,search-tool", "python", ("-c", SEARCH_TOOL), "blue water"),
    ("s3", "python", ("-c", S3), "Signature="),
    ("traces", "python", ("-c", TRACES), "exports True"),
    ("wandb", "python", ("-c", WANDB), "logged"),
]
UNTESTED = {
    "dev": "this environment",
    "http": "included in orchestrator and trainer",
    "trackio": "needs an older pillow than constraints.txt has",
    "trainer-8bit": "optimizers are tested in an environment with torchao (PRIME_TORCHAO_HOME)",
    "rollout": "needs CUDA",
    "rollout-cpu": "engines are tested in an environment with vLLM (PRIME_VLLM_HOME)",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def checkout(folder: Path) -> Path:
    """The files that git knows, as they are in this tree."""
    said = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in said.stdout.decode().split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def littered(folder: Path) -> Path:
    """A checkout that was worked in: leftovers of builds, caches and tools."""
    for name in (
        "build/lib/prime_core/left_over.py",
        "build/lib/bench/left_over.py",
        "protocol/prime_core/__pycache__/ids.cpython-311.pyc",
        "protocol/prime_core/notes.json",
        "node_modules/package/index.js",
        "var/run/store.sqlite",
        "prime_open.egg-info/SOURCES.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("devnet/plan.py\nprotocol/prime_core/notes.json\n")
    return folder


def build(folder: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(folder)]
    subprocess.run(command, check=True)
    return next(out.glob("prime_open-*.whl"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout(tmp_path_factory.mktemp("clean")), tmp_path_factory.mktemp("wheel"))


def test_a_dirty_tree_makes_the_same_wheel_as_a_clean_one(wheel: Path, tmp_path: Path) -> None:
    dirty = build(littered(checkout(tmp_path / "dirty")), tmp_path / "out")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, dirty)]
    assert digests[0] == digests[1], zipfile.ZipFile(dirty).namelist()


def test_the_wheel_holds_our_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    packages = {file.parent.name for file in ROOT.glob("*/prime_*/__init__.py")}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    for package in packages:
        assert f"{package}/py.typed" in names
    for folder, held in (
        ("protocol/prime_chain/abi", "prime_chain/abi"),
        ("protocol/prime_chain/deployments", "prime_chain/deployments"),
        ("orchestrator/prime_orchestrator/web", "prime_orchestrator/web"),
        (
            "orchestrator/prime_orchestrator/store/migrations/versions",
            "prime_orchestrator/store/migrations/versions",
        ),
        ("docs/examples", "prime_orchestrator/examples"),
        ("devnet/model", "prime_orchestrator/examples/model"),
    ):
        files = [path.name for path in (ROOT / folder).iterdir() if path.is_file()]
        assert files
        assert not [name for name in files if f"{held}/{name}" not in names]
    for calibration in ("calibration.json", "calibration-2.json"):
        assert f"prime_verify/proofs/{calibration}" in names
    assert "prime_orchestrator/store/migrations/script.py.mako" in names


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment outside of the checkout, which each test fills with what it needs."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


class Installed:
    """The wheel with an extra in an environment that holds nothing else."""

    def __init__(self, venv: Path, wheel: Path, extra: str, folder: Path) -> None:
        self.folder, self.bin = folder, venv / "bin"
        wanted = f"prime-open[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        subprocess.run(
            ["bash", "-c", INSTALL, "install", ROOT, self.bin / "python",
             "--exact", "--constraint", ROOT / "constraints.txt", wanted],
            check=True, env={**os.environ, "PATH": path},
        )  # fmt: skip

    def run(self, program: str, *words: object, code: int = 0) -> str:
        """What a program says; it must end with `code`."""
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder),
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            # compiled once for all tests
            "PRIME_TOOL_CACHE": str(python_wasm.cache_folder()),
            "PYTHONPYCACHEPREFIX": str(self.bin.parents[1] / "byte-code"),
        }  # fmt: skip
        done = subprocess.run(
            [self.bin / program, *map(str, words)],
            capture_output=True, text=True, check=False, cwd=self.folder, env=environment,
        )  # fmt: skip
        assert done.returncode == code, (program, words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def example(self, package: str) -> str:
        """What the README's example of a package prints."""
        where = self.run("python", "-c", f"import {package}; print({package}.__path__[0])").strip()
        blocks = re.findall(r"```python\n(.*?)```", (Path(where) / "README.md").read_text(), re.S)
        assert len(blocks) == 1
        return self.run("python", "-c", blocks[0])


Install = Callable[[str], Installed]


@pytest.fixture
def install(venv: Path, wheel: Path, tmp_path: Path) -> Install:
    """Installs the wheel with the extra that it is given."""
    return lambda extra: Installed(venv, wheel, extra, tmp_path)


def missing(said: str, extra: str) -> None:
    """One sentence that names what to install, and no traceback."""
    assert "Traceback" not in said
    assert f"prime-open[{extra}]" in said


def test_every_extra_is_installed_by_a_test_or_has_a_reason_not_to_be() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    alone = {"broadcast", "validator", "verify"}
    tested = alone.union(*(extra.split(",") for extra, *_ in [*PROGRAMS, *PARTS]))
    assert extras - tested == set(UNTESTED)


def test_broadcast(install: Install, tmp_path: Path) -> None:
    installed = install("broadcast")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "weights.bin").write_bytes(bytes(1000))
    data = ("--data", tmp_path / "data", "--key", tmp_path / "key", "--once", "--json")
    assert '"version": 0' in installed.run("prime-broadcast", "serve", tmp_path / "folder", *data)
    assert installed.example("prime_broadcast").strip() == "whole b'weights'"


def test_verify(install: Install, tmp_path: Path) -> None:
    installed = install("verify")
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "file.parquet"
    installed.run("prime-verify", "prove", "model", file, "--tokens", "40")
    assert "accepted" in installed.run("prime-verify", "verify", "model", file, "--tokens", "40")
    other = ("--tokens", "40", "--lease", "1")
    assert "void" in installed.run("prime-verify", "verify", "model", file, *other, code=3)
    assert installed.example("prime_verify").startswith("ACCEPTED")


def test_validator(install: Install) -> None:
    installed = install("validator")
    assert re.search(r"\d+\.\d+", installed.run("validator", "--version"))
    said = installed.run("validator", *DOCTOR, code=1)
    assert "✓ torch: installed" in said
    assert "✓ folder" in said
    assert "✗ pool: 127.0.0.1:9 does not answer" in said


@pytest.mark.parametrize(("extra", "program", "words"), PROGRAMS)
def test_a_programs_extra_is_enough_for_it(
    install: Install, extra: str, program: str, words: tuple[object, ...]
) -> None:
    installed = install(extra)
    assert re.search(r"\d+\.\d+", installed.run(program, "--version"))
    installed.run(program, *words)


@pytest.mark.parametrize(
    ("extra", "program", "words", "said"), PARTS, ids=[extra for extra, *_ in PARTS]
)
def test_an_optional_part_works_with_its_extra_alone(
    install: Install, extra: str, program: str, words: tuple[object, ...], said: str
) -> None:
    assert said in install(extra).run(program, *words)


def test_base(install: Install, tmp_path: Path) -> None:
    """The last one: of what the others installed, nothing is left."""
    installed = install("")
    (tmp_path / "password").write_text("secret\n")
    wallet = ("--out", tmp_path / "wallet.json", "--password-file", tmp_path / "password")
    installed.run("prime-node", "wallet", "new", *wallet)
    assert (tmp_path / "wallet.json").exists()
    for program, words, extra in (
        ("orchestrator", ("serve",), "orchestrator"),
        ("trainer", ("run",), "trainer"),
        ("trainer", TRAIN, "trainer"),
        ("validator", DOCTOR, "validator"),
        ("prime-broadcast", ("diff", MODEL, MODEL), "rollout-base"),
        ("prime-verify", ("verify", MODEL, tmp_path / "wallet.json"), "rollout-base"),
    ):
        for words_of_help in (("--version",), ("--help",)):
            installed.run(program, *words_of_help)
        missing(installed.run(program, *words, code=69), extra)
