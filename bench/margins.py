"""What sums of sampling margins find: `python -m bench margins [--minutes M]`.

A node that samples with 8-bit weights or an 8-bit cache, and lets the leased weights compute
states, log-probabilities and proof passes, differs from honest nodes in its sampling margins alone
(manager/history.py). SmolLM2-135M-Instruct, from PRIME_SMOLLM_HOME, makes files of 8 rows of up to
64 tokens in bfloat16, 64 rows together, and all rows are replayed. Each unit is kept in
var/bench/few, so a run goes on where one stopped (`--minutes` of CPU time).

Nodes are simulated: each of a node's files is drawn with replacement from the measured ones, and so
are its replayed rows: two, four in its first files, or, now and then, all. OTHERS honest files make
the sums of the other nodes. A node is found once history.excess of its sums is beyond
history.MOST_EXCESS.

    apart_X_S     how far X's mean of statistic S lies above that of the honest files, in standard
                  deviations of honest files of which two rows are replayed; ± its standard error,
                  from files replayed whole
    found_X_N     share of nodes found within N files
    whole_X_N     the same, but all rows of each file are replayed

X is a lie, or honest work: `honest` is as the others', `processor` is made without this machine's
newest instructions, `batch` in batches of 8 rows.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from statistics import mean, pstdev, variance

from bench.few import EVALUATED, FOLDER, SMOL, File, Unit, cpu_minutes, measured
from bench.form import Row
from bench.honest_files import Maker
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_ADDRESS
from prime_orchestrator.manager import history
from prime_orchestrator.store.drift import DriftRow
from prime_verify import replay
from prime_verify.calibrate import OTHER_CPUS
from prime_verify.proofs.thresholds import FILE_ROWS, shipped

PACKAGES = ("numpy", "torch", "transformers")
TOKENS = 64
DRAWN = 2
"""Rows of a lease of 8 that the default share draws."""
OTHERS, NODES, QUICK_NODES = 1_000, 400, 20
FILES, QUICK_FILES = (10, 30, 100, 300), (10, 30)
"""N of the rows."""
LIES = ("int8", "kv8")


@dataclass(frozen=True)
class Seen:
    """What a validator states of one file: its kind, and the shares of its limits."""

    kind: str
    shares: Mapping[str, float]


def units() -> dict[str, list[Unit]]:
    """The work by the name in rows. The first honest and 8-bit files are also those of `few`."""
    made = Unit(SMOL, Maker("plain", "bfloat16", 64), TOKENS, 8)
    found = {
        "honest": [made, replace(made, files=4, first=EVALUATED)],
        "int8": [replace(made, files=4, first=EVALUATED, lie="int8")],
        "kv8": [],
        "processor": [replace(made, first=2 * EVALUATED + 24, settings=OTHER_CPUS[1])],
        "batch": [replace(made, first=2 * EVALUATED + 32, maker=replace(made.maker, batch_rows=8))],
    }
    for first in range(2 * EVALUATED, 2 * EVALUATED + 24, made.files):
        for name in ("honest", *LIES):
            found[name].append(replace(made, first=first, lie=name if name in LIES else ""))
    return found


def _work(minutes: float | None) -> Iterator[tuple[str, File]]:
    """All files with their names, as far as `minutes` of CPU time allow."""
    for name, work in units().items():
        for unit in work:
            kept = (FOLDER / f"{unit.name}.json").exists()
            if not kept and minutes is not None and cpu_minutes() > minutes:
                continue
            try:
                yield from ((name, file) for file in measured(unit))
            except UnavailableError as error:
                print(f"bench: {unit.name}: {error}", file=sys.stderr, flush=True)


def seen(file: File, numbers: Sequence[int]) -> Seen:
    """A file of which these rows are replayed."""
    rows = [file.rows[number] for number in numbers]
    setup = shipped().setup(*file.setup, "cpu")
    assert setup is not None, "the shipped calibration has it"
    reference = replay.reference_of([file.drifts[number] for number in numbers])
    limits, values = setup.limits(reference).of["file"], replay.combine(rows)
    tokens = sum(row.tokens for row in rows)
    return Seen(
        str(tokens.bit_length()), {name: values[name] / limits[name] for name in history.MARGINS}
    )


class Work:
    """The measured files of one name, of which a node's files are drawn."""

    def __init__(self, files: Sequence[File]) -> None:
        self._files = range(len(files))
        self._seen = cache(lambda file, numbers: seen(files[file], numbers))

    def draw(self, lot: random.Random, before: int, whole: bool) -> Seen:
        """A node's next file, after `before` others."""
        file = lot.choice(self._files)
        few = 2 * DRAWN if before < history.NEWCOMER_FILES else DRAWN
        if before >= history.NEWCOMER_FILES and lot.randrange(history.FULL_EVERY) == 0:
            whole = True
        rows = FILE_ROWS if whole else few
        return self._seen(file, tuple(sorted(lot.sample(range(FILE_ROWS), rows))))

    def shares(self, statistic: str, drawn: int) -> list[float]:
        """The share of a statistic in each draw of `drawn` rows of each file."""
        return [
            self._seen(file, numbers).shares[statistic]
            for file in self._files
            for numbers in combinations(range(FILE_ROWS), drawn)
        ]

    def apart(self, honest: Work, statistic: str) -> tuple[float, float]:
        """How far the mean lies above that of `honest`, and its standard error, in standard
        deviations of honest files of DRAWN rows."""
        own, others = (work.shares(statistic, FILE_ROWS) for work in (self, honest))
        deviation = pstdev(honest.shares(statistic, DRAWN))
        error = math.sqrt(variance(own) / len(own) + variance(others) / len(others))
        return (mean(own) - mean(others)) / deviation, error / deviation


