"""The store: tables, migrations and named queries, one file per topic.

Every query function takes the Connection of `Store.begin()` (or `Store.read()`) first, so that
callers can combine them in one transaction.
"""

from sqlalchemy import Connection

from prime_orchestrator.store.engine import (
    Store,
    lock,
    on_commit,
    open_store,
    sqlite_file,
    sqlite_url,
)

__all__ = ["Connection", "Store", "lock", "on_commit", "open_store", "sqlite_file", "sqlite_url"]
