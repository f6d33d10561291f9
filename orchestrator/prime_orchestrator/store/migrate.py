"""Schema migrations (Alembic), packaged with the orchestrator.

`serve` runs them at startup; `orchestrator store migrate` runs them on demand. A test checks that
the migrated schema equals `schema.metadata` on both databases.
"""

from __future__ import annotations

import functools
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from prime_core.errors import FatalError

FOLDER = Path(__file__).parent / "migrations"


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@functools.cache
def revisions() -> tuple[str, ...]:
    """Returns the revisions that this program knows, the oldest first."""
    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return tuple(script.revision for script in scripts)[::-1]


def head() -> str:
    """Returns the newest revision that this program knows."""
    return revisions()[-1]


def current(connection: Connection) -> str | None:
    """Returns the database's revision, or None before the first migration."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(connection: Connection, to: str = "head") -> None:
    """Migrates to a revision within the caller's transaction.

    Raises FatalError if the database was written by a newer program.
    """
    found = current(connection)
    if found is not None and found not in revisions():
        raise FatalError(
            f"the database is of revision {found}, which this program does not know; "
            "it was made by a newer version: install that one, or restore a backup"
        )
    if found != head():
        command.upgrade(_config(connection), to)
