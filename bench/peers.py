"""Packages that benches measure ours against: each in a virtual environment of its own.

They live under `var/bench/NAME` (never in the project's own environment) and are made on first use.
Where one cannot be made, UnavailableError says why; a bench then falls back on figures measured
earlier and says so in its rows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.form import ROOT
from prime_core.errors import UnavailableError

FOLDER = ROOT / "var" / "bench"
_MINUTES = 20


def peer_python(name: str, check: str, steps: Sequence[Sequence[str]]) -> Path:
    """The interpreter of peer `name`: made by `pip install` with each of `steps` in turn unless
    `python -c check` succeeds already.

    Raises UnavailableError, with pip's last line, if it cannot be made.
    """
    home = FOLDER / name
    python = home / "bin" / "python"
    if python.exists() and _run([str(python), "-c", check]).returncode == 0:
        return python
    print(f"bench: making {home} (minutes, once)", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    commands = [[sys.executable, "-m", "venv", str(home)]]
    commands += [[str(python), "-m", "pip", "install", "-q", *step] for step in steps]
    for command in [*commands, [str(python), "-c", check]]:
        done = _run(command)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            shutil.rmtree(home, ignore_errors=True)
            raise UnavailableError(f"the peer {name} cannot be installed here: {last[:300]}")
    return python


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_MINUTES * 60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
