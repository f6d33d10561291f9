"""What the tests of the contracts share: where forge is, and how it is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORGE = ROOT / "scripts" / "forge"
SHIM = ROOT / "scripts" / "solc-shim"


def _fails(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "it fails") if done.returncode else ""


def need_forge() -> None:
    """Skips the test, by name, where the toolchain is missing."""
    for what in (FORGE, SHIM):
        problem = _fails([str(what), "--version"])
        if problem:
            pytest.skip(f"needs the Foundry toolchain: {problem} (make setup installs it)")


def forge(
    *arguments: str, profile: str = "default", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs forge in the repository's root and returns what it said."""
    return subprocess.run(
        [str(FORGE), *arguments],
        cwd=ROOT,
        env={**os.environ, "FOUNDRY_PROFILE": profile, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
