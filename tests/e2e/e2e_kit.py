"""What the end-to-end tests share: the demo as a user starts it, and looking for what it left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from served import until as until

from devnet.chain import find_anvil
from prime_core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def require_anvil() -> None:
    """Skips by name where the local chain is missing."""
    try:
        find_anvil()
    except UserError as error:
        pytest.skip(f"needs anvil: {error}; {error.hint}")


def devnet(*words: str) -> list[str]:
    return [sys.executable, "-m", "devnet", *words]


def run(words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs to the end; the output is shown if the test fails."""
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    print(done.stdout[-6000:], done.stderr[-3000:])
    return done


def processes_of(root: Path) -> list[str]:
    """Command lines of running processes that name the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(root) in w for w in words):
            found.append(" ".join(words))
    return found


def listening(processes: Iterable[int]) -> set[int]:
    """TCP ports that these processes listen on."""
    mine = set(processes)
    return {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.pid in mine and connection.status == psutil.CONN_LISTEN
    }


def findings(root: Path) -> dict[str, bool]:
    """Finding → whether it holds, as the run wrote it."""
    written = json.loads((root / "findings.json").read_text())
    return {row["name"]: row["ok"] for row in written["findings"]}
