"""The orchestrator's database: SQLite in a file (the default) or PostgreSQL by URL.

`Store.begin()` is the only way to write: one transaction, committed at the end of the block and
rolled back on any exception. Query functions (the other files of this folder) take its Connection,
so a caller can combine several in one transaction.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError, DBAPIError, InvalidatePoolError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from prime_core.errors import ConflictError, FatalError, UnavailableError, UserError
from prime_core.folders import make_folder

log = logging.getLogger(__name__)
P = ParamSpec("P")

BUSY_SECONDS = 30
CONNECT_SECONDS = 10
"""Time-out for opening a connection to PostgreSQL."""
LOCK_SECONDS = 10.0
"""How long a migration of PostgreSQL waits for a table. Requests that come later wait behind it."""
_LOCK_NOT_AVAILABLE = "55P03"
"""The SQLSTATE of a time-out."""
TRUSTED_SECONDS = 1.0
"""For this long after its last use, a PostgreSQL connection is used again without a check."""
REPLICA_SECONDS = 30
"""A replica that is further behind is not read."""
CHECK_SECONDS, PAUSE_SECONDS = 5.0, 10.0
"""Interval between two checks of a replica's delay, and before one that failed is tried again."""
_DELAY = sa.text(
    "SELECT CASE WHEN pg_is_in_recovery() THEN "
    "extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()) END"
)
_SNAPSHOT: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
_PUBLIC = "the database cannot be used now; try again later"
_READ_ONLY = "prime_read_only"
_ON_COMMIT = "prime_on_commit"
_POOL: dict[str, Any] = {"pool_size": 10, "max_overflow": 50}
"""Enough connections for the API's threads (40) and the loops; ten are kept open."""


