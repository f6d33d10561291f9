"""Migrated stores for tests. The migrations run once in a process; each further SQLite file is a
copy of what they made. tests/orchestrator/test_store_schema.py tests the migrations themselves."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from pathlib import Path

from sqlalchemy import event

from prime_orchestrator.store import Store, open_store, sqlite_url


@functools.cache
def _migrated() -> bytes:
    """A SQLite file of the newest revision with no rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        store = open_store(sqlite_url(path))
        store.migrate()
        store.close()
        assert [one.name for one in Path(folder).iterdir()] == [path.name], "a log is left"
        return path.read_bytes()


def migrate(store: Store) -> None:
    """Gives a newly opened store its tables: by copy if it is a SQLite file that is not there yet.
    What is then committed to a SQLite file does not wait for the disk."""
    url = store.engine.url
    if url.get_backend_name() != "sqlite":
        store.migrate()
        return
    event.listen(store.engine, "connect", _do_not_wait)
    path = Path(url.database or "")
    if path.exists():
        store.migrate()
    else:
        path.write_bytes(_migrated())


def _do_not_wait(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")
