"""The detection bench's work in pieces that are kept: a run may be stopped and taken up again.

A unit is some honest files of one set-up, or some of one attack. Its result is a JSON file
under var/bench/detection/KEY, KEY being the model, the statistics' source (protocol/proofs) and the
attacks'; its name has the limits that it was judged by, each record the commit it was made by.
`behind` says which line of work is furthest behind its aim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attacks import AS_VLLM, ATTACKS, DTYPE, Job
from bench.form import ROOT, commit
from bench.honest import Bench
from bench.honest_files import Maker, make, makers
from bench.textmodel import text_model
from protocol.core.errors import MalformedError
from protocol.proofs.thresholds import shipped
from protocol.verification import replay
from protocol.verification.rollout_file import read_rollout_file
from protocol.verification.setups import HonestFile
from protocol.verification.verify import Finding

FOLDER = ROOT / "var" / "bench" / "detection"
OUTPUT_TOKENS = 256
ROWS_OF_A_FILE = 8
SINGLE_SEQUENCES = 96
FILES_TOGETHER = 5
"""Files of one attack that are made at once."""
SERIES_FILES = 40
"""Files of an attack, and of honest ones in the attacks' set-up, whose every window is kept."""
_SOURCES = (
    *("bench/attacks.py", "bench/textmodel.py"),
    *("protocol/engine/variants.py", "protocol/verification/forgeries.py"),
)
Record = dict[str, Any]


def sources() -> list[Path]:
    """The files that decide what a unit finds, but for the limits and the model."""
    paths = [ROOT / name for name in _SOURCES]
    return paths + sorted((ROOT / "protocol" / "proofs").glob("*.py"))


@dataclass(frozen=True)
class Line:
    """One line of work: `aim` units of `files` files each; `maker` None: an attack."""

    name: str
    aim: int
    files: int
    maker: Maker | None = None


