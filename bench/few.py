"""Limits of few replayed rows, and what they find: `python -m bench few [--minutes M] [--write]`.

    measure   files of 8 rows, all of them replayed: honest ones by each setup and model, vLLM's too
              where it is installed (scripts/setup_vllm.sh), and those of SmolLM2-135M-Instruct with
              8-bit weights or an 8-bit cache. Each unit is kept in var/bench/few, so a run goes on
              where one stopped (`--minutes` of CPU time)
    fit       from the honest files of leases below EVALUATED, each model and way of making them a
              group (calibrate.few_of). No limit is tighter than the shipped one of a file
    evaluate  other leases, so other prompts and seeds: every draw of two and of four rows of a
              file; 8-bit files also as declared as vLLM's

SmolLM2 is read from PRIME_SMOLLM_HOME. `held_out`: by limits that were fitted without SmolLM2.
`--write` writes calibration-2.json: the shipped calibration with these limits, of setups with at
least WRITTEN_ROWS honest rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

from bench.form import ROOT, Row
from bench.honest import Bench
from bench.honest_files import Maker, files_by, make
from prime_core.errors import UnavailableError
from prime_engine.variants import VARIANTS
from prime_verify import replay
from prime_verify.calibrate import LENGTHS, OTHER_CPUS, Measured, few_of, replay_rows, tiny_models
from prime_verify.engines import load_engine
from prime_verify.proofs.thresholds import (
    FEW_TOKENS,
    FILE_ROWS,
    LEAST_TOKENS,
    NEWEST,
    Calibration,
    SetupLimits,
    shipped,
)
from prime_verify.replay import RowStatistics

PACKAGES = ("numpy", "torch", "transformers")
FOLDER = ROOT / "var" / "bench" / "few"
SMOL = "smollm2-135m-instruct"
EVALUATED = 1000
"""Leases from this number on are evaluated, those below are fitted."""
LIE = "int8"
CACHE = "kv8"
WRITTEN_ROWS = 700
"""Fewest honest rows from which `--write` takes a setup's limits; a setup with fewer
has none."""
DRAWS = (2, 4)
"""Rows of a lease of 8 that the default share draws, and twice as many, of a new node's files."""
NEW_FILES = 8
FILES = 10
Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Unit:
    """`files` files of the leases from `first` on, of rows of up to `tokens` tokens. `lie`: made
    with other weights, in VARIANTS. `settings`: environment variables of the making process."""

    model: str
    maker: Maker
    tokens: int
    files: int
    first: int = 0
    lie: str = ""
    settings: Settings = ()

    @property
    def name(self) -> str:
        parts = [self.model, self.maker.name, str(self.tokens), str(self.first), str(self.files)]
        return "-".join([*parts, self.lie, *(value for _, value in self.settings)])


@dataclass(frozen=True)
class File:
    """A file's rows, as its replay measured them, and the drift of each that its dtype explains
    (none in the replay's)."""

    unit: Unit
    rows: Sequence[RowStatistics]
    drifts: Sequence[RowStatistics]

    @property
    def setup(self) -> tuple[str, str]:
        return f"{self.unit.maker.engine}/1", self.unit.maker.dtype


