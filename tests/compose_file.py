"""deploy/compose/compose.yaml as Compose reads it where no variable is set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

COMPOSE = Path(__file__).parents[1] / "deploy" / "compose"
OURS = "prime-open"
"""The image of our programs."""


def filled(text: str) -> str:
    """`text` with the defaults of ${NAME:-default}."""
    found = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert "$" not in found, f"no default: {text}"
    return found


def compose() -> dict[str, Any]:
    """The file, with its defaults filled in."""
    made: dict[str, Any] = yaml.safe_load(filled((COMPOSE / "compose.yaml").read_text()))
    return made
