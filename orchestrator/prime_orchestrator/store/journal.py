"""The manager's sender journal in the store, available to whichever orchestrator runs the loops.

A transaction that one process signed and another finds unmined is sent again, not signed again. The
nonce is the same, so it is mined once. The SQL is prime_chain/journal.py's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, CursorResult

from prime_chain.journal import Journal, Sql
from prime_core.ids import Address
from prime_orchestrator.store.engine import Store


class StoreJournal(Journal):
    """The journal of one account on one chain. Raises UnavailableError if the database is
    unavailable.

    The loops' lease (leaders.py) keeps several processes from ticking at once, not this class.
    """

    def __init__(self, store: Store, account: Address, chain_id: int) -> None:
        self._store = store
        self._path = "in the store"  # type: ignore[assignment]  # only named in sentences
        self.bind("account", account)
        self.bind("chain_id", str(chain_id))

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        yield True

    @contextmanager
    def _reading(self) -> Iterator[Sql]:
        with self._store.read() as connection:
            yield _Plain(connection)

    @contextmanager
    def _writing(self) -> Iterator[Sql]:
        with self._store.begin() as connection:
            yield _Plain(connection)

    def close(self) -> None:
        """Does nothing; the store's owner closes the store."""


class _Plain:
    """Runs SQL with `?` placeholders on either database."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any:
        if self._connection.dialect.name == "postgresql":
            sql = sql.replace("?", "%s")
        return _Rows(self._connection.exec_driver_sql(sql, tuple(values)))


class _Rows:
    """A result whose columns are read by name."""

    def __init__(self, result: CursorResult[Any]) -> None:
        self._result = result

    def fetchone(self) -> Any:
        return self._result.mappings().first()

    def fetchall(self) -> list[Any]:
        return list(self._result.mappings().all())
