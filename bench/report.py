"""docs/performance.md, written from bench/results: `python -m bench report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.form import ROOT

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "performance.md"
HEAD = """# Figures

Written by `python -m bench report` from `bench/results`; `python -m bench NAME --json` measures
one of them anew. A row with a bar is held to it; one beside a peer was measured with it in the same
run, unless the peer's name says otherwise.
"""


def write(results: Path = RESULTS, page: Path = PAGE) -> int:
    """Writes the page; returns how many benches are on it. Raises MalformedError naming a result
    that cannot be read."""
    from prime_core.errors import MalformedError

    sections = []
    for path in sorted(results.glob("*.json")):
        try:
            found = json.loads(path.read_text())
            if "bench" in found and "rows" in found:
                sections.append(section(found))
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedError(f"{path} is no result of a bench: {error}") from error
    page.write_text("\n".join([HEAD, *sections]))
    return len(sections)


def section(found: Mapping[str, Any]) -> str:
    """One bench: where and when, beside what (`load`, a sentence written by whoever kept it), and
    its rows."""
    machine, load = found["machine"], found.get("load")
    lines = [
        f"## {found['bench']}",
        f"{found.get('date', 'undated')}, commit {found['commit']}, {machine['cores']} cores of "
        f"{machine['cpu']}{', at the quick size' if found['quick'] else ''}"
        f"{f' ({load})' if load else ''}.",
        "",
        "| row | measured | bar | peer |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        bar = "" if row["bar"] is None else f"{_sign(row)} {_short(row['bar'])}"
        missed = "" if row["ok"] else " **not met**"
        peer = "" if row["peer"] is None else f"{_short(row['peer'])} ({row['peer_name']})"
        lines.append(
            f"| `{row['name']}` | {_short(row['value'])} {row['unit']}{missed} | {bar} | {peer} |"
        )
    return "\n".join(lines) + "\n"


def _sign(row: Mapping[str, Any]) -> str:
    return "≥" if row["better"] == "higher" else "≤"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
