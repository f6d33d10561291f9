"""One chunk's bytes on their way to their place: written as they come, so that a kill costs none.

The first to fetch a chunk that takes its time writes what has arrived every EARLY_SECONDS, before
the chunk is verified, and once more if it comes to grief: whoever starts again finds its beginning
there and asks only for the rest. Until it is verified nobody reads it (a relay passes on only what
is marked), and nothing that came later may be overwritten: whoever verified the chunk first claims
it, and the other stops.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from protocol.broadcast.files import open_regular, read_at, read_into, write_at
from protocol.broadcast.layout import Item
from protocol.core.errors import PrimeError
from protocol.core.ids import to_bytes

EARLY_SECONDS = 0.25
"""A chunk that comes faster is written at once: more and smaller writes cost more."""
MARGIN = 64 << 10
"""The last bytes before a hole are fetched again: their block may have been half written."""


class Claim:
    """Who may write a chunk: the first fetch of it as it arrives, whoever verified it the rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken = False

    def write(self, fd: int, data: memoryview, offset: int) -> bool:
        """Writes bytes that are not verified yet; False, and nothing written, if the chunk is
        taken."""
        with self._lock:
            if not self.taken:
                write_at(fd, data, offset)
            return not self.taken

    def take(self) -> bool:
        """True for the one that verified the chunk first."""
        with self._lock:
            first = not self.taken
            self.taken = True
            return first


class Landing:
    """Writes a chunk into the file `path` at `offset` while its buffer `view` fills from `begun`
    on (what is before lies there already). `early` False: nothing before it is verified. `clock` in
    seconds, monotonic."""

    def __init__(
        self,
        path: Path,
        offset: int,
        view: memoryview,
        claim: Claim,
        begun: int,
        *,
        early: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._offset = offset
        self.view = view
        self._claim = claim
        self._landed = self._filled = begun
        self._early = early
        self._clock = clock
        self._written_at = clock()
        if begun:
            read_into(self._fd, view[:begun], offset)

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._write_early()
        finally:
            os.close(self._fd)

    def arrived(self, end: int) -> None:
        """The buffer is filled up to `end`; it is written now and then, in whole pages."""
        self._filled = end
        now = self._clock()
        if now - self._written_at >= EARLY_SECONDS:
            self._written_at = now
            self._write_early()

    def _write_early(self) -> None:
        end = self._filled - self._filled % MARGIN
        if self._early and end > self._landed:
            if self._claim.write(
                self._fd, self.view[self._landed : end], self._offset + self._landed
            ):
                self._landed = end
            else:
                self._early = False

    def finish(self) -> None:
        """The chunk is verified, and this fetch took it: the rest is written."""
        write_at(self._fd, self.view[self._landed :], self._offset + self._landed)


def verified_chunks(path: Path, item: Item) -> Iterator[int]:
    """Indices of the chunks of a partial file that are there and right; holes cost nothing."""
    with open_regular(path) as fd:
        for index, digest in enumerate(item.chunks):
            offset, length = item.span(index)
            with contextlib.suppress(OSError):  # ENXIO: no data behind; or no such seek here
                if os.lseek(fd, offset, os.SEEK_DATA) >= offset + length:
                    continue
            try:
                data = read_at(fd, offset, length)
            except PrimeError:
                return
            if blake3(data).digest() == to_bytes(digest):
                yield index


def beginning(path: Path, offset: int, length: int) -> int:
    """How many bytes of a chunk that does not verify an earlier fetch left at its beginning; they
    are as good as who sent them."""
    with path.open("rb") as file, contextlib.suppress(OSError):  # ENXIO: nothing; or no such seek
        if os.lseek(file.fileno(), offset, os.SEEK_DATA) == offset:
            hole = os.lseek(file.fileno(), offset, os.SEEK_HOLE)
            return max(0, min(hole - offset, length) - MARGIN)
    return 0
