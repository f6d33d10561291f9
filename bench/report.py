"""docs/performance.md, written from bench/results: `python -m bench report`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.form import ROOT

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "performance.md"
HEAD = """# Figures

`python -m bench report` writes this page from `bench/results`; `python -m bench NAME --json`
measures one bench again. A peer was measured in the same run, unless its name says otherwise.
"""
LIES = ("caught_", "caught256_", "tokens_")
"""Rows of `bench detection` for one lie: share of its files and of its rows that are found, tokens
that one statistic needs. They are shown as one row of a table."""
AS_VLLM = "_as_vllm"
VARIANT = "_of_"
"""Rows of `bench population` named NAME_of_VARIANT are a table with one variant a row."""
REASON = re.compile(r"\b(?!NONE)[A-Z_]{2,}\b")


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
            raise MalformedError(f"{path} is not a result of a bench: {error}") from error
    page.write_text("\n".join([HEAD, *sections, *gpu_section(results / "gpu")]))
    return len(sections)


def gpu_section(folder: Path) -> list[str]:
    """The last record of each part of the GPU kit in `folder`/*.jsonl, ordered by file name."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["name"] != "part" or not record["ok"]:
                found[record["part"], record["name"]] = record
    if not found:
        return []
    lines = [
        "## On a GPU",
        "The last record of each part of `make gpu` (`bench/results/gpu`). The models have random "
        "weights unless a record names another.",
        "",
        "| record | card, commit | values |",
        "|---|---|---|",
    ]
    for (part, name), record in found.items():
        values = record.get("error") or ", ".join(_leaves(record["values"]))
        machine = record.get("machine", {})
        where = f"{machine.get('card', 'no card')}, {machine.get('commit', 'no commit')}"
        values = " ".join(values.replace("|", "/").split())
        lines.append(f"| `{part}.{name}` | {where} | {values} |")
    return ["\n".join(lines) + "\n"]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """ "name value" of each number, truth, short text and few numbers in nested `values`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "facts":
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, bool) or (isinstance(value, str) and len(value) < 40):
            yield f"{prefix}{name} {value}"
        elif isinstance(value, int | float):
            yield f"{prefix}{name} {_short(value)}"
        elif isinstance(value, list) and all(isinstance(one, int | float) for one in value[:5]):
            yield f"{prefix}{name} {' / '.join(map(_short, value[:5]))}"


def section(found: Mapping[str, Any]) -> str:
    """One bench: where and when, with what else running (`load`, a sentence), and its rows, without
    columns in which all rows are empty."""
    machine, load = found["machine"], found.get("load")
    lines = [
        f"## {found['bench']}",
        f"{found.get('date', 'undated')}, commit {found['commit']}, {machine['cores']} cores of "
        f"{machine['cpu']}{', at the quick size' if found['quick'] else ''}"
        f"{f' ({load})' if load else ''}.",
    ]
    of_lies, of_variants = (found["bench"] == name for name in ("detection", "population"))
    lies = [row for row in found["rows"] if of_lies and row["name"].startswith(LIES)]
    variants = [row for row in found["rows"] if of_variants and VARIANT in row["name"]]
    rows = [row for row in found["rows"] if row not in [*lies, *variants]]
    notes = _notes(rows)
    lines += [f"{mark} {text}." for text, mark in notes.items()]
    cells = [_cells(row, notes) for row in rows]
    kept = [at for at in range(4) if at < 2 or any(row[at] for row in cells)]
    names = ("row", "measured", "bar", "peer")
    head, *table = [f"| {' | '.join(row[at] for at in kept)} |" for row in (names, *cells)]
    lines += ["", head, f"|{'---|' * len(kept)}", *table]
    return "\n".join([*lines, *_lies(lies), *_variants(variants)]) + "\n"


def _notes(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What follows "; " in the units of three rows or more, and the mark that stands for it."""
    counts = Counter(row["unit"].partition("; ")[2] for row in rows)
    texts = [text for text, count in counts.items() if text and count >= 3]
    return {text: f"[{number}]" for number, text in enumerate(texts, start=1)}


def _cells(row: Mapping[str, Any], notes: Mapping[str, str]) -> tuple[str, str, str, str]:
    """A row's name, value with unit, bar and peer."""
    unit, _, after = row["unit"].partition("; ")
    unit = f"{unit} {notes[after]}" if after in notes else row["unit"]
    missed = "" if row["ok"] else " **not met**"
    peer = "" if row["peer"] is None else f"{_short(row['peer'])} ({row['peer_name']})"
    return f"`{row['name']}`", f"{_short(row['value'])} {unit}{missed}", _bar(row), peer


def _lies(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table with one lie a row, from the rows named by `LIES`."""
    if not rows:
        return []
    found = {row["name"]: row for row in rows}
    names = {row["name"].removesuffix(AS_VLLM).partition("_")[2]: None for row in rows}
    lines = [
        "",
        "Share of a lie's files and of its single rows that are found, declared as the plain "
        "engine's · as vLLM's work; tokens that one statistic needs to find it:",
        "",
        "| lie | files | rows | reasons | tokens |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        files, single = (
            [found[key] for key in (f"{kind}_{name}", f"{kind}_{name}{AS_VLLM}") if key in found]
            for kind in ("caught", "caught256")
        )
        reasons = {reason: None for row in files for reason in REASON.findall(row["unit"])}
        cells = [
            " · ".join(map(_share, files)),
            " · ".join(map(_share, single)),
            ", ".join(reasons),
            _tokens(found.get(f"tokens_{name}")),
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _variants(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table with one variant a row and one quantity a column, from rows named
    NAME_of_VARIANT."""
    if not rows:
        return []
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        name, _, variant = row["name"].partition(VARIANT)
        found.setdefault(variant, {})[name] = _short(row["value"])
    names = list(next(iter(found.values())))
    lines = [
        "",
        "The same in smaller pools, each with one default changed:",
        "",
        f"| variant | {' | '.join(f'`{name}`' for name in names)} |",
        f"|{'---|' * (len(names) + 1)}",
    ]
    for variant, values in found.items():
        cells = " | ".join(values.get(name, "") for name in names)
        lines.append(f"| `{variant}` | {cells} |")
    return lines


def _share(row: Mapping[str, Any]) -> str:
    """A share found, and its bar where it is missed: "0.8 (**not met**: ≥ 0.99)"."""
    return _short(row["value"]) + ("" if row["ok"] else f" (**not met**: {_bar(row)})")


def _tokens(row: Mapping[str, Any] | None) -> str:
    """How many tokens a statistic needs, and which: "256 (margin)"."""
    if row is None:
        return ""
    statistic = row["unit"].removeprefix("tokens ")
    return statistic if row["value"] < 0 else f"{_short(row['value'])} {statistic}"


def _bar(row: Mapping[str, Any]) -> str:
    return "" if row["bar"] is None else f"{_sign(row)} {_short(row['bar'])}"


def _sign(row: Mapping[str, Any]) -> str:
    return "≥" if row["better"] == "higher" else "≤"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
