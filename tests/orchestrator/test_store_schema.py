"""Migrations and metadata say the same on both databases; what cannot be opened is said plainly."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from prime_core.errors import ConflictError, FatalError, UnavailableError, UserError
from prime_core.ids import Address
from prime_core.transport.problems import to_problem
from prime_orchestrator.store import (
    Store,
    groups,
    intents,
    meta,
    migrate,
    open_store,
    opinions,
    schema,
    sessions,
    sqlite_url,
    submissions,
)

TRIGGERS = {
    "sqlite": {
        "opinions_overrule",
        "submissions_overrule",
        "submissions_tally_enter",
        "submissions_tally_insert",
        "submissions_tally_leave",
    },
    "postgresql": {"opinions_overrule", "submissions_overrule", "submissions_tally"},
}
EMPTIED_BY = {"jobs": "0006", "opinions": "0006", "draw_secrets": "0006"}
"""Tables whose rows a migration deletes, and the migration."""
MOVED_TO = {"sender_intents": "intents"}
DROPPED = {("intents", "lane"), ("class_records", "rows"), ("class_records", "longest")}
"""Columns that a migration drops. A migration that loses anything else fails the test below."""


BOUNDED = {
    "alembic_version", "arrivals", "chain_state", "chain_steps", "chain_undo", "challenges",
    "class_members", "class_records", "class_rows", "class_suspects", "classes", "cursors",
    "draw_commitments", "drift",
    "loop_leases", "measurements", "meta", "nodes", "nonces", "passports", "relays", "revocations",
    "sender_attempts", "sender_meta", "sessions", "tallies", "validators",
}  # fmt: skip
"""Tables that do not grow with files (docs/retention.md). `draw_commitments` has a row for each
validator and hour."""
OFFLINE_FROM = "0029"
"""From here on no migration may touch old rows of other tables (docs/adr/0022)."""


def test_migrations_make_exactly_the_tables_of_the_metadata(empty_database: Store) -> None:
    empty_database.migrate()
    _check_schema(empty_database)


def _check_schema(store: Store) -> None:
    with store.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, schema.metadata) == []
        assert migrate.current(connection) == migrate.head()
        triggers = (
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
            if store.is_sqlite
            else "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal"
        )
        names = connection.execute(sa.text(triggers)).scalars()
        assert set(names) == TRIGGERS[connection.dialect.name]


@pytest.mark.postgres
def test_no_new_migration_takes_longer_with_more_files(empty_postgres: str) -> None:
    """The older ones show that the check finds what was measured to be slow, and no more."""
    store = open_store(empty_postgres)
    seen: list[str] = []

    def note(*event: Any) -> None:
        seen.append(" ".join(event[2].replace('"', "").split()))

    sa.event.listen(store.engine, "before_cursor_execute", note)
    slow = {}
    for revision in migrate.revisions():
        with store.begin() as connection:
            growing = _tables(connection).keys() - BOUNDED
            seen.clear()
            migrate.upgrade(connection, revision)
            slow[revision] = [one for one in seen if _reads_rows(one, growing)]
    store.close()
    found = {revision for revision, statements in slow.items() if statements}
    assert {"0010", "0012", "0013", "0018", "0019", "0020", "0024"} <= found
    assert not found & {"0008", "0026", "0027", "0028"}
    assert not [(one, slow[one]) for one in sorted(found) if one >= OFFLINE_FROM]


def _reads_rows(statement: str, tables: set[str]) -> bool:
    """Whether a statement goes through the rows of one of these tables. Columns with a constant
    default, triggers and constraints that are NOT VALID do not."""
    if statement.startswith(("CREATE TABLE", "CREATE FUNCTION", "CREATE TRIGGER", "DROP ")):
        return False
    if (altered := re.match(r"ALTER TABLE (?:ONLY )?(\w+) (.*)", statement)) is not None:
        added = re.match(r"ADD COLUMN (?!.*\b(?:random|now|nextval|uuid)\w*\()", altered[2])
        harmless = added or re.match(r"(DROP|RENAME)\b|ADD CONSTRAINT .* NOT VALID$", altered[2])
        return altered[1] in tables and harmless is None
    named = re.findall(r"\b(?:FROM|INTO|JOIN|ON|UPDATE|USING) (\w+)", statement)
    return not tables.isdisjoint(named)


@pytest.mark.slow
def test_a_store_of_each_revision_keeps_its_rows(empty_database: Store) -> None:
    """Every table of every revision gets a row with a value in each column. From each revision, one
    transaction then upgrades to the newest; it is rolled back, and the next revision follows."""
    for number, revision in enumerate(migrate.revisions(), 1):
        with empty_database.begin() as connection:
            migrate.upgrade(connection, revision)
            for table in _tables(connection).values():
                if table.name != "tallies":  # triggers fill it
                    row = {column.name: _value(table, column, number) for column in table.c}
                    connection.execute(sa.insert(table), row)
            before = _rows(connection)
        with empty_database.begin() as connection:
            migrate.upgrade(connection)
            _check_kept(revision, before, _rows(connection))
            files = sa.select(sa.func.sum(schema.tallies.c.files))
            assert connection.execute(files).scalar_one() == number
            connection.rollback()
    _check_schema(empty_database)


def _tables(connection: sa.Connection) -> dict[str, sa.TableClause]:
    found = sa.inspect(connection).get_multi_columns()
    return {
        name: sa.table(name, *(sa.column(one["name"], one["type"]) for one in columns))
        for (_, name), columns in found.items()
        if name != "alembic_version"
    }


def _value(table: sa.TableClause, column: sa.ColumnClause[Any], number: int) -> object:
    if (table.name, column.name) == ("passports", "body"):
        return json.dumps({"passport": {"measured_at": number, "claimed_memory_mb": number}})
    match column.type:
        case sa.Boolean():
            return number % 2 == 0
        case sa.Text():
            return f"{column.name} {number}"
        case sa.LargeBinary():
            return f"{column.name} {number}".encode()
        case _:
            return number


def _rows(connection: sa.Connection) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
        for name, table in _tables(connection).items()
    }


def _check_kept(
    revision: str,
    before: dict[str, list[dict[str, Any]]],
    after: dict[str, list[dict[str, Any]]],
) -> None:
    for name, rows in before.items():
        if not rows or revision < EMPTIED_BY.get(name, ""):
            continue
        found = after[MOVED_TO.get(name, name)]
        assert len(rows) == len(found), f"{name} of {revision}"
        lost = rows[0].keys() - found[0].keys()
        assert {(name, column) for column in lost} <= DROPPED, revision
        kept = sorted(rows[0].keys() - lost)
        old, new = (
            sorted(repr([row[key] for key in kept]) for row in side) for side in (rows, found)
        )
        assert old == new, f"{name} of {revision}"


def test_migrating_twice_and_at_once_changes_nothing(empty_database: Store) -> None:
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            empty_database.migrate()
        except BaseException as error:  # reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    with empty_database.begin() as connection:
        meta.put(connection, "kept", "yes")
    empty_database.migrate()
    with empty_database.read() as connection:
        assert meta.get(connection, "kept") == "yes"


def test_a_store_with_history_gets_what_status_shows_of_it(
    empty_database: Store,
) -> None:
    statuses = ("accepted", "rejected", "void", "submitted")
    with empty_database.begin() as connection:
        migrate.upgrade(connection, "0018")
        for at in range(12):
            fields = {"id": f"0x{at}", "at": at, "status": statuses[at % 4], "no": False,
                      "target": (2, 6)[at % 2], "step": at % 3}  # fmt: skip
            for statement in (
                "INSERT INTO leases (digest, node, step, lease_index, policy_version, status,"
                " deadline, created_at, uploads, body, shadow, target) VALUES"
                " (:id, '0x1', 0, :at, 0, 'accepted', 0, 0, 0, '', :no, :target)",
                "INSERT INTO submissions (digest, lease_digest, node, step, policy_version, sha256,"
                " size, body, receipt, received_at, status, reason, units, shadow) VALUES"
                " (:id, :id, '0x1', 0, 0, :id, 1, '', '', 0, :status, 0, 1, :no)",
                "INSERT INTO opinions (submission_digest, validator, reason, body, at) VALUES"
                " (:id, 'a', 0, '', :at), (:id, 'b', 7, '', :at), (:id, 'c', 56, '', :at)",
                "INSERT INTO groups (submission_digest, group_no, policy_version, rows,"
                " informative, reward_micro_sum, accepted_at, batch_step) VALUES"
                " (:id, 0, 0, 2, :no, 0, 0, :step)",
            ):
                connection.execute(sa.text(statement), fields)
        for step in range(3):
            connection.execute(
                sa.text("INSERT INTO batches VALUES (:step, 'd', '', 1, 0, 0, 0)"), {"step": step}
            )
    empty_database.migrate()
    with empty_database.read() as connection:
        assert groups.by_target(connection, 0, 9) == {2: 6, 6: 6}
        assert groups.by_target(connection, 1, 9) == {2: 4, 6: 4}
        found = {row.validator: (row.opinions, row.overruled)
                 for row in opinions.track_records(connection)}  # fmt: skip
        assert found == {"a": (12, 3), "b": (12, 3), "c": (12, 0)}
        assert submissions.counts(connection) == dict.fromkeys(statuses, 3)


def test_a_store_of_the_first_schema_keeps_its_leases_transactions_and_revocations(
    empty_database: Store,
) -> None:
    """Each intent of the old two tables becomes one row: what was signed keeps its transaction;
    what was queued again has its call built again."""
    with empty_database.begin() as connection:
        migrate.upgrade(connection, "0001")
        connection.execute(sa.text("INSERT INTO meta VALUES ('revoked_before/0x1', '77')"))
        old = [  # id, status of the intent, status and transaction of the sender's row
            ("root:done", "confirmed", "confirmed", "0xd"),
            ("root:failed", "failed", "failed", "0xf"),
            ("root:again", "queued", "failed", "0xa"),
            ("root:sent", "sent", "sent", None),
            ("root:just", "queued", "sent", None),
            ("root:new", "queued", None, None),
            ("root:lost", "sent", None, None),
        ]
        for moment, (name, status, sender, tx_hash) in enumerate(old):
            block = None if tx_hash is None else moment
            error = None if status != "failed" else "in words"
            connection.execute(
                sa.text(
                    "INSERT INTO intents VALUES"
                    " (:id, 'lane', 'root', '{}', :status, :error, :tx_hash, :block, :at, :at)"
                ),
                {
                    "id": name, "status": status, "error": error, "tx_hash": tx_hash,
                    "block": block, "at": float(moment),
                },
            )  # fmt: skip
            if sender is None:
                continue
            error = None if sender != "failed" else '{"name": "Spurious", "arguments": {}}'
            connection.execute(
                sa.text(
                    "INSERT INTO sender_intents (id, data, value, description, status, nonce, note,"
                    " error, tx_hash, block, created_at, updated_at) VALUES"
                    " (:id, :data, '0', 'a root', :status, :at, '', :error, :tx_hash, :block, :at,"
                    " :at)"
                ),
                {
                    "id": name, "data": b"call", "status": sender, "error": error,
                    "tx_hash": tx_hash, "block": block, "at": moment,
                },
            )  # fmt: skip
            connection.execute(
                sa.text(
                    "INSERT INTO sender_attempts VALUES (:hash, :id, 1, '1', '1', :raw, 1, 1, 0)"
                ),
                {"hash": f"0x{moment}", "id": name, "raw": b"signed"},
            )
        for index, status in enumerate(("open", "expired", "submitted", "accepted", "void")):
            connection.execute(
                sa.text(
                    "INSERT INTO leases (digest, node, step, lease_index, policy_version, status,"
                    " deadline, created_at, uploads, body, shadow, target) VALUES"
                    " (:id, '0x1', 0, :at, 0, :status, 0, 0, 0, '', :no, 8)"
                ),
                {"id": status, "at": index, "status": status, "no": False},
            )
    empty_database.migrate()
    with empty_database.read() as connection:
        kinds = sa.select(schema.leases.c.status).order_by(schema.leases.c.lease_index)
        assert [*connection.execute(kinds).scalars()] == ["open", "expired"] + 3 * ["submitted"]
        assert sessions.revocation(connection, Address("0x1")) == 77
        rows = [intents.get(connection, name) for name, *_ in old]
        closed = connection.execute(
            sa.select(schema.sender_attempts.c.intent_id).where(
                schema.sender_attempts.c.closed == 1
            )
        ).scalars()
        assert list(closed) == ["root:again"]
    kept = [(row.status, row.tx_hash) for row in rows if row is not None]
    assert kept == [
        ("confirmed", "0xd"), ("failed", "0xf"), ("waiting", None), ("sent", None), ("sent", None),
        ("waiting", None), ("waiting", None),
    ]  # fmt: skip
    assert rows[1] is not None
    assert "Spurious" in (rows[1].error or "")


def test_a_database_of_a_newer_program_is_left_alone(either_store: Store) -> None:
    with either_store.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(FatalError, match="newer version"):
        either_store.migrate()


@pytest.mark.postgres
def test_a_migration_gives_up_where_another_transaction_keeps_a_table(
    empty_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_orchestrator.store.engine.LOCK_SECONDS", 0.05)
    store = open_store(empty_postgres)
    with store.begin() as connection:
        migrate.upgrade(connection, "0027")
    with store.read() as reading:
        reading.execute(sa.text("SELECT * FROM slashes"))
        with pytest.raises(ConflictError, match="not migrated: another program kept a table"):
            store.migrate()
    with store.read() as connection:
        assert migrate.current(connection) == "0027"
    store.migrate()
    _check_schema(store)
    store.close()


@pytest.mark.postgres
def test_an_index_is_made_after_the_commit_and_again_after_a_failure(
    empty_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a new migration declares it. Two processes migrate at once; the first try has failed."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrate.FOLDER, folder)
    made = "CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS things_value ON things (value)"
    (folder / "versions" / "9999_index.py").write_text(
        "from alembic import op\n"
        f"revision, down_revision = '9999', {migrate.head()!r}\n"
        f"AFTER_COMMIT = ({made!r},)\n"
        "def upgrade() -> None:\n"
        "    op.execute('CREATE TABLE things (value integer)')\n"
        "    op.execute('INSERT INTO things VALUES (1), (1)')\n"
    )
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('things_value')"

    def index(store: Store) -> list[bool]:
        with store.read() as connection:
            return list(connection.execute(sa.text(valid)).scalars())

    monkeypatch.setattr(migrate, "FOLDER", folder)
    cached = (migrate.revisions, migrate.after_commit)
    for one in cached:
        one.cache_clear()
    stores = [open_store(empty_postgres) for _ in range(2)]
    try:
        with pytest.raises(sa.exc.IntegrityError):
            stores[0].migrate()
        assert index(stores[0]) == [False]
        with stores[0].begin() as connection:
            connection.execute(sa.text("DELETE FROM things"))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Store.migrate, stores))
        assert index(stores[0]) == [True]
    finally:
        for store in stores:
            store.close()
        for one in cached:
            one.cache_clear()


def test_an_exception_undoes_the_whole_transaction(either_store: Store) -> None:
    def fail() -> None:
        with either_store.begin() as connection:
            meta.put(connection, "half", "written")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with either_store.read() as connection:
        assert meta.get(connection, "half") is None


def test_a_reader_sees_one_snapshot_despite_concurrent_writes(either_store: Store) -> None:
    with either_store.read() as reading:
        assert meta.get(reading, "key") is None
        with either_store.begin() as writing:
            meta.put(writing, "key", "value")
        assert meta.get(reading, "key") is None
    with either_store.read() as reading:
        assert meta.get(reading, "key") == "value"


def test_put_replaces(either_store: Store) -> None:
    with either_store.begin() as connection:
        meta.put(connection, "key", "old")
        meta.put(connection, "key", "new")
        assert meta.get(connection, "key") == "new"


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_names_no_store_is_the_users_error(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert caught.value.hint


def test_a_file_that_is_no_database_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"this is not a database, however long it is" * 100)
    store = open_store(sqlite_url(path))
    with pytest.raises(FatalError, match=r"store\.sqlite is damaged") as caught:
        store.migrate()
    assert str(tmp_path) not in str(to_problem(caught.value))
    store.close()


def test_an_absent_postgresql_is_unavailable_and_its_password_unsaid() -> None:
    store = open_store("postgresql://me:topsecret@127.0.0.1:1/none?connect_timeout=2")
    with pytest.raises(UnavailableError) as caught, store.begin():
        pass
    assert "topsecret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value), "the operator's log says where"
    status, problem = to_problem(caught.value)
    assert (status, "127.0.0.1" in str(problem)) == (503, False), "its clients need not know"


def test_sqlite_keeps_what_it_promised_through_power_loss(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "orchestrator.sqlite"))
    store.migrate()
    with store.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    store.close()


def test_a_reader_never_waits_for_a_writer(store: Store) -> None:
    with store.begin() as writing:
        meta.put(writing, "key", "unseen")
        with store.read() as connection:
            assert meta.get(connection, "key") is None


def test_a_locked_database_is_unavailable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.engine.url.database
    assert path is not None
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    impatient = open_store(sqlite_url(Path(path)))
    with impatient.read() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=50")
    with pytest.raises(UnavailableError, match="locked"), impatient.begin():
        pass
    other.execute("ROLLBACK")
    other.close()
    impatient.close()


def test_a_database_that_holds_no_unicode_is_refused(postgres_url: str) -> None:
    name = f"prime_test_ascii_{os.getpid()}"
    url = urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name}")
        connection.execute(
            f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' "
            "LC_CTYPE 'C'"
        )
        store = open_store(url)
        try:
            with pytest.raises(UserError, match="encoding is SQL_ASCII") as caught:
                store.migrate()
        finally:
            store.close()
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    assert "UTF8" in caught.value.hint
