"""Set-ups that honest files are generated with, in this process or by another interpreter (vLLM
lives in an environment of its own).

    python -m protocol.verification.setups --out DIR --job MODEL BATCH FILES …      for `generate`
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.core import encoding
from protocol.core.errors import PrimeError, UnavailableError
from protocol.core.ids import ZERO_ADDRESS, ZERO_DIGEST, Digest
from protocol.core.run import LengthBudgets, RunDefinition
from protocol.core.task import Lease, SignedLease, Task
from protocol.environments.registry import environment_for, environment_ref
from protocol.verification.build import build_rollout_file
from protocol.verification.engines import load_engine

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 3600


@dataclass(frozen=True)
class HonestFile:
    """An honest file and the lease it fulfils."""

    data: bytes
    signed: SignedLease
    lease_digest: Digest


@dataclass(frozen=True)
class Setup:
    """One way to generate. `python` None: in this process."""

    engine: str
    dtype: str
    device: str = "cpu"
    python: Path | None = None

    @property
    def words(self) -> str:
        return f"{self.engine} {self.dtype} on {self.device}"


@dataclass(frozen=True)
class Job:
    """`files` files of each length to be made by `model`, `batch_rows` rows together."""

    model: Path
    batch_rows: int
    files: int


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


def generate(
    setup: Setup, jobs: Sequence[Job], lengths: Sequence[int]
) -> Iterator[tuple[Job, int, HonestFile]]:
    """(job, output limit, honest file): each job's files of each of `lengths`.

    Another interpreter makes all files of all jobs in one process before the first is given.
    Raises UnavailableError if the set-up does not run here.
    """
    if setup.python is None:
        yield from _here(setup, jobs, lengths)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(setup.python), "-m", "protocol.verification.setups", "--out", folder),
            *("--engine", setup.engine, "--dtype", setup.dtype, "--device", setup.device),
            *("--lengths", *map(str, lengths)),
        ]
        for job in jobs:
            command += ["--job", str(job.model.resolve()), str(job.batch_rows), str(job.files)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_SECONDS,
                env=environment,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{setup.words} does not run: {error}") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UnavailableError(f"{setup.words} does not run: {last[:300]}")
        for at, job in enumerate(jobs):
            for length in lengths:
                run = synthetic_run(length)
                for number in range(job.files):
                    data = (Path(folder) / f"{at}-{length}-{number}.parquet").read_bytes()
                    yield job, length, replace(synthetic_lease(run, number), data=data)


def _here(
    setup: Setup, jobs: Sequence[Job], lengths: Sequence[int]
) -> Iterator[tuple[Job, int, HonestFile]]:
    for job in jobs:
        engine = load_engine(
            job.model,
            engine=setup.engine,
            dtype=setup.dtype,
            device=setup.device,
            batch_rows=job.batch_rows,
            threads=1,
        )
        try:
            for length in lengths:
                run = synthetic_run(length)
                environment = environment_for(run)
                for number in range(job.files):
                    lease = synthetic_lease(run, number)
                    data = build_rollout_file(
                        lease.signed, lease.lease_digest, run, engine, environment
                    )
                    yield job, length, replace(lease, data=data)
        finally:
            engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes JOB-LENGTH-NUMBER.parquet files into --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", default="plain")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument(
        "--job", nargs=3, action="append", required=True, metavar=("MODEL", "BATCH", "FILES")
    )
    options = parser.parse_args(arguments)
    setup = Setup(options.engine, options.dtype, options.device)
    jobs = [Job(Path(model), int(batch), int(files)) for model, batch, files in options.job]
    numbers: dict[tuple[int, int], int] = {}
    try:
        for job, length, file in generate(setup, jobs, options.lengths):
            key = (jobs.index(job), length)
            number = numbers[key] = numbers.get(key, -1) + 1
            (options.out / f"{key[0]}-{length}-{number}.parquet").write_bytes(file.data)
    except PrimeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
