"""`prime-verify`: makes a rollout file with its proofs from a model folder, and verifies one.

    prime-verify prove MODEL FILE [--run RUN] [--lease N]
    prime-verify verify MODEL FILE [--run RUN] [--lease N] [--rows N]

No pool, chain or network: the lease is derived from its number; the run is the given definition, or
a built-in one (the reverse task). Exit code 0: accepted; 1: rejected; 3: void, or not to be judged
here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_core.command_line import Json, program
from prime_core.command_line import run as run_program
from prime_core.errors import MalformedError, UnavailableError

if TYPE_CHECKING:
    from prime_core.ids import Digest
    from prime_core.run import RunDefinition
    from prime_engine.base import Engine

app = program("prime-verify", "Proves rollout files and verifies them, given a model folder.")
REJECTED, NOT_JUDGED = 1, 3

Model = Annotated[Path, typer.Argument(help="Hugging Face folder of the policy.")]
Run = Annotated[Path | None, typer.Option(help="Run definition (default: a built-in one).")]
Tokens = Annotated[int, typer.Option(help="Most output tokens a row, in the built-in run.", min=1)]
LeaseNumber = Annotated[int, typer.Option("--lease", help="Number of the lease.", min=0)]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:0,cuda:1 or all (verify).")]


@dataclass(frozen=True)
class OneEngine:
    """An EngineProvider with one policy, version 0."""

    loaded: Engine

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        if version != 0:
            raise UnavailableError(f"policy {version} is not here: only the given model, as 0")
        return self.loaded

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        return iter(())


@app.command()
def prove(
    model: Model,
    file: Annotated[Path, typer.Argument(help="Rollout file to write (Parquet).")],
    run: Run = None,
    tokens: Tokens = 70,
    lease: LeaseNumber = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Generate and prove the rows of a lease into a rollout file."""
    from prime_envs.registry import environment_for
    from prime_verify.build import build_rollout_file
    from prime_verify.engines import load_engine
    from prime_verify.setups import synthetic_lease

    definition = _run(run, tokens)
    leased = synthetic_lease(definition, lease)
    engine = load_engine(model, dtype=dtype, device=device)
    data = build_rollout_file(
        leased.signed, leased.lease_digest, definition, engine, environment_for(definition)
    )
    file.write_bytes(data)
    typer.echo(f"{file}: {len(data)} bytes, lease {lease} of run {definition.digest()}")


@app.command()
def verify(
    model: Model,
    file: Annotated[Path, typer.Argument(help="Rollout file.", exists=True, dir_okay=False)],
    run: Run = None,
    tokens: Tokens = 70,
    lease: LeaseNumber = 0,
    rows: Annotated[int, typer.Option(help="Rows to replay, at least.", min=0)] = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Judge a rollout file. Makes every check of a pool's validator, on freshly drawn rows."""
    from prime_core.ids import digest
    from prime_core.rollout import MAX_FILE_BYTES
    from prime_core.verdict import Outcome
    from prime_envs.registry import environment_for
    from prime_verify.case import Case
    from prime_verify.engines import load_engine
    from prime_verify.setups import synthetic_lease
    from prime_verify.verify import verify_file

    definition = _run(run, tokens)
    leased = synthetic_lease(definition, lease)
    with file.open("rb") as source:
        data = source.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise MalformedError(f"{file} exceeds {MAX_FILE_BYTES} bytes")
    found = verify_file(
        Case(
            data,
            leased.signed,
            leased.lease_digest,
            definition,
            environment_for(definition),
            OneEngine(load_engine(model, dtype=dtype, device=device)),
            draw_secret=digest(secrets.token_bytes(32)),
            submission_digest=leased.lease_digest,
            draw_count=rows or None,
        )
    )
    facts = {
        "outcome": found.outcome.name.lower(),
        "reason": found.reason.name.lower(),
        "check": found.check,
        "detail": found.detail,
        "setup": found.setup,
        "rows_replayed": list(found.rows_drawn),
        "statistics": found.decimal_statistics(),
        "limits": found.decimal_thresholds(),
        "units": found.units,
    }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        why = f": {facts['reason']}, {found.detail}" if found.detail else ""
        typer.echo(f"{facts['outcome']}{why} ({len(found.rows_drawn)} rows replayed)")
    if found.outcome is not Outcome.ACCEPTED:
        raise typer.Exit(REJECTED if found.outcome is Outcome.REJECTED else NOT_JUDGED)


def _run(path: Path | None, tokens: int) -> RunDefinition:
    from prime_core.run_file import read_run
    from prime_verify.setups import synthetic_run

    return synthetic_run(tokens) if path is None else read_run(path)


def main() -> None:
    """Entry point."""
    run_program(app, "prime-verify")


if __name__ == "__main__":
    main()
