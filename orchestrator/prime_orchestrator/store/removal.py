"""Removes rollout files of the archive once they are old (docs/retention.md, "Rollout files").

    choose    a round of pages of the archive whose files are all old
    mark      `archive_pages.kept_days`: nothing expects their rollout files from here on
    delete    the objects that no row and no line of the archive depends on
    done      `archive_pages.removed`

Pages are marked before and done after anything of them is deleted, all pages of a round at once. A
round that is killed is done again, and until then nothing misses a file.

Whether an object may go is asked in the transaction in which it is deleted, and no submission is
added meanwhile. Its upload is copied to permanent storage afterwards, so the same bytes can come
back. Only a node that hands in an archived file's bytes again, and uploads nothing, can get a
submission without a file; the bytes name another lease, so it would not be paid either way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Digest
from prime_core.storage.base import ObjectStore, digest_key
from prime_orchestrator.store import archive, backup, policies, schema
from prime_orchestrator.store.archive import Page
from prime_orchestrator.store.engine import Store

DAY_SECONDS = 86_400
KEPT_POLICIES = 64
"""Files of the newest policies stay, however old: a trainer that goes on from a checkpoint trains
batches again that they are in."""
PAGES_AT_ONCE = 100
"""Pages of a round. It reads the whole archive once, and holds the names of these pages' files."""
_OBJECTS_AT_ONCE = 250
"""Objects that are deleted in a transaction. Submissions wait for it."""
_DELETERS = 16


@dataclass(frozen=True)
class Removed:
    """What `remove` removed: pages of the archive, their rollout files, the bytes of these.
    `shared`: rollout files of these pages that stay because something else depends on them."""

    pages: int = 0
    files: int = 0
    bytes: int = 0
    shared: int = 0


def remove(
    store: Store,
    objects: ObjectStore,
    now: float,
    days: int,
    *,
    dry_run: bool,
    went: Callable[[int], None] = lambda _files: None,
) -> Removed:
    """Removes the rollout files of archived submissions received more than `days` before `now`
    (Unix seconds), except those of pages with a younger one and those that are not `removable`.

    Calls `went` with the number of files deleted by each transaction. With `dry_run`, only counts.
    Raises NotFoundError, MalformedError or UntrustedError if a page of the archive is missing or
    damaged, UnavailableError if the store does not answer; what was removed before stays removed.
    """
    done, after = Removed(), 0
    while True:
        with store.read() as connection:
            some = _next(connection, now - days * DAY_SECONDS, after)
            newest = policies.latest_version(connection) or 0
            pages = archive.pages(connection)
        if not some:
            return done
        after = some[-1].id
        files: dict[Digest, int] = {}
        chosen: set[int] = set()
        for page in some:
            found = _files(objects, page, newest - KEPT_POLICIES)
            if found is not None:
                chosen.add(page.id)
                files |= found
        if not chosen:
            continue
        count = len(files)
        _leave_out(files, objects, pages, chosen)
        if dry_run:
            with store.read() as connection:
                for part in _parts(files):
                    for name in _named(connection, part):
                        del files[name]
            gone, size = len(files), sum(files.values())
        else:
            with store.begin() as connection:
                archive.mark(connection, chosen, days)
            gone, size = _delete(store, objects, files, pages, chosen, went)
            with store.begin() as connection:
                archive.set_removed(connection, chosen)
        done = Removed(
            pages=done.pages + len(chosen),
            files=done.files + gone,
            bytes=done.bytes + size,
            shared=done.shared + count - gone,
        )


def _next(connection: Connection, before: float, after: int) -> list[Page]:
    """Returns the next pages with an id above `after`, at most PAGES_AT_ONCE, whose files were all
    received before `before` or that a round has marked, and that are not done."""
    found = schema.archive_pages.c
    query = (
        sa.select(schema.archive_pages)
        .where(
            found.id > after,
            found.files > 0,
            found.removed.is_(False),
            sa.or_(found.kept_days.is_not(None), found.last_received < before),
        )
        .order_by(found.id)
        .limit(PAGES_AT_ONCE)
    )
    return [Page(**row) for row in connection.execute(query).mappings()]


def _files(objects: ObjectStore, page: Page, below: int) -> dict[Digest, int] | None:
    """Returns the rollout files of a page that may be removed, and their sizes in bytes; None if a
    file of it was made by policy `below` or a later one."""
    found = {}
    for line in archive.read(objects, page.digest):
        (file,) = json.loads(line)["submissions"]
        if file["policy_version"] >= below:
            return None
        if archive.removable(file):
            found[Digest(file["sha256"])] = int(file["size"])
    return found


def _leave_out(
    files: dict[Digest, int], objects: ObjectStore, pages: Sequence[Page], chosen: Collection[int]
) -> None:
    """Removes from `files` what a line of these pages depends on once the `chosen` are marked."""
    for page in pages:
        marked = page.kept_days is not None or page.id in chosen
        files.pop(page.digest, None)
        for line in archive.read(objects, page.digest) if page.files else ():
            for name in archive.named(line, marked=marked):
                files.pop(name, None)


def _named(connection: Connection, names: Sequence[Digest]) -> set[Digest]:
    """Returns those of these objects that a row names."""
    queries = (sa.select(column).where(column.in_(names)) for column in backup.NAMED)
    return {Digest(name) for name in connection.execute(sa.union(*queries)).scalars()}


def _delete(
    store: Store,
    objects: ObjectStore,
    files: dict[Digest, int],
    pages: Sequence[Page],
    chosen: Collection[int],
    went: Callable[[int], None],
) -> tuple[int, int]:
    """Deletes the objects that nothing depends on; returns their number and total size in bytes.
    `pages` are the archive pages that were already searched for dependents."""
    known = max(page.id for page in pages)
    gone = size = 0
    with ThreadPoolExecutor(_DELETERS) as pool:
        for part in _parts(files):
            mine = {name: files[name] for name in part}
            with store.begin() as connection:
                if not store.is_sqlite:  # which has one writer at a time
                    connection.execute(sa.text("LOCK TABLE submissions IN SHARE MODE"))
                later = [page for page in archive.pages(connection) if page.id > known]
                _leave_out(mine, objects, later, chosen)
                for name in _named(connection, part):
                    mine.pop(name, None)
                list(pool.map(objects.delete, map(digest_key, mine)))
            gone, size = gone + len(mine), size + sum(mine.values())
            went(len(mine))
    return gone, size


def _parts(files: Collection[Digest]) -> list[list[Digest]]:
    names = sorted(files)
    return [
        names[start : start + _OBJECTS_AT_ONCE] for start in range(0, len(names), _OBJECTS_AT_ONCE)
    ]
