"""A relay: fetches what the trainer signed and serves each chunk as soon as it is verified.

    offer()      checks signed manifests (signature, no contradiction, nothing replayed) and wakes
                 the fetching thread
    the thread   fetches the newest missing version: its deltas first, which most nodes want, then
                 the files: made from a delta if their base is here, else fetched; either way a
                 chunk is served once it is verified
    the server   answers for a version as soon as its manifest is known

    the scrubber reads what is on disk again (`Scrubber`); a damaged version is no longer served,
                 and its wrong chunks are fetched again

A relay keeps the last few versions, restores them from disk after a restart, and resumes what a
kill cut off. It can mislead only about availability, because its clients verify everything.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from prometheus_client.core import Metric

from prime_broadcast import delta as deltas
from prime_broadcast import files, layout
from prime_broadcast.chunks import ChunkFetcher, Hooks, Pace
from prime_broadcast.content import LiveContent, LiveVersion, live_version
from prime_broadcast.durable import appear, settle
from prime_broadcast.files import (
    DiskError,
    FullError,
    disk_errors,
    open_regular,
    read_at,
    remove_folder,
    replace_file,
    require_space,
)
from prime_broadcast.layout import Item, delta_items, file_items
from prime_broadcast.manifest import MANIFEST_NAME, History, Trust, signed_bytes, total_size
from prime_broadcast.metrics import Received, held
from prime_broadcast.server import Counters, Server, Serving
from prime_broadcast.sources import SourceBook, normal_url
from prime_core.checkpoint import SignedManifest
from prime_core.errors import (
    MalformedError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import to_bytes


def partial_folder(root: Path, signed: SignedManifest) -> Path:
    """The folder of a version while it arrives."""
    manifest = signed.manifest
    return root / layout.POLICIES / f".partial-{manifest.version}-{manifest.digest()[2:18]}"


def make_folder(live: LiveVersion, root: Path) -> None:
    """Makes the folder of an arriving version, or takes back that of a damaged version that is
    still in its place. Raises DiskError."""
    if layout.version_folder(root, live.signed.manifest.version).exists():
        take_aside(live.signed, root)
    files.make_folder(live.folder)


def make_room(live: LiveVersion, items: Iterable[Item]) -> list[Item]:
    """Returns the `items` that are incomplete. Raises DiskError if the missing bytes do not
    fit on the disk."""
    missing = [item for item in items if not live.arrivals[item.name].complete or not item.size]
    with disk_errors():
        there = [path for item in missing if (path := live.folder / item.name).exists()]
        have = sum(path.stat().st_blocks * 512 for path in there)
        require_space(live.folder, sum(item.size for item in missing) - have)
    return missing


def restored(root: Path, trust: Trust, history: History, keep: int) -> list[LiveVersion]:
    """Returns the complete versions. Removes what killed fetches left of versions that are no
    longer among the newest `keep`. Raises UserError if they are another run's."""
    with disk_errors():
        settle(layout.policies_folder(root))
    found = []
    for version in layout.versions(root):
        try:
            signed = layout.manifest_of(root, version)
            history.admit(trust.check(signed))
        except (UntrustedError, MalformedError) as error:
            raise UserError(
                f"{root} holds policies of another run: {error}",
                hint="give this relay its own folder with --data",
            ) from error
        live = live_version(signed, layout.version_folder(root, version))
        for arrival in live.arrivals.values():
            arrival.mark_all()
        found.append(live)
    _sweep(layout.policies_folder(root), layout.versions(root), keep)
    return found


def _sweep(folder: Path, versions: Iterable[int], keep: int) -> None:
    for path in folder.glob(".partial-*-*"):
        number = path.name.split("-")[1]
        if number.isdigit() and int(number) <= max(versions, default=0) - keep:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".trash-*"):
        shutil.rmtree(path, ignore_errors=True)


def to_read(content: LiveContent, versions: Iterable[int]) -> list[tuple[int, Path, list[Item]]]:
    """What the scrubber reads of `versions`: number, folder, items."""
    live = (content.get(version) for version in versions)
    return [
        (one.signed.manifest.version, one.folder, list(one.items.values()))
        for one in live
        if one is not None
    ]


