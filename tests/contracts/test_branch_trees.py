"""Branch trees of the unit tests: every function has one, every leaf its test.

tests/contracts/trees/NAME.tree, one tree a function:

    Contract::function
    └── when a condition holds
        └── refused: CustomError [TestContract::test_Name]
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from forge_kit import ROOT

TREES = sorted((ROOT / "tests" / "contracts" / "trees").glob("*.tree"))
SOURCES = ROOT / "contracts" / "src"
LEAF = re.compile(r"└── (?P<what>.*) \[(?P<contract>\w+)::(?P<test>\w+)\]$")
INHERITED = {"approve", "transfer", "transferFrom", "permit", "burn", "burnFrom"}


@dataclass(frozen=True)
class Leaf:
    """One branch's end: what happens, and the test that shows it."""

    function: str
    what: str
    contract: str
    test: str

    @property
    def error(self) -> str | None:
        """The custom error by which the call is refused, if it is."""
        return self.what.removeprefix("refused: ") if self.what.startswith("refused: ") else None


def leaves(path: Path) -> list[Leaf]:
    """All leaves of one file; fails on a line that is neither head, condition nor leaf."""
    found, function = [], ""
    for line in path.read_text().splitlines():
        if not line:
            continue
        if head := re.fullmatch(rf"{path.stem}::(\w+)", line):
            function = head[1]
        elif leaf := LEAF.search(line):
            found.append(Leaf(function, leaf["what"], leaf["contract"], leaf["test"]))
        else:
            assert re.match(r"[├└]── (when |otherwise)", line), f"{path.name}: {line}"
    return found


def bodies(text: str, start: str) -> dict[str, str]:
    """Every function's text by its name; an overloaded name's texts are joined."""
    found: dict[str, str] = {}
    for part in re.split(r"(?m)^    (?=function |constructor|modifier )", text)[1:]:
        name = part.split("(")[0].removeprefix("function ").removeprefix("modifier ").strip()
        if name.startswith(start):
            found[name] = found.get(name, "") + part
    return found


def texts() -> dict[str, dict[str, str]]:
    """Test contract → test → its text."""
    found: dict[str, dict[str, str]] = {}
    for path in (ROOT / "tests" / "contracts").glob("*.t.sol"):
        for part in re.split(r"(?m)^contract ", path.read_text())[1:]:
            found[re.match(r"\w+", part)[0]] = bodies(part, "")  # type: ignore[index]
    return found


def test_every_function_that_changes_state_has_a_tree() -> None:
    for path in TREES:
        body = json.loads((ROOT / "protocol/prime_chain/abi" / f"{path.stem}.json").read_text())
        functions = {
            entry["name"]
            for entry in body["abi"]
            if entry["type"] == "function" and entry["stateMutability"] == "nonpayable"
        }
        drawn = {leaf.function for leaf in leaves(path)}
        missing = functions - INHERITED - drawn
        assert not missing, f"{path.name} lacks {sorted(missing)}"


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.stem))
def test_every_leaf_has_its_test_and_the_test_names_its_error(path: Path) -> None:
    known = texts()
    helpers = {
        "BadSignature": ("refused(kind, ",),
        "NotAllowed": ("expectNotAllowed",),
        "NotAgreed": ("notAgreed(",),
        "StakeBound": ("joinRefused(", "crooksRefused("),
    }
    for leaf in leaves(path):
        text = known.get(leaf.contract, {}).get(leaf.test)
        assert text is not None, f"{path.name}: there is no {leaf.contract}.{leaf.test}"
        if leaf.error is None:
            assert re.search(r"assert\w+\(|refusedReentry|vaultIsWhole", text), leaf
            continue
        names = (f"Errors.{leaf.error}.selector", *helpers.get(leaf.error, ()))
        assert any(name in text for name in names), f"{leaf.test} does not expect {leaf.error}"


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.stem))
def test_every_error_that_a_function_raises_itself_is_a_leaf(path: Path) -> None:
    drawn = {(leaf.function, leaf.error) for leaf in leaves(path)}
    for function, text in bodies((SOURCES / f"{path.stem}.sol").read_text(), "").items():
        if function not in {name for name, _ in drawn}:
            continue
        for error in re.findall(r"revert Errors\.(\w+)", text):
            assert (function, error) in drawn, f"{path.stem}::{function} lacks {error}"


def test_every_custom_error_is_a_leaf_somewhere() -> None:
    errors = set(re.findall(r"error (\w+)\(", (SOURCES / "libraries/Errors.sol").read_text()))
    drawn = {leaf.error for path in TREES for leaf in leaves(path)}
    assert errors - drawn == set()
