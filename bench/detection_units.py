"""The detection bench's work in pieces that are kept: a run may be stopped and taken up again.

A unit is some honest files of one setup, or some of one attack. Its result is a JSON file under
var/bench/detection/KEY, KEY being the model, the device and golden.STATISTICS; its name has the
limits that it was judged by, an attack's the digest of the attacks' source too, and each record the
commit it was made by. `behind` says which line of work is furthest behind its aim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.detection_attacks import ATTACKS, MUST_CATCH, held_by_verifier
from bench.form import ROOT, commit
from bench.golden import STATISTICS
from bench.honest import Bench
from bench.honest_files import Maker, make, makers
from bench.kin import OLDER, stepped, weights_digest
from bench.lying import DTYPE, Job, as_vllm
from bench.textmodel import text_model
from prime_core.errors import MalformedError, UnavailableError
from prime_core.verdict import Outcome
from prime_verify import replay
from prime_verify.checks import (
    check_improbable_tokens,
    check_proofs,
    check_rewards,
    check_rows,
)
from prime_verify.finding import Finding, RulingError
from prime_verify.proofs.thresholds import shipped
from prime_verify.rollout_file import read_rollout_file
from prime_verify.setups import HonestFile


class FileRows:
    """All rows of a file, replayed once (not at all if its proofs do not even decode)."""

    def __init__(self, bench: Bench, file: HonestFile) -> None:
        self._bench, self._signed = bench, file.signed
        made = read_rollout_file(file.data)
        self._rows, self._device, self._dtype = made.rows, made.metadata.device, made.metadata.dtype
        _, self._plan = bench.lease(file.signed.lease.index)
        engine = bench.engine()
        self._replayed: replay.Replayed | None = None
        self._measured: list[replay.RowStatistics] = []
        try:
            self._replayed = replay.Replayed(
                engine,
                bench.run,
                replay.ClaimedRows(file.lease_digest, self._plan, self._rows),
                range(len(self._rows)),
                engine.in_dtype(self._dtype),
            )
            self._measured = self._replayed.measure()
            self._reference = self._replayed.reference()
        except MalformedError:
            self._replayed = None

    def series(self) -> dict[str, NDArray[np.float64]] | None:
        """Statistic → value of each window of the file, in order: [windows]."""
        if self._replayed is None:
            return None
        parts = [self._replayed.by_window(i) for i in range(len(self._rows))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def alone(self, engine: str) -> list[bool] | None:
        """Of each row, whether it is caught by nothing but itself, declared as made by `engine`:
        by a check before the replay, or beyond a row's limits. None for a setup without limits."""
        setup = shipped().setup(engine, self._dtype, self._device)
        if setup is None:
            return None
        refuted = [self._refuted(i) for i in range(len(self._rows))]
        if self._replayed is None:
            return refuted
        limits = setup.limits(self._reference)
        return [
            early or replay.accuse([row], limits) is not None
            for early, row in zip(refuted, self._measured, strict=True)
        ]

    def _refuted(self, i: int) -> bool:
        rows, plan, engine = [self._rows[i]], [self._plan[i]], self._bench.engine()
        try:
            check_rows(rows, plan, self._signed, self._bench.run, engine)
            check_proofs(rows, engine)
            check_improbable_tokens(rows, engine)
            check_rewards(rows, plan, self._bench.environment, engine)
        except RulingError as ruling:
            return ruling.finding.outcome is Outcome.REJECTED
        return False


FOLDER = ROOT / "var" / "bench" / "detection"
OUTPUT_TOKENS = 256
GROUPS, SAMPLES = 2, 4
ROWS_OF_A_FILE = GROUPS * SAMPLES
SINGLE_SEQUENCES = 96
FILES_TOGETHER = 5
"""Files of one attack that are made at once."""
REFERENCE_SETUP = "plain-bfloat16-64"
"""The honest setup against whose windows attacks are measured: the attackers' own."""
REFERENCE_OLDER = f"{OLDER}-bfloat16-64"
"""The same with the older policy, which lies about older policies are measured against."""
REFERENCES = (REFERENCE_SETUP, REFERENCE_OLDER)
SERIES_FILES = 40
"""Honest files of either whose every window is kept."""
OLDER_UNITS = 5
AGED = frozenset(name for name in ATTACKS if name.startswith("old"))
"""Lies whose verifier holds a newer policy."""
AS_VLLM = "_as_vllm"
"""Ends the name of an attack whose very same files are declared as vLLM's work."""
_ATTACK_SOURCES = (
    *("bench/detection_attacks.py", "bench/lying.py", "bench/kin.py"),
    *("protocol/prime_engine/variants.py", "protocol/prime_verify/canaries/forgeries.py"),
)
Record = dict[str, Any]


@cache
def attacks_digest() -> str:
    """Of what decides how lies are made; honest files do not depend on it."""
    return sha256(b"".join((ROOT / name).read_bytes() for name in _ATTACK_SOURCES)).hexdigest()


@dataclass(frozen=True)
class Line:
    """One line of work: `aim` units of `files` files each; `maker` None: an attack."""

    name: str
    aim: int
    files: int
    maker: Maker | None = None


def honest_lines(sequences: int, device: str = "cpu") -> list[Line]:
    """Every pair of {vLLM, plain} × {float32, bfloat16} × {64, 1}: together `sequences` honest rows
    of OUTPUT_TOKENS tokens, few of each setup in batches of 1, which are slow to make."""
    every = makers(device)
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