def take_aside(signed: SignedManifest, root: Path) -> bool:
    """Turns a complete version into an arriving one; False if it was dropped meanwhile. Raises
    DiskError."""
    partial = partial_folder(root, signed)
    with disk_errors():
        remove_folder(partial)
        try:
            layout.version_folder(root, signed.manifest.version).rename(partial)
        except FileNotFoundError:
            return False
    return True


def outlived(present: Iterable[int], keep: int, floor: int) -> list[int]:
    """The versions among `present` to drop, oldest first: all but the newest `keep`, and those
    older than `floor`."""
    ordered = sorted(present)
    kept = ordered[max(0, len(ordered) - keep) :]
    return [v for v in ordered if v < floor or v not in kept]


def remove_version(root: Path, version: int) -> None:
    """Removes a version and what had arrived of it. Raises DiskError."""
    with disk_errors():
        remove_folder(layout.version_folder(root, version))
        for path in layout.policies_folder(root).glob(f".partial-{version}-*"):
            shutil.rmtree(path, ignore_errors=True)


def make_from_delta(
    live: LiveVersion, bases: Mapping[int, LiveVersion], tell: Callable[[str], None]
) -> bool:
    """Makes the files of an arriving version, whose deltas are here, from one of `bases`; False if
    none of them leads to it, or those that do are damaged, which is reported to `tell`."""
    manifest = live.signed.manifest
    for entry in sorted(manifest.deltas, key=lambda entry: entry.size):
        base = bases.get(entry.base)
        if base is None or base.signed.manifest.result_digest != entry.base_digest:
            continue
        if entry.size >= total_size(manifest):
            continue
        if any(live.arrivals[item.name].begun for item in file_items(manifest)):
            return False  # a delta's bytes are verified after they are written: over nothing that
            # is being served
        try:
            deltas.apply(
                base.folder,
                base.signed.manifest,
                live.folder / f"delta-{entry.base}",
                manifest,
                live.folder,
                on_chunk=lambda name, index: live.arrivals[name].mark(index),
            )
        except (UntrustedError, MalformedError) as error:
            tell(str(error))
            continue
        return True
    return False


SCRUB_RATE = 8e6
"""Bytes per second that are read again: about 1 % of a disk's rate, less than 1 % of a core."""
IDLE = 1.0
"""Seconds between looks while there is nothing to read."""

ListVersions = Callable[[], Sequence[tuple[int, Path, Sequence[Item]]]]
"""The complete versions now: number, folder, items."""


def first_rotten(folder: Path, items: Iterable[Item], pause: Callable[[int], bool]) -> str | None:
    """Names the first damaged chunk or unreadable file; None if all are right. `pause(bytes)` is
    called before each chunk; if it returns True, reading ends."""
    for item in items:
        try:
            with open_regular(folder / item.name) as fd:
                for index, digest in enumerate(item.chunks):
                    offset, length = item.span(index)
                    if pause(length):
                        return None
                    if blake3(read_at(fd, offset, length)).digest() != to_bytes(digest):
                        return f"chunk {index} of {item.address} has rotted on disk"
        except (PrimeError, OSError) as error:
            return f"{item.address} cannot be read any more: {error}"
    return None


class Scrubber:
    """One thread that reads all complete versions again. `on_rot(version, why)` is called in it."""

    def __init__(self, list_versions: ListVersions, on_rot: Callable[[int, str], None]) -> None:
        self._list_versions = list_versions
        self._on_rot = on_rot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ends at the next chunk."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            versions = self._list_versions()
            for version, folder, items in versions:
                why = first_rotten(folder, items, self._pause)
                if why is not None and any(
                    (v, f) == (version, folder) for v, f, _ in self._list_versions()
                ):  # else it was dropped meanwhile
                    self._on_rot(version, why)
                    self._stop.wait(IDLE)  # the version may fail again before a byte is read
                if self._stop.is_set():
                    return
            if not any(item.size for _, _, items in versions for item in items):
                self._stop.wait(IDLE)

    def _pause(self, count: int) -> bool:
        return self._stop.wait(count / SCRUB_RATE)


