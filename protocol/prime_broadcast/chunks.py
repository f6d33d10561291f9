"""Downloads chunks with known digests from several sources into preallocated files.

A worker takes the next chunk and the best free source. It hashes and writes the chunk once, at its
final offset, as it arrives (landing.py), and reports it only if the digest matches. Failures:

- wrong digest: the source is banned and named, and the chunk is fetched from another source;
- a dead, slow or refusing source is paused, longer each time; the others continue;
- when the queue is empty, late chunks in flight are also requested from one more source at a time,
  and from every unproven source at once if nothing of them arrives;
- an untried source gets one chunk as a trial, which proven sources fetch too, so it delays nothing;
- while every worker waits for an answer, more workers start and ask other sources;
- a server without range support is read from the beginning; every missing chunk is kept.

The folder holds verified chunks, prefixes of chunks, and holes. A killed fetch resumes by reading
the files; there is no journal. Only the last few pages of each chunk in flight are fetched again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from prime_broadcast.files import create_sized
from prime_broadcast.landing import PIECE, Landing, beginning, verified_chunks
from prime_broadcast.layout import Item
from prime_broadcast.sources import Fault, Source, SourceBook
from prime_broadcast.tasks import (
    HEDGE_AFTER,
    SILENT_AFTER,
    TOO_SLOW,
    Asked,
    ChunkStats,
    ChunkTask,
    Counting,
    all_silent,
    missing_chunks_error,
)
from prime_broadcast.transfer import Link, SupersededError, TransferError, WholeOnlyError
from prime_core.errors import UnavailableError
from prime_core.ids import to_bytes

PATIENCE = 60.0
"""A fetch gives up after this many seconds without a verified chunk."""
STALLED = 0.5
"""After this many seconds without a verified chunk, more workers ask other sources."""
STARVING = 1.25
"""After this many seconds in which nothing arrives, sources of the last resort are preferred."""
MOST_WORKERS = 16
RESERVE = 2
"""Extra workers that start only when all others wait and nothing arrives."""
JOIN_SECONDS = 1.0
"""Total time that a finished fetch waits for its threads to end."""
PER_SOURCE = 2
"""Connections per source: while one chunk is hashed and written, the next one is received."""


@dataclass(frozen=True)
class Pace:
    """How hard a fetch tries: connections in all and per source, and the seconds without a verified
    chunk after which it gives up. Sources of the roles `last_resorts` are used only when no other
    source is left, in the order of the roles. `own` are URLs of the pool's own accounts. While one
    of them is a mirror that may be asked (the trainer's bucket), origins are last resorts too."""

    parallel: int = 4
    per_source: int = PER_SOURCE
    patience: float = PATIENCE
    last_resorts: tuple[str, ...] = ("origin",)
    own: Collection[str] = ()


@dataclass(frozen=True)
class Hooks:
    """What a fetch calls. It ends when `stop()` returns true. `on_chunk(item, index)` is called
    from worker threads for each chunk that is verified and on disk, including those already
    present; `progress(done, total)`, in bytes, after each."""

    stop: Callable[[], bool] = lambda: False
    on_chunk: Callable[[Item, int], None] = lambda item, index: None
    progress: Callable[[int, int], None] = lambda done, total: None


class ChunkFetcher:
    """Fetches every chunk of `items` from `urls` into the files `folder/<item name>`. When `run`
    returns, each file matches its manifest entry."""

    def __init__(
        self,
        items: Sequence[Item],
        folder: Path,
        urls: Sequence[str],
        book: SourceBook,
        pace: Pace,
        hooks: Hooks = Hooks(),
    ) -> None:
        self._items = items
        self._folder = folder
        self._book = book
        self._urls = book.urls(urls)
        self._workers = max(1, min(pace.parallel, len(self._urls) * pace.per_source))
        self._pace = pace
        self._hooks = hooks
        self._change = threading.Condition()
        self._over = threading.Event()
        self._queue: deque[ChunkTask] = deque()
        self._open: set[ChunkTask] = set()
        self._missing: dict[tuple[str, int], ChunkTask] = {}
        self._error: BaseException | None = None
        self._links: list[Link] = []
        self._total = sum(item.size for item in items)
        self._done, self._usual = 0, 0.0
        self._begun = self._last_success = time.monotonic()
        self.stats = ChunkStats()

    def run(self) -> ChunkStats:
        """Returns the statistics once every chunk is on disk. Raises UnavailableError, with each
        source's last failure, if no chunk is verified for the pace's patience, if all sources are
        banned, or if the disk fails."""
        self._look_around()
        if not self._open:
            return self.stats
        if not self._urls:
            raise UnavailableError("no relay or origin is known to fetch the policy from")
        threads = [threading.Thread(target=self._try_newcomers, name="fetch-trial", daemon=True)]
        threads += [self._worker(number) for number in range(self._workers)]
        for thread in threads:
            thread.start()
        most = max(self._workers, min(MOST_WORKERS, len(self._urls) * self._pace.per_source))
        try:
            while not self._over.wait(0.1):  # only the last chunk wakes this thread
                if self._hooks.stop():
                    raise UnavailableError("the fetch was stopped; it can be resumed")
                if self.idle_seconds > STALLED:
                    with self._change:
                        starving = self._starving()
                    for number in range(len(threads) - 1, most + RESERVE * starving):
                        threads.append(self._worker(number))
                        threads[-1].start()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for link in list(self._links):
                link.abort()
            until = time.monotonic() + JOIN_SECONDS
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            with self._change:
                for task in self._open:  # a thread still waiting for an answer must not write
                    task.claim.take()
        if self._error is not None:
            raise self._error
        return self.stats

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last verified chunk (or the start)."""
        return time.monotonic() - self._last_success

    def _look_around(self) -> None:
        """Creates the files, keeps the chunks that verify, and queues the rest in order."""
        for item in self._items:
            path = self._folder / item.name
            fresh = not path.exists()
            os.close(create_sized(path, item.size))
            have = set(() if fresh else verified_chunks(path, item))
            for index in range(len(item.chunks)):
                if index in have:
                    self.stats.kept += 1
                    self._done += item.span(index)[1]
                    self._hooks.on_chunk(item, index)
                else:
                    left = 0 if fresh else beginning(path, *item.span(index))
                    task = ChunkTask(item, index, left)
                    self._missing[item.name, index] = task
                    self._queue.append(task)
                    self._open.add(task)
        self._hooks.progress(self._done, self._total)

    # The workers

    def _worker(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, name=f"fetch-{number}", daemon=True)

    def _link(self, source: Source) -> Link:
        signed = partial(self._book.authorization, source.url)
        return Link(source.url, signed, public_only=self._book.public_only)

    def _try_newcomers(self) -> None:
        """Requests one chunk from each untried source, outside the fetch. The chunk is checked and
        discarded, so the fetch never waits for an untried source."""
        tried: set[str] = set()
        while not self._over.wait(0.1):
            left = [url for url in self._urls if url not in tried]
            with self._change:
                task = next(iter(self._open), None)
            source = self._book.newcomer(left, self._last_resorts) if task else None
            if task is None or source is None:
                continue
            tried.add(source.url)
            link = self._link(source)
            with self._change:
                self._links.append(link)
            offset, length = task.item.span(task.index)
            buffer, begun = memoryview(bytearray(length)), time.monotonic()
            try:
                source.role = link.role()
                if self._book.spares(source, self._urls, self._last_resorts):
                    self._book.release(source)
                    continue
                link.read_range(
                    task.item.address,
                    offset,
                    task.item.size,
                    buffer,
                    cancelled=self._over.is_set,
                )
            except (SupersededError, WholeOnlyError) as error:
                source.whole_only |= isinstance(error, WholeOnlyError)
                self._book.release(source)
            except TransferError as error:
                if self._over.is_set():
                    self._book.release(source)
                else:
                    self._book.bad(source, str(error), pause=error.pause)
            else:
                if blake3(buffer).digest() == to_bytes(task.item.chunks[task.index]):
                    self._book.good(source, length, time.monotonic() - begun)
                else:
                    reason = f"it sent a wrong chunk {task.index} of {task.item.address}"
                    self._book.sent_bad_data(source, reason)
                    with self._change:
                        self.stats.faults.append(Fault(source.url, "bad_data", reason))
            finally:
                link.close()

    def _work(self) -> None:
        links: dict[str, Link] = {}
        largest = max(min(item.chunk_size, item.size) for item in self._items)
        buffer = memoryview(bytearray(min(PIECE, largest)))
        choice: tuple[ChunkTask, Source] | None = None
        try:
            while True:
                choice = self._next()
                if choice is None:
                    return
                task, source = choice
                link = links.get(source.url)
                if link is None:
                    link = links[source.url] = self._link(source)
                    with self._change:
                        self._links.append(link)
                self._attempt(task, source, link, buffer)
        except BaseException as error:  # handed to run(), which raises it
            if choice is not None and choice[1].url in choice[0].running:
                self._book.release(choice[1])  # a local failure, not the source's
            self._fail(error)
        finally:
            for link in links.values():
                link.close()

    def _next(self) -> tuple[ChunkTask, Source] | None:
        """Returns the next chunk and its source; None when no work is left."""
        with self._change:
            while True:
                if not self._open or self._error is not None:
                    return None
                choice = self._choose()
                if choice is not None:
                    task, source = choice
                    task.running[source.url] = Asked(time.monotonic())
                    return choice
                if self._hopeless():
                    self._error = missing_chunks_error(self._open, self._urls, self._book)
                    self._over.set()
                    self._change.notify_all()
                    return None
                self._change.wait(0.05)

    def _choose(self) -> tuple[ChunkTask, Source] | None:
        for position, task in enumerate(self._queue):
            source = self._pick(task)
            if source is not None:
                del self._queue[position]
                return task, source
            if not task.excluded:
                return None
        if self._queue:
            return None
        return self._hedge()

    def _pick(self, task: ChunkTask, *, unproven: bool = False) -> Source | None:
        return self._book.pick(
            self._urls,
            task.excluded,
            self._pace.per_source,
            asked=task.running,
            unproven=unproven,
            length=task.item.span(task.index)[1],
            last_resorts=self._last_resorts,
            starving=self._starving(),
        )

    @property
    def _last_resorts(self) -> tuple[str, ...]:
        pace = self._pace
        mirrored = bool(pace.own) and self._book.may_mirror(pace.own)
        return ("origin", *pace.last_resorts) if mirrored else pace.last_resorts

    def _starving(self) -> bool:
        """Whether nothing arrives."""
        asked = (asked for task in self._open for asked in task.running.values())
        return self.idle_seconds > STARVING and all_silent(asked, time.monotonic())

    def _hedge(self) -> tuple[ChunkTask, Source] | None:
        """Returns a chunk in flight that is late, and one more source to ask for it."""
        now, limit = time.monotonic(), max(HEDGE_AFTER, 3 * self._usual)
        for task in self._open:
            if not task.running:
                continue
            newest = max(asked.since for asked in task.running.values())
            silent = all_silent(task.running.values(), now)
            due = now - newest > (SILENT_AFTER if silent else limit)
            source = self._pick(task, unproven=not due) if due or silent else None
            if source is not None:
                return task, source
        return None

    def _hopeless(self) -> bool:
        """Whether nothing is in flight and no source can be asked in time."""
        if any(task.running for task in self._open):
            return False
        if time.monotonic() - self._last_success > self._pace.patience:
            return True
        chances = [self._book.next_chance(self._urls, t.excluded) for t in self._open]
        return all(chance is None for chance in chances)

    # One chunk

    def _attempt(self, task: ChunkTask, source: Source, link: Link, buffer: memoryview) -> None:
        offset, length = task.item.span(task.index)
        asked = task.running[source.url]
        begun = asked.since
        # Otherwise the earlier fetch keeps writing until the chunk is verified.
        alone = len(task.running) == 1
        have = task.beginning if alone else 0
        try:
            if source.role == "unknown":
                source.role = link.role()
                if source.role in self._last_resorts:
                    self._put_back(task, source)
                    self._book.release(source)
                    return
            if source.whole_only:
                raise WholeOnlyError
            with task.landing(self._folder, buffer, have, early=alone) as landing:
                link.read_span(
                    task.item.address,
                    (offset + have, offset + length),
                    task.item.size,
                    Counting(landing, asked),
                    cancelled=lambda: self._unneeded(task, source, begun),
                )
                if landing.digest() == to_bytes(task.item.chunks[task.index]):
                    self._book.good(source, length - have, time.monotonic() - begun)
                    self._store(task, source, landing, length - have, time.monotonic() - begun)
                else:
                    self._note_bad_data(task, source, have)
        except WholeOnlyError:
            source.whole_only = True
            if source.in_use == 1:
                self._stream(task, source, link, asked)
            else:  # a server without ranges sends the whole file over one connection
                self._put_back(task, source)
                self._book.release(source)
        except TransferError as error:
            self._note_failure(task, source, asked, error)

    def _stream(self, task: ChunkTask, source: Source, link: Link, asked: Asked) -> None:
        """Reads the whole file that contains the chunk `task` and keeps every chunk that is still
        missing."""
        item, begun, index = task.item, time.monotonic(), 0
        buffer = memoryview(bytearray(min(item.chunk_size, item.size)))
        try:
            with link.reading(item.address, item.size) as fill:
                for index, digest in enumerate(item.chunks):
                    length = item.span(index)[1]
                    view = buffer[:length]
                    since = time.monotonic()
                    fill(view, lambda: self._error is not None)
                    asked.received += length
                    if blake3(view).digest() != to_bytes(digest):
                        self._note_bad_data(self._missing.get((item.name, index), task), source)
                        self._put_back(task, source)
                        return
                    found = self._missing.get((item.name, index))
                    if found is not None and not found.claimed:
                        with self._change, contextlib.suppress(ValueError):
                            self._queue.remove(found)
                        with found.landing(self._folder, view, 0, early=False) as landing:
                            self._store(found, source, landing, length, time.monotonic() - since)
                    if not any(one.item is item for one in self._open):
                        break
        except TransferError as error:
            self._note_failure(task, source, asked, error)
            return
        except BaseException:
            task.running.setdefault(source.url, asked)  # still in use: `_work` releases it
            raise
        self._put_back(task, source)
        self._book.good(
            source, min(item.size, (index + 1) * item.chunk_size), time.monotonic() - begun
        )

    def _unneeded(self, task: ChunkTask, source: Source, begun: float) -> bool:
        """Returns true once another source delivered the chunk. Raises TransferError if the source
        is much slower than usual while others deliver."""
        spent, usual = time.monotonic() - begun, self._usual
        if usual and spent > max(TOO_SLOW, 10 * usual) and len(self._urls) > 1:
            raise TransferError(f"it is slow: {spent:.1f} s where {usual:.1f} s are usual", 10.0)
        return task.done or self._error is not None

    def _store(
        self, task: ChunkTask, source: Source, landing: Landing, received: int, seconds: float
    ) -> None:
        """Records a verified chunk and writes the rest of it, unless another fetch was first."""
        with self._change:
            task.running.pop(source.url, None)
            self.stats.bytes_received += received
            got = self.stats.by_source.get(source.url, 0)
            self.stats.by_source[source.url] = got + received
            self._usual = seconds if not self._usual else 0.7 * self._usual + 0.3 * seconds
            if self._error is not None or not task.claim.take():
                self.stats.refetched += 1
                return
        landing.finish()
        self._hooks.on_chunk(task.item, task.index)
        with self._change:
            now = time.monotonic()
            task.done = True
            self._open.discard(task)
            self._done += task.item.span(task.index)[1]
            self._last_success = now
            self.stats.bytes_written += received
            self.stats.chunks += 1
            if self.stats.first_chunk_seconds is None:
                self.stats.first_chunk_seconds = now - self._begun
            if not self._open:
                self._over.set()
            self._change.notify_all()
            done = self._done
        self._hooks.progress(done, self._total)

    def _note_failure(
        self, task: ChunkTask, source: Source, asked: Asked, error: TransferError
    ) -> None:
        now = time.monotonic()
        silent = asked.silent(now)
        if task.done or self._error is not None:
            self._put_back(task, source)
            if task.done and silent:
                spent = now - asked.since
                reason = f"it sent {asked.received} bytes in {spent:.1f} s, others were faster"
                self._book.bad(source, reason, silent=True)
            else:
                self._book.release(source)
            return
        # A mirror has no upstream to wait for.
        if error.gone or (error.missing and source.role == "mirror"):
            self._exclude(task.item, source)
            self._put_back(task, source)
            self._book.release(source)
            return
        if error.waiting and error.pause is not None:
            self._book.wait(source, error.pause)
        else:
            self._book.bad(source, str(error), pause=error.pause, silent=silent)
            self.stats.faults.append(Fault(source.url, "failed", str(error)))
        self._put_back(task, source)

    def _exclude(self, item: Item, source: Source) -> None:
        """Stops asking the source for this item. This is not a fault of the source."""
        with self._change:
            for task in self._open:
                if task.item is item:
                    task.excluded.add(source.url)
                    task.gone = True

    def _note_bad_data(self, task: ChunkTask, source: Source, had: int = 0) -> None:
        reason = f"it sent a wrong chunk {task.index} of {task.item.address}"
        with self._change:
            self.stats.refetched += 1
            task.beginning = 0
            if not had:
                self.stats.faults.append(Fault(source.url, "bad_data", reason))
                task.excluded.add(source.url)
        if had:  # the beginning left by an earlier fetch was wrong: no source is at fault
            self._book.release(source)
        else:
            self._book.sent_bad_data(source, reason)
        self._put_back(task, source)

    def _put_back(self, task: ChunkTask, source: Source) -> None:
        with self._change:
            task.running.pop(source.url, None)
            if not task.claimed and not task.running and task not in self._queue:
                self._queue.appendleft(task)
            self._change.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._change:
            if self._error is None:
                self._error = error
            self._over.set()
            self._change.notify_all()
