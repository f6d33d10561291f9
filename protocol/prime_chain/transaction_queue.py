"""The transaction queue: every intent, and every transaction ever signed for it.

    waiting ── the call is built ──> queued ── signed ──> sent ── receipt ──> confirmed | failed

A row holds what should be sent and how far it has come. It is written before anything is sent, so
that a process killed at any instant finds here what it may have sent. A queue belongs to one
account on one chain. It is a SQLite file; an orchestrator keeps it in its store, with other
`_reading`, `_writing` and `exclusive` (the SQL is plain). Only an orchestrator has waiting intents:
it records them together with their cause, and builds the call later (its store/intents.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from prime_chain.client import Call, TxReceipt
from prime_chain.errors import ChainRevertedError
from prime_core.errors import ConflictError, FatalError, UnavailableError, UserError
from prime_core.ids import Address, Digest

IntentStatus = Literal["queued", "sent", "confirmed", "failed"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sender_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS intents (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    id           TEXT NOT NULL UNIQUE,
    kind         TEXT NOT NULL,       -- of an orchestrator's intent: root, join, …
    payload      TEXT NOT NULL,       -- JSON from which its call is built
    call_to      TEXT,               -- NULL creates a contract
    data         BLOB,               -- NULL while it waits: the call is not built yet
    value        TEXT NOT NULL,
    description  TEXT NOT NULL,
    status       TEXT NOT NULL,      -- waiting, queued, sent, confirmed, failed
    nonce        INTEGER,
    gas          INTEGER,
    note         TEXT NOT NULL DEFAULT '',  -- why it waits, in plain words
    error        TEXT,               -- JSON {name, arguments} of a failed one
    tx_hash      TEXT,               -- the one that was mined
    block        INTEGER,
    contract     TEXT,               -- the address it created
    block_hash   TEXT,
    created_at   REAL NOT NULL,
    updated_at   REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS intents_status ON intents (status, seq);
CREATE INDEX IF NOT EXISTS intents_nonce ON intents (nonce);
CREATE INDEX IF NOT EXISTS intents_block ON intents (block);
CREATE TABLE IF NOT EXISTS sender_attempts (
    hash          TEXT PRIMARY KEY,
    intent_id     TEXT NOT NULL,
    nonce         INTEGER NOT NULL,
    max_fee       TEXT NOT NULL,     -- wei per gas
    priority_fee  TEXT NOT NULL,
    raw           BLOB NOT NULL,
    signed_at     REAL NOT NULL,
    sent_at       REAL,              -- last broadcast; NULL: not known to have been sent
    closed        INTEGER NOT NULL DEFAULT 0  -- its failure was seen and tried again
);
CREATE INDEX IF NOT EXISTS sender_attempts_intent ON sender_attempts (intent_id, signed_at);
"""


@dataclass(frozen=True)
class Attempt:
    """One signed transaction of an intent. Fees in wei per gas, times in seconds."""

    hash: Digest
    nonce: int
    max_fee: int
    priority_fee: int
    raw: bytes = field(repr=False)
    signed_at: float
    sent_at: float | None
    closed: bool = False


@dataclass(frozen=True)
class Intent:
    """What was asked for and how far it is. `hashes`: every transaction tried, oldest first."""

    id: str
    call: Call
    status: IntentStatus
    nonce: int | None
    gas: int | None
    note: str
    error: ChainRevertedError | None
    tx_hash: Digest | None
    block: int | None
    contract: Address | None
    block_hash: Digest | None
    created_at: float
    updated_at: float
    attempts: tuple[Attempt, ...]

    @property
    def hashes(self) -> tuple[Digest, ...]:
        return tuple(attempt.hash for attempt in self.attempts)

    @property
    def live(self) -> tuple[Attempt, ...]:
        """The transactions that may still be mined, or were, since the last retry."""
        return tuple(attempt for attempt in self.attempts if not attempt.closed)

    @property
    def done(self) -> bool:
        return self.status in ("confirmed", "failed")


