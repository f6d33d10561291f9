"""Options of the commands that open a pool's database and objects, and how they are opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from prime_orchestrator.config import Settings
    from prime_orchestrator.store import Store

Data = Annotated[Path | None, typer.Option("--data", help="Folder of the store and its objects.")]
Database = Annotated[
    str | None,
    typer.Option("--database", help="sqlite:///PATH or postgresql://… (default: in --data)."),
]
Objects = Annotated[Path | None, typer.Option(help="Folder of the object store.")]
Bucket = Annotated[
    str | None, typer.Option(help="Keep objects in this bucket; credentials: docs/storage.md.")
]
Endpoint = Annotated[str | None, typer.Option(help="URL of the S3 server (default: AWS).")]
Region = Annotated[str | None, typer.Option(help="Its region (default: us-east-1).")]


@contextmanager
def opened(flags: dict[str, object], config: Path | None) -> Iterator[tuple[Settings, Store]]:
    """The settings that a command's arguments name, and the open database."""
    from prime_orchestrator.config import Settings, load
    from prime_orchestrator.store import open_store

    named = {name: flags[name] for name in Settings.model_fields if name in flags}
    settings = load(named, config)
    store = open_store(settings.database_url)
    try:
        yield settings, store
    finally:
        store.close()


@contextmanager
def pool_store(flags: dict[str, object], config: Path | None) -> Iterator[tuple[Settings, Store]]:
    """The settings and the database of a pool that exists. Raises UserError if there is none, so
    that a mistyped folder is not made."""
    from prime_orchestrator.config import Settings, load
    from prime_orchestrator.store import backup, sqlite_file

    named = {name: flags[name] for name in Settings.model_fields if name in flags}
    file = sqlite_file(load(named, config).database_url)
    if file is not None and not file.is_file():
        raise UserError(
            f"there is no pool in {file}",
            hint="name the folder of orchestrator serve by --data, or its --database",
        )
    with opened(flags, config) as (settings, store):
        backup.place(store)
        yield settings, store


def progress(of: str = "files") -> Progress:
    """A progress bar on standard error, which names what it counts; nothing is drawn where that is
    no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    terminal = Console(stderr=True)
    return Progress(
        TextColumn(of),
        BarColumn(),
        MofNCompleteColumn(),
        console=terminal,
        disable=not terminal.is_terminal,
    )