def units() -> list[Unit]:
    """The work, what matters most first."""
    bf16, f32 = Maker("plain", "bfloat16", 64), Maker("plain", "float32", 64)
    small, turns = ("devnet", "small", "deep"), (0, EVALUATED)
    found = [Unit(model, bf16, n, 16) for model in small for n in LENGTHS]
    found += [Unit(SMOL, bf16, 64, 8), Unit(SMOL, bf16, 64, 4, EVALUATED, LIE)]
    found += [Unit("deep", bf16, 160, 8, settings=settings) for settings in OTHER_CPUS]
    found += [Unit(SMOL, bf16, 64, 4, EVALUATED), Unit("deep", bf16, 160, 32, 100)]
    found += [Unit(model, f32, n, 16) for model in small for n in LENGTHS[:2]]
    found += [Unit("deep", bf16, 160, 4, EVALUATED, settings=one) for one in OTHER_CPUS]
    found += [Unit(model, bf16, 160, 16, EVALUATED) for model in small]
    for first in turns:
        for maker in (bf16, f32):
            one, vllm = replace(maker, batch_rows=1), replace(maker, engine="vllm")
            found += [Unit(model, one, 80, 2, first) for model in small]
            found += [Unit("devnet", vllm, 80, 24, first)]
        found += [Unit("deep", f32, 160, 8, first, settings=one) for one in OTHER_CPUS]
        found += [Unit(SMOL, f32, 64, 3, first)]
        found += [Unit(SMOL, bf16, 64, 2, first, settings=one) for one in OTHER_CPUS[1:]]
    found.append(Unit(SMOL, f32, 64, 3, EVALUATED, LIE))
    vllm = replace(bf16, engine="vllm")
    for turn in range(4):  # both in turns, so that a run that stops early has some of each
        found += [Unit(SMOL, vllm, 64, 8, 100 * turn + first) for first in turns]
        found += [Unit("devnet", vllm, 160, 16, 100 * turn + first) for first in turns]
    more = [EVALUATED + 1000 + 8 * turn for turn in range(3)]
    return found + [Unit(SMOL, bf16, 64, 8, first, lie) for first in more for lie in (LIE, CACHE)]


@cache
def _folder(model: str) -> Path:
    """The model's folder. Raises UnavailableError if SmolLM2 is not here."""
    if model == SMOL:
        home = Path(os.environ.get("PRIME_SMOLLM_HOME", ROOT / "var" / "models" / SMOL))
        if not (home / "config.json").is_file():
            raise UnavailableError(f"{home} holds no model: set PRIME_SMOLLM_HOME")
        return home
    if model == "devnet":
        return ROOT / "devnet" / "model"
    tiny = FOLDER / "models"
    if not (tiny / model).is_dir():
        tiny_models(tiny)
    return tiny / model


@cache
def _bench(model: str, tokens: int) -> Bench:
    return Bench(tokens, _folder(model), groups=2, samples=4)


def measured(unit: Unit) -> list[File]:
    """Makes and replays a unit's files, or reads what was kept of it. Raises UnavailableError if
    its setup does not run here."""
    path = FOLDER / f"{unit.name}.json"
    if not path.exists():
        bench, numbers = _bench(unit.model, unit.tokens), range(unit.first, unit.first + unit.files)
        if unit.lie:
            maker = unit.maker
            liar = load_engine(
                bench.folder, dtype=maker.dtype, batch_rows=maker.batch_rows, threads=1,
                prepare=VARIANTS[unit.lie],
            )  # fmt: skip
            made = files_by(bench, liar, numbers)
        else:
            made = make(bench, unit.maker, numbers, dict(unit.settings))
        found = [replay_rows(one, bench.run, bench.environment, bench.engine()) for one in made]
        kept = [[[asdict(row) for row in part] for part in one] for one in found]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept))
    return [
        File(unit, *([RowStatistics(**row) for row in part] for part in one))
        for one in json.loads(path.read_text())
    ]


def _work(minutes: float | None) -> Iterator[File]:
    """All files, as far as `minutes` of CPU time allow."""
    for unit in units():
        kept = (FOLDER / f"{unit.name}.json").exists()
        if not kept and minutes is not None and cpu_minutes() > minutes:
            continue
        before = cpu_minutes()
        try:
            yield from measured(unit)
        except UnavailableError as error:
            print(f"bench: {unit.name}: {error}", file=sys.stderr, flush=True)
            continue
        if not kept:
            spent = 60 * (cpu_minutes() - before)
            print(f"{unit.name}: {spent:.1f} s of CPU time", file=sys.stderr, flush=True)


def cpu_minutes() -> float:
    """CPU time of this process and those that it waited for."""
    return sum(os.times()[:4]) / 60


