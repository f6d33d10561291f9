"""What is on disk of a file that is still arriving: its verified chunks, its digest so far."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from protocol.broadcast.files import open_regular, read_at
from protocol.broadcast.layout import Item
from protocol.core import ids
from protocol.core.errors import PrimeError
from protocol.core.ids import Digest, to_bytes

READ_SIZE = 1 << 20


class RunningHash:
    """BLAKE3 of the file of one item. Chunks that come in order are hashed from the worker's
    buffer, while they are in the processor's cache; the others are read again once their turn has
    come. Several threads may feed it; none waits for another."""

    def __init__(self, item: Item, path: Path) -> None:
        self._item = item
        self._path = path
        self._hasher = blake3()
        self._next = 0
        self._written: set[int] = set()
        self._busy = threading.Lock()

    def feed(self, index: int, view: memoryview) -> None:
        """Chunk `index` is verified and on disk; `view` are its bytes."""
        if self._busy.acquire(blocking=False):
            try:
                if index == self._next:
                    self._hasher.update(view)
                    self._next += 1
                    return
            finally:
                self._busy.release()
        self._written.add(index)
        self._catch_up()

    def kept(self, index: int) -> None:
        """Chunk `index` was there already."""
        self._written.add(index)

    def digest(self) -> Digest:
        """The digest, once every chunk is on disk. Raises UnavailableError if one is not."""
        with self._busy:
            self._read_to(self._item.size)
            self._next = len(self._item.chunks)
            return ids.digest(self._hasher.digest())

    def _catch_up(self) -> None:
        """Hashes what is on disk and next, unless another thread is at it."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            end = self._next
            while end in self._written:
                self._written.discard(end)
                end += 1
            self._read_to(min(self._item.size, end * self._item.chunk_size))
            self._next = end
        finally:
            self._busy.release()

    def _read_to(self, end: int) -> None:
        position = min(self._item.size, self._next * self._item.chunk_size)
        if position >= end:
            return
        with open_regular(self._path) as fd:
            while position < end:
                part = os.pread(fd, min(READ_SIZE, end - position), position)
                if not part:
                    break  # shorter than it was: the digest will tell
                self._hasher.update(part)
                position += len(part)


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
