"""`orchestrator gateway`: serve tool calls that need a network; export what was answered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import ConfigFile, PasswordFd, PasswordFile, group
from prime_core.errors import UserError
from prime_core.settings import load_settings, settings_file

app = group("Answers tool calls that need a network (docs/gateway.md).")
GatewayData = Annotated[Path | None, typer.Option("--data", help="Folder of the records.")]


@app.command()
def serve(
    config: ConfigFile = None,
    orchestrator: Annotated[
        str | None, typer.Option(help="URL of the pool's orchestrator.")
    ] = None,
    wallet: Annotated[Path | None, typer.Option(help="Keystore of the gateway's key.")] = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    data: GatewayData = None,
) -> None:
    """Answer calls of the pool's nodes until SIGTERM. The tools are in the file of --config."""
    flags: dict[str, object] = dict(locals())
    from prime_orchestrator.gateway.service import Settings
    from prime_orchestrator.gateway.service import serve as run_server

    del flags["config"]
    run_server(load_settings(Settings, flags, settings_file(config)))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="Cassette to write, as JSON lines.")],
    config: ConfigFile = None,
    data: GatewayData = None,
) -> None:
    """Write every recorded answer to a cassette. For `trainer local`; `serve` goes on
    meanwhile."""
    from prime_orchestrator.gateway.service import Settings
    from prime_orchestrator.store.engine import open_store, sqlite_url
    from prime_orchestrator.store.gateway_records import Records

    settings = load_settings(Settings, {"data": data}, settings_file(config))
    if not settings.database.is_file():
        raise UserError(f"{settings.data} holds no records", hint="name the gateway's --data")
    store, count = open_store(sqlite_url(settings.database)), 0
    try:
        with file.open("x") as out:
            for line in Records(store).cassette():
                out.write(line.model_dump_json() + "\n")
                count += 1
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror}", hint="name a new file"
        ) from error
    finally:
        store.close()
    typer.echo(f"{count} answers in {file}")
