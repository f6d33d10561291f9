"""Moves the rows of finished files from the tables to the archive (store/archive.py).

A round begins when the reward root of a further epoch has been claimable for one epoch: no arbiter
can disable it any more. It goes through the files of that epoch and earlier ones, oldest first, a
page in a tick, then through the leases that ended without a file. Files that do not fill a page
wait for the next round, and so do those that `archive.over` leaves out, the newest KEPT_OF_NODE of
each node, those that the newest settlement holds, and those that are not yet in permanent storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prime_core.ids import Address, Digest
from prime_core.storage.base import ObjectStore, digest_key, put_object
from prime_orchestrator import scheduler
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.revisions import current
from prime_orchestrator.manager.settlement import CHAIN_LOCK, chain_clock, load
from prime_orchestrator.store import (
    Connection,
    archive,
    batches,
    leases,
    lock,
    opinions,
    rewards,
)
from prime_orchestrator.store.archive import FILES, Bounds, Candidate, Newest
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)

ARCHIVE_SECONDS = 10.0
KEPT = opinions.RECENT
"""Newest submissions, leases, opinions and groups of the pool that stay in the tables: status and
metrics show them, and the scheduler counts them."""
KEPT_OF_NODE = 64
"""Newest paid files, judged files and leases of each node that stay: its speed and its standing are
taken from them, and the notices of its files that ended badly. More than a node's open leases
(`MOST_SLOTS`) and its newest two together."""
KEPT_SECONDS = 86_400.0
KEPT_TURNS = 8
"""Leases younger than this many seconds and lease durations stay, because the scheduler counts
recent ones and issues the groups of expired ones again."""
_READERS = 8


@dataclass
class Round:
    """Where the round stands: `after` (received at, digest) in the files of epochs up to `epoch`,
    once these are done `after_lease` (deadline, digest) in the leases. `held`: files that the
    newest settlement holds."""

    epoch: int = -1
    after: tuple[float, str] = (-1.0, "")
    after_lease: tuple[int, str] = (-1, "")
    held: frozenset[Digest] = frozenset()
    files_over: bool = True
    over: bool = True
    nodes: dict[Address, Newest] = field(default_factory=dict)


@dataclass
class Archiver:
    """Archives the pool's files. `page_files`, `kept`, `kept_of_node`: see FILES, KEPT and
    KEPT_OF_NODE; without `kept`, it is KEPT or the scheduler's window if that is larger."""

    store: Store
    objects: ObjectStore
    context: PoolContext
    now: Callable[[], float]
    page_files: int = FILES
    kept: int | None = None
    kept_of_node: int = KEPT_OF_NODE
    round: Round = field(default_factory=Round)

    def tick(self) -> int:
        """Archives one page; returns the number of its files or leases, 0 if there is nothing to
        do. Raises UnavailableError if objects cannot be read or written; the next tick goes on."""
        with self.store.read() as connection:
            epoch = self._settled(connection)
            if epoch > self.round.epoch:
                held = self._held(connection, epoch)
                self.round = Round(epoch, held=held, files_over=False, over=False)
            if self.round.over:
                return 0
            bounds = self._bounds(connection)
        if not self.round.files_over:
            chosen = self._choose(bounds)
            if len(chosen) == self.page_files:
                return self._archive_files(chosen, bounds)
            self.round.files_over = True
        ended = self._ended_leases(bounds)
        if len(ended) == self.page_files:
            return self._archive_leases(ended, bounds)
        self.round.over = True
        return 0

    def _archive_files(self, chosen: Sequence[Candidate], bounds: Bounds) -> int:
        """Archives a page of files; returns how many, 0 if a row changed meanwhile: the next tick
        chooses again."""
        names = [one.digest for one in chosen]
        if not self._move(names, bounds):
            return 0
        self.round.after = (chosen[-1].received_at, chosen[-1].digest)
        log.info("%d files of epochs up to %d are archived", len(names), bounds.epoch)
        return len(names)

    def _ended_leases(self, bounds: Bounds) -> list[tuple[int, Digest]]:
        """Returns (deadline, digest) of the next leases without a file to archive, at most
        `page_files`."""
        chosen: list[tuple[int, Digest]] = []
        after = self.round.after_lease
        with self.store.read() as connection:
            while len(chosen) < self.page_files:
                some = archive.ended_leases(connection, after, bounds, self.page_files)
                chosen += [
                    (deadline, digest)
                    for deadline, digest, node, given_at in some
                    if given_at < self._newest(connection, node).leased
                ]
                if len(some) < self.page_files:
                    break
                after = some[-1][:2]
        return chosen[: self.page_files]

    def _archive_leases(self, ended: Sequence[tuple[int, Digest]], bounds: Bounds) -> int:
        """Like `_archive_files`, for leases."""
        names = [digest for _, digest in ended]
        with self.store.read() as connection:
            rows = archive.rows_of_leases(connection, names)
        if len(rows["leases"]) < len(names):
            return 0
        page = put_object(self.objects, archive.encode(names, rows))
        with self.store.begin() as connection:
            lock(connection, CHAIN_LOCK)
            leases.lock_rows(connection, names)
            if archive.rows_of_leases(connection, names) != rows:
                return 0
            archive.move_leases(connection, page, names, rows, bounds.epoch)
        self.round.after_lease = ended[-1]
        log.info("%d leases that ended without a file are archived", len(names))
        return len(names)

    def _settled(self, connection: Connection) -> int:
        """Returns the newest epoch whose reward root could be claimed for one epoch, or −1."""
        clock = chain_clock(connection)
        if clock is None:
            return -1
        since = clock.time - self.context.run.epoch_seconds
        return rewards.newest_claimable(connection, since)

    def _held(self, connection: Connection, epoch: int) -> frozenset[Digest]:
        """Returns the files that the settlement of an epoch or the newest one holds."""
        found = (rewards.root_of(connection, epoch), rewards.newest_root(connection))
        return frozenset(
            file.submission_digest
            for name in {root.object for root in found if root is not None}
            for file in load(self.objects, name).files
            if file.state == "held"
        )

    def _bounds(self, connection: Connection) -> Bounds:
        run, step = current(connection, self.context), batches.next_step(connection)
        periods, clock = self.context.deployment.periods, chain_clock(connection)
        newest = self.kept or max(KEPT, scheduler.window(run.budgets))
        received, leased, judged, accepted = archive.newest_times(connection, newest)
        young = max(KEPT_SECONDS, KEPT_TURNS * run.lease_seconds)
        return Bounds(
            epoch=self.round.epoch,
            next_step=step,
            oldest_version=step - run.max_staleness,
            settled=(self.round.epoch + 1) * self.context.run.epoch_seconds,
            appealed=(clock.time if clock else 0) - periods.validity - periods.accountable,
            received=received,
            leased=min(leased, self.now() - young),
            judged=judged,
            accepted=accepted,
        )

    def _choose(self, bounds: Bounds) -> list[Candidate]:
        """Returns the next files to archive, at most `page_files`."""
        chosen: list[Candidate] = []
        after = self.round.after
        while len(chosen) < self.page_files:
            with self.store.read() as connection:
                some = archive.following(connection, after, bounds, self.page_files)
                found = archive.over(connection, bounds, [digest for _, digest in some])
                free = [one for one in found if self._is_free(connection, one)]
            chosen += self._stored(free)
            if len(some) < self.page_files:
                break
            after = some[-1]
        return chosen[: self.page_files]

    def _stored(self, files: Sequence[Candidate]) -> list[Candidate]:
        """Returns those of the files that are in permanent storage."""

        def of(some: Sequence[Candidate]) -> list[Candidate]:
            return [one for one in some if self.objects.exists(digest_key(one.sha256))]

        each = -(-len(files) // _READERS) or 1  # a task for each file takes longer than a look
        parts = [files[start : start + each] for start in range(0, len(files), each)]
        with ThreadPoolExecutor(_READERS) as pool:
            return [one for part in pool.map(of, parts) for one in part]

    def _is_free(self, connection: Connection, one: Candidate) -> bool:
        """Whether the file may leave the tables: no settlement holds it, and it is not among its
        node's newest."""
        free = one.digest not in self.round.held
        return free and self._newest(connection, one.node).may_go(one)

    def _newest(self, connection: Connection, node: Address) -> Newest:
        if node not in self.round.nodes:
            newest = archive.newest_of_node(connection, node, self.kept_of_node)
            self.round.nodes[node] = newest
        return self.round.nodes[node]

    def _move(self, names: list[Digest], bounds: Bounds) -> bool:
        """Writes the object of a page, then moves its files there. Returns False and moves none if
        a row changed in between or is in use."""
        with self.store.read() as connection:
            rows = archive.rows_of(connection, names)
        if len(rows["submissions"]) < len(names):
            return False
        page = put_object(self.objects, archive.encode(names, rows))
        with self.store.begin() as connection:
            if archive.lock_jobs(connection, names) < len(rows["jobs"]):
                return False
            lock(connection, CHAIN_LOCK)  # no settlement and no event reads or changes them
            if archive.lock_files(connection, names) < len(names):
                return False
            still = {one.digest for one in archive.over(connection, bounds, names)}
            if still != set(names) or archive.rows_of(connection, names) != rows:
                return False
            archive.move(connection, page, names, rows, bounds.epoch)
        return True
