"""A standby of PostgreSQL answers public pages, and the database itself whenever it cannot."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from orchestrator_world import MakeWorld

from prime_core.errors import UserError
from prime_orchestrator.api import status
from prime_orchestrator.store import Store, engine, meta, open_store, sqlite_url

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ci_postgres.sh"
RECOVERY = sa.text("SELECT pg_is_in_recovery()")


def script(*words: str, state: str) -> None:
    subprocess.run(
        [SCRIPT, *words],
        env={**os.environ, "PRIME_POSTGRES_STATE": state},
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def state() -> Iterator[str]:
    """The folder of a server and its standby."""
    if not (shutil.which("initdb") or list(Path("/usr/lib/postgresql").glob("*/bin/initdb"))):
        pytest.skip("needs PostgreSQL's server programs: apt-get install postgresql")
    folder = tempfile.mkdtemp(prefix="prime-replica-")
    place = f"{folder}/s"
    Path(folder).chmod(0o755)
    try:
        script("start", state=place)
        script("standby", state=place)
        yield place
    finally:
        script("stop", state=place)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(state: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with a replica; a failure is forgotten at once."""
    monkeypatch.setattr(engine, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(engine, "PAUSE_SECONDS", 0.0)
    url = f"postgresql://postgres@/postgres?host={state}"
    opened = open_store(url, f"{url}&port=5433")
    opened.migrate()
    yield opened
    opened.close()


def on_standby(state: str, statement: str) -> object:
    opened = open_store(f"postgresql://postgres@/postgres?host={state}&port=5433")
    try:
        with opened.engine.connect() as connection:
            return connection.execute(sa.text(statement)).scalar()
    finally:
        opened.close()


def catch_up(store: Store, state: str) -> None:
    """Waits until the standby has what is committed now."""
    with store.read() as connection:
        place = connection.execute(sa.text("SELECT pg_current_wal_lsn()")).scalar()
    while not on_standby(state, f"SELECT pg_last_wal_replay_lsn() >= '{place}'::pg_lsn"):
        time.sleep(0.05)


def in_recovery(store: Store) -> bool:
    with store.browse() as connection:
        return bool(connection.execute(RECOVERY).scalar())


def test_pages_come_from_the_standby_and_everything_else_from_the_database(
    store: Store, state: str, make_world: MakeWorld
) -> None:
    backend = make_world().backend
    catch_up(store, state)
    seen = str(backend.now())
    on_standby(state, "SELECT pg_wal_replay_pause()")
    try:
        with store.begin() as connection:
            meta.put(connection, meta.CHAIN_SEEN_AT, seen)
            assert not connection.execute(RECOVERY).scalar()
        with store.read() as connection:
            assert meta.get(connection, meta.CHAIN_SEEN_AT) == seen
        with store.browse() as connection:
            assert connection.execute(RECOVERY).scalar()
            assert meta.get(connection, meta.CHAIN_SEEN_AT) is None
        assert not status.status(backend).chain_reachable
    finally:
        on_standby(state, "SELECT pg_wal_replay_resume()")
    catch_up(store, state)
    assert status.status(backend).chain_reachable
    with pytest.raises(sa.exc.InternalError, match="read-only"), store.browse() as connection:
        meta.put(connection, "x", "y")


def test_a_standby_that_is_behind_or_gone_is_not_read(
    store: Store,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, engine.__name__)
    catch_up(store, state)
    assert in_recovery(store)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "REPLICA_SECONDS", -1)
        assert not in_recovery(store)
    assert "behind; public pages are read from the primary for 0 s" in caplog.text
    assert store.replica_read
    assert in_recovery(store)
    script("stop-standby", state=state)
    monkeypatch.setattr(engine, "PAUSE_SECONDS", 3600.0)
    assert not in_recovery(store)
    assert store.replica_read is False
    assert "cannot be used" in caplog.text
    script("standby", state=state)
    assert not in_recovery(store), "it is left alone for an hour"


def test_a_replica_needs_postgresql(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="PostgreSQL servers"):
        open_store(sqlite_url(tmp_path / "s.sqlite"), "postgresql://localhost/p")