def honest_lines(sequences: int) -> list[Line]:
    """Every pair of {vLLM, plain} × {float32, bfloat16} × {64, 1}: together `sequences` honest rows
    of OUTPUT_TOKENS tokens, few of each set-up in batches of 1, which are slow to make."""
    every = makers()
    single = min(SINGLE_SEQUENCES, sequences // len(every))
    lots = [maker for maker in every if maker.batch_rows > 1]
    each = (sequences - single * (len(every) - len(lots))) / len(lots)
    lines = []
    for maker in every:
        files = 8 if maker.batch_rows > 1 else 1
        if maker.engine == "vllm":  # which takes a while to start
            files *= 2
        wanted = each if maker.batch_rows > 1 else single
        aim = -(-int(wanted) // (files * ROWS_OF_A_FILE))
        lines.append(Line(maker.name, max(1, aim), files, maker))
    return lines


def attack_lines(files: int) -> list[Line]:
    """Each attack, `files` times."""
    together = min(files, FILES_TOGETHER)
    return [Line(name, -(-files // together), together) for name in ATTACKS]


def limits_key(line: Line) -> str:
    """Eight digits of the limits that a line's files are judged by; "none" where their set-up is
    not in the shipped calibration."""
    engine = "vllm" if line.name.endswith(AS_VLLM) else "plain"
    dtype = DTYPE
    if line.maker is not None:
        engine, dtype = line.maker.engine, line.maker.dtype
    for setup in shipped().setups:
        if (setup.engine.partition("/")[0], setup.dtype, setup.device) == (engine, dtype, "cpu"):
            return sha256(setup.model_dump_json().encode()).hexdigest()[:8]
    return "none"


def bench_of(folder: Path | None) -> Bench:
    """Files of 2 × 4 rows of OUTPUT_TOKENS tokens, all replayed; the text model unless given."""
    return Bench(
        max_output_tokens=OUTPUT_TOKENS,
        folder=folder or text_model(),
        groups=2,
        samples=4,
        remembering=True,
    )


class Units:
    """What has been done, on disk."""

    def __init__(self, bench: Bench, root: Path = FOLDER) -> None:
        self.bench = bench
        key = sha256()
        for path in sources() + sorted(bench.folder.glob("*.safetensors")):
            key.update(path.read_bytes())
        self.folder = root / key.hexdigest()[:12]
        self.folder.mkdir(parents=True, exist_ok=True)

    def _paths(self, line: Line) -> list[Path]:
        return sorted(self.folder.glob(f"{line.name}.{limits_key(line)}.*.json"))

    def done(self, line: Line) -> int:
        """Units of a line that are there."""
        return len(self._paths(line))

    def records(self, line: Line) -> list[Record]:
        """One record a file, in order."""
        return [record for path in self._paths(line) for record in json.loads(path.read_bytes())]

    def behind(self, lines: Sequence[Line]) -> Line | None:
        """The line that is furthest behind its aim; None if all are there."""
        open_lines = [line for line in lines if self.done(line) < line.aim]
        return min(open_lines, key=lambda line: self.done(line) / line.aim, default=None)

    def work(self, line: Line, base: int) -> None:
        """Makes and keeps a line's next unit; its leases are numbered from `base`."""
        unit = self.done(line)
        if line.maker is None:  # every attack on the same leases: what is honest is made once
            base = 100_000
        numbers = range(base + unit * line.files, base + (unit + 1) * line.files)
        if line.maker is None:
            made = ATTACKS[line.name](Job(self.bench, numbers))
        else:
            made = make(self.bench, line.maker, numbers)
        records = [
            self._record(file, number, line, unit)
            for file, number in zip(made, numbers, strict=True)
        ]
        self.keep(f"{line.name}.{limits_key(line)}.{unit:05}", records)

    def keep(self, name: str, found: object) -> None:
        """Writes one result whole, or not at all."""
        partial = self.folder / f"{name}.part"
        partial.write_text(json.dumps(found))
        partial.replace(self.folder / f"{name}.json")

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """A result that is measured once and then kept."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.keep(name, measure())
        return json.loads(path.read_bytes())

    def kept(self, name: str) -> Any:
        """A result of `once`, if it is there; else an empty list."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_bytes()) if path.exists() else []

    def _record(self, file: HonestFile, number: int, line: Line, unit: int) -> Record:
        finding = self.bench.judge(file, number)
        wanted = line.maker is None or (line.maker.engine, line.maker.dtype) == (
            "plain",
            "bfloat16",
        )
        series = None
        if wanted and unit * line.files < SERIES_FILES:
            series = series_of(self.bench, file)
        return {
            "number": number,
            "commit": commit(),
            "outcome": finding.outcome.name,
            "reason": finding.reason.name,
            "detail": finding.detail[:300],
            "rows": len(finding.rows_drawn),
            "shares": _shares(finding),
            "compute_share": finding.statistics.get("compute_share"),
            "series": series and {name: values.tolist() for name, values in series.items()},
        }


def _shares(finding: Finding) -> dict[str, float]:
    """Each statistic of the file as a share of the tightest limit that a whole long file has."""
    limits = finding.thresholds
    shares: dict[str, float] = {}
    for scope in ("file", "long"):
        for name, value in finding.statistics.items():
            limit = limits.get(f"{scope}.{name}")
            if limit:
                shares[name] = max(shares.get(name, 0.0), value / limit)
    return shares


def series_of(bench: Bench, file: HonestFile) -> dict[str, NDArray[np.float64]] | None:
    """Statistic → value of each window of a file, in order: [windows]; None if the file's proofs
    do not even decode."""
    made = read_rollout_file(file.data)
    rows = made.rows
    _, plan = bench.lease(file.signed.lease.index)
    try:
        replayed = replay.Replayed(
            bench.engine(), bench.run, file.lease_digest, range(len(rows)), plan, rows,
            bench.engine().twin(made.metadata.dtype),
        )  # fmt: skip
        parts = [replayed.by_window(i) for i in range(len(rows))]
    except MalformedError:
        return None
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def numbered(lines: Sequence[Line]) -> Iterator[tuple[Line, int]]:
    """Each line with the number of its first lease: no two honest lines share a lease."""
    for at, line in enumerate(lines):
        yield line, 1_000_000 * (at + 1)
