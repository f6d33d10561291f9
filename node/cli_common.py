"""What every `prime-node` command shares: its settings' flags, and how it prints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from node.config import Settings, load

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", "--calldata", help="Send nothing; print what to sign elsewhere (calldata)."
    ),
]
NodeFlag = Annotated[
    str | None, typer.Option("--node", help="Node's address; by default the wallet's.")
]

_COMMON: dict[str, Any] = {
    "orchestrator": Annotated[str | None, typer.Option(help="URL of the pool's orchestrator.")],
    "rpc": Annotated[
        list[str] | None, typer.Option(help="RPC endpoint of the chain; repeat for more.")
    ],
    "deployment": Annotated[Path | None, typer.Option(help="Deployment JSON of the contracts.")],
    "pool": Annotated[int | None, typer.Option(help="Number of the pool.")],
    "wallet": Annotated[Path | None, typer.Option(help="Keystore (v3) of the signing account.")],
    "password_file": Annotated[Path | None, typer.Option(help="File with its password.")],
    "password_fd": Annotated[int | None, typer.Option(help="Open descriptor with it.")],
    "provider": Annotated[
        str | None, typer.Option(help="Owner's account; by default the wallet's own.")
    ],
    "data": Annotated[
        Path | None, typer.Option(help="Folder of state (~/.local/share/prime-node).")
    ],
    "config": Annotated[
        Path | None, typer.Option(help="TOML file of settings (~/.config/prime/node.toml).")
    ],
}


def configured(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the common flags and hands it the Settings made of them.

    `function` takes `settings` first and its own parameters after it. Its further Settings (such
    as `runtime`) are its own parameters whose names Settings knows; they reach it in `settings`.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if name != "settings"
    ]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _COMMON.items()
    ]

    def command(**values: Any) -> None:
        config = values.pop("config")
        flags = {name: values.pop(name) for name in _COMMON if name in values}
        flags |= {name: value for name, value in values.items() if name in Settings.model_fields}
        flags["rpc"] = tuple(flags["rpc"] or ())
        function(load(flags, config), **values)

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in own + common}
    return command


def print_json(value: Any, *, compact: bool = False) -> None:
    """One JSON document on stdout; `compact` keeps it on one line, for JSON lines."""
    typer.echo(json.dumps(value, indent=None if compact else 2))


def print_fields(title: str, fields: Sequence[tuple[str, object]]) -> None:
    """A small two-column table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for name, value in fields:
        table.add_row(name, "–" if value is None else str(value))
    Console(highlight=False).print(table)


def print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row))
    Console(highlight=False).print(table)


def local_time(seconds: int) -> str:
    """Unix seconds as people read them, in this machine's zone."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
