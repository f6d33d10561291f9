"""Measures honest drift and writes a calibration object.

    python -m protocol.verification.calibrate --model DIR … --out protocol/proofs/calibration.json

For every model, dtype and batch size, honest rollout files are built exactly as a worker builds
them and every row is replayed exactly as a validator replays it (float32). Kept are the largest
ratios of proofs/thresholds.py over single rows and over sets of FILE_ROWS rows. Besides --model,
tiny random models are used. Minutes on one core; the result depends on the machine's rounding, so
two runs agree in kind, not to the digit.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.core import encoding
from protocol.core.errors import PrimeError
from protocol.core.ids import ZERO_ADDRESS, ZERO_DIGEST, Digest
from protocol.core.run import LengthBudgets, RunDefinition
from protocol.core.task import Lease, SignedLease, Task
from protocol.engine.base import Engine
from protocol.environments.base import Environment
from protocol.environments.registry import environment_for, environment_ref
from protocol.proofs.thresholds import (
    FILE_ROWS,
    NO_REFERENCE,
    STATISTICS,
    Calibration,
    Reference,
    SetupLimits,
    explained,
)
from protocol.verification import replay
from protocol.verification.build import build_rollout_file, plan_rows
from protocol.verification.engines import load_engine
from protocol.verification.rollout_file import read_rollout_file

BATCH_FILES = {64: 40, 16: 16, 1: 2}
"""Rows generated together → files of 64 rows measured, for each model, dtype and length."""
LENGTHS = (24, 80)
"""Output limits in tokens: rows of one proof window, and of three."""


@dataclass(frozen=True)
class HonestFile:
    """An honest file and the lease it fulfils."""

    data: bytes
    signed: SignedLease
    lease_digest: Digest


def synthetic_run(max_output_tokens: int, temperature_micro: int = 1_000_000) -> RunDefinition:
    """A run of the reverse task: 4 groups of 16 a lease. For calibration, tests and benches."""
    budgets = LengthBudgets(by_class={"1": (2, 6, 10, 14)}, penalty_micro=150_000)
    return RunDefinition(
        name="synthetic",
        base_model=ZERO_DIGEST,
        environment=environment_ref("reverse", {}, budgets, train_size=1000, heldout_size=0),
        temperature_micro=temperature_micro,
        max_output_tokens=max_output_tokens,
        samples_per_group=16,
        groups_per_lease=4,
        groups_per_batch=32,
        budgets=budgets,
        task=Task(image="none"),
        price_per_unit=1,
        stake_per_class=1,
        slash_amount=1,
    )


def synthetic_lease(run: RunDefinition, number: int, policy_version: int = 0) -> HonestFile:
    """An unsigned lease number `number` of `run`, with no file yet."""
    salt = encoding.sha256(number.to_bytes(8, "big"))
    lease = Lease(
        pool=1,
        step=0,
        node=ZERO_ADDRESS,
        index=number,
        policy_digest=ZERO_DIGEST,
        run_digest=run.digest(),
        speed_class=1,
        salt=salt,
        deadline=0,
    )
    signed = SignedLease(
        lease=lease,
        signature="0x" + "00" * 65,  # type: ignore[arg-type]
        policy_version=policy_version,
    )
    return HonestFile(b"", signed, encoding.sha256(lease.model_dump_json().encode()))


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


def honest_files(
    models: Sequence[Path], dtype: str, scale: float
) -> Iterator[tuple[list[replay.RowStatistics], list[Reference]]]:
    """Every honest file of one dtype: over models, batch sizes and lengths."""
    for model in models:
        verifier = load_engine(model, threads=1)
        for batch_rows, files in BATCH_FILES.items():
            engine = load_engine(model, dtype=dtype, batch_rows=batch_rows)
            for length in LENGTHS:
                run = synthetic_run(length)
                environment = environment_for(run)
                for number in range(max(1, round(files * scale))):
                    lease = synthetic_lease(run, number)
                    data = build_rollout_file(
                        lease.signed, lease.lease_digest, run, engine, environment
                    )
                    honest = replace(lease, data=data)
                    yield replay_rows(honest, run, environment, verifier)


def measure_setup(models: Sequence[Path], dtype: str, scale: float) -> SetupLimits:
    """The largest honest ratios of the plain engine in `dtype` on this machine's CPU."""
    row_max = dict.fromkeys(STATISTICS, 0.0)
    file_max = dict.fromkeys(STATISTICS, 0.0)
    rows = files = tokens = 0
    for found, references in honest_files(models, dtype, scale):
        files += 1
        rows += len(found)
        tokens += sum(row.tokens for row in found)
        for number, reference in enumerate(references):
            members = found[number * FILE_ROWS :][:FILE_ROWS]
            together = replay.combine(members)
            for name in STATISTICS:
                largest = max(row.values[name] for row in members)
                row_max[name] = max(row_max[name], largest / explained(name, reference.row))
                ratio = together[name] / explained(name, reference.file)
                file_max[name] = max(file_max[name], ratio)
    return SetupLimits(
        engine="plain/1",
        dtype=dtype,
        device="cpu",
        rows=rows,
        files=files,
        tokens=tokens,
        row={name: math.ceil(value * 1e6) for name, value in row_max.items()},
        file={name: math.ceil(value * 1e6) for name, value in file_max.items()},
    )


def calibrate(models: Sequence[Path], source: str, scale: float = 1.0) -> Calibration:
    """Measures float32 and bfloat16 of the plain engine on this machine's CPU."""
    return Calibration(
        replay_engine="plain/1",
        replay_dtype="float32",
        source=source,
        setups=tuple(measure_setup(models, dtype, scale) for dtype in ("float32", "bfloat16")),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a model folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer files")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            models = [*options.model, *_tiny_models(Path(scratch))]
            names = [*map(str, options.model), "2 tiny random models"]
            source = f"{', '.join(names)}; batches {list(BATCH_FILES)}; {platform.machine()} CPU"
            calibration = calibrate(models, source, options.scale)
    except PrimeError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return error.exit_code
    options.out.write_text(calibration.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {calibration.digest()}")
    return 0


def _tiny_models(folder: Path) -> list[Path]:
    from protocol.engine.tiny import write_tiny_model

    return [
        write_tiny_model(folder / "small", seed=1),
        write_tiny_model(folder / "deep", seed=2, hidden=128, layers=6, logit_scale=4.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