class Sums:
    """Sums over files of one setup, by kind and statistic."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, str], DriftRow] = {}

    def add(self, one: Seen) -> None:
        for name, share in one.shares.items():
            empty = DriftRow(ZERO_ADDRESS, "", one.kind, name, 0, 0.0, 0.0)
            row = self.of.get((one.kind, name), empty)
            self.of[one.kind, name] = replace(
                row,
                files=row.files + 1,
                total=row.total + share,
                squares=row.squares + share * share,
            )

    def beyond(self, others: Sums) -> bool:
        """Whether a node with these sums is found next to nodes with those of `others`."""
        totals: dict[tuple[str, str, str], tuple[int, float, float]] = defaultdict(
            lambda: (0, 0.0, 0.0)
        )
        for (kind, name), row in [*self.of.items(), *others.of.items()]:
            files, total, squares = totals["", kind, name]
            totals["", kind, name] = files + row.files, total + row.total, squares + row.squares
        found = (history.excess(own, totals) for own in history.by_statistic(self.of.values()))
        return any(one is not None and one > history.MOST_EXCESS for one in found)


def files_until_found(
    work: Work, others: Sums, most: int, lot: random.Random, whole: bool = False
) -> int | None:
    """After how many files a node of this work is found; None if not within `most`."""
    own = Sums()
    for before in range(most):
        own.add(work.draw(lot, before, whole))
        if own.beyond(others):
            return before + 1
    return None


def run(quick: bool, minutes: float | None = None) -> list[Row]:
    """Returns the rows. No honest node of the others' hardware may be found."""
    files: dict[str, list[File]] = defaultdict(list)
    for name, file in _work(0.5 if quick and minutes is None else minutes):
        files[name].append(file)
    nodes, steps = (QUICK_NODES, QUICK_FILES) if quick else (NODES, FILES)
    works = {name: Work(found) for name, found in files.items()}
    if "honest" not in works:
        raise UnavailableError("no honest file is measured: set PRIME_SMOLLM_HOME, and --minutes")
    rows: list[Row] = []
    for name, work in works.items():
        for statistic in sorted(history.MARGINS) if name != "honest" else ():
            apart, error = work.apart(works["honest"], statistic)
            unit = f"± {error:.2f} standard deviations; {len(files[name])} measured files"
            rows.append(Row(f"apart_{name}_{statistic}", apart, unit))
    rows.append(Row("honest_files", len(files["honest"]), "measured"))
    for prefix, whole in (("found", False), ("whole", True)):
        lot = random.Random(0)
        others = Sums()
        for number in range(OTHERS):
            others.add(works["honest"].draw(lot, number % 100, whole))
        for name, work in works.items():
            found = [files_until_found(work, others, steps[-1], lot, whole) for _ in range(nodes)]
            for step in steps:
                share = sum(one is not None and one <= step for one in found) / nodes
                bar = 0.0 if name == "honest" else None
                rows.append(Row(f"{prefix}_{name}_{step}", share, f"of {nodes} nodes", bar))
    return rows