def fitted(files: Iterable[File]) -> tuple[Calibration, dict[tuple[str, str], int]]:
    """The shipped calibration with limits of few rows from `files`, for setups of which some were
    measured, and by (engine, dtype) the number of rows."""
    groups: dict[Any, Measured] = defaultdict(Measured)
    by_unit: dict[Unit, list[File]] = defaultdict(list)
    for file in files:
        by_unit[file.unit].append(file)
    for unit, found in by_unit.items():  # rows of short files, too, make sets of many tokens
        rows = [row for file in found for row in file.rows]
        drifts = [row for file in found for row in file.drifts]
        groups[found[0].setup, unit.model, unit.maker, unit.settings].add(rows, drifts)
    setups = []
    counts: dict[tuple[str, str], int] = {}
    for setup in shipped().setups:
        key = setup.engine, setup.dtype
        mine = [group for (of, *_), group in groups.items() if of == key]
        counts[key] = sum(group.rows for group in mine)
        setups.append(setup.model_copy(update={"few": few_of(setup.dtype, mine, setup.file)}))
    return shipped().model_copy(update={"setups": tuple(setups)}), counts


def draws(file: File, rows: int) -> list[list[int]]:
    """Every draw of `rows` rows of a file, with further rows until those of a file in another dtype
    than the replay's have LEAST_TOKENS tokens."""
    found = []
    for drawn in combinations(range(len(file.rows)), rows):
        numbers = list(drawn)
        for more in range(len(file.rows)):
            short = sum(file.rows[number].tokens for number in numbers) < LEAST_TOKENS
            if file.drifts and short and more not in numbers:
                numbers.append(more)
        found.append(numbers)
    return found


def rejected(file: File, numbers: Sequence[int], setup: SetupLimits) -> bool:
    """Whether the limits of `setup` reject a file of which these rows are replayed."""
    rows = [file.rows[number] for number in numbers]
    reference = replay.reference_of([file.drifts[number] for number in numbers if file.drifts])
    return replay.accuse(rows, setup.limits(reference, replay.few_tokens(rows))) is not None


def found_in(file: File, rows: int, setup: SetupLimits) -> float:
    """Share of a file's draws of `rows` rows that are rejected."""
    return mean(rejected(file, numbers, setup) for numbers in draws(file, rows))


def within(files: int, two: float, four: float) -> float:
    """Chance that one of a new node's first `files` files is rejected, if a draw of two or four
    rows is with these chances."""
    new = min(files, NEW_FILES)
    passed: float = (1 - four) ** new * (1 - two) ** (files - new)
    return 1 - passed


def by_tokens(files: Sequence[File], setup: SetupLimits) -> dict[int, float]:
    """Share of draws of fewer than FILE_ROWS rows that are rejected, by the limit of FEW_TOKENS
    that judges them; no larger than that of more tokens."""
    found: dict[int, list[bool]] = defaultdict(list)
    for file in files:
        for rows in range(1, FILE_ROWS):
            for numbers in draws(file, rows):
                tokens = replay.few_tokens([file.rows[number] for number in numbers])
                if filled := [least for least in FEW_TOKENS if least <= tokens]:
                    found[filled[-1]].append(rejected(file, numbers, setup))
    shares = {tokens: mean(values) for tokens, values in found.items()}
    return {n: min(share for more, share in shares.items() if more >= n) for n in sorted(shares)}


