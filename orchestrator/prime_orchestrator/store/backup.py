"""Backup of a pool: a snapshot of the database, and every object that it may reference.

    backup     database first (one read view), then uploads/, then sha256/
    restore    objects first, then the database in one transaction

An object is stored before the row that names it, and submitted files move from uploads/ to sha256/.
Only store/removal.py deletes objects, which a backup notices. Objects copied later therefore
include all that the snapshot names. The backup is a folder with a SQLite file and a directory
store, independent of the pool's own storage. A damaged object is left out and named: it keeps
nothing else from being saved or restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    UntrustedError,
    UserError,
)
from prime_core.folders import make_folder, sync
from prime_core.ids import Digest
from prime_core.storage.base import ObjectStore, digest_key, named_digest
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.store import archive, meta, schema
from prime_orchestrator.store.engine import Store, open_store, sqlite_url
from prime_orchestrator.store.migrate import current, head

ROWS_AT_ONCE = 1000
_S = schema.submissions.c
NAMED = (
    _S.sha256, _S.verdict, _S.verdict_table, _S.evidence, schema.batches.c.digest,
    schema.roots.c.leaves_object, schema.reward_roots.c.object, schema.slashes.c.evidence,
)  # fmt: skip


@dataclass(frozen=True)
class Copied:
    """What a backup or restore copied; objects that already existed do not count. `absent`: objects
    that its rows and pages name and the copy lacks."""

    rows: int
    objects: int
    absent: tuple[Digest, ...]


@dataclass(frozen=True)
class Checked:
    """What `check` examined, and the objects that are missing or damaged. Of `pages` of the archive
    it did not expect the rollout files that may be removed (`archive.removable`)."""

    rows: int
    objects: int
    absent: tuple[Digest, ...]
    pages: int


def place(store: Store) -> str:
    """Returns the pool that the database belongs to, as `<chain>/<Pools contract>/<pool>`. Raises
    UserError if no `serve` has used it."""
    with store.read() as connection:
        known = current(connection)
        found = meta.get(connection, meta.SERVES) if known else None
    if found is None:
        raise UserError("the database belongs to no pool yet", hint="name another --database")
    if known != head():
        raise UserError(
            f"the database's schema is {known}, not {head()}", hint="orchestrator store migrate"
        )
    return found


def backup(store: Store, objects: ObjectStore, folder: Path) -> Copied:
    """Copies the pool into `folder` while it keeps serving. If the folder holds an earlier backup,
    only missing objects are copied; its database must be moved away first.

    Raises UserError if the folder contains a database, ConflictError if rollout files were removed
    meanwhile.
    """
    make_folder(folder).chmod(0o700)  # the database holds draw secrets
    file = folder / "store.sqlite"
    if file.exists():
        raise UserError(f"{file} is another backup", hint="name a new folder, or move it away")
    draft = folder / "store.sqlite.part"
    draft.unlink(missing_ok=True)
    target, saved = open_store(sqlite_url(draft)), DirectoryStore(folder / "objects")
    try:
        target.migrate()
        with store.read() as source, target.begin() as connection:
            rows = _copy_rows(source, connection)
            marked = archive.files_marked(source)
        copied = _save(objects, saved)
        absent = check(target, saved).absent
    finally:
        target.close()  # the last connection merges the WAL into the one file
    _refuse_removal(store, marked)
    if absent:  # shadow nodes' rows and files are deleted all the time
        with store.read() as source:
            still = dict(_named(source, objects))
        absent = tuple(name for name in absent if name in still)
    draft.rename(file)
    sync(folder)
    return Copied(rows, copied, absent)


def restore(folder: Path, store: Store, objects: ObjectStore) -> Copied:
    """Fills an empty database and an object store from a backup. Objects that are damaged in the
    object store are replaced.

    Raises UserError if the database is not empty.
    """
    source = open_backup(folder)
    try:
        store.migrate()
        with store.read() as connection:
            _refuse_full(connection)
        saved, copied = DirectoryStore(folder / "objects"), 0
        lacking = set(check(source, saved).absent)
        for key in saved.keys(""):
            if _is_whole(objects, key):
                continue
            try:
                objects.put_file(key, saved.root / key)
                copied += 1
            except MalformedError:  # it is damaged in the backup
                if (name := named_digest(key)) is None:
                    raise
                lacking.add(name)
        absent = sorted(one for one in lacking if not _is_whole(objects, digest_key(one)))
        with source.read() as rows, store.begin() as connection:
            _refuse_full(connection)
            return Copied(_copy_rows(rows, connection), copied, tuple(absent))
    finally:
        source.close()


def open_backup(folder: Path) -> Store:
    """Opens the database of a backup. Raises UserError if there is none."""
    file = folder / "store.sqlite"
    if not file.is_file():
        raise UserError(f"{folder} holds no backup", hint="orchestrator store backup FOLDER")
    return open_store(sqlite_url(file))


def check(store: Store, objects: ObjectStore, *, read: bool = False) -> Checked:
    """Checks that every object named by the database exists; with `read`, also checks its SHA-256.

    Raises ConflictError if one is absent and rollout files were removed meanwhile.
    """
    absent: list[Digest] = []
    with store.read() as connection:
        rows = sum(
            connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in _tables()
        )
        named = dict(_named(connection, objects))
        marked = archive.files_marked(connection)
    for name, staged in named.items():
        if not any(_is_there(objects, key, name, read) for key in (digest_key(name), *staged)):
            absent.append(name)
    if absent:
        _refuse_removal(store, marked)
    return Checked(rows, len(named), tuple(sorted(absent)), marked[0])


def _refuse_removal(store: Store, marked: tuple[int, int]) -> None:
    """Raises ConflictError if files were removed since `archive.files_marked` returned `marked`."""
    with store.read() as connection:
        if archive.files_marked(connection) != marked:
            raise ConflictError(
                "rollout files were removed meanwhile: try again once `orchestrator store "
                "prune-files` has ended"
            )


def _is_whole(objects: ObjectStore, key: str) -> bool:
    """Whether the object is there, with the digest that its key names, if it names one."""
    name = named_digest(key)
    return objects.exists(key) if name is None else _is_there(objects, key, name, read=True)


def _is_there(objects: ObjectStore, key: str, name: Digest, read: bool) -> bool:
    try:
        return objects.stat(key).sha256 == name if read else objects.exists(key)
    except NotFoundError:
        return False


def _named(
    connection: Connection, objects: ObjectStore
) -> Iterator[tuple[Digest, tuple[str, ...]]]:
    """Yields every object that a column or an archived file names, and alternative keys where it
    may be stored. Files of a page that is absent or damaged are left out; its own name is not."""
    for column in NAMED:
        found = sa.select(column).where(column.is_not(None)).distinct()
        for (name,) in connection.execute(found):
            yield Digest(name), ()
    for page in archive.pages(connection):
        yield page.digest, ()
        with suppress(NotFoundError, MalformedError, UntrustedError):
            for line in archive.read(objects, page.digest):
                for name in archive.named(line, marked=page.kept_days is not None):
                    yield name, ()
    leases = schema.leases.c
    joined = sa.select(_S.sha256, leases.deadline).join(
        schema.leases, leases.digest == _S.lease_digest
    )
    for name, deadline in connection.execute(joined):
        yield Digest(name), (f"uploads/{deadline}-{name[2:]}",)


def _tables() -> list[sa.Table]:
    """Returns the tables of a backup. Without the leader's lease: a restored one would keep the new
    process waiting for a holder that is gone."""
    return [table for table in schema.metadata.sorted_tables if table is not schema.loop_leases]


def _copy_rows(source: Connection, target: Connection) -> int:
    copied = 0
    for table in _tables():
        if table is schema.tallies:
            target.execute(table.delete())  # triggers made them from the submissions
        wanted = table.select()
        if table is schema.meta:  # who reads a backup must not be able to sign uploads
            wanted = wanted.where(table.c.key != meta.URL_SECRET)
        rows = source.execute(wanted.execution_options(yield_per=ROWS_AT_ONCE))
        for part in rows.mappings().partitions():
            target.execute(table.insert(), [dict(row) for row in part])
            copied += len(part)
        number = table.autoincrement_column
        if number is not None and target.dialect.name == "postgresql":
            target.execute(
                sa.select(
                    sa.func.setval(
                        sa.func.pg_get_serial_sequence(table.name, number.name),
                        sa.func.coalesce(sa.func.max(number), 1),
                        sa.func.max(number).is_not(None),
                    )
                )
            )
    return copied


def _refuse_full(connection: Connection) -> None:
    if any(connection.execute(table.select().limit(1)).first() for table in _tables()):
        raise UserError("the database is not empty", hint="name a new one by --data or --database")


def _save(objects: ObjectStore, target: DirectoryStore) -> int:
    """Copies the objects that `target` lacks and that are not damaged; returns how many."""
    copied = 0
    for prefix in ("uploads/", "sha256/"):
        for key in objects.keys(prefix):
            if target.exists(key):
                continue
            try:
                pieces = objects.chunks(key)
                with target.receive(key, size=objects.size(key)) as sink:
                    for piece in pieces:
                        sink.write(piece)
            except NotFoundError:  # moved to sha256/, which is copied next, or was swept
                continue
            except MalformedError:  # damaged
                continue
            copied += 1
    return copied
