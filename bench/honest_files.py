"""Honest files of a bench by any engine, several leases to one batch, as a busy worker makes them.

python -m bench.honest_files --out DIR --model DIR …      by an interpreter that has vLLM
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from bench.form import ROOT, Row
from bench.honest import Bench
from prime_core.errors import PrimeError, UnavailableError
from prime_core.verdict import Outcome, Reason
from prime_engine.base import Engine
from prime_verify import build
from prime_verify.engines import load_engine
from prime_verify.proofs import activations
from prime_verify.rollout_file import read_rollout_file
from prime_verify.setups import HonestFile, run_elsewhere

VLLM_PYTHON = Path(
    os.environ.get("PRIME_VLLM_PYTHON", ROOT / "var" / "engines" / "vllm" / "bin" / "python")
)


SHADOW = frozenset({Reason.UNKNOWN_SETUP, Reason.UNCALIBRATED})
"""Reasons of files that were measured only."""


@dataclass(frozen=True)
class Maker:
    """A setup: `batch_rows` rows generated together, on `device` ("cpu", "cuda:0")."""

    engine: str
    dtype: str
    batch_rows: int
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.dtype}-{self.batch_rows}"


def make(
    bench: Bench, maker: Maker, numbers: range, settings: Mapping[str, str] = MappingProxyType({})
) -> list[HonestFile]:
    """The files of the leases `numbers`; with `settings` (environment variables), by a process of
    their own. Raises UnavailableError if the setup does not run."""
    if maker.engine == "plain" and not settings:
        return files_by(bench, bench.engine(maker.dtype, maker.batch_rows), numbers)
    python = Path(sys.executable) if maker.engine == "plain" else VLLM_PYTHON
    if not python.exists():
        raise UnavailableError(f"{maker.name}: vLLM is not installed here: scripts/setup_vllm.sh")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("bench.honest_files", "--out", folder),
            *("--model", str(bench.folder.resolve()), "--engine", maker.engine),
            *("--dtype", maker.dtype, "--batch", str(maker.batch_rows)),
            *("--device", maker.device),
            *("--first", str(numbers.start), "--count", str(len(numbers))),
            *("--tokens", str(bench.max_output_tokens), "--share", str(bench.share)),
            *("--groups", str(bench.groups), "--samples", str(bench.samples)),
        ]
        ours = os.pathsep.join((str(ROOT), str(ROOT / "protocol")))
        run_elsewhere(python, arguments, maker.name, {"PYTHONPATH": ours, **settings})
        return [
            replace(bench.lease(number)[0], data=(Path(folder) / f"{number}.parquet").read_bytes())
            for number in numbers
        ]


def files_by(bench: Bench, engine: Engine, numbers: range) -> list[HonestFile]:
    """The files of the leases `numbers`, whose rows `engine` makes together."""
    leases = [bench.lease(number) for number in numbers]
    rows = [row for _, plan in leases for row in plan]
    generations = iter(build.generate_rows(rows, bench.run, engine))
    return [
        bench.assemble(lease, plan, [next(generations) for _ in plan], engine)
        for lease, plan in leases
    ]


def makers(device: str = "cpu") -> list[Maker]:
    """Every pair of {plain, vLLM} × {bfloat16, float32} × {64, 1}; no vLLM where it is missing."""
    engines = ("plain", "vllm") if VLLM_PYTHON.exists() else ("plain",)
    return [
        Maker(engine, dtype, batch_rows, device)
        for engine in engines
        for dtype in ("bfloat16", "float32")
        for batch_rows in (64, 1)
    ]


def honest_windows(count: int, minutes: float | None = None, device: str = "cpu") -> list[Row]:
    """At least `count` windows (or as many as `minutes` allow), none of them made by the replaying
    setup (plain, float32, rows together): how many lie in files that were rejected. All rows are
    replayed. On a device without shipped limits they are measured in shadow, as the row says.
    Raises UnavailableError if a file could not be judged."""
    wide = Bench(max_output_tokens=128, device=device)
    narrow = replace(wide, groups=2, samples=4)  # one by one is slow
    made: Counter[str] = Counter()
    rejected = first = shadow = 0
    replaying = Maker("plain", "float32", 64, device)
    others = [maker for maker in makers(device) if maker != replaying]
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    while made.total() < count and time.monotonic() < end:
        for maker in others:
            bench, files = (wide, 6) if maker.batch_rows > 1 else (narrow, 3)
            for file in make(bench, maker, range(first, first + files)):
                finding = bench.judge(file)
                windows = windows_in(file)
                made[maker.name] += windows
                if finding.outcome is Outcome.REJECTED:
                    rejected += windows
                elif finding.reason in SHADOW:
                    shadow += windows
                elif finding.outcome is not Outcome.ACCEPTED:
                    raise UnavailableError(f"{maker.name} could not be judged: {finding.detail}")
            first += files
            if made.total() >= count or time.monotonic() >= end:
                break
    said = ", ".join(f"{name} {windows}" for name, windows in made.items())
    return [
        Row(
            "honest_windows",
            made.total(),
            f"by setups other than the replay's: {said}",
            count,
            "higher",
        ),
        Row(
            "honest_windows_rejected",
            rejected,
            f"of {made.total()}; replayed in float32"
            + (f"; {shadow} in shadow: no limits for this device" if shadow else ""),
            None if shadow else 0,
        ),
    ]


def windows_in(file: HonestFile) -> int:
    """Proof windows of a file."""
    rows = read_rollout_file(file.data).rows
    return sum(activations.windows_of(len(row.output_tokens)) for row in rows)


def main() -> int:
    """Writes NUMBER.parquet into --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu")
    for name in ("--batch", "--first", "--count", "--tokens", "--groups", "--samples"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--share", type=float, required=True)
    options = parser.parse_args()
    try:
        bench = Bench(
            max_output_tokens=options.tokens, folder=options.model,
            groups=options.groups, samples=options.samples, share=options.share,
        )  # fmt: skip
        engine = load_engine(
            options.model, engine=options.engine, dtype=options.dtype, device=options.device,
            batch_rows=options.batch, threads=1,
        )  # fmt: skip
        try:
            numbers = range(options.first, options.first + options.count)
            for number, file in zip(numbers, files_by(bench, engine, numbers), strict=True):
                (options.out / f"{number}.parquet").write_bytes(file.data)
        finally:
            engine.close()
    except PrimeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
