"""docs/architecture.md describes every package and names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SECTIONS = re.findall(r"^### `([\w/]+)`\n(.*?)(?=^##)", PAGE, re.M | re.S)
WALKS = re.findall(r"^\*\*From .*?(?=^\*\*From|^## )", PAGE, re.M | re.S)
NOT_MODULES = {"trainer plan", "tests/contracts"}


def test_every_package_is_described() -> None:
    packages = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("*/prime_*/__init__.py")}
    assert {package for package, _ in SECTIONS} == packages | {"devnet", "contracts"}


@pytest.mark.parametrize(("package", "text"), SECTIONS)
def test_a_named_module_exists(package: str, text: str) -> None:
    existing = {path.stem for path in (ROOT / package).rglob("*")}
    names = set(re.findall(r"`([^`]+?)/?`", text)) - NOT_MODULES
    assert names or package == "contracts"
    assert names <= existing


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_crosses_at_most_fifteen_files_that_exist(walk: str) -> None:
    names = re.findall(r"`([\w/]+\.(?:py|sol))`", walk)
    rooms = ("protocol", "node", "validator", "orchestrator", "trainer", "contracts")
    existing = [str(path) for room in rooms for path in (ROOT / room).rglob("*.*")]
    assert 5 <= len(set(names)) <= 15
    for name in names:
        assert any(path.endswith(f"/{name}") for path in existing), name
