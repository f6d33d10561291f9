"""The manager's transaction queue in the store, available to the orchestrator that runs the loops.

A transaction that one process signed and another finds unmined is sent again, not signed again. The
nonce is the same, so it is mined once. The SQL is prime_chain/transaction_queue.py's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, CursorResult

from prime_chain.client import TxReceipt
from prime_chain.errors import ChainRevertedError
from prime_chain.transaction_queue import Attempt, Sql, TransactionQueue
from prime_core.errors import UnavailableError
from prime_core.ids import Address
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)


class StoreQueue(TransactionQueue):
    """The queue of one account on one chain. Raises UnavailableError if the database is
    unavailable.

    The loops' lease (leaders.py) keeps several processes from ticking at once. `held` tells whether
    this process still has it: a process that was paused signs nothing with it lost.
    """

    def __init__(
        self,
        store: Store,
        account: Address,
        chain_id: int,
        held: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._held = held
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

    def record_signed(self, intent_id: str, gas: int, attempt: Attempt, now: float) -> None:
        if not self._held():
            raise UnavailableError("another process runs the manager's loops now")
        super().record_signed(intent_id, gas, attempt, now)

    def record_mined(
        self, intent_id: str, receipt: TxReceipt, error: ChainRevertedError | None, now: float
    ) -> None:
        super().record_mined(intent_id, receipt, error, now)
        if error is None:
            block, tx_hash = receipt.block, receipt.tx_hash
            log.info("intent %s is confirmed in block %s (%s)", intent_id, block, tx_hash)
        else:
            log.error("intent %s failed: %s", intent_id, error)

    def record_refused(self, intent_id: str, error: ChainRevertedError, now: float) -> None:
        super().record_refused(intent_id, error, now)
        log.error("intent %s failed: %s", intent_id, error)

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
