"""`orchestrator store check`, `backup` and `restore`: one moment of a pool that goes on working."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from orchestrator_world import MakeWorld, World
from typer.testing import CliRunner

from devnet.s3 import BUCKET, S3Server
from prime_core.encoding import sha256
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.storage.base import digest_key
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.cli.main import app
from prime_orchestrator.manager import uploads
from prime_orchestrator.store import (
    Store,
    backup,
    meta,
    open_store,
    opinions,
    schema,
    sqlite_url,
    submissions,
)
from prime_orchestrator.store.leaders import LoopLease
from prime_orchestrator.store.opinions import OpinionRow

PLACE = "31337/0xPools/1"


@pytest.fixture
def store(either_store: Store) -> Store:
    """The pool's database, of each kind."""
    return either_store


@pytest.fixture
def pool(make_world: MakeWorld, store: Store) -> World:
    made = make_world(groups_per_batch=10_000)  # it leases as long as files come in
    made.publish(0)
    assert LoopLease(store, "serving", now=lambda: 0.0).tick()
    with store.begin() as connection:
        meta.put(connection, meta.SERVES, PLACE)
    return made


def opened(folder: Path) -> tuple[Store, DirectoryStore]:
    return open_store(sqlite_url(folder / "new.sqlite")), DirectoryStore(folder / "new-objects")


def table(store: Store, of: sa.Table) -> list[tuple[object, ...]]:
    with store.read() as connection:
        return sorted((tuple(row) for row in connection.execute(of.select())), key=repr)


