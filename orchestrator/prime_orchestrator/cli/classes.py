"""`orchestrator classes`: what a pool's files showed of exact classes, and which are proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import ConfigFile, Json, command
from prime_core.errors import UserError
from prime_core.run_file import read_run
from prime_orchestrator.cli.storage import Data, Database, opened

app = command()


@app.command()
def classes(
    run: Annotated[Path, typer.Option(help="Run definition that classes are proven for.")],
    keep: Annotated[
        Path | None, typer.Option(help="Calibration to copy, with the proven classes of this pool.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The copy to write (JSON), not signed.")] = None,
    config: ConfigFile = None,
    data: Data = None,
    database: Database = None,
    json_output: Json = False,
) -> None:
    """Show each exact class and what it lacks to be proven; write a calibration that lists those
    that lack nothing, to be signed by `orchestrator calibrate --sign`."""
    flags: dict[str, object] = dict(locals())
    from prime_orchestrator.manager import proving
    from prime_verify.proofs.thresholds import load

    if (keep is None) != (out is None):
        raise UserError(
            "a calibration is copied from one file to another", hint="give --keep and --out"
        )
    definition = read_run(run)
    kept = load(keep) if keep is not None else None
    with opened(flags, config) as (_, store), store.read() as connection:
        found = proving.standings(connection)
    proven = [one for one in found if not one.lacking(definition)]
    written = None
    if kept is not None and out is not None:
        listed = tuple(one.proven() for one in proven)
        made = kept.model_copy(update={"proven": listed, "signed": None})
        try:
            out.write_bytes(made.canonical())
        except OSError as error:
            raise UserError(
                f"{out} cannot be written: {error.strerror}", hint="name another file with --out"
            ) from error
        written = {"calibration": str(out), "proven": len(listed)}
    if json_output:
        shown = [one.as_json() | {"lacking": one.lacking(definition)} for one in found]
        typer.echo(json.dumps({"classes": shown, "written": written}))
        return
    for one in found:
        lacking = one.lacking(definition)
        state = "lacks " + ", ".join(lacking) if lacking else "proven"
        typer.echo(
            f"{one.key}: {state}\n  {one.rows} rows of {one.providers} providers since the last "
            f"unexplained mismatch, the longest {one.longest} tokens; {one.files} files, "
            f"{one.mismatched} with a mismatch\n  "
            + ", ".join(f"{name} {value}" for name, value in sorted(one.facts.items()))
        )
    if not found:
        typer.echo("no file of an exact lease was judged yet")
    if written is not None:
        typer.echo(f"{written['proven']} proven classes in {out}, to be signed with --sign")
