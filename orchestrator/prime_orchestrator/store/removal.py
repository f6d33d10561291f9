"""Removes rollout files of the archive once they are old (docs/retention.md, "Rollout files").

    choose    up to PAGES_AT_ONCE pages of the archive whose files are all old
    search    the whole archive, once, for lines that depend on one of these pages' files
    mark      `archive_pages.kept_days`: nothing expects their rollout files from here on
    delete    one page after another, the objects that no row and no line depends on
    done      `archive_pages.removed` of that page

All chosen pages are marked before any file of them is deleted. A page is done once its files are
deleted. If the command is killed, the next one finishes the marked pages; nothing expects their
files meanwhile.

The search keeps what the lines depend on only if it is, or seems to be, one of the chosen pages'
files (`_Filter`), so its memory does not grow with the rest of the archive.

Whether an object may be deleted is checked in the transaction that deletes it, during which no
submission is added. A later submission of the same bytes has its own upload, which is copied to
permanent storage again. Only a node that submits an archived file's bytes again without an upload
gets a submission without a file; the bytes name another lease, so it would not be paid anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
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
PAGES_AT_ONCE = 50_000
"""Pages that are chosen together: the filter of their files takes 100 MB."""
_FILTER_BYTES = 2
"""Bytes of the filter for each file."""
_OBJECTS_AT_ONCE = 250
"""Objects that are deleted in a transaction. Submissions wait for it."""
_DELETERS = 16
_ADDED = (
    (schema.batches.c.step, schema.batches.c.digest),
    (schema.roots.c.id, schema.roots.c.leaves_object),
)
"""Keys and names of rows that the manager adds, in the order of their keys. Each is read once, as
there are ever more of them."""
_CHANGED = tuple(name for name in backup.NAMED if name.table not in (schema.batches, schema.roots))


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
            due = _next(connection, now - days * DAY_SECONDS, after)
            newest = policies.latest_version(connection) or 0
            pages = archive.pages(connection)
        if not due:
            return done
        after = due[-1].id
        filtered = _Filter(sum(page.files for page in due))
        chosen: dict[int, Page] = {}
        for page in due:
            files, policy = _files(objects, page)
            if policy < newest - KEPT_POLICIES:
                chosen[page.id] = page
                for name in files:
                    filtered.add(name)
        if not chosen:
            continue
        search = _Search(objects, chosen, filtered)
        search.read(pages)
        with store.read() as connection:
            search.read_added(connection)
        if not dry_run:
            with store.begin() as connection:
                archive.mark(connection, list(chosen), days)
        for page in chosen.values():
            files, _ = _files(objects, page)
            gone: list[Digest] = []
            for part in _parts(files):
                if dry_run:
                    with store.read() as connection:
                        gone += search.free(connection, part)
                else:
                    deleted = _delete(store, objects, search, part)
                    gone += deleted
                    went(len(deleted))
            if not dry_run:
                with store.begin() as connection:
                    archive.set_removed(connection, page.id)
            done = Removed(
                pages=done.pages + 1,
                files=done.files + len(gone),
                bytes=done.bytes + sum(files[name] for name in gone),
                shared=done.shared + len(files) - len(gone),
            )


def _next(connection: Connection, before: float, after: int) -> list[Page]:
    """Returns the next pages with an id above `after`, at most PAGES_AT_ONCE, whose files were all
    received before `before` or that are marked, and that are not done."""
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


def _files(objects: ObjectStore, page: Page) -> tuple[dict[Digest, int], int]:
    """Returns the rollout files of a page that may be removed, with their sizes in bytes, and the
    newest policy that made a file of the page."""
    found, policy = {}, 0
    for line in archive.read(objects, page.digest):
        (file,) = json.loads(line)["submissions"]
        policy = max(policy, file["policy_version"])
        if archive.removable(file):
            found[Digest(file["sha256"])] = int(file["size"])
    return found, policy


class _Filter:
    """A Bloom filter of `names` names: all that were added are in it, and one of 400 others."""

    def __init__(self, names: int) -> None:
        self._bits = bytearray(_FILTER_BYTES * names)

    def add(self, name: Digest) -> None:
        for place in self._places(name):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, name: Digest) -> bool:
        return all(self._bits[place >> 3] >> (place & 7) & 1 for place in self._places(name))

    def _places(self, name: Digest) -> list[int]:
        digits, bits = name[2:], 8 * len(self._bits)
        return [int(digits[start : start + 16], 16) % bits for start in range(0, 64, 16)]


class _Search:
    """The search for what lines of the archive and rows of `_ADDED` depend on once the pages
    `chosen` are marked. `names`: what was found, as far as it is in the filter."""

    def __init__(self, objects: ObjectStore, chosen: Collection[int], filtered: _Filter) -> None:
        self._objects, self._chosen, self._filter = objects, chosen, filtered
        self._last = 0
        self._last_added = [-1] * len(_ADDED)
        self.names: set[Digest] = set()

    def read(self, pages: Sequence[Page]) -> None:
        """Searches these pages, oldest first."""
        for page in pages:
            marked = page.kept_days is not None or page.id in self._chosen
            found = {page.digest}
            for line in archive.read(self._objects, page.digest) if page.files else ():
                found |= archive.named(line, marked=marked)
            self._note(found)
            self._last = page.id

    def read_added(self, connection: Connection) -> None:
        """Searches the rows of `_ADDED` that were not searched yet."""
        for at, (key, name) in enumerate(_ADDED):
            query = sa.select(key, name).where(key > self._last_added[at]).order_by(key)
            for part in connection.execute(query.execution_options(yield_per=1000)).partitions():
                self._note(Digest(found) for _, found in part)
                self._last_added[at] = part[-1][0]

    def _note(self, found: Iterable[Digest]) -> None:
        self.names |= {name for name in found if name in self._filter}

    def free(self, connection: Connection, names: Collection[Digest]) -> list[Digest]:
        """Returns the given files that no row and no archived line depends on, also none that was
        written since the search."""
        self.read(archive.pages(connection, after=self._last))
        self.read_added(connection)
        free = {*names} - self.names
        queries = (sa.select(column).where(column.in_(free)) for column in _CHANGED)
        free -= {Digest(name) for name in connection.execute(sa.union(*queries)).scalars()}
        return sorted(free)


def _delete(
    store: Store, objects: ObjectStore, search: _Search, names: Sequence[Digest]
) -> list[Digest]:
    """Deletes the given objects that nothing depends on; returns them."""
    with store.begin() as connection, ThreadPoolExecutor(_DELETERS) as pool:
        if not store.is_sqlite:  # which has one writer at a time
            connection.execute(sa.text("LOCK TABLE submissions IN SHARE MODE"))
        free = search.free(connection, names)
        list(pool.map(objects.delete, map(digest_key, free)))
    return free


def _parts(files: Collection[Digest]) -> list[list[Digest]]:
    names = sorted(files)
    return [
        names[start : start + _OBJECTS_AT_ONCE] for start in range(0, len(names), _OBJECTS_AT_ONCE)
    ]