def run(quick: bool, minutes: float | None = None, write: bool = False) -> list[Row]:
    """All rows; `minutes` of CPU time bound what is measured, `write` writes the calibration."""
    files = list(_work(0.5 if quick and minutes is None else minutes))
    learned = [one for one in files if one.unit.first < EVALUATED and not one.unit.lie]
    calibration, counts = fitted(learned)
    held_out, _ = fitted(one for one in learned if one.unit.model != SMOL)
    rows = [
        Row(f"fitted_{engine.partition('/')[0]}_{dtype}", count, "honest rows")
        for (engine, dtype), count in sorted(counts.items())
        if count
    ]
    others = [one for one in files if one.unit.first >= EVALUATED]
    honest = [one for one in others if not one.unit.lie]
    smol = [one for one in files if one.unit.model == SMOL and not one.unit.lie]
    by_vllm = [file for file in honest if file.unit.maker.engine == "vllm"]
    for name, by, judged in (
        ("honest_rejected", calibration, honest), ("honest_rejected_vllm", calibration, by_vllm),
        ("honest_rejected_held_out", held_out, smol),
    ):  # fmt: skip
        wrong, count = 0, 0
        for file in judged:
            setup = _setup(by, *file.setup)
            outcomes = [rejected(file, drawn, setup) for n in DRAWS for drawn in draws(file, n)]
            wrong, count = wrong + sum(outcomes), count + len(outcomes)
        rows.append(Row(name, wrong, f"of {count} draws of {len(judged)} files", 0))
    if by_vllm:
        outcomes = [
            rejected(file, drawn, _setup(calibration, "plain/1", file.setup[1]))
            for file in by_vllm for n in DRAWS for drawn in draws(file, n)
        ]  # fmt: skip
        of = f"of {len(outcomes)} draws of {len(by_vllm)} files of vLLM"
        unit = f"{of}, by the plain engine's limits"
        rows.append(Row("honest_vllm_by_plain", sum(outcomes), unit))
    for dtype, lie in product(("bfloat16", "float32"), (LIE, CACHE)):
        lies = [one for one in others if one.unit.lie == lie and one.unit.maker.dtype == dtype]
        if lies:
            rows += _found(dtype, lies, calibration, held_out)
    if write:
        source = f"{shipped().source}; few rows: {_said(learned)}"
        setups = tuple(
            new if counts[new.engine, new.dtype] >= WRITTEN_ROWS else old
            for new, old in zip(calibration.setups, shipped().setups, strict=True)
        )
        changed = {"source": source, "setups": setups}
        NEWEST.write_bytes(calibration.model_copy(update=changed).canonical())
    return rows


def _found(
    dtype: str, lies: Sequence[File], calibration: Calibration, held_out: Calibration
) -> Iterator[Row]:
    """What limits find of the files `lies` of SmolLM2 in `dtype`, all made with one lie."""
    cached = lies[0].unit.lie == CACHE
    what = "SmolLM2 with an 8-bit cache" if cached else "8-bit SmolLM2"
    of = f"of draws of {len(lies)} files of {what} in {dtype}"
    kind = f"{dtype}_{CACHE}" if cached else dtype
    for name, by, engine in (
        ("", calibration, "plain/1"), ("_held_out", held_out, "plain/1"),
        ("_alone", shipped(), "plain/1"), ("_as_vllm", calibration, "vllm/1"),
        ("_as_vllm_held_out", held_out, "vllm/1"),
    ):  # fmt: skip
        setup = _setup(by, engine, dtype)
        two, four = (mean(found_in(file, n, setup) for file in lies) for n in DRAWS)
        words = {"_alone": ", by limits of rows alone"}.get(name, "")
        yield Row(f"found2_{kind}{name}", two, f"{of}, two rows{words}")
        yield Row(f"found4_{kind}{name}", four, f"{of}, four rows{words}")
        bar = 0.99 if (kind, name) == ("bfloat16", "") else None
        found = within(FILES, two, four)
        unit = f"chance that one of a new node's first {FILES} such files is rejected{words}"
        yield Row(f"within{FILES}_{kind}{name}", found, unit, bar, "higher")
        if by is calibration:
            for tokens, share in by_tokens(lies, setup).items():
                yield Row(f"few{tokens}_{kind}{name}", share, f"{of}, {tokens} tokens or more")


def _setup(calibration: Calibration, engine: str, dtype: str) -> SetupLimits:
    setup = calibration.setup(engine, dtype, "cpu")
    assert setup is not None, "the shipped calibration has it"
    return setup


def _said(files: Sequence[File]) -> str:
    """The models, and how many files of each, as text."""
    counts: dict[str, int] = defaultdict(int)
    for file in files:
        counts[file.unit.model] += 1
    return ", ".join(f"{count} files of 8 rows of {model}" for model, count in counts.items())
