"""`orchestrator classes`: what a pool's files showed of exact classes, and which are proven.

A class is proven by rows that validators compared bit for bit and found equal:

    rows       LEAST_ROWS, and as many again for each provider that differed
    providers  LEAST_PROVIDERS with LEAST_ROWS_EACH or more; those that differed are at most one in
               suspicion.SHARE of all of them
    length     one row as long as a row of the run may be

A provider *differed* if a file of its nodes mismatched and had nothing else against it. It is
counted once, however often, and none of its rows count, so that one stake that sends void files
keeps no class unproven. All of it must hold without any one validator's comparisons, so that no
validator's word proves a class.

At 95 % confidence, fewer than one row in 3,300 differs if no provider's did, and fewer than one in
4,200 if one did; each further provider adds enough rows to lower the bound.

A mismatch is evidence only in classes that the run's calibration lists; the manager signs that
list.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_core.command_line import Json, command
from prime_core.errors import UserError
from prime_core.given import write_given
from prime_core.run import RunDefinition
from prime_core.run_file import read_run
from prime_orchestrator.cli.storage import StoreOptions, with_database

if TYPE_CHECKING:
    from prime_orchestrator.store.exact_classes import SumRow

LEAST_ROWS = 10_000
LEAST_ROWS_EACH = 1_000
LEAST_PROVIDERS = 3
app = command()


@app.command()
@with_database
def classes(
    options: StoreOptions,
    run: Annotated[Path, typer.Option(help="Run definition that classes are proven for.")],
    keep: Annotated[
        Path | None, typer.Option(help="Calibration to copy, with the proven classes of this pool.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The copy to write (JSON), not signed.")] = None,
    json_output: Json = False,
) -> None:
    """Show each exact class and what it lacks to be proven; write a calibration that lists those
    that lack nothing, to be signed by `orchestrator calibrate --sign`."""
    from prime_orchestrator.store import exact_classes
    from prime_verify.proofs.thresholds import ProvenClass, load

    if (keep is None) != (out is None):
        raise UserError(
            "a calibration is copied from one file to another", hint="give --keep and --out"
        )
    definition = read_run(run)
    kept = load(keep) if keep is not None else None
    with options.opened() as (_, store), store.read() as connection:
        found = [
            (one, json.loads(exact_classes.facts_of(connection, one.key)))
            for one in exact_classes.sums(connection, LEAST_ROWS_EACH)
        ]
    needs = {one.key: lacking(one, definition) for one, _ in found}
    written = None
    if kept is not None and out is not None:
        listed = tuple(
            ProvenClass(key=one.key, rows=one.rows, providers=one.providers, longest=one.longest)
            for one, _ in found
            if not needs[one.key]
        )
        made = kept.unsigned().model_copy(update={"proven": listed})
        write_given(out, made.canonical())
        written = {"calibration": str(out), "proven": len(listed)}
    if json_output:
        shown = [asdict(one) | {"facts": facts, "lacking": needs[one.key]} for one, facts in found]
        typer.echo(json.dumps({"classes": shown, "written": written}))
        return
    for one, facts in found:
        state = "lacks " + ", ".join(needs[one.key]) if needs[one.key] else "proven"
        typer.echo(
            f"{one.key}: {state}\n  {one.rows} equal rows, the longest {one.longest} tokens, "
            f"{one.providers} providers with {LEAST_ROWS_EACH} or more, whichever validator is "
            f"left out; {one.files} files, {one.mismatched} with a mismatch; {one.differing} "
            "providers differed\n  "
            + ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))
        )
    if not found:
        typer.echo("no file of an exact lease was judged yet")
    if written is not None:
        typer.echo(f"{written['proven']} proven classes in {out}, to be signed with --sign")


def lacking(row: SumRow, run: RunDefinition) -> list[str]:
    """Returns phrases that name what a class still lacks to be proven for a run."""
    from prime_orchestrator.manager.suspicion import SHARE

    found = []
    rows = LEAST_ROWS * (1 + row.differing)
    if row.rows < rows:
        found.append(f"{rows - row.rows} more rows")
    providers = max(LEAST_PROVIDERS, (SHARE - 1) * row.differing)
    if row.providers < providers:
        found.append(f"{providers - row.providers} more providers")
    if row.longest < run.max_output_tokens:
        found.append(f"a row of {run.max_output_tokens} tokens")
    return found
