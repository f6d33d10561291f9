"""Measures honest drift and makes a calibration: `orchestrator calibrate` writes and signs it.

    generate   honest files of every set-up (setups.py), as a worker builds them
    replay     every row of them, as a validator replays it
    fit        each statistic's distribution over rows, and over sets of FILE_ROWS rows (tails.py)

Besides the models given, tiny random ones are used. Minutes on one core; the result depends on the
machine's rounding, so two runs agree in kind, not to the digit. A set-up that does not run here is
left out and reported: files that declare it are judged in shadow.
"""

from __future__ import annotations

import logging
import platform
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.core.errors import UnavailableError
from protocol.core.run import RunDefinition
from protocol.engine.base import Engine
from protocol.environments.base import Environment
from protocol.environments.registry import environment_for
from protocol.proofs import tails
from protocol.proofs.thresholds import (
    FILE_ROWS,
    NO_REFERENCE,
    STATISTICS,
    Calibration,
    Reference,
    SetupLimits,
    chance_of_one,
    explained,
)
from protocol.verification import replay
from protocol.verification.build import plan_rows
from protocol.verification.engines import load_engine
from protocol.verification.rollout_file import read_rollout_file
from protocol.verification.setups import (
    HonestFile,
    Job,
    Setup,
    generate,
    synthetic_lease,
    synthetic_run,
)

__all__ = ["HonestFile", "calibrate", "replay_rows", "synthetic_lease", "synthetic_run"]

log = logging.getLogger(__name__)
BATCH_FILES = {64: 40, 16: 16, 1: 2}
"""Rows generated together → files of 64 rows measured, for each model, dtype and length."""
LENGTHS = (24, 80)
"""Output limits in tokens: rows of one proof window, and of three."""
DTYPES = ("float32", "bfloat16")


@dataclass
class _Measured:
    """Honest ratios of one set-up's rows and files, by statistic."""

    row: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    file: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    batches: set[int] = field(default_factory=set)
    device: str = ""
    engine: str = ""
    rows: int = 0
    files: int = 0
    tokens: int = 0

    def add(self, found: Sequence[replay.RowStatistics], references: Sequence[Reference]) -> None:
        self.files += 1
        self.rows += len(found)
        self.tokens += sum(row.tokens for row in found)
        for number, reference in enumerate(references):
            members = found[number * FILE_ROWS :][:FILE_ROWS]
            together = replay.combine(members)
            for name in STATISTICS:
                scale = explained(name, reference.row)
                self.row[name] += [row.values[name] / scale for row in members]
                self.file[name].append(together[name] / explained(name, reference.file))


def replay_rows(
    honest: HonestFile, run: RunDefinition, environment: Environment, verifier: Engine
) -> tuple[list[replay.RowStatistics], list[Reference]]:
    """All rows of a file as a validator's engine measures them, and the reference drift of each
    set of FILE_ROWS rows (none if the file's dtype is the verifier's)."""
    file = read_rollout_file(honest.data)
    plan = plan_rows(honest.signed.lease, honest.lease_digest, run, environment, verifier.tokenizer)
    found, references = [], []
    for start in range(0, len(file.rows), FILE_ROWS):
        numbers = range(start, start + FILE_ROWS)
        replays = replay.Replayed(verifier, run, honest.lease_digest, numbers, plan, file.rows)
        found += replays.measure()
        twin = verifier.twin(file.metadata.dtype)
        references.append(replays.reference(twin) if twin is not verifier else NO_REFERENCE)
    return found, references


def _limits(dtype: str, measured: _Measured) -> SetupLimits:
    return SetupLimits(
        engine=measured.engine,
        dtype=dtype,
        device=measured.device,
        batches=tuple(sorted(measured.batches)),
        rows=measured.rows,
        files=measured.files,
        tokens=measured.tokens,
        row={n: tails.fit(measured.row[n], chance_of_one("row")) for n in STATISTICS},
        file={n: tails.fit(measured.file[n], chance_of_one("file")) for n in STATISTICS},
    )


def calibrate(
    models: Sequence[Path],
    *,
    python_of: dict[str, Path | None],
    device: str = "cpu",
    dtypes: Sequence[str] | None = None,
    scale: float = 1.0,
) -> tuple[Calibration, list[str]]:
    """(calibration, set-ups that do not run here with the reason).

    `python_of`: engine → its interpreter (None: this one). `scale` multiplies the number of files.
    Every set-up is measured on each of `models` and on tiny random ones, and replayed in float32 on
    `device`. Raises UnavailableError if a model does not load, or no set-up runs.
    """
    measured: dict[tuple[str, str], _Measured] = defaultdict(_Measured)
    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = [*models, *tiny_models(Path(scratch))]
        verifiers = {model: load_engine(model, device=device, threads=1) for model in folders}
        for engine, python in python_of.items():
            for dtype in dtypes or DTYPES:
                setup = Setup(engine, dtype, device, python)
                try:
                    _measure(setup, verifiers, scale, measured[engine, dtype])
                except UnavailableError as error:
                    log.warning("left out: %s", error)
                    left_out.append(str(error))
    setups = [_limits(dtype, found) for (_, dtype), found in measured.items() if found.files]
    if not setups:
        raise UnavailableError("no set-up runs here: " + "; ".join(left_out))
    names = ", ".join([*(model.name for model in models), "2 tiny random models"])
    calibration = Calibration(
        replay_engine=next(iter(verifiers.values())).name,
        replay_dtype="float32",
        source=f"{names}; {platform.machine()}, {device}",
        setups=tuple(setups),
    )
    return calibration, left_out


def _measure(setup: Setup, verifiers: dict[Path, Engine], scale: float, into: _Measured) -> None:
    jobs = [
        Job(model, batch_rows, max(1, round(files * scale)))
        for model in verifiers
        for batch_rows, files in BATCH_FILES.items()
    ]
    log.info("%s: %d files", setup.words, len(LENGTHS) * sum(job.files for job in jobs))
    for job, length, honest in generate(setup, jobs, LENGTHS):
        run = synthetic_run(length)
        into.add(*replay_rows(honest, run, environment_for(run), verifiers[job.model]))
        made = read_rollout_file(honest.data).metadata
        into.engine, into.device = made.engine, made.device
        into.batches.add(job.batch_rows)


def tiny_models(folder: Path) -> list[Path]:
    """Two models with random weights, written into `folder`."""
    from protocol.engine.tiny import write_tiny_model

    return [
        write_tiny_model(folder / "small", seed=1, hidden=128),
        write_tiny_model(folder / "deep", seed=2, hidden=128, layers=6, logit_scale=4.0),
    ]
