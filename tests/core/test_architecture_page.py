"""docs/architecture.md names only modules that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = re.findall(r"^\*\*([\w/]+?)/?\*\*(?: itself holds [^:]*)?: (.+)$", PAGE, re.M)
NOT_MODULES = {"Call", "cli*", "verify"}


def test_every_room_is_described() -> None:
    told = {room for room, _ in ROOMS}
    packages = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("*/prime_*/__init__.py")}
    assert told == packages | {"devnet", "contracts"}


@pytest.mark.parametrize(("room", "text"), ROOMS)
def test_a_named_module_is_there(room: str, text: str) -> None:
    folder = ROOT / room
    there = {path.stem for path in folder.rglob("*")}
    names = re.findall(r"`([\w*]+)/?`", text)
    assert names or room == "contracts"
    assert not [name for name in names if name not in there | NOT_MODULES]