class Store:
    """An open database. Thread-safe; each process opens its own. `replica`: a streaming standby of
    it, which `browse` reads."""

    def __init__(self, engine: Engine, replica: Engine | None = None) -> None:
        self.engine = engine
        self._replica = None if replica is None else _Replica(replica)
        self._writing = threading.RLock() if self.is_sqlite else nullcontext()
        """Serializes this process's writers. Other processes wait for SQLite's own lock, which
        polls."""

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Opens a read-write transaction. SQLite takes the write lock immediately, so nothing
        read inside can change before the commit. Makes the calls of `on_commit` after it. Raises
        UnavailableError if the database is unavailable."""
        calls: list[Callable[[], object]] = []
        with self._writing, _reachable(self.engine), self.engine.begin() as connection:
            yield connection.execution_options(**{_ON_COMMIT: calls})
        for call in calls:
            try:
                call()
            except Exception:  # the transaction is committed, and its caller must know that
                log.exception("a call after a commit failed")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Opens a read-only snapshot; never waits for writers."""
        options: dict[str, Any] = {_READ_ONLY: True}
        if not self.is_sqlite:
            options = _SNAPSHOT
        with (
            _reachable(self.engine),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection

    @property
    def replica_read(self) -> bool | None:
        """Whether `browse` reads the replica now; None if there is none."""
        return None if self._replica is None else self._replica.ready()

    @contextmanager
    def browse(self) -> Iterator[Connection]:
        """Opens a read-only snapshot for public pages, which may be some seconds old: on the
        replica if there is one that answers and is not more than REPLICA_SECONDS behind, else like
        `read`."""
        connection = None if self._replica is None else self._replica.connect()
        if connection is None:
            with self.read() as connection:
                yield connection
            return
        with _reachable(connection.engine), connection, connection.begin():
            yield connection

    def migrate(self) -> None:
        """Migrates the schema to the newest revision, in one transaction, then runs what may not
        run in it; safe if several processes start at once.

        Raises UserError if PostgreSQL's database does not hold Unicode, ConflictError if a
        transaction of another program keeps a table for LOCK_SECONDS; nothing has changed then.
        """
        from prime_orchestrator.store.migrate import after_commit, finish, upgrade

        with self.begin() as connection:
            lock(connection, "migrate")  # however long another process migrates
            if not self.is_sqlite:
                _check_encoding(connection)
                connection.execute(sa.text(f"SET LOCAL lock_timeout = {LOCK_SECONDS * 1000:.0f}"))
            try:
                upgrade(connection)
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                    raise
                raise ConflictError(
                    f"the schema was not migrated: another program kept a table for "
                    f"{LOCK_SECONDS:.0f} s; end every `serve`, backup and export of this database, "
                    "then run `orchestrator store migrate`"
                ) from error
        if self.is_sqlite or not after_commit():
            return
        with (
            _reachable(self.engine),
            self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            finish(connection)

    def close(self) -> None:
        self.engine.dispose()
        if self._replica is not None:
            self._replica.engine.dispose()


def _check_encoding(connection: Connection) -> None:
    encoding = connection.execute(sa.text("SHOW server_encoding")).scalar_one()
    if encoding != "UTF8":
        raise UserError(
            f"the database's encoding is {encoding}, and texts are kept in UTF8",
            hint="make another: createdb --encoding UTF8 --template template0 --locale C NAME",
        )


class _Replica:
    """A PostgreSQL standby. After a failure, or while it is too far behind, it is not used for
    PAUSE_SECONDS."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._where = shown(engine.url)
        self._not_before = self._checked_at = float("-inf")

    def ready(self) -> bool:
        """Whether it has not failed recently."""
        return time.monotonic() >= self._not_before

    def connect(self) -> Connection | None:
        """Returns a connection for one read-only transaction, or None if the replica cannot be
        used now."""
        if not self.ready():
            return None
        now = time.monotonic()
        connection: Connection | None = None
        try:
            connection = self.engine.connect().execution_options(**_SNAPSHOT)
            if now - self._checked_at >= CHECK_SECONDS:
                behind = connection.execute(_DELAY).scalar()
                connection.rollback()
                if behind is not None and behind > REPLICA_SECONDS:
                    connection.close()
                    self._leave(now, f"is {behind:.0f} s behind")
                    return None
                self._checked_at = now
        except DBAPIError as error:
            if connection is not None:
                connection.close()
            cause = str(error.orig).strip().splitlines() or ["no answer"]
            self._leave(now, f"cannot be used: {cause[0]}")
            return None
        return connection

    def _leave(self, now: float, why: str) -> None:
        self._not_before = now + PAUSE_SECONDS
        log.warning(
            "the replica %s %s; public pages are read from the primary for %d s",
            *(self._where, why, PAUSE_SECONDS),
        )


def sqlite_url(path: Path) -> str:
    """Returns the database URL of a SQLite file."""
    return f"sqlite:///{path.absolute()}"


def sqlite_file(url: str) -> Path | None:
    """Returns the file of a SQLite URL; None for any other database. Raises UserError if the URL
    cannot be read."""
    parsed = _parsed(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def shown(url: sa.URL) -> str:
    """Returns a database URL for people: no password, and no query, which may hold one."""
    return url.set(query={}).render_as_string(hide_password=True)


def _parsed(url: str) -> sa.URL:
    try:
        return sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise UserError(
            "the database URL cannot be read", hint="use sqlite:///PATH or postgresql://…"
        ) from error


def open_store(url: str, replica: str = "") -> Store:
    """Opens `sqlite:///…` or `postgresql://…` (with psycopg 3). `replica`: URL of a standby of it,
    if there is one. Raises UserError for any other URL."""
    parsed, standby = _parsed(url), _parsed(replica) if replica else None
    both = {parsed.get_backend_name(), standby.get_backend_name()} if standby else set()
    if both - {"postgresql"}:
        raise UserError(
            "a replica can be read only if it and the database are PostgreSQL servers",
            hint="give --database and --replica as postgresql://…",
        )
    match parsed.get_backend_name():
        case "sqlite":
            return Store(_sqlite(parsed))
        case "postgresql":
            return Store(_postgresql(parsed), _postgresql(standby) if standby else None)
        case other:
            raise UserError(
                f"no store can be kept in {other!r}", hint="use sqlite:///PATH or postgresql://…"
            )


def _postgresql(url: sa.URL) -> Engine:
    url = url.set(drivername="postgresql+psycopg")
    # Without an encoding, SQLAlchemy cannot read the answers of a database in SQL_ASCII.
    arguments = {"connect_timeout": CONNECT_SECONDS, "client_encoding": "utf8"}
    engine = sa.create_engine(url, connect_args=arguments, **_POOL)

    @event.listens_for(engine, "checkin")
    def _note(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _ping(connection: DBAPIConnection, record: ConnectionPoolEntry, _: object) -> None:
        """SQLAlchemy's `pool_pre_ping` asks before every transaction, which costs as much as one of
        its statements."""
        if time.monotonic() - record.info.get("used_at", 0.0) < TRUSTED_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError("the server has closed the connection") from error

    return engine


def _sqlite(url: sa.URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise UserError("a SQLite store needs a file", hint="use sqlite:///PATH")
    make_folder(Path(url.database).parent)
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS}, **_POOL)

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # we issue BEGIN ourselves (SQLAlchemy: pysqlite dialect)
        for pragma in (
            "journal_mode=WAL",  # readers never wait for the writer
            "synchronous=FULL",  # an issued receipt survives a power loss
            f"busy_timeout={BUSY_SECONDS * 1000}",
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


@contextmanager
def _reachable(engine: Engine) -> Iterator[None]:
    """Translates errors: UnavailableError for a missing, locked or full database, FatalError for a
    damaged one."""
    try:
        yield
    except OperationalError as error:
        cause = str(error.orig).strip().splitlines() or ["no answer"]
        where = shown(engine.url)
        said = f"the database {where} cannot be used: {cause[0]}"
        raise UnavailableError(said, public=_PUBLIC) from error
    except DBAPIError as error:
        if type(error) is DatabaseError:  # SQLite: "not a database", "malformed"
            where = shown(engine.url)
            said = f"{where} is damaged ({error.orig}): restore a backup"
            raise FatalError(said, public=_PUBLIC) from error
        if error.connection_invalidated:
            raise UnavailableError("the database closed the connection") from error
        raise


def on_commit(
    connection: Connection, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Calls `call(*args, **kwargs)` once the transaction of `Store.begin` is committed and holds no
    locks; never if it is rolled back. Log what a transaction changed by it: a log can block."""
    connection.get_execution_options()[_ON_COMMIT].append(partial(call, *args, **kwargs))


def lock(connection: Connection, name: str) -> None:
    """Holds the named lock until the transaction ends, so that only one such decision runs at a
    time.

    A transaction takes several locks in this order, so that no two transactions wait for each
    other: "assignments" (before rows of several jobs), "row_marks", rows of jobs, "chain",
    "leases", rows of submissions, of nodes by address, of leases by digest, "measurements". Writing
    a file's verdict also locks its node's `tallies`, by a trigger: lock the node's row first. A
    no-op on SQLite, whose write transactions are already serialized.
    """
    if connection.dialect.name == "postgresql":
        number = zlib.crc32(f"prime/{name}".encode())
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:n)"), {"n": number})
