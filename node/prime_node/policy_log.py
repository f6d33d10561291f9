"""`policies.jsonl` in the data folder: one line per fetched policy, with its route and sources."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these import numpy
    from prime_broadcast.client import FetchStats
    from prime_core.checkpoint import Manifest

NAME = "policies.jsonl"
_TAIL = 1 << 20
"""Bytes at the end that are searched for the last whole line."""


def record(root: Path, manifest: Manifest, stats: FetchStats, seconds: float) -> None:
    """Appends a policy's line to the log in `root`. Raises OSError."""
    line = {
        "version": manifest.version,
        "digest": manifest.digest(),
        "result_digest": manifest.result_digest,
        "route": stats.route,
        "bytes": stats.bytes_received,
        "policy_bytes": stats.policy_bytes,
        "seconds": round(seconds, 3),
        "sources": stats.by_source,
        "verified": stats.chunks,
        "kept": stats.kept,
        "refetched": stats.refetched,
        "faults": [vars(fault) for fault in stats.faults],
        "at": round(time.time(), 3),
    }
    with (root / NAME).open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut_off = file.read(1) not in (b"", b"\n")  # by a kill or a full disk
        file.write(b"\n" * cut_off + json.dumps(line).encode() + b"\n")


def last(root: Path) -> dict[str, Any] | None:
    """Returns the newest whole line of the log in `root`; None if there is none."""
    try:
        with (root / NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:  # cut off by a kill or a full disk
            continue
        if isinstance(found, dict):
            return found
    return None
