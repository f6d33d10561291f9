"""Set-ups that honest files are generated with, in this process or by another interpreter (vLLM
lives in an environment of its own).

    python -m prime_verify.setups --out DIR --job MODEL BATCH FILES …      for `generate`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from prime_core import encoding
from prime_core.errors import PrimeError, UnavailableError
from prime_core.ids import ZERO_ADDRESS, ZERO_DIGEST, Digest
from prime_core.run import LengthBudgets, RunDefinition
from prime_core.task import Lease, SignedLease, Task
from prime_envs.registry import environment_for, environment_ref
from prime_verify.build import build_rollout_file
from prime_verify.engines import load_engine

PACKAGES = Path(__file__).resolve().parents[1]
_SECONDS = 3600
PROMPT_TOKENS = 32
"""Positions left for a prompt."""


@dataclass(frozen=True)
class HonestFile:
    """An honest file and the lease it fulfils."""

    data: bytes
    signed: SignedLease
    lease_digest: Digest


@dataclass(frozen=True)
class Setup:
    """One way to generate. `python` None: this interpreter, and this process if no `settings`
    (environment variables) are asked for."""

    engine: str
    dtype: str
    device: str = "cpu"
    python: Path | None = None
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self.settings)
        return f"{self.engine} {self.dtype} on {self.device}{settings}"


@dataclass(frozen=True)
class Job:
    """`files` files of each length to be made by `model`, `batch_rows` rows together."""

    model: Path
    batch_rows: int
    files: int


def synthetic_run(
    max_output_tokens: int,
    temperature_micro: int = 1_000_000,
    *,
    groups: int = 4,
    samples: int = 16,
) -> RunDefinition:
    """A run of the reverse task: `groups` of `samples` rows a lease. For calibration, tests and
    benches."""
    budgets = LengthBudgets(targets=(2, 6, 10, 14), penalty_micro=150_000)
    return RunDefinition(
        name="synthetic",
        base_model=ZERO_DIGEST,
        environment=environment_ref("reverse", {}, budgets, train_size=1000, heldout_size=0),
        temperature_micro=temperature_micro,
        max_output_tokens=max_output_tokens,
        samples_per_group=samples,
        groups_per_lease=groups,
        groups_per_batch=32,
        budgets=budgets,
        task=Task(image="none"),
        price_per_unit=1,
        stake_per_class=1,
        slash_amount=1,
    )


def synthetic_lease(
    run: RunDefinition, number: int, policy_version: int = 0, step: int = 0
) -> HonestFile:
    """An unsigned lease number `number` of `run`, with no file yet."""
    salt = encoding.sha256(number.to_bytes(8, "big"))
    lease = Lease(
        pool=1,
        step=step,
        node=ZERO_ADDRESS,
        index=number,
        policy_digest=ZERO_DIGEST,
        run_digest=run.digest(),
        target=run.budgets.targets[number % len(run.budgets.targets)],
        salt=salt,
        deadline=0,
    )
    signed = SignedLease(
        lease=lease,
        signature="0x" + "00" * 65,  # type: ignore[arg-type]
        policy_version=policy_version,
    )
    return HonestFile(b"", signed, encoding.sha256(lease.model_dump_json().encode()))


def run_of(job: Job, length: int) -> RunDefinition:
    """The run of a job's files: of 64 rows, or of 8 where rows are generated one by one."""
    return (
        synthetic_run(length, groups=2, samples=4) if job.batch_rows == 1 else synthetic_run(length)
    )


def fitting(model: Path, lengths: Sequence[int]) -> list[int]:
    """Those output limits that the model in the folder has positions for, beside a prompt's.

    Raises UnavailableError if the folder holds no model.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
        positions = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"no model can be loaded from {model}: {error}") from error
    return [length for length in lengths if length + PROMPT_TOKENS <= positions]


def generate(
    setup: Setup, jobs: Sequence[Job], lengths: Sequence[int]
) -> Iterator[tuple[Job, int, HonestFile]]:
    """(job, output limit, honest file): each job's files of each of `lengths` that fits its model.

    Another interpreter makes all files of all jobs in one process before the first is given.
    Raises UnavailableError if the set-up does not run here.
    """
    if setup.python is None and not setup.settings:
        yield from _here(setup, jobs, lengths)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("prime_verify.setups", "--out", folder),
            *("--engine", setup.engine, "--dtype", setup.dtype, "--device", setup.device),
            *("--lengths", *map(str, lengths)),
        ]
        for job in jobs:
            command += ["--job", str(job.model.resolve()), str(job.batch_rows), str(job.files)]
        python = setup.python or Path(sys.executable)
        run_elsewhere(python, command, setup.words, dict(setup.settings))
        for at, job in enumerate(jobs):
            for length in fitting(job.model, lengths):
                run = run_of(job, length)
                for number in range(job.files):
                    data = (Path(folder) / f"{at}-{length}-{number}.parquet").read_bytes()
                    yield job, length, replace(synthetic_lease(run, number), data=data)


def run_elsewhere(
    python: Path,
    module_and_arguments: Sequence[str],
    words: str,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Runs a module of this project by another interpreter, to its end; `words` name the set-up,
    `settings` are environment variables for it.

    Raises UnavailableError with its last line of stderr if it fails.
    """
    try:
        done = subprocess.run(
            [str(python), "-m", *module_and_arguments],
            capture_output=True, text=True, check=False, timeout=_SECONDS,
            env={**os.environ, "PYTHONPATH": str(PACKAGES), **settings},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{words} does not run: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"{words} does not run: {last[:300]}")


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
            for length in fitting(job.model, lengths):
                run = run_of(job, length)
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
