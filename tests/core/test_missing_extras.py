"""A package that only an extra installs has a sentence that names the extra."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from prime_core.command_line import _EXTRAS

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "verifiers": "the worker of crowd environments runs in an environment of its own",
    "mcp": "verifiers brings it",
    "lm_eval": "benchmarks are scored by an interpreter of its own",
    "nltk": "lm_eval brings it",
    "langdetect": "lm_eval brings it",
}


def base_distributions() -> set[str]:
    """Everything that `pip install prime-open` installs, by normalized name."""
    found: set[str] = set()
    waiting = ["prime-open"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for needed in map(Requirement, requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(needed.name))
    return found


def imported(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.slow
def test_what_the_base_lacks_has_an_extra_to_name() -> None:
    ours = [path for room in ("protocol", "node", "orchestrator", "validator", "trainer")
            for path in (ROOT / room).rglob("*.py")]  # fmt: skip
    names = set().union(*map(imported, ours)) - set(sys.stdlib_module_names)
    base, by_package = base_distributions(), packages_distributions()
    assert "httpx" in base
    lacking = {
        name for name in names
        if not name.startswith("prime_")
        and not {canonicalize_name(one) for one in by_package.get(name, ())} & base
    }  # fmt: skip
    assert lacking - set(_EXTRAS) - set(ELSEWHERE) == set()
