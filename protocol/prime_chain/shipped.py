"""The deployment files that ship with this package, one per chain, in the folder deployments."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("deployments")


def shipped_file(chain_id: int) -> Path | None:
    """The shipped deployment file of a chain; None if there is none."""
    file = FOLDER / f"{chain_id}.json"
    return file if file.is_file() else None


def shipped_chains() -> str:
    """The ids of the chains that have a shipped file, for help and messages."""
    ids = sorted(int(file.stem) for file in FOLDER.glob("*.json") if file.stem.isdecimal())
    return ", ".join(map(str, ids)) or "none"


def help_text() -> str:
    """The help of an optional --deployment."""
    return (
        f"Deployment JSON. Default: the shipped file of the pool's chain (shipped: "
        f"{shipped_chains()}), else, on a test network only, what the orchestrator names."
    )
