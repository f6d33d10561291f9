"""Schema migrations (Alembic), packaged with the orchestrator.

`serve` runs them at startup; `orchestrator store migrate` runs them on demand. A test checks that
the migrated schema equals `schema.metadata` on both databases.

A migration may declare `AFTER_COMMIT`, statements for PostgreSQL that must not run in its
transaction (docs/adr/0022):

    AFTER_COMMIT = ("CREATE INDEX CONCURRENTLY IF NOT EXISTS name ON table (column)",)
"""

from __future__ import annotations

import functools
import re
import time
import zlib
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from prime_core.errors import FatalError

FOLDER = Path(__file__).parent / "migrations"
POLL_SECONDS = 0.2
_LOCK = zlib.crc32(b"prime/after-migrate")
_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY IF NOT EXISTS (\w+) ON ")
_INVALID = text("SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid")


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


@functools.cache
def after_commit() -> tuple[str, ...]:
    """Returns what the migrations declare as `AFTER_COMMIT`, the oldest first."""
    scripts = tuple(ScriptDirectory.from_config(_config()).walk_revisions())[::-1]
    return tuple(one for script in scripts for one in getattr(script.module, "AFTER_COMMIT", ()))


def finish(connection: Connection) -> None:
    """Runs the statements of `after_commit` on a connection to PostgreSQL that commits each one.

    They run at every start, so they must do nothing where they have run before. One process at a
    time runs them. An invalid index, which a broken `CREATE INDEX CONCURRENTLY` leaves, is dropped
    and made again.
    """
    # To wait inside PostgreSQL would hold a snapshot, for which CONCURRENTLY waits in turn.
    while not connection.execute(text("SELECT pg_try_advisory_lock(:n)"), {"n": _LOCK}).scalar():
        time.sleep(POLL_SECONDS)
    try:
        for statement in after_commit():
            if (index := _INDEX.match(statement)) is not None:
                name = index[1]
                if connection.execute(_INVALID, {"name": name}).first() is not None:
                    connection.execute(text(f"DROP INDEX CONCURRENTLY IF EXISTS {name}"))
            connection.exec_driver_sql(statement)
    finally:
        connection.execute(text("SELECT pg_advisory_unlock(:n)"), {"n": _LOCK})
