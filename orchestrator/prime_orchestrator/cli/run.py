"""`orchestrator run new|show|revise`: the run definition, made from a readable TOML file, and its
revisions in a running pool.

The TOML holds what a person decides; the digests that pin environment and base model are computed
from what is installed here. The SHA-256 of the file that is written is the pool's run digest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_broadcast.files import write_whole
from prime_chain.keystore import open_keystore
from prime_core.command_line import Json, PasswordFd, PasswordFile, group
from prime_core.errors import ConflictError, UserError
from prime_core.folders import make_folder
from prime_core.messages import RevisionRequest, RunList, RunRevision
from prime_core.run import RunDefinition
from prime_core.run_file import read_run
from prime_core.transport.client import OrchestratorClient

app = group("Make, read and revise run definitions.")


@app.command()
def new(
    source: Annotated[Path, typer.Argument(help="TOML file; see docs/examples/run.toml.")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the base model.")],
    out: Annotated[Path, typer.Option(help="Run definition to write.")],
    json_output: Json = False,
) -> None:
    """Write a run definition. Its environment and base model are pinned by digest."""
    from prime_envs.definition import read_toml, unsaid
    from prime_orchestrator.economics import warnings

    if out.exists():
        raise UserError(f"{out} exists already", hint="name another file by --out")
    values = read_toml(source)
    run = define(values, source, model)
    doubts = warnings(run)
    make_folder(out.parent)
    write_whole(out, run.raw())
    _show(run, doubts, out, json_output)
    if not json_output:
        for name, value in unsaid(values).items():
            typer.echo(f"{source} leaves {name} out; the run has {name} = {value}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Run definition.")],
    json_output: Json = False,
) -> None:
    """Show a run definition: digest, contents, cheats that pay."""
    from prime_orchestrator.economics import warnings

    run = read_run(file, exact=True)
    _show(run, warnings(run), file, json_output)


@app.command()
def revise(
    run: Annotated[Path, typer.Option(help="The revised run definition.")],
    from_step: Annotated[int, typer.Option(help="First step that it holds for.", min=1)],
    orchestrator: Annotated[str, typer.Option(help="URL of the orchestrator.")],
    wallet: Annotated[Path, typer.Option(help="Keystore of the pool's manager.")],
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until it is final on chain.", min=0)
    ] = 1800.0,
    json_output: Json = False,
) -> None:
    """Revise the run of a running pool: its image, prices or budgets. Also its environment
    or requirements.

    Leases that are given already keep their revision: they are judged and paid by it. The step must
    not be leased yet. Its leases wait until the revision is final on chain, so name a step some
    way ahead.
    """
    definition = read_run(run, exact=True)
    signer = open_keystore(wallet, password_file, password_fd)
    request = RevisionRequest(run=definition.raw().decode(), from_step=from_step)
    with OrchestratorClient(orchestrator, signer, "manager") as client:
        made = client.post("/v1/revisions", request, RunRevision)
        end = time.monotonic() + wait
        while not made.final and time.monotonic() < end:
            time.sleep(1.0)
            listed = client.get("/v1/runs", RunList).revisions
            found = [one for one in listed if one.from_step == from_step]
            if not found:
                raise ConflictError(
                    "the chain refused the revision; the orchestrator's log says why"
                )
            made = found[0]
    if json_output:
        typer.echo(made.model_dump_json())
        return
    state = "is final on chain" if made.final else "is announced and not final on chain yet"
    typer.echo(f"run {made.run_digest} holds from step {made.from_step} and {state}")


def define(values: dict[str, Any], source: Path, model: Path) -> RunDefinition:
    """The run that `values` describe, for the base model in `model`. It names the newest shipped
    calibration unless they name one. Raises UserError with the name of what is wrong."""
    from prime_broadcast.manifest import build_manifest
    from prime_envs.definition import require_config, run_from
    from prime_verify.proofs.thresholds import newest

    require_config(model)
    base = build_manifest(model, pool=0, version=0, step=0).result_digest
    return run_from({"calibration": newest().digest(), **values}, source, model, base)


def _show(
    run: RunDefinition, doubts: Sequence[Mapping[str, object]], file: Path, json_output: bool
) -> None:
    if json_output:
        facts = {"digest": run.digest(), "run": run.model_dump(mode="json"), "warnings": doubts}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"run {run.name!r} in {file}: digest {run.digest()}")
    typer.echo(
        f"  {run.environment.name}, {run.environment.train_size:,} problems · "
        f"{run.groups_per_batch} groups of {run.samples_per_group} a batch · "
        f"at most {run.max_staleness} policies old"
    )
    for doubt in doubts:
        typer.echo(f"warning: {doubt['text']}")
