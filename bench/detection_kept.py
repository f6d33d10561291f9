"""The detection bench's work beside the results, so that another machine goes on with it.

    python -m bench.detection_kept      var/bench/detection → bench/results/detection-files.json

One line a unit: of each file its lease, ending, reason, rows, commit and the statistic nearest to
its limit. Kept work counts as long as the sources that decide it are the same; the text model is
trained anew elsewhere, to weights that may differ in their last bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.detection_units import Record, Units, bench_of, sources
from bench.form import ROOT

KEPT = ROOT / "bench" / "results" / "detection-files.json"
Tokens = Mapping[str, tuple[int, str]]


def sources_digest() -> str:
    """Of all that decides what a unit finds, the model's weights left out."""
    return sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()


def shortened(record: Record) -> list[Any]:
    """A record without its series and words."""
    shares = record["shares"]
    nearest = max(shares, key=lambda name: shares[name], default=None)
    return [
        *(record[name] for name in ("number", "outcome", "reason", "rows", "commit")),
        record["compute_share"],
        {} if nearest is None else {nearest: round(shares[nearest], 4)},
    ]


def lengthened(parts: list[Any]) -> Record:
    """The other way."""
    number, outcome, reason, rows, commit, compute_share, shares = parts
    return {
        "number": number, "commit": commit, "outcome": outcome, "reason": reason, "detail": "",
        "rows": rows, "shares": shares, "compute_share": compute_share, "series": None,
    }  # fmt: skip


def keep(units: Units, tokens: Tokens, path: Path = KEPT) -> int:
    """Writes every unit that is there; returns how many."""
    lines = []
    for unit in sorted(units.folder.glob("*.*.*.json")):
        records = [shortened(record) for record in json.loads(unit.read_bytes())]
        lines.append(f"{json.dumps(unit.stem)}: {json.dumps(records)}")
    head = json.dumps({"sources": sources_digest(), "tokens": dict(tokens)})
    path.write_text(head[:-1] + ', "units": {\n' + ",\n".join(lines) + "\n}}\n")
    return len(lines)


def restore(units: Units, path: Path = KEPT) -> Tokens:
    """Puts kept units where they are missing, if their sources are these; what was known of the
    tokens that attacks need."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_bytes())
    if kept["sources"] != sources_digest():
        return {}
    for name, records in kept["units"].items():
        if not (units.folder / f"{name}.json").exists():
            units.keep(name, [lengthened(parts) for parts in records])
    return {name: (needed, by) for name, (needed, by) in kept["tokens"].items()}


def main() -> None:
    from bench.detection import tokens_of

    units = Units(bench_of(None))
    known = restore(units)
    print(f"{KEPT.relative_to(ROOT)}: {keep(units, {**known, **tokens_of(units)})} units")


if __name__ == "__main__":
    main()