@pytest.mark.slow
def test_a_backup_taken_under_load_restores_to_a_consistent_pool(
    pool: World, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts that were given before it began are in it, with their files; and no row names an
    object that is not there."""
    sessions = [pool.member(number) for number in range(1, 7)]
    before = [pool.hand_in(sessions[0], secrets.token_bytes(99)) for _ in range(3)]
    stop, handed_in, save = threading.Event(), threading.Semaphore(0), backup._save
    failed: list[Exception] = []

    def load() -> None:
        try:
            while not stop.is_set():
                for session in sessions:
                    pool.hand_in(session, secrets.token_bytes(2000))
                    handed_in.release()
        except Exception as error:
            failed.append(error)

    def several() -> None:
        for _ in range(len(sessions)):
            assert handed_in.acquire(timeout=60), failed

    def save_later(*arguments: Any) -> int:
        """Files come in between the copy of the database and that of the objects."""
        while handed_in.acquire(blocking=False):
            pass
        several()
        return save(*arguments)

    monkeypatch.setattr(backup, "_save", save_later)
    thread = threading.Thread(target=load)
    thread.start()
    several()
    try:
        made = backup.backup(store, pool.backend.objects, tmp_path / "backup")
    finally:
        stop.set()
        thread.join()
    assert not failed
    assert made.rows > 0
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "backup").glob("store.sqlite?*")), "one file"

    new, objects = opened(tmp_path)
    assert backup.restore(tmp_path / "backup", new, objects).rows == made.rows
    found = backup.check(new, objects, read=True)
    assert found.absent == ()
    assert found.objects >= len(before)
    assert backup.place(new) == PLACE
    rows = {row[0] for row in table(new, schema.submissions)}
    assert set(before) <= rows
    later = {row[0] for row in table(store, schema.submissions)}
    assert rows < later, "work went on, and nothing of it came in afterwards"
    assert table(new, schema.nodes) == table(store, schema.nodes)
    assert LoopLease(new, "restored", now=lambda: 0.0).tick(), "it need not wait for the old leader"
    new.close()


def test_a_backup_restores_into_a_database_of_either_kind(
    pool: World, empty_database: Store, tmp_path: Path
) -> None:
    """And rows that are added then get numbers of their own."""
    session = pool.member(1)
    digest, author = pool.hand_in(session), session.account.address
    with pool.backend.store.begin() as connection:
        opinions.add(connection, OpinionRow(digest, author, 0, '{"a":1}', 1.0))
        submissions.change(connection, digest, status="rejected")
        connection.execute(schema.batch_targets.insert().values(step=3, target=2, groups=5))
        assert [one.overruled for one in opinions.of(connection, digest)] == [True]
    root = {"root": "0x1", "leaves_object": sha256(b"leaves"), "count": 1, "created_at": 1.0}
    with pool.backend.store.begin() as connection:
        connection.execute(schema.roots.insert().values(**root))
    pool.backend.objects.put(digest_key(sha256(b"leaves")), b"leaves")
    kept = {one.name: table(pool.backend.store, one) for one in schema.metadata.sorted_tables}
    kept[schema.loop_leases.name] = []
    with pool.backend.store.begin() as connection:
        meta.put_once(connection, meta.URL_SECRET, "who can read a backup must not sign with this")
    backup.backup(pool.backend.store, pool.backend.objects, tmp_path / "backup")
    with empty_database.begin() as connection:  # it is the pool's own database: emptied
        for one in schema.metadata.sorted_tables:
            connection.execute(one.delete())
    objects = DirectoryStore(tmp_path / "new-objects")
    backup.restore(tmp_path / "backup", empty_database, objects)
    assert {one.name: table(empty_database, one) for one in schema.metadata.sorted_tables} == kept
    with empty_database.begin() as connection:
        added = connection.execute(schema.roots.insert().values(**root | {"root": "0x2"}))
        assert added.inserted_primary_key is not None
        assert added.inserted_primary_key[0] == 2
    with pytest.raises(UserError, match="not empty"):
        backup.restore(tmp_path / "backup", empty_database, objects)
    with pytest.raises(UserError, match="another backup"):
        backup.backup(empty_database, objects, tmp_path / "backup")


def test_what_is_absent_or_damaged_is_named(pool: World, tmp_path: Path) -> None:
    session = pool.member(1)
    for data in (b"kept", b"lost", b"damaged"):
        pool.hand_in(session, data)
    store, objects = pool.backend.store, pool.backend.objects
    assert isinstance(objects, DirectoryStore)
    assert backup.check(store, objects, read=True).absent == ()
    objects.delete(digest_key(sha256(b"lost")))
    (objects.root / digest_key(sha256(b"damaged"))).write_bytes(b"damage?")
    assert backup.check(store, objects).absent == (sha256(b"lost"),)
    both = tuple(sorted([sha256(b"lost"), sha256(b"damaged")]))
    assert backup.check(store, objects, read=True).absent == both
    saved = tmp_path / "backup"
    assert backup.backup(store, objects, saved).absent == both, "all else is saved"

    (objects.root / digest_key(sha256(b"kept"))).write_bytes(b"damaged since")
    new, _ = opened(tmp_path)
    made = backup.restore(saved, new, objects)
    assert (made.objects, made.absent) == (1, both)
    assert objects.get(digest_key(sha256(b"kept")), 10) == b"kept", "it is put back"
    new.close()

    (saved / "objects" / digest_key(sha256(b"kept"))).write_bytes(b"damaged there")
    new, elsewhere = open_store(sqlite_url(tmp_path / "newer.sqlite")), DirectoryStore(tmp_path)
    made = backup.restore(saved, new, elsewhere)
    assert made.absent == tuple(sorted([*both, sha256(b"kept")]))
    assert table(new, schema.submissions) == table(store, schema.submissions)
    new.close()


def test_a_file_that_was_handed_in_and_not_moved_yet_is_saved(
    pool: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = pool.member(1)
    with monkeypatch.context() as patched:
        patched.setattr(uploads, "keep", lambda *_: None)
        pool.hand_in(session, b"still among the uploads")
    name = sha256(b"still among the uploads")
    assert not pool.backend.objects.exists(digest_key(name))
    assert backup.check(pool.backend.store, pool.backend.objects, read=True).absent == ()
    backup.backup(pool.backend.store, pool.backend.objects, tmp_path / "backup")
    new, objects = opened(tmp_path)
    backup.restore(tmp_path / "backup", new, objects)
    assert backup.check(new, objects, read=True).absent == ()
    new.close()


def orchestrator(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["store", *words])
    if isinstance(done.exception, UserError):
        assert code == UserError.exit_code
        return str(done.exception)
    assert done.exit_code == code, done.exception
    return done.output


@pytest.mark.slow
def test_the_commands_move_a_pool_from_a_folder_to_s3(tmp_path: Path, s3: S3Server) -> None:
    data, saved, moved = tmp_path / "data", tmp_path / "saved", tmp_path / "moved"
    store = open_store(sqlite_url(data / "orchestrator.sqlite"))
    store.migrate()
    place = f"31337/{secrets.token_hex(8)}/1"
    name = Digest(sha256(b"leaves"))
    root = {"root": "0x1", "leaves_object": name, "count": 1, "created_at": 1.0}
    assert "no pool yet" in orchestrator("check", "--data", str(data), code=64)
    with store.begin() as connection:
        meta.put(connection, meta.SERVES, place)
        connection.execute(schema.roots.insert().values(**root))
    store.close()
    said = orchestrator("check", "--data", str(data), code=1)
    assert f"absent or damaged: {name}" in said
    DirectoryStore(data / "objects").put(digest_key(name), b"leaves")
    assert "1 objects, 0 absent" in orchestrator("check", "--data", str(data), "--read")
    unmounted = ("--data", str(data), "--objects", str(tmp_path / "unmounted"))
    said = orchestrator("backup", str(tmp_path / "without"), *unmounted, code=1)
    assert f"absent or damaged: {name}" in said
    assert "1 new objects" in orchestrator("backup", str(saved), "--data", str(data))
    for words in (["check"], ["backup", str(saved)], ["prune"], ["export", str(saved)]):
        said = orchestrator(*words, "--data", str(tmp_path / "mistyped"), code=64)
        assert said == f"there is no pool in {tmp_path / 'mistyped' / 'orchestrator.sqlite'}"
    assert not (tmp_path / "mistyped").exists()
    bucket = ("--s3-bucket", BUCKET, "--s3-endpoint", s3.url)
    said = orchestrator("restore", str(saved), "--data", str(moved), *bucket)
    assert said.startswith(f"pool {place}: 2 rows and 1 objects restored")
    said = orchestrator("check", "--data", str(moved), "--read", *bucket)
    assert said.startswith(f"pool {place}: 2 rows, 1 objects, 0 absent")
    assert "no backup" in orchestrator("restore", str(data), "--data", str(moved), code=64)
