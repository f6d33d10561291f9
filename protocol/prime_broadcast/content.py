"""What a server serves: complete versions on disk, and versions that are still arriving.

`DirectoryContent` serves a finished layout. `LiveContent` serves a relay's versions: a chunk is
served from the moment it is verified, and a request for a later chunk waits for it.
"""

from __future__ import annotations

import asyncio
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prime_broadcast import layout
from prime_broadcast.layout import Item, delta_items, file_items
from prime_broadcast.manifest import MANIFEST_NAME, signed_bytes
from prime_core import encoding
from prime_core.checkpoint import SignedManifest


class Arrival:
    """Tracks which chunks of a file are verified and on disk. Fetching threads mark chunks; the
    server's event loop waits for them. Thread-safe."""

    def __init__(self, size: int, chunk_size: int, count: int) -> None:
        self._size = size
        self._chunk_size = chunk_size
        self._have = bytearray(count)
        self._failed = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def mark(self, index: int) -> None:
        """Marks chunk `index` as verified and written."""
        with self._lock:
            self._have[index] = 1
        self._wake()

    def mark_all(self) -> None:
        """Marks every chunk as verified and written."""
        with self._lock:
            self._have = bytearray(b"\1" * len(self._have))
        self._wake()

    def fail(self) -> None:
        """Ends all waits: no more chunks will arrive."""
        with self._lock:
            self._failed = True
        self._wake()

    @property
    def complete(self) -> bool:
        with self._lock:
            return all(self._have)

    @property
    def begun(self) -> bool:
        """Whether any chunk can be served."""
        with self._lock:
            return any(self._have)

    def ready_until(self, offset: int) -> int:
        """Returns the end of the verified bytes that start at `offset`; `offset` itself if there
        are none."""
        with self._lock:
            index = offset // self._chunk_size
            while index < len(self._have) and self._have[index]:
                index += 1
        return max(offset, min(self._size, index * self._chunk_size))

    async def wait(self, offset: int, timeout: float) -> int:
        """Waits until bytes at `offset` are verified and returns `ready_until(offset)`. Returns
        `offset` after `timeout` seconds or a failure."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        event = asyncio.Event()
        entry = (loop, event)
        with self._lock:
            self._waiting.append(entry)
        try:
            while True:
                event.clear()
                end = self.ready_until(offset)
                left = deadline - loop.time()
                if end > offset or self._failed or left <= 0:
                    return end
                try:
                    await asyncio.wait_for(event.wait(), left)
                except TimeoutError:
                    continue
        finally:
            with self._lock:
                self._waiting.remove(entry)

    def _wake(self) -> None:
        with self._lock:
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)


@dataclass(frozen=True)
class Resource:
    """What a path serves: a complete file (`arrival` None), an arriving file, or bytes in
    memory."""

    size: int
    etag: str
    immutable: bool
    content_type: str = "application/octet-stream"
    path: Path | None = None
    data: bytes | None = None
    arrival: Arrival | None = None


class Content(Protocol):
    """Maps URL paths to resources. `find` runs in the event loop and must be fast."""

    role: str

    def find(self, path: str) -> Resource | None: ...

    def gone(self, path: str) -> bool:
        """Whether the path existed once and will not come back."""
        ...

    def versions(self) -> list[int]: ...

    def complete(self) -> list[int]:
        """Returns the versions that are complete."""
        ...


class DirectoryContent:
    """A finished layout on disk, as an origin serves it."""

    role = "origin"

    def __init__(self, root: Path) -> None:
        self._root = root

    def versions(self) -> list[int]:
        return layout.versions(self._root)

    def complete(self) -> list[int]:
        return self.versions()

    def find(self, path: str) -> Resource | None:
        named = layout.parse_address(path)
        if named is None:
            return None
        folder = self._root / layout.POLICIES
        if named.version is None:
            return _on_disk(folder / named.name, immutable=False)
        return _on_disk(folder / str(named.version) / named.name, immutable=True)

    def gone(self, path: str) -> bool:
        named = layout.parse_address(path)
        if named is None or named.version is None:
            return False
        return layout.is_thin(self._root, named.version)


@dataclass
class LiveVersion:
    """A version that a relay has or is fetching: its current folder, and what has arrived."""

    signed: SignedManifest
    folder: Path
    items: dict[str, Item]
    arrivals: dict[str, Arrival]

    def whole(self) -> bool:
        """Whether every file has arrived; deltas do not count."""
        return all(self.arrivals[entry.name].complete for entry in self.signed.manifest.files)


def live_version(signed: SignedManifest, folder: Path) -> LiveVersion:
    """Returns a LiveVersion in `folder` with no chunk marked as arrived."""
    items = {i.name: i for i in (*file_items(signed.manifest), *delta_items(signed.manifest))}
    arrivals = {
        name: Arrival(item.size, item.chunk_size, len(item.chunks)) for name, item in items.items()
    }
    return LiveVersion(signed, folder, items, arrivals)


class LiveContent:
    """A relay's versions. The index lists only versions that can be requested."""

    role = "relay"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, LiveVersion] = {}
        self._index, self._index_tag = b"", ""
        self._set_index()

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._versions)

    def complete(self) -> list[int]:
        with self._lock:
            return sorted(version for version, live in self._versions.items() if live.whole())

    def put(self, version: LiveVersion) -> None:
        """Adds a version, or updates it after its folder moved."""
        with self._lock:
            self._versions[version.signed.manifest.version] = version
            self._set_index()

    def get(self, version: int) -> LiveVersion | None:
        with self._lock:
            return self._versions.get(version)

    def drop(self, version: int) -> None:
        """Removes a version and ends the requests that wait for it."""
        with self._lock:
            gone = self._versions.pop(version, None)
            self._set_index()
        if gone is not None:
            for arrival in gone.arrivals.values():
                arrival.fail()

    def find(self, path: str) -> Resource | None:
        named = layout.parse_address(path)
        if named is None:
            return None
        with self._lock:
            if named.version is None:
                data, tag = self._index, self._index_tag
                return Resource(len(data), tag, False, "application/json", data=data)
            live = self._versions.get(named.version)
            if live is None:
                return None
            if named.name == MANIFEST_NAME:
                data = signed_bytes(live.signed)
                etag = live.signed.manifest.digest()
                return Resource(len(data), etag, True, "application/json", data=data)
            item = live.items.get(named.name)
            if item is None:
                return None
            return Resource(
                item.size,
                item.digest,
                True,
                path=live.folder / item.name,
                arrival=live.arrivals[item.name],
            )

    def gone(self, path: str) -> bool:
        return False

    def _set_index(self) -> None:
        newest = layout.newest_first(live.signed for live in self._versions.values())
        self._index = layout.index_bytes(newest[: layout.INDEX_LENGTH])
        self._index_tag = encoding.blake3_digest(self._index)


def _on_disk(path: Path, *, immutable: bool) -> Resource | None:
    try:
        status = path.lstat()
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    kind = "application/json" if path.suffix == ".json" else "application/octet-stream"
    etag = f"{status.st_size:x}-{status.st_mtime_ns:x}"
    return Resource(status.st_size, etag, immutable, kind, path=path)