class Sql(Protocol):
    """An open connection: `?` marks values, rows are read by column name."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any: ...


class TransactionQueue:
    """The open queue. Safe to use from several threads."""

    def __init__(self, path: Path, account: Address, chain_id: int) -> None:
        self._path = path
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _create(path)
            self._db = sqlite3.connect(path, timeout=10, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"the transaction queue {path} cannot be opened: {error}",
                hint="name a folder that you may write to",
            ) from error
        self._db.row_factory = sqlite3.Row
        self._db.isolation_level = None
        self._check_whole()
        self.bind("account", account)
        self.bind("chain_id", str(chain_id))

    def _check_whole(self) -> None:
        """Raises FatalError if the file is empty, cut off or damaged: what it knew of sent
        transactions is lost, and sending them again could pay twice."""
        try:
            with self._lock:
                sound = self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
                self._db.execute("PRAGMA synchronous = FULL")
                made = self._objects()
        except sqlite3.Error as error:
            found = _trouble(self._path, error)
            if isinstance(found, UnavailableError):
                raise found from error
            sound, made = False, set()
        if not sound or not made >= _OBJECTS:
            raise FatalError(
                f"the transaction queue {self._path} is empty or damaged, so that transactions "
                "already sent could be sent again. Put back a copy of the file. Without one: wait "
                "until no transaction of the account is under way, check with a block explorer "
                "what it sent last, then remove the file"
            )

    def _objects(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT name FROM sqlite_master")}

    @contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        """Raises UnavailableError for what may pass (a full disk, a lock), FatalError if the file
        is damaged."""
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                raise _trouble(self._path, error) from error

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """True if no other process is ticking this queue; holds it while the block runs."""
        with self._path.with_name(self._path.name + ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    @contextmanager
    def _reading(self) -> Iterator[Sql]:
        with self._guarded() as db:
            yield db

    @contextmanager
    def _writing(self) -> Iterator[Sql]:
        with self._guarded() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # a full disk has rolled it back already
                    db.execute("ROLLBACK")
                raise

    def bind(self, key: str, value: str) -> None:
        """Remembers a fact the queue belongs to. Raises UserError if it belongs to another."""
        kept = self.remember(key, value)
        if kept != value:
            raise UserError(
                f"the transaction queue {self._path} belongs to {key} {kept}, not {value}",
                hint="use another data folder for this account and chain",
            )

    def remember(self, key: str, value: str) -> str:
        """The value first remembered under `key`, which may be this one."""
        with self._writing() as db:
            db.execute("INSERT INTO sender_meta VALUES (?, ?) ON CONFLICT DO NOTHING", (key, value))
            row = db.execute("SELECT value FROM sender_meta WHERE key = ?", (key,)).fetchone()
            kept: str = row["value"]
        return kept

    def begin_act(self, act: str) -> None:
        """Records that an act has begun."""
        with self._writing() as db:
            db.execute("INSERT INTO sender_meta VALUES (?, '')", (f"act/{act}",))

    def end_acts(self, command: str) -> None:
        """Removes the command's recorded acts: those named `command`, a hyphen, and a suffix."""
        with self._writing() as db:
            db.execute("DELETE FROM sender_meta WHERE key LIKE ?", (f"act/{command}-%",))

    def done_in_acts(self, command: str, since: float) -> list[Intent]:
        """Returns the intents of the command's recorded acts that were confirmed at `since` (Unix
        seconds) or later, in order."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT intents.* FROM intents JOIN sender_meta"
                " ON sender_meta.key = 'act/' || substr(intents.id, 1, instr(intents.id, ':') - 1)"
                " WHERE sender_meta.key LIKE ? AND intents.status = 'confirmed'"
                " AND intents.updated_at >= ? ORDER BY intents.seq",
                (f"act/{command}-%", since),
            ).fetchall()
            return [self._intent(db, row) for row in rows]

    def submit(self, intent_id: str, call: Call, now: float) -> None:
        """Writes an intent down once. Raises ConflictError if the id stands for another call."""
        with self._writing() as db:
            db.execute(
                "INSERT INTO intents (id, kind, payload, call_to, data, value, description, status,"
                " note, created_at, updated_at)"
                " VALUES (?, '', '', ?, ?, ?, ?, 'queued', '', ?, ?)"
                " ON CONFLICT DO NOTHING",
                (intent_id, call.to, call.data, str(call.value), call.description, now, now),
            )
            row = db.execute(
                "SELECT call_to, data, value FROM intents WHERE id = ?", (intent_id,)
            ).fetchone()
        if (row["call_to"], bytes(row["data"] or b""), int(row["value"])) != (
            call.to, call.data, call.value,
        ):  # fmt: skip
            raise ConflictError(f"the intent {intent_id!r} was written down for another call")

    def build(self, intent_id: str, call: Call, now: float) -> None:
        """Gives a waiting intent its call. Does nothing if it is gone or has one."""
        with self._writing() as db:
            db.execute(
                "UPDATE intents SET call_to = ?, data = ?, value = ?, description = ?,"
                " status = 'queued', updated_at = ? WHERE id = ? AND status = 'waiting'",
                (call.to, call.data, str(call.value), call.description, now, intent_id),
            )

    def get(self, intent_id: str) -> Intent | None:
        """Returns the intent; None if there is none, or its call is not built yet."""
        query = "SELECT * FROM intents WHERE id = ? AND data IS NOT NULL"
        with self._reading() as db:
            row = db.execute(query, (intent_id,)).fetchone()
            return self._intent(db, row) if row is not None else None

    def with_status(self, *statuses: IntentStatus) -> list[Intent]:
        """Intents of these states in the order they were asked for."""
        marks = ",".join("?" * len(statuses))
        with self._reading() as db:
            rows = db.execute(
                f"SELECT * FROM intents WHERE status IN ({marks}) ORDER BY seq",  # noqa: S608
                statuses,
            ).fetchall()
            return [self._intent(db, row) for row in rows]

    def open_count(self) -> int:
        with self._reading() as db:
            query = "SELECT count(*) AS n FROM intents WHERE status IN ('queued', 'sent')"
            return int(db.execute(query).fetchone()["n"])

    def mined_after(self, block: int) -> list[Intent]:
        """Intents whose transaction lies above `block`, in order."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT * FROM intents WHERE block > ? AND nonce IS NOT NULL ORDER BY nonce",
                (block,),
            ).fetchall()
            return [self._intent(db, row) for row in rows]

    def newest_confirmed(self) -> Intent | None:
        """The mined intent with the highest nonce."""
        with self._reading() as db:
            row = db.execute(
                "SELECT * FROM intents WHERE status IN ('confirmed', 'failed')"
                " AND tx_hash IS NOT NULL AND nonce IS NOT NULL ORDER BY nonce DESC LIMIT 1"
            ).fetchone()
            return self._intent(db, row) if row is not None else None

    def record_signed(self, intent_id: str, gas: int, attempt: Attempt, now: float) -> None:
        """Before the broadcast: the transaction and its nonce, in one step. Raises
        UnavailableError if the intent ended meanwhile, by another process."""
        with self._writing() as db:
            row = db.execute("SELECT status FROM intents WHERE id = ?", (intent_id,)).fetchone()
            if row is None or row["status"] not in ("queued", "sent"):
                raise UnavailableError(f"the intent {intent_id!r} is not to be sent any more")
            db.execute(
                "INSERT INTO sender_attempts (hash, intent_id, nonce, max_fee, priority_fee, raw,"
                " signed_at, closed) VALUES (?, ?, ?, ?, ?, ?, ?, 0) ON CONFLICT DO NOTHING",
                (
                    attempt.hash, intent_id, attempt.nonce, str(attempt.max_fee),
                    str(attempt.priority_fee), attempt.raw, attempt.signed_at,
                ),
            )  # fmt: skip
            db.execute(
                "UPDATE intents SET status = 'sent', nonce = ?, gas = ?, note = '',"
                " updated_at = ? WHERE id = ?",
                (attempt.nonce, gas, now, intent_id),
            )

    def record_sent(self, tx_hash: Digest, now: float) -> None:
        with self._writing() as db:
            db.execute("UPDATE sender_attempts SET sent_at = ? WHERE hash = ?", (now, tx_hash))

    def record_mined(
        self, intent_id: str, receipt: TxReceipt, error: ChainRevertedError | None, now: float
    ) -> None:
        """The end: confirmed, or failed with the contract's error."""
        status = "failed" if error is not None else "confirmed"
        self._update(
            intent_id,
            now,
            status=status,
            note="",
            error=_error_json(error),
            tx_hash=receipt.tx_hash,
            block=receipt.block,
            block_hash=receipt.block_hash,
            contract=receipt.contract,
        )

    def record_refused(self, intent_id: str, error: ChainRevertedError, now: float) -> None:
        """Failed before it was sent: the contract would revert it."""
        self._update(intent_id, now, status="failed", note="", error=_error_json(error))

    def requeue(self, intent_id: str, note: str, now: float) -> None:
        """Back to the start with no nonce; the attempts stay on record."""
        self._update(intent_id, now, status="queued", nonce=None, note=note, error=None)

    def retry(self, intent_id: str, now: float) -> None:
        """A failed intent starts again; what was mined of it is history."""
        with self._writing() as db:
            db.execute("UPDATE sender_attempts SET closed = 1 WHERE intent_id = ?", (intent_id,))
            db.execute(
                "UPDATE intents SET status = 'queued', nonce = NULL, note = '',"
                " error = NULL, tx_hash = NULL, block = NULL, block_hash = NULL, updated_at = ?"
                " WHERE id = ?",
                (now, intent_id),
            )

    def reopen(self, intent_id: str, note: str, now: float) -> None:
        """A mined transaction left the chain with its block: it is on its way again."""
        self._update(
            intent_id,
            now,
            status="sent",
            note=note,
            error=None,
            tx_hash=None,
            block=None,
            block_hash=None,
            contract=None,
        )

    def note(self, intent_id: str, text: str, now: float) -> None:
        """Why it waits. Writes only what changed."""
        current = self.get(intent_id)
        if current is not None and current.note != text:
            self._update(intent_id, now, note=text)

    def _update(self, intent_id: str, now: float, **columns: Any) -> None:
        columns["updated_at"] = now
        sets = ", ".join(f"{name} = ?" for name in columns)
        with self._writing() as db:
            db.execute(
                f"UPDATE intents SET {sets} WHERE id = ?",  # noqa: S608 - names are ours
                (*columns.values(), intent_id),
            )

    def _intent(self, db: Sql, row: Any) -> Intent:
        rows = db.execute(
            "SELECT * FROM sender_attempts WHERE intent_id = ?"
            " ORDER BY signed_at, length(max_fee), max_fee",
            (row["id"],),
        ).fetchall()
        error = json.loads(row["error"]) if row["error"] else None
        doing = row["description"]
        return Intent(
            id=row["id"],
            call=Call(row["call_to"], bytes(row["data"]), int(row["value"]), doing),
            status=row["status"],
            nonce=row["nonce"],
            gas=row["gas"],
            note=row["note"],
            error=ChainRevertedError(error["name"], error["arguments"], doing) if error else None,
            tx_hash=row["tx_hash"],
            block=row["block"],
            contract=row["contract"],
            block_hash=row["block_hash"],
            created_at=row["created_at"],
            updated_at=row["updated_at"],
            attempts=tuple(
                Attempt(
                    Digest(a["hash"]),
                    a["nonce"],
                    int(a["max_fee"]),
                    int(a["priority_fee"]),
                    bytes(a["raw"]),
                    a["signed_at"],
                    a["sent_at"],
                    bool(a["closed"]),
                )
                for a in rows
            ),
        )

    def close(self) -> None:
        with self._lock:
            self._db.close()


_OBJECTS = set(re.findall(r"CREATE \w+ IF NOT EXISTS (\w+)", _SCHEMA))


def _create(path: Path) -> None:
    """An empty queue under `path`, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    draft.unlink(missing_ok=True)
    db = sqlite3.connect(draft)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(_SCHEMA)
    db.close()
    try:
        os.link(draft, path)  # unlike a rename, never over another process's queue
    except FileExistsError:
        pass
    finally:
        draft.unlink()


_PASSING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


def _trouble(path: Path, error: sqlite3.Error) -> UnavailableError | FatalError:
    """What an error of SQLite means to the program."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte of an extended code
    if code == sqlite3.SQLITE_FULL:
        return UnavailableError(
            f"the disk of the transaction queue {path} is full: free some space ({error})"
        )
    if code in _PASSING:
        return UnavailableError(f"the transaction queue {path} cannot be used now: {error}")
    return FatalError(f"the transaction queue {path} is damaged or misused: {error}")


def _error_json(error: ChainRevertedError | None) -> str | None:
    if error is None:
        return None
    return json.dumps({"name": error.name, "arguments": error.arguments})
