"""A file's bytes as they pass, in order: each chunk against its digest in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from prime_core.ids import Digest, to_bytes


class ChunkCheck:
    """Takes a file of `size` bytes piece by piece from its beginning. `on_chunk(index)` is told of
    each chunk that is right; pieces need not end where chunks do."""

    def __init__(
        self,
        size: int,
        chunk_size: int,
        chunks: Sequence[Digest],
        on_chunk: Callable[[int], None] = lambda index: None,
    ) -> None:
        self._size = size
        self._chunk_size = chunk_size
        self._chunks = chunks
        self._on_chunk = on_chunk
        self._hasher = blake3()
        self._seen = 0
        self._right = 0

    def feed(self, data: bytes | bytearray | memoryview) -> bool:
        """The next bytes; False if they end a chunk that is wrong, or go beyond the file."""
        view = memoryview(data)
        while view:
            end = min(self._size, (self._right + 1) * self._chunk_size)
            piece = view[: end - self._seen]
            if not piece:
                return False
            self._hasher.update(piece)
            self._seen += len(piece)
            view = view[len(piece) :]
            if self._seen == end:
                if self._hasher.digest() != to_bytes(self._chunks[self._right]):
                    return False
                self._hasher = blake3()
                self._on_chunk(self._right)
                self._right += 1
        return True

    @property
    def complete(self) -> bool:
        """Whether every chunk has passed and was right."""
        return self._right == len(self._chunks)