def older_line(device: str = "cpu", units: int = OLDER_UNITS) -> Line:
    """Honest files of the policy that all newer ones come from."""
    return Line(REFERENCE_OLDER, units, 8, Maker("plain", DTYPE, 64, device))


def attack_lines(files: int, device: str = "cpu") -> list[Line]:
    """Each attack, `files` times, declared as plain and (on CPUs, which have limits) as vLLM;
    first those that have to be caught."""
    together = min(files, FILES_TOGETHER)
    declared = ("", AS_VLLM) if device == "cpu" else ("",)
    return [
        Line(name + suffix, -(-files // together), together)
        for name in sorted(ATTACKS, key=lambda name: name not in MUST_CATCH)
        for suffix in declared
    ]


def limits_key(line: Line, device: str = "cpu") -> str:
    """Eight digits of the limits that a line's files are judged by; "none" where their setup is
    not in the shipped calibration. An attack's goes on with what it was made by."""
    engine = "vllm" if line.name.endswith(AS_VLLM) else "plain"
    dtype, made_by = DTYPE, "-" + attacks_digest()[:8]
    if line.maker is not None:
        engine, dtype, made_by = line.maker.engine, line.maker.dtype, ""
    for setup in shipped().setups:
        if (setup.engine.partition("/")[0], setup.dtype, setup.device) == (engine, dtype, device):
            return sha256(setup.model_dump_json().encode()).hexdigest()[:8] + made_by
    return "none" + made_by


def bench_of(folder: Path | None, device: str = "cpu") -> Bench:
    """Files of 2 × 4 rows of OUTPUT_TOKENS tokens, all replayed; the text model unless given.
    Raises UnavailableError if the folder holds no model."""
    if folder is not None and not (folder / "config.json").exists():
        raise UnavailableError(f"there is no model in {folder}: no config.json")
    bench = Bench(
        max_output_tokens=OUTPUT_TOKENS,
        folder=folder or text_model(),
        groups=GROUPS,
        samples=SAMPLES,
        remembering=True,
        device=device,
    )
    bench.engine()  # a folder that does not load is refused before anything is begun
    return bench


def older(bench: Bench) -> Bench:
    """The bench whose policy is the older one."""
    return replace(bench, folder=stepped(bench.folder) / OLDER)


class Units:
    """What has been done, on disk."""

    def __init__(self, bench: Bench, root: Path = FOLDER) -> None:
        self.bench = bench
        key = f"{STATISTICS} {bench.device} {weights_digest(bench.folder)}"
        self.folder = root / sha256(key.encode()).hexdigest()[:12]
        self.folder.mkdir(parents=True, exist_ok=True)

    def limits_key(self, line: Line) -> str:
        """See `limits_key`, for the device that this work is done on."""
        return limits_key(line, self._device)

    @cached_property
    def _device(self) -> str:
        """As files name it."""
        return "cpu" if self.bench.device == "cpu" else self.bench.engine().device

    def _paths(self, line: Line) -> list[Path]:
        return sorted(self.folder.glob(f"{line.name}.{self.limits_key(line)}.*.json"))

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
        """Makes and keeps a line's next unit; its leases are numbered from `base`. An attack's is
        kept as declared either way."""
        unit = self.done(line)
        if line.maker is None:
            self._lie(line, unit)
            return
        numbers = range(base + unit * line.files, base + (unit + 1) * line.files)
        bench = older(self.bench) if line.name == REFERENCE_OLDER else self.bench
        records = []
        for number, file in zip(numbers, make(bench, line.maker, numbers), strict=True):
            rows = FileRows(bench, file)
            series = line.name in REFERENCES and unit * line.files < SERIES_FILES
            records.append(_record(bench, file, number, rows, series))
        self.keep(f"{line.name}.{self.limits_key(line)}.{unit:05}", records)

    def _lie(self, line: Line, unit: int) -> None:
        name = line.name.removesuffix(AS_VLLM)
        bench = held_by_verifier(name, self.bench)
        base = 100_000  # every attack on the same leases: what is honest is made once
        numbers = range(base + unit * line.files, base + (unit + 1) * line.files)
        plain: list[Record] = []
        relabeled: list[Record] = []
        for number, file in zip(numbers, ATTACKS[name](Job(bench, numbers)), strict=True):
            rows = FileRows(bench, file)
            plain.append(_record(bench, file, number, rows, True))
            if bench.device == "cpu":
                relabeled.append(_record(bench, as_vllm(file), number, rows, False))
        for suffix, records in (("", plain), (AS_VLLM, relabeled)):
            stem = f"{name}{suffix}.{self.limits_key(replace(line, name=name + suffix))}"
            if records:
                self.keep(f"{stem}.{unit:05}", records)

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


def _record(bench: Bench, file: HonestFile, number: int, rows: FileRows, series: bool) -> Record:
    finding = bench.judge(file, number)
    windows = rows.series() if series else None
    return {
        "number": number,
        "commit": commit(),
        "outcome": finding.outcome.name,
        "reason": finding.reason.name,
        "detail": finding.detail[:300],
        "rows": len(finding.rows_drawn),
        "shares": _shares(finding),
        "compute_share": finding.statistics.get("compute_share"),
        "alone": rows.alone(read_rollout_file(file.data).metadata.engine),
        "series": windows and {name: values.tolist() for name, values in windows.items()},
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


def numbered(lines: Sequence[Line]) -> Iterator[tuple[Line, int]]:
    """Each line with the number of its first lease: no two honest lines share a lease."""
    for at, line in enumerate(lines):
        yield line, 1_000_000 * (at + 1)
