"""`orchestrator doctor`: whether a configured or running orchestrator is fit to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import ConfigFile, Json, PasswordFile, Quorum, Rpcs, command
from prime_core.errors import PrimeError
from prime_orchestrator.cli.storage import Bucket, Data, Database, Endpoint, Objects, Region

app = command()


@app.command()
def doctor(
    config: ConfigFile = None,
    data: Data = None,
    database: Database = None,
    objects: Objects = None,
    s3_bucket: Bucket = None,
    s3_endpoint: Endpoint = None,
    s3_region: Region = None,
    deployment: Annotated[Path | None, typer.Option(help="Deployment JSON.")] = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    pool: Annotated[int | None, typer.Option(help="Number of the pool on chain.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run definition (canonical JSON).")] = None,
    wallet: Annotated[Path | None, typer.Option(help="Keystore of the pool's manager.")] = None,
    password_file: PasswordFile = None,
    json_output: Json = False,
) -> None:
    """Check files, keys, database, objects, machine, process and chain, before or while `serve`
    runs.

    Takes the settings of `serve`. Each check says ok, warning or failed, and what to type next.
    Exits with 1 if one failed.
    """
    flags: dict[str, object] = dict(locals())
    from prime_core.doctor import show
    from prime_orchestrator.config import load
    from prime_orchestrator.doctor import examine

    for name in ("config", "json_output"):
        del flags[name]
    checks = examine(lambda: load(flags | {"rpc": tuple(rpc or ())}, config))
    if not show(checks, as_json=json_output):
        raise typer.Exit(PrimeError.exit_code)
