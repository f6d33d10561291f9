"""Options of the commands that open a pool's database and objects, and how they are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_core.command_line import ConfigFile, PasswordFile, Quorum, Rpcs, with_options
from prime_core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from prime_orchestrator.config import Settings
    from prime_orchestrator.store import Store

_DATABASE: dict[str, Any] = {
    "config": ConfigFile,
    "data": Annotated[Path | None, typer.Option(help="Folder of the store and its objects.")],
    "database": Annotated[
        str | None, typer.Option(help="sqlite:///PATH or postgresql://… (default: in --data).")
    ],
}
_OBJECTS = _DATABASE | {
    "objects": Annotated[Path | None, typer.Option(help="Folder of the object store.")],
    "s3_bucket": Annotated[
        str | None, typer.Option(help="Keep objects in this bucket; credentials: docs/storage.md.")
    ],
    "s3_endpoint": Annotated[str | None, typer.Option(help="URL of the S3 server (default: AWS).")],
    "s3_region": Annotated[
        str | None, typer.Option(help="Region of the S3 bucket (default: us-east-1).")
    ],
}
_POOL = _OBJECTS | {
    "deployment": Annotated[Path | None, typer.Option(help="Deployment JSON.")],
    "rpc": Rpcs,
    "rpc_quorum": Quorum,
    "pool": Annotated[int | None, typer.Option(help="Number of the pool on chain.")],
    "run": Annotated[Path | None, typer.Option(help="Run definition (canonical JSON).")],
    "wallet": Annotated[Path | None, typer.Option(help="Keystore of the pool's manager.")],
    "password_file": PasswordFile,
}


@dataclass(frozen=True)
class StoreOptions:
    """What a command's options say of a pool's database and objects; `flags` by setting."""

    config: Path | None
    flags: dict[str, object]

    def settings(self, more: Mapping[str, object] = {}) -> Settings:
        """The settings that flags, environment and file give. `more`: further flags."""
        from prime_orchestrator.config import load

        return load({**self.flags, **more}, self.config)

    @contextmanager
    def opened(self, more: Mapping[str, object] = {}) -> Iterator[tuple[Settings, Store]]:
        """The settings, and the open database."""
        from prime_orchestrator.store import open_store

        settings = self.settings(more)
        store = open_store(settings.database_url)
        try:
            yield settings, store
        finally:
            store.close()

    @contextmanager
    def pool(self, more: Mapping[str, object] = {}) -> Iterator[tuple[Settings, Store]]:
        """The settings and the database of a pool that exists. Raises UserError if there is none,
        so that a mistyped folder is not made."""
        from prime_orchestrator.store import backup, sqlite_file

        file = sqlite_file(self.settings(more).database_url)
        if file is not None and not file.is_file():
            raise UserError(
                f"there is no pool in {file}",
                hint="name the folder of orchestrator serve by --data, or its --database",
            )
        with self.opened(more) as (settings, store):
            backup.place(store)
            yield settings, store


def _adds(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of `function(options: StoreOptions, own parameters …)`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            flags = {name: values.pop(name) for name in options}
            function(StoreOptions(flags.pop("config"), flags), **values)

        return with_options(function, {name: (one, None) for name, one in options.items()}, command)

    return decorate


with_database = _adds(_DATABASE)
"""Adds --config, --data and --database to a command."""
with_objects = _adds(_OBJECTS)
"""Likewise, and the options of the object store."""
with_pool = _adds(_POOL)
"""Likewise, and the options of the manager's pool on chain."""


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
