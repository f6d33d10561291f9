"""The detection bench's work next to the results, so that another machine goes on with it.

    python -m bench.detection_kept      var/bench/detection → bench/results/detection-files.json

One line a unit: of each file its lease, ending, reason, rows, commit, the statistic nearest to its
limit, and which rows were caught alone. Kept work counts as long as golden.STATISTICS is the same,
an attack's also as long as the attacks' source is; the text model is trained again elsewhere, to
weights that may differ in their last bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.detection_units import Record, Units, attacks_digest, bench_of
from bench.form import ROOT
from bench.golden import STATISTICS

KEPT = ROOT / "bench" / "results" / "detection-files.json"
Tokens = Mapping[str, tuple[int, str]]


def shortened(record: Record) -> list[Any]:
    """A record without its series and words."""
    shares = record["shares"]
    nearest = max(shares, key=lambda name: shares[name], default=None)
    return [
        *(record[name] for name in ("number", "outcome", "reason", "rows", "commit")),
        record["compute_share"],
        {} if nearest is None else {nearest: round(shares[nearest], 4)},
        record["alone"] and "".join("01"[caught] for caught in record["alone"]),
    ]


def lengthened(parts: list[Any]) -> Record:
    """The other way."""
    number, outcome, reason, rows, commit, compute_share, shares, alone = parts
    return {
        "number": number, "commit": commit, "outcome": outcome, "reason": reason, "detail": "",
        "rows": rows, "shares": shares, "compute_share": compute_share,
        "alone": alone and [caught == "1" for caught in alone], "series": None,
    }  # fmt: skip


def keep(units: Units, tokens: Tokens, path: Path = KEPT) -> int:
    """Writes every unit that is there; returns how many."""
    lines = []
    for unit in sorted(units.folder.glob("*.*.*.json")):
        records = [shortened(record) for record in json.loads(unit.read_bytes())]
        lines.append(f"{json.dumps(unit.stem)}: {json.dumps(records)}")
    head = json.dumps(
        {"statistics": STATISTICS, "attacks": attacks_digest(), "tokens": dict(tokens)}
    )
    path.write_text(head[:-1] + ', "units": {\n' + ",\n".join(lines) + "\n}}\n")
    return len(lines)


def restore(units: Units, path: Path = KEPT) -> Tokens:
    """Puts kept units where they are missing, if their statistics are these; what was known of the
    tokens that attacks need, if the attacks are."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_bytes())
    if kept.get("statistics") != STATISTICS:
        return {}
    for name, records in kept["units"].items():
        if not (units.folder / f"{name}.json").exists():
            units.keep(name, [lengthened(parts) for parts in records])
    if kept["attacks"] != attacks_digest():
        return {}
    return {name: (needed, by) for name, (needed, by) in kept["tokens"].items()}


def main() -> None:
    from bench.detection import tokens_of

    units = Units(bench_of(None))
    known = restore(units)
    print(f"{KEPT.relative_to(ROOT)}: {keep(units, {**known, **tokens_of(units)})} units")


if __name__ == "__main__":
    main()
