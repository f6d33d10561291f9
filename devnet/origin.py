"""Where a figure comes from: the state of the sources, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@cache
def commit() -> str:
    """What git calls the state of the sources."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """Its processor, cores and system."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