@dataclass(frozen=True)
class RelayEvent:
    """Something worth a log line. `kind`: "learned", "refused", "complete", "failed", "fault",
    "dropped", "rot"."""

    kind: str
    version: int
    detail: str = ""


class SourcesChangedError(UnavailableError):
    """The fetch starts again at once, with the sources that are known now."""


class GivesWayError(UnavailableError):
    """A newer version goes first; this one is resumed after it."""


__all__ = ["KEEP", "Relay", "RelayEvent"]

KEEP = 5
RETRY_SECONDS = 1.0
DISK_RETRY_SECONDS = 5.0
PATIENCE = 20.0
"""Seconds without a chunk after which the next group of sources is tried."""
STANDSTILL = 2.0
"""Seconds without a chunk after which a fetch is begun again if other sources became known."""


class Relay:
    """Serves the newest `keep` policies of one trainer from `root`. Start, offer, stop."""

    def __init__(
        self,
        root: Path,
        trust: Trust,
        serving: Serving = Serving(),
        *,
        keep: int = KEEP,
        book: SourceBook | None = None,
        on_event: Callable[[RelayEvent], None] = lambda event: None,
    ) -> None:
        self._root = root
        self._trust = trust
        self._keep = keep
        self._book = book or SourceBook()
        self._tell = on_event
        self._content = LiveContent()
        self._server = Server(self._content, serving, more_metrics=self._metrics)
        self._received = Received()
        self._scrubber = Scrubber(self._list_versions, self._rotted)
        self._history = History()
        self._complete: set[int] = set()
        self._wanted: dict[int, SignedManifest] = {}
        self._failures: dict[int, int] = {}
        self._refused: set[str] = set()
        self._reported: dict[int, str] = {}
        self._gave_way = False
        self._floor = 0
        self._sources: list[list[str]] = []
        self._own: frozenset[str] = frozenset()
        self._change = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="relay-fetch", daemon=True)
        self._crash: BaseException | None = None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def counters(self) -> Counters:
        """What the server has done."""
        return self._server.counters

    def versions(self) -> list[int]:
        """Versions that can be asked for, arriving ones included."""
        return self._content.versions()

    def complete(self) -> list[int]:
        """Versions that are wholly here."""
        with self._change:
            return sorted(self._complete)

    def start(self) -> None:
        """Restores what is on disk, then listens. Raises UserError if the port is taken, or the
        folder holds another run's policies."""
        self._restore()
        self._server.start()
        self._thread.start()
        self._scrubber.start()

    def stop(self) -> None:
        """Ends fetching (resumable) and serving."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        self._scrubber.stop()
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(30.0)

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def offer(
        self,
        manifests: Iterable[SignedManifest],
        sources: Sequence[Sequence[str]],
        own: Collection[str] = (),
    ) -> None:
        """Takes the published manifests and where to fetch them: groups of base URLs, of which each
        is used only if those before it fail. `own` are the URLs of the pool's own accounts. If
        there is one group and a mirror is among `own`, the relay prefers it to the trainer's
        origin.

        Invalid manifests are refused (reported once as an event), never served. If the fetching
        thread has ended by an error, raises that error.
        """
        if self._crash is not None:
            raise self._crash
        newest = layout.newest_first(manifests)[: self._keep]
        this = normal_url(self.url)
        groups = [[u for u in self._book.urls(group) if u != this] for group in sources]
        with self._change:
            self._sources = [group for group in groups if group]
            self._own = frozenset(self._book.urls(own)) - {this}
        for signed in reversed(newest):
            self._learn(signed)
        with self._change:
            self._change.notify_all()

    def _learn(self, signed: SignedManifest) -> None:
        version = signed.manifest.version
        key = f"{version}/{signed.signature}"
        with self._change:
            known = version in self._complete or version in self._wanted
            if key in self._refused or (known and self._same(signed)) or self._too_old(version):
                return
        try:
            self._history.admit(self._trust.check(signed))
        except (UntrustedError, MalformedError) as error:
            if len(self._refused) < 1024:
                self._refused.add(key)
            self._tell(RelayEvent("refused", version, str(error)))
            return
        self._content.put(live_version(signed, partial_folder(self._root, signed)))
        with self._change:
            self._wanted[version] = signed
        self._tell(RelayEvent("learned", version, signed.manifest.digest()))

    def _same(self, signed: SignedManifest) -> bool:
        live = self._content.get(signed.manifest.version)
        return live is not None and live.signed == signed

    def _too_old(self, version: int) -> bool:
        """True for what would be dropped again at once."""
        present = {*self._complete, *self._wanted, version}
        return version in outlived(present, self._keep, self._floor)

    def _metrics(self) -> list[Metric]:
        return [*self._received.metrics(), *held(self.complete())]

    # Disk

    def _restore(self) -> None:
        for live in restored(self._root, self._trust, self._history, self._keep):
            self._complete.add(live.signed.manifest.version)
            self._content.put(live)
        self._drop_old()

    def _list_versions(self) -> list[tuple[int, Path, list[Item]]]:
        return to_read(self._content, self.complete())

    def _rotted(self, version: int, why: str) -> None:
        """Takes a version out of service; the next offer has its wrong chunks fetched again."""
        live = self._content.get(version)
        if live is None:
            return
        try:
            if not take_aside(live.signed, self._root):
                return
        except DiskError as error:  # it stays where it is, unserved, until it can be moved
            self._refusal(version, error)
        self._content.drop(version)
        with self._change:
            self._complete.discard(version)
        self._tell(RelayEvent("rot", version, why))

    def _refusal(self, version: int, error: DiskError) -> None:
        """Counts that the disk does not take or remove a version, and reports it when that
        changes."""
        self._received.refused()
        if self._reported.get(version) != str(error):
            self._reported[version] = str(error)
            self._tell(RelayEvent("fault", version, str(error)))

    # The fetching thread

    def _work(self) -> None:
        try:
            while True:
                signed = self._next()
                if signed is None:
                    return
                version = signed.manifest.version
                try:
                    with disk_errors():
                        self._bring(signed)
                except DiskError as error:
                    self._refusal(version, error)
                    room = isinstance(error, FullError) and self._drop_for(version)
                    with self._change:
                        if not room:
                            self._failures[version] = self._failures.get(version, 0) + 1
                        self._change.wait_for(lambda: self._stopping, DISK_RETRY_SECONDS)
                    continue
                except GivesWayError:
                    self._gave_way = True
                    continue
                except PrimeError as error:
                    self._tell(RelayEvent("failed", version, str(error)))
                    with self._change:
                        self._failures[version] = self._failures.get(version, 0) + 1
                        if not self._stopping and not isinstance(error, SourcesChangedError):
                            self._change.wait(RETRY_SECONDS)
                    continue
                with self._change:
                    self._wanted.pop(version, None)
                    self._complete.add(version)
                    self._reported.pop(version, None)
                    self._gave_way = False
                self._tell(RelayEvent("complete", version, signed.manifest.digest()))
                self._drop_old()
        except BaseException as error:
            self._crash = error  # a defect: the next offer() raises it
            raise

    def _next(self) -> SignedManifest | None:
        """Returns the newest wanted version, failed ones last; None to stop."""
        with self._change:
            while not self._stopping:
                if self._wanted and self._sources:
                    version = min(self._wanted, key=self._rank)
                    return self._wanted[version]
                self._change.wait()
        return None

    def _bring(self, signed: SignedManifest) -> None:
        manifest = signed.manifest
        live = self._content.get(manifest.version)
        assert live is not None
        make_folder(live, self._root)
        self._get(make_room(live, delta_items(manifest)), live)  # room or not for the files
        missing = make_room(live, file_items(manifest))
        if not self._from_delta(live):
            self._get(missing, live)
        replace_file(live.folder / MANIFEST_NAME, signed_bytes(signed), durable=False)
        final = layout.version_folder(self._root, manifest.version)
        appear(live.folder, final)
        self._content.put(LiveVersion(signed, final, live.items, live.arrivals))

    def _get(self, items: Sequence[Item], live: LiveVersion) -> None:
        """Fetches items chunk by chunk from the first group of sources that delivers."""
        with self._change:
            groups = self._sources
        if items and not groups:
            raise UnavailableError("no source is known")
        for number, urls in enumerate(groups):
            try:
                self._get_from(items, live, urls, groups)
                return
            except (SourcesChangedError, GivesWayError, DiskError):
                raise
            except UnavailableError:
                if self._stopping or number == len(groups) - 1:
                    raise

    def _get_from(
        self, items: Sequence[Item], live: LiveVersion, urls: list[str], groups: list[list[str]]
    ) -> None:
        """One run of the chunk engine over one of the `groups` of sources."""
        fetcher = ChunkFetcher(
            items,
            live.folder,
            urls,
            self._book,
            # Other relays may wait for this one.
            Pace(patience=PATIENCE, last_resorts=("relay",), own=self._own)
            if len(groups) == 1
            else Pace(patience=PATIENCE, last_resorts=()),
            Hooks(
                stop=lambda: (
                    self._stopping
                    or self._better_elsewhere(fetcher, groups)
                    or self._gives_way(live)
                ),
                on_chunk=lambda item, index: live.arrivals[item.name].mark(index),
            ),
        )
        begun = time.monotonic()
        try:
            fetcher.run()
        except UnavailableError as error:
            if self._gives_way(live) and not isinstance(error, DiskError):
                raise GivesWayError("a newer version goes first") from error
            if self._better_elsewhere(fetcher, groups):
                raise SourcesChangedError("other sources are known now") from error
            raise
        finally:
            self._received.add(fetcher.stats, time.monotonic() - begun)
            for fault in fetcher.stats.faults:
                version = live.signed.manifest.version
                self._tell(RelayEvent("fault", version, f"{fault.url}: {fault.reason}"))

    def _better_elsewhere(self, fetcher: ChunkFetcher, groups: list[list[str]]) -> bool:
        """Whether a fetch makes no progress although other sources have been offered since."""
        return self._sources != groups and fetcher.idle_seconds > STANDSTILL

    def _gives_way(self, live: LiveVersion) -> bool:
        """Whether a fetch yields to a newer wanted version whose deltas do not start from it. Only
        one fetch yields until a version is complete. Otherwise no version would ever be complete if
        the trainer publishes faster than the link transfers."""
        if self._gave_way:
            return False
        manifest = live.signed.manifest
        with self._change:
            version = min(self._wanted, key=self._rank, default=manifest.version)
            if version <= manifest.version:
                return False
            newer = self._wanted[version].manifest
        return all(entry.base != manifest.version for entry in newer.deltas)

    def _rank(self, version: int) -> tuple[int, int]:
        """Sort key of the next fetch: fewest failures first, then the newest."""
        return (self._failures.get(version, 0), -version)

    def _from_delta(self, live: LiveVersion) -> bool:
        """Makes the files from a base that is here, if there is one; False if not."""
        bases = {v: base for v in self.complete() if (base := self._content.get(v)) is not None}
        version = live.signed.manifest.version
        return make_from_delta(live, bases, lambda e: self._tell(RelayEvent("fault", version, e)))

    def _drop_for(self, version: int) -> bool:
        """Drops the oldest complete version for a newer one that does not fit, never the newest;
        False if there is none to drop."""
        complete = self.complete()
        if len(complete) < 2 or complete[0] > version:
            return False
        self._floor = complete[0] + 1  # else the next offer would bring it again
        self._drop_old()
        return True

    def _drop_old(self) -> None:
        with self._change:
            present = self._complete | set(self._wanted)
            gone = outlived(present, self._keep, self._floor)
            for version in gone:
                self._complete.discard(version)
                self._wanted.pop(version, None)
        for version in gone:
            self._content.drop(version)
            try:
                remove_version(self._root, version)
            except DiskError as error:
                self._refusal(version, error)
            self._tell(RelayEvent("dropped", version))
