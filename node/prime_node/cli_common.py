"""What every `prime-node` command shares: its settings' flags, and how it prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_chain.shipped import help_text
from prime_core.command_line import (
    PasswordFd,
    PasswordFile,
    PollSeconds,
    Quorum,
    Rpcs,
    as_typed,
    with_options,
)
from prime_core.printing import printable
from prime_core.times import utc

ReplayDevice = Annotated[
    str,
    typer.Option(
        help="Where to replay, as the run's calibration names it: cpu, cuda, several cards like "
        "cuda:0,cuda:1 that share the layers, or all."
    ),
]
ReplayDtype = Annotated[
    str, typer.Option(help="float32 or bfloat16, as the run's calibration names it.")
]
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
    "rpc": Rpcs,
    "rpc_quorum": Quorum,
    "chain_poll_seconds": PollSeconds,
    "deployment": Annotated[Path | None, typer.Option(help=help_text())],
    "pool": Annotated[int | None, typer.Option(help="Number of the pool.")],
    "wallet": Annotated[Path | None, typer.Option(help="Keystore (v3) of the signing account.")],
    "password_file": PasswordFile,
    "password_fd": PasswordFd,
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


_typed: ContextVar[str] = ContextVar("typed")


def typed_command() -> str:
    """Returns the command that runs, with the arguments that make its transactions others."""
    return _typed.get()


def configured(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the common flags and hands it the Settings made of them.

    `function` takes `settings` first and its own parameters after it. Its further Settings (such
    as `runtime`) are its own parameters whose names Settings knows; they reach it in `settings`.
    """

    def command(**values: Any) -> None:
        from prime_node.config import Settings, load

        config = values.pop("config")
        flags = {name: values.pop(name) for name in _COMMON if name in values}
        flags |= {name: value for name, value in values.items() if name in Settings.model_fields}
        given = {name: values[name] for name in values.keys() - {"as_json", "dry_run"}}
        _typed.set(as_typed(function, given))
        function(load(flags, config), **values)

    return with_options(function, {name: (one, None) for name, one in _COMMON.items()}, command)


def print_json(value: Any, *, compact: bool = False) -> None:
    """One JSON document on stdout; `compact` keeps it on one line, for JSON lines."""
    typer.echo(json.dumps(value, indent=None if compact else 2))


def print_fields(title: str, fields: Sequence[tuple[str, object]]) -> None:
    """Names and values in two columns on stdout."""
    width = max((len(name) for name, _ in fields), default=0)
    typer.echo(title)
    for name, value in fields:
        typer.echo(f" {name:{width}}  {'–' if value is None else value}")


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


TIMES = ("_at", "deadline", "valid_until", "expiry", "post_from", "post_until")
"""How the names of fields end that hold Unix seconds."""


def said(name: str, value: object) -> str:
    """One value as people read it: times in UTC, amounts in PRIME, reasons by their names."""
    from prime_chain.amounts import prime
    from prime_core.verdict import Outcome, Reason

    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is not None and name.endswith(TIMES):
        return utc(number) if number else "not yet"
    if number is not None and name == "reason" and number in set(Reason):
        return f"{Reason(number).name} ({number})"
    if number is not None and name == "outcome" and number in set(Outcome):
        return f"{Outcome(number).name} ({number})"
    if name == "amount":
        return prime(int(str(value)))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value in (None, "") else printable(str(value))


def tree_lines(fields: Mapping[str, Any], indent: int = 0) -> list[str]:
    """Nested plain values, a line each: what is inside something stands indented under its name."""
    margin, width = "  " * indent, max(map(len, fields), default=0)
    lines = []
    for name, value in fields.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            lines += [f"{margin}{label}", *tree_lines(value, indent + 1)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if any(isinstance(one, Mapping) for one in value):
                for number, one in enumerate(value):
                    lines += [f"{margin}{label} {number}", *tree_lines(one, indent + 1)]
            else:
                one_line = ", ".join(said(name, one) for one in value) or "none"
                lines.append(f"{margin}{label:{width}}  {one_line}")
        else:
            lines.append(f"{margin}{label:{width}}  {said(name, value)}")
    return lines
