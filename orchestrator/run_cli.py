"""`orchestrator run new|show`: the run definition, made from a readable TOML file.

The TOML holds what a person decides; the digests that pin environment and base model are computed
from what is installed here. The result is canonical JSON, whose SHA-256 is the pool's run digest.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from protocol.broadcast.manifest import build_manifest
from protocol.core.errors import UserError
from protocol.core.run import LengthBudgets, RunDefinition
from protocol.environments.lengths import budgets_from
from protocol.environments.registry import environment_ref
from protocol.folders import make_folder

app = typer.Typer(
    help="Make and read run definitions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def new(
    source: Annotated[Path, typer.Argument(help="TOML file; see docs/examples/run.toml.")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the base model.")],
    out: Annotated[Path, typer.Option(help="Run definition to write.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write a run definition, its environment and base model pinned by digest."""
    if out.exists():
        raise UserError(f"{out} exists already", hint="name another file by --out")
    run = define(_toml(source), source, model)
    make_folder(out.parent)
    out.write_bytes(run.canonical())
    _show(run, out, json_output)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Run definition (canonical JSON).")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """The digest of a run definition, and what it says."""
    try:
        run = RunDefinition.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{file} is no run definition: {_first(error)}") from error
    if run.canonical() != file.read_bytes():
        raise UserError(f"{file} is not canonical", hint="orchestrator run new")
    _show(run, file, json_output)


def define(values: dict[str, Any], source: Path, model: Path) -> RunDefinition:
    """The run that `values` describe. Raises UserError with the name of what is wrong."""
    if not (model / "config.json").is_file():
        raise UserError(
            f"{model} is no model folder: it has no config.json",
            hint="name a Hugging Face folder with config.json, tokenizer and safetensors",
        )
    try:
        values["budgets"] = budgets_from(values["budgets"])
        budgets = LengthBudgets.model_validate_json(json.dumps(values["budgets"]))
        wanted = values.pop("environment")
        environment = environment_ref(
            wanted["name"],
            wanted.get("arguments", {}),
            budgets,
            train_size=wanted["train_size"],
            heldout_size=wanted["heldout_size"],
        )
        base = build_manifest(model, pool=0, version=0, step=0).result_digest
        whole = {**values, "environment": environment.model_dump(mode="json"), "base_model": base}
        return RunDefinition.model_validate_json(json.dumps(whole))
    except KeyError as error:
        raise UserError(
            f"{source} does not say {error}", hint="see docs/examples/run.toml"
        ) from error
    except (ValidationError, TypeError) as error:
        raise UserError(f"{source} is no run: {_first(error)}") from error


def _toml(source: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(source.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{source} cannot be read as TOML: {error}") from error


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)


def _show(run: RunDefinition, file: Path, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"digest": run.digest(), "run": run.model_dump(mode="json")}))
        return
    typer.echo(f"run {run.name!r} in {file}: digest {run.digest()}")
    typer.echo(
        f"  {run.environment.name}, {run.environment.train_size:,} problems · "
        f"{run.groups_per_batch} groups of {run.samples_per_group} a batch · "
        f"at most {run.max_staleness} policies old"
    )
