"""Receives one chunk: hashes its bytes and writes them to the file as they arrive.

The first fetch of a chunk writes it piece by piece before it is verified: after every PIECE, after
EARLY_SECONDS if it is slow, and when it fails. A fetch that starts again after a kill finds the
beginning there and requests only the rest. An unverified chunk is never read (a relay passes on
only what is marked), and a verified one is never overwritten: the fetch that verifies the chunk
first claims it, and the other stops.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from blake3 import blake3

from prime_broadcast.files import open_regular, read_at, read_into, write_at
from prime_broadcast.layout import Item
from prime_core.errors import PrimeError
from prime_core.ids import to_bytes

PIECE = 1 << 20
"""A connection's buffer. What is received stays in the processor's cache until it is hashed and
written. Larger writes use the kernel's largest folios, which the host of a virtual machine may have
reclaimed: the first write of 1 GiB then took 2.7 processor seconds in pieces of 4 MiB, and 0.26 in
pieces of this size."""
EARLY_SECONDS = 0.25
"""What has arrived is written after this time at the latest; a kill loses at most that much."""
MARGIN = 64 << 10
"""The last bytes before a hole are fetched again: their block may have been half written."""


class ChunkClaim:
    """Who may write a chunk: the first fetch as it arrives, then the one that verified it."""

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
    """Receives the chunk at `span` (offset, length) of the file `path`: the bytes put into
    `room()` are hashed and written in pieces of the size of `buffer`, while they are in the
    processor's cache. The chunk's first `begun` bytes are in the file already and are hashed first.

    `early` False: another fetch is writing; the chunk is held in memory (in `buffer` if it fits),
    and nothing of it written before it is verified."""

    def __init__(
        self,
        path: Path,
        span: tuple[int, int],
        claim: ChunkClaim,
        begun: int,
        buffer: memoryview,
        *,
        early: bool,
    ) -> None:
        offset, length = span
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._offset = offset
        self._length = length
        self._claim = claim
        self._early = early
        if not early and len(buffer) < length:
            buffer = memoryview(bytearray(length))
        self._buffer = buffer if early else buffer[:length]
        self._written_at = monotonic()
        self._hasher = blake3()
        self._landed = 0
        """Bytes of the chunk that are hashed and written (by this fetch or an earlier one)."""
        self._held = 0
        """Bytes that follow them, in the buffer."""
        while self._landed < begun:
            part = self._buffer[: begun - self._landed]
            read_into(self._fd, part, offset + self._landed)
            self._hasher.update(part)
            self._landed += len(part)

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and self._early:
                self._put_down()
        finally:
            os.close(self._fd)

    def room(self) -> memoryview:
        """Where the next bytes go; empty once the chunk is full."""
        return self._buffer[self._held : self._length - self._landed]

    def arrived(self, count: int) -> None:
        """`count` bytes were put into `room()`."""
        self._held += count
        if self._early and (
            self._held == len(self._buffer) or monotonic() - self._written_at >= EARLY_SECONDS
        ):
            self._put_down()

    def digest(self) -> bytes:
        """BLAKE3 of the chunk, once it is full."""
        if self._early:
            self._put_down()
        else:
            self._hasher.update(self._buffer)
        return self._hasher.digest()

    def finish(self) -> None:
        """Writes the rest of the chunk, which this fetch has verified and claimed."""
        if not self._early:
            write_at(self._fd, self._buffer, self._offset)

    def _put_down(self) -> None:
        if not self._held:
            return
        piece = self._buffer[: self._held]
        self._hasher.update(piece)
        # Once another fetch has verified the chunk, nothing more is written.
        self._claim.write(self._fd, piece, self._offset + self._landed)
        self._landed += self._held
        self._held = 0
        self._written_at = monotonic()


def verified_chunks(path: Path, item: Item) -> Iterator[int]:
    """Indices of the chunks of a partial file that are present and correct; holes are not read."""
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
    """How many bytes an earlier fetch left at the beginning of an unverified chunk. They may be
    wrong."""
    with path.open("rb") as file, contextlib.suppress(OSError):  # ENXIO: nothing; or no such seek
        if os.lseek(file.fileno(), offset, os.SEEK_DATA) == offset:
            hole = os.lseek(file.fileno(), offset, os.SEEK_HOLE)
            return max(0, min(hole - offset, length) - MARGIN)
    return 0
