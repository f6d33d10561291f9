"""`orchestrator doctor`: whether a configured or running orchestrator is fit to serve."""

from __future__ import annotations

import typer

from prime_core.command_line import Json, command
from prime_core.errors import PrimeError
from prime_orchestrator.cli.storage import StoreOptions, with_pool

app = command()


@app.command()
@with_pool
def doctor(options: StoreOptions, json_output: Json = False) -> None:
    """Check files, keys, database, objects, machine, process and chain, before or while `serve`
    runs.

    Takes the settings of `serve`. Each check says ok, warning or failed, and what to type next.
    Exits with 1 if one failed.
    """
    from prime_core.doctor import show
    from prime_orchestrator.doctor import examine

    checks = examine(options.settings)
    if not show(checks, as_json=json_output):
        raise typer.Exit(PrimeError.exit_code)
