"""Intents: transactions that the manager's account will send, recorded before they are sent.

An intent's id is derived from the fact that it reports, so a fact queues one intent however often
it is reported. Queue it in the transaction that decides the fact: it waits until
`manager/transactions.py` builds its call. From then on the sender (prime_chain/sender.py)
writes its row, through `StoreQueue`, in the orchestrator that runs the loops.

A transaction that one process signed and another finds unmined is sent again, not signed again. The
nonce is the same, so it is mined once. That SQL is prime_chain/transaction_queue.py's own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection, CursorResult, RowMapping

from prime_chain.client import TxReceipt
from prime_chain.errors import ChainRevertedError
from prime_chain.transaction_queue import Attempt, Sql, TransactionQueue
from prime_core.errors import UnavailableError
from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.engine import Store
from prime_orchestrator.store.rows import insert_new

IntentKind = Literal[
    "join", "root", "policy", "reward_root", "eject", "propose", "execute", "revise", "dismiss"
]
"""Payloads (JSON; digests, addresses and signatures as text, wei as decimal text):

join           {"invite": Invite, "signature"}                        id join:<node>:<deadline>
policy         {"statement": PolicyStatement, "signature"}            id policy:<version>
root           {"root", "count", "leaves_object"}                     id root:<root>
reward_root    {"epoch", "root", "cumulative_total", "object", "as_of_block", "previous"}
                                                                 id reward_root:<epoch>:<object>
eject          {"node"}                                               id eject:<node>:<why>
propose        {"submission_digest"}                                  id propose:<digest>
execute        {"submission_digest"}                                  id execute:<digest>
revise         {"run_digest", "from_step"}                            id revise:<step>:<digest>
dismiss        {"validator"}                       id dismiss:<validator>:<block of its appointment>
"""
Status = Literal["waiting", "queued", "sent", "confirmed", "failed"]
"""Waiting: its call is not built yet. The others are the sender's."""
UNFINISHED: tuple[Status, ...] = ("waiting", "queued", "sent")
MAX_OTHERS = 100
MAX_JOINS = 16
"""Most joins per round: each costs a chain query."""
MAX_PROPOSALS = 32
"""Most proposals per round: each waits for its root, and then for a quorum."""

_table, _attempts = schema.intents, schema.sender_attempts
_intents = schema.intents.c
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IntentRow:
    """An intent. `payload` is JSON; `tx_hash` is the mined transaction, or the last one signed;
    `error` says why it failed."""

    id: str
    kind: str
    payload: str
    status: str
    error: str | None
    tx_hash: str | None
    block: int | None
    created_at: float
    updated_at: float

    def arguments(self) -> dict[str, Any]:
        """Returns the payload, parsed."""
        parsed: dict[str, Any] = json.loads(self.payload)
        return parsed


def queue_intent(
    connection: Connection, *, kind: IntentKind, key: str, payload: Mapping[str, Any], now: float
) -> str:
    """Queues the intent "<kind>:<key>" unless it exists already; returns its id.

    Call it inside the transaction that decides the fact.
    """
    intent = f"{kind}:{key}"
    values = {
        "id": intent,
        "kind": kind,
        "payload": json.dumps(payload, sort_keys=True),
        "value": "0",
        "description": "",
        "status": "waiting",
        "note": "",
        "created_at": now,
        "updated_at": now,
    }
    insert_new(connection, _table, values)
    return intent


def requeue_failed(connection: Connection, intent: str, now: float, *, not_before: float) -> bool:
    """Lets a failed intent wait again if it failed before `not_before`: its cause may be gone.
    Returns whether it did. Its call is built again; its earlier transactions are history."""
    done = connection.execute(
        sa.update(_table)
        .where(
            _intents.id == intent, _intents.status == "failed", _intents.updated_at <= not_before
        )
        .values(
            status="waiting", data=None, note="", error=None, nonce=None, tx_hash=None, block=None,
            block_hash=None, updated_at=now,
        )
    )  # fmt: skip
    if not done.rowcount:
        return False
    connection.execute(sa.update(_attempts).where(_attempts.c.intent_id == intent).values(closed=1))
    return True


def get(connection: Connection, intent_id: str) -> IntentRow | None:
    """Returns the intent, or None."""
    query = sa.select(_table).where(_intents.id == intent_id)
    found = connection.execute(query).mappings().first()
    return None if found is None else _row(found)


def pending(connection: Connection, statuses: Iterable[Status] = ("waiting",)) -> list[IntentRow]:
    """Returns at most MAX_OTHERS intents in the given states, oldest first, followed by at most
    MAX_PROPOSALS proposals and MAX_JOINS joins, least recently updated first: anyone may request an
    invite, and proposals wait for roots, so neither may block other intents."""
    mine = sa.select(_table).where(_intents.status.in_(tuple(statuses)), _intents.kind != "")
    queries = [mine.where(_intents.kind.not_in(("join", "propose"))).order_by(_intents.seq)]
    for kind in ("propose", "join"):
        queries.append(mine.where(_intents.kind == kind).order_by(_intents.updated_at, _intents.id))
    return [
        _row(row)
        for query, most in zip(queries, (MAX_OTHERS, MAX_PROPOSALS, MAX_JOINS), strict=True)
        for row in connection.execute(query.limit(most)).mappings()
    ]


def postpone(connection: Connection, waiting: Iterable[str], *, now: float) -> None:
    """Moves waiting proposals and joins behind the others of their kind."""
    connection.execute(
        sa.update(_table)
        .where(
            _intents.id.in_(tuple(waiting)),
            _intents.status == "waiting",
            _intents.kind.in_(("join", "propose")),
        )
        .values(updated_at=now)
    )


def fail(connection: Connection, intent_id: str, why: str, *, now: float) -> None:
    """Ends an intent whose call can never be built."""
    connection.execute(
        sa.update(_table)
        .where(_intents.id == intent_id, _intents.status == "waiting")
        .values(status="failed", note=why, updated_at=now)
    )


def forget_waiting(connection: Connection, ids: Collection[str]) -> int:
    """Deletes the given intents that still wait for their call, and returns how many."""
    waiting = sa.delete(_table).where(_intents.id.in_(ids), _intents.status == "waiting")
    return connection.execute(waiting).rowcount


def waiting_of(connection: Connection, kind: IntentKind) -> list[IntentRow]:
    """Returns the intents of this kind that wait for their call."""
    query = sa.select(_table).where(_intents.kind == kind, _intents.status == "waiting")
    return [_row(row) for row in connection.execute(query).mappings()]


def failed_of(
    connection: Connection, kinds: Iterable[str], before: float, limit: int
) -> list[IntentRow]:
    """Returns intents of these kinds that failed before a time (Unix seconds), newest first: those
    that are no longer wanted sink and never block the others."""
    query = (
        sa.select(_table)
        .where(
            _intents.status == "failed",
            _intents.kind.in_(tuple(kinds)),
            _intents.updated_at <= before,
        )
        .order_by(_intents.updated_at.desc(), _intents.id)
        .limit(limit)
    )
    return [_row(row) for row in connection.execute(query).mappings()]


def newest_join(connection: Connection, node: str) -> IntentRow | None:
    """Returns the newest request of a node to join the pool, or None."""
    query = (
        sa.select(_table)
        .where(_intents.kind == "join", _intents.id.startswith(f"join:{node}:", autoescape=True))
        .order_by(_intents.seq.desc())
        .limit(1)
    )
    found = connection.execute(query).mappings().first()
    return None if found is None else _row(found)


def mined_between(connection: Connection, after: int, until: int) -> list[IntentRow]:
    """Returns confirmed intents whose transaction is in blocks after + 1 … until. Not the sender's
    own transactions, which have no kind: those that use up a nonce emit no event."""
    query = sa.select(_table).where(
        _intents.status == "confirmed",
        _intents.kind != "",
        _intents.block > after,
        _intents.block <= until,
    )
    return [_row(row) for row in connection.execute(query).mappings()]


def mined_since(connection: Connection, since: float, limit: int) -> list[tuple[str, Digest]]:
    """Returns the newest mined transactions since a time, as (kind, hash). Their kind is empty if
    the sender only used up a nonce."""
    query = (
        sa.select(_intents.kind, _intents.tx_hash)
        .where(_intents.updated_at >= since, _intents.tx_hash.is_not(None))
        .order_by(_intents.updated_at.desc())
        .limit(limit)
    )
    return [(kind, Digest(tx_hash)) for kind, tx_hash in connection.execute(query)]


def latest_sent(connection: Connection, limit: int) -> list[IntentRow]:
    """Returns the last intents that have a transaction, oldest first."""
    last = (
        sa.select(_attempts.c.hash)
        .where(_attempts.c.intent_id == _intents.id)
        .order_by(_attempts.c.signed_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = (
        sa.select(_table, last.label("last_hash"))
        .where(
            _intents.kind != "", sa.or_(_intents.tx_hash.is_not(None), _intents.nonce.is_not(None))
        )
        .order_by(_intents.updated_at.desc(), _intents.id)
        .limit(limit)
    )
    rows = connection.execute(query).mappings().all()
    return [_row(row, row["last_hash"]) for row in reversed(rows)]


def counts(connection: Connection) -> dict[str, int]:
    """Returns the number of intents by status."""
    query = sa.select(_intents.status, sa.func.count()).group_by(_intents.status)
    return {status: int(n) for status, n in connection.execute(query)}


def _row(row: RowMapping, last_hash: str | None = None) -> IntentRow:
    why = None
    if row["status"] == "failed":
        why = row["note"] or None
        if row["error"]:
            error = json.loads(row["error"])
            why = str(ChainRevertedError(error["name"], error["arguments"], row["description"]))
    return IntentRow(
        id=row["id"],
        kind=row["kind"],
        payload=row["payload"],
        status=row["status"],
        error=why,
        tx_hash=row["tx_hash"] or last_hash,
        block=row["block"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


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
