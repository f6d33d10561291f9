"""Lossless deltas between two policy folders. Applying one gives bit-identical files.

encode(base folder, new folder) → one file:
    magic "PRIMEDL1" · header length u32 · header (canonical JSON) · records
apply(base folder, delta) → the new folder's files, each chunk checked against its digest

The header names the versions, both result digests, the base's files and the new files. The records
follow the new files' bytes from first to last. Each covers `length` bytes and states the base
offset and how the bytes changed (prime_broadcast/codec.py). Tensors of safetensors files are paired
by name. A tensor that is new or changed its shape or type is written whole, like all bytes outside
of tensors. Memory use is a few blocks for any file size.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from blake3 import blake3
from pydantic import Field, ValidationError

from prime_broadcast import progress
from prime_broadcast.blocks import MAX_BLOCK, WIDTHS, Block, Buffer, Kind
from prime_broadcast.files import (
    DATA_MODE,
    create_sized,
    open_regular,
    read_at,
    read_into,
    write_at,
)
from prime_broadcast.manifest import MAX_POLICY_BYTES
from prime_broadcast.tensors import Tensor, read_tensors
from prime_core import encoding
from prime_core.checkpoint import FileEntry, Manifest
from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import Digest, to_bytes
from prime_core.signing import DigestField, Strict

T = TypeVar("T")


class Buffers:
    """A pool of buffers of `size` bytes; reusing memory is faster than allocating it. Thread-safe,
    because a deque's ends are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[bytearray] = deque()

    def take(self, length: int) -> bytearray:
        """Returns a buffer of at least `length` bytes."""
        try:
            buffer = self._free.pop()
        except IndexError:
            return bytearray(max(length, self._size))
        return buffer if len(buffer) >= length else bytearray(length)

    def give_back(self, buffer: bytearray) -> None:
        """Returns a buffer to the pool."""
        self._free.append(buffer)


def job(function: Callable[..., T], *arguments: object) -> Callable[[], T]:
    """Binds a function to its arguments."""
    return lambda: function(*arguments)


def in_order(
    pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], T]], window: int
) -> Generator[T, None, None]:
    """Yields the results in the jobs' order, with at most `window` jobs started ahead. When the
    generator ends or is closed, no job is running, so the caller may close the files they use."""
    running: deque[Future[T]] = deque()
    try:
        for call in jobs:
            running.append(pool.submit(call))
            if len(running) >= window:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
        wait(running)


class ChunkCheck:
    """Checks a file of `size` bytes, fed in pieces from its beginning. `on_chunk(index)` is called
    for each chunk that matches its digest. Pieces need not end at chunk boundaries."""

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
        """Takes the next bytes. Returns False if they end a wrong chunk or exceed the file's
        size."""
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
        """Whether every chunk was fed and matched."""
        return self._right == len(self._chunks)


MAGIC = b"PRIMEDL1"
BLOCK = 4 << 20
"""Maximum bytes of the result that one record covers, as written by `encode`."""
MAX_HEADER = 4 << 20
NO_BASE = 0xFFFF

_RECORD = struct.Struct("<BBHQQII")
"""kind, width, base file (NO_BASE: none), base offset, length, bytes of the two frames."""


class DeltaFile(Strict):
    """A new file: its name, size and digest."""

    name: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    size: int = Field(ge=0, le=MAX_POLICY_BYTES)
    digest: DigestField


class DeltaHeader(Strict):
    """The header of a delta. Records refer to `base_files` by index."""

    base_version: int = Field(ge=0)
    base_digest: DigestField
    version: int = Field(ge=0)
    result_digest: DigestField
    base_files: tuple[str, ...] = Field(max_length=4096)
    files: tuple[DeltaFile, ...] = Field(min_length=1, max_length=4096)


class Record(NamedTuple):
    kind: int
    width: int
    base_file: int
    base_offset: int
    length: int
    first: int
    second: int


@dataclass(frozen=True)
class _Span:
    """`length` bytes of a new file at `offset`, and the base bytes they are compared with."""

    offset: int
    length: int
    width: int
    base_file: int = NO_BASE
    base_offset: int = 0
    same: bool = False


def encode(
    base_folder: Path,
    base: Manifest,
    new_folder: Path,
    new: Manifest,
    path: Path,
    *,
    threads: int = 2,
) -> int:
    """Writes to `path` the delta from the policy in `base_folder` to the one in `new_folder`. Both
    folders must match their manifests. Returns the delta's size in bytes. Raises UnavailableError
    if the disk is full or a file is missing."""
    progress.part(f"comparing with policy {base.version}", sum(f.size for f in new.files))
    path.unlink(missing_ok=True)
    with Records(base_folder, base, new_folder, path, threads=threads) as records:
        records.head(new)
        for entry in new.files:
            records.add(entry)
        return records.position


class Records:
    """Appends a delta's header and records to `path`: `head` first, then `add` for every new file
    in the manifest's order."""

    def __init__(
        self, base_folder: Path, base: Manifest, new_folder: Path, path: Path, *, threads: int = 2
    ) -> None:
        from prime_broadcast import codec  # noqa: F401  # if numpy is missing, before any work

        self._base, self._new_folder, self._window = base, new_folder, 2 * threads
        self._stack = ExitStack()
        try:
            self._bases = [
                self._stack.enter_context(open_regular(base_folder / entry.name))
                for entry in base.files
            ]
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._out = os.open(path, flags, DATA_MODE)
            self._stack.callback(os.close, self._out)
        except BaseException:
            self._stack.close()
            raise
        self.position = os.fstat(self._out).st_size
        self._pool = self._stack.enter_context(ThreadPoolExecutor(threads))
        self._pairs = _Pairing(base, self._bases)
        self._buffers = Buffers(BLOCK)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def head(self, new: Manifest) -> None:
        """Writes the header of the delta that leads to `new`."""
        header = DeltaHeader(
            base_version=self._base.version,
            base_digest=self._base.result_digest,
            version=new.version,
            result_digest=new.result_digest,
            base_files=tuple(entry.name for entry in self._base.files),
            files=tuple(DeltaFile(name=f.name, size=f.size, digest=f.digest) for f in new.files),
        )
        head = encoding.canonical_json(header.model_dump(mode="json"))
        self._append(MAGIC + struct.pack("<I", len(head)) + head)

    def add(self, entry: FileEntry, part: tuple[int, int] | None = None) -> None:
        """Writes the records of a new file; with `part`, only those that begin at an offset from
        `part[0]` to below `part[1]`."""
        begin, end = part or (0, entry.size)
        with open_regular(self._new_folder / entry.name) as fd:
            spans = (s for s in self._pairs.spans(entry, fd) if begin <= s.offset < end)
            jobs = (
                job(_encode_span, self._bases, fd, self._buffers, span) for span in _counted(spans)
            )
            with closing(in_order(self._pool, jobs, self._window)) as records:
                for record in records:
                    self._append(record)

    def _append(self, data: bytes) -> None:
        write_at(self._out, data, self.position)
        self.position += len(data)


def apply(
    base_folder: Path,
    base: Manifest,
    delta_path: Path,
    new: Manifest,
    target: Path,
    *,
    threads: int = 2,
    on_chunk: Callable[[str, int], None] = lambda name, index: None,
) -> int:
    """Writes the files of policy `new` into the folder `target`, from the base and the delta, and
    returns the bytes written. `on_chunk(file name, index)` is called for each chunk that is written
    and verified.

    Raises UntrustedError if the delta is for another base or a chunk does not match the manifest
    (the base is damaged or the delta is wrong), MalformedError if the delta does not parse, and
    UnavailableError if the disk fails. After an error the caller must discard the target.
    """
    from prime_broadcast import codec  # noqa: F401  # if numpy is missing, before any work

    with ExitStack() as stack:
        source = stack.enter_context(open_regular(delta_path))
        header, position = read_header(source)
        _check_header(header, base, new)
        bases = [
            stack.enter_context(open_regular(base_folder / name)) for name in header.base_files
        ]
        sizes = [os.fstat(fd).st_size for fd in bases]
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        records = _Records(source, position, sizes)
        buffers = Buffers(BLOCK)
        written = 0
        progress.part(f"applying to policy {base.version}", sum(f.size for f in new.files))
        for file in new.files:
            out = create_sized(target / file.name, file.size)
            check = ChunkCheck(file.size, new.chunk_size, file.chunks, partial(on_chunk, file.name))
            try:
                jobs = (
                    job(_place_record, bases, buffers, out, *item)
                    for item in records.of_file(file.size)
                )
                with closing(in_order(pool, jobs, 2 * threads)) as placed:
                    for data, buffer in placed:
                        if not check.feed(data):
                            break
                        progress.went(len(data))
                        buffers.give_back(buffer)
            finally:
                os.close(out)
            if not check.complete:
                raise UntrustedError(
                    f"{file.name} made from policy {base.version} and its delta is not the "
                    f"published one of policy {new.version}: the base is damaged"
                )
            written += file.size
        records.end()
    return written


def read_header(fd: int) -> tuple[DeltaHeader, int]:
    """Returns the header of an open delta and the offset of its first record. Raises
    MalformedError."""
    size = os.fstat(fd).st_size
    if size < len(MAGIC) + 4 or read_at(fd, 0, len(MAGIC)) != MAGIC:
        raise MalformedError("not a delta: it does not begin with PRIMEDL1")
    (length,) = struct.unpack("<I", read_at(fd, len(MAGIC), 4))
    begin = len(MAGIC) + 4
    if not 2 <= length <= min(MAX_HEADER, size - begin):
        raise MalformedError("the delta's header does not fit the file")
    try:
        header = DeltaHeader.model_validate_json(read_at(fd, begin, length))
    except ValidationError as error:
        raise MalformedError(f"the delta's header: {error.errors()[0]['msg']}") from error
    return header, begin + length


def _check_header(header: DeltaHeader, base: Manifest, new: Manifest) -> None:
    if header.base_digest != base.result_digest or header.base_version != base.version:
        raise UntrustedError(
            f"the delta starts from {header.base_digest} (policy {header.base_version}), "
            f"not from {base.result_digest} (policy {base.version})"
        )
    files = tuple(DeltaFile(name=f.name, size=f.size, digest=f.digest) for f in new.files)
    if header.result_digest != new.result_digest or header.files != files:
        raise UntrustedError(f"the delta does not lead to policy {new.version}")
    known = {entry.name for entry in base.files}
    if not set(header.base_files) <= known:
        raise MalformedError("the delta starts from a file that its base does not have")


def _counted(spans: Iterator[_Span]) -> Iterator[_Span]:
    for span in spans:
        yield span
        progress.went(span.length)


class _Pairing:
    """Chooses the base bytes with which each part of a new file is compared."""

    def __init__(self, base: Manifest, fds: list[int]) -> None:
        self._whole = {entry.digest: index for index, entry in enumerate(base.files)}
        self._tensors: dict[str, tuple[int, Tensor]] = {}
        for index, fd in enumerate(fds):
            for tensor in read_tensors(fd):
                self._tensors.setdefault(tensor.name, (index, tensor))

    def spans(self, entry: FileEntry, fd: int) -> Iterator[_Span]:
        """Yields spans of at most BLOCK bytes that cover the file in order; an unchanged file is
        one span."""
        same = self._whole.get(entry.digest)
        if same is not None and entry.size:
            yield _Span(0, entry.size, 1, same, 0, same=True)
            return
        position = 0
        for tensor in read_tensors(fd):
            yield from _cut(_Span(position, tensor.offset - position, 1))
            yield from _cut(self._pair(tensor))
            position = tensor.offset + tensor.size
        yield from _cut(_Span(position, entry.size - position, 1))

    def _pair(self, tensor: Tensor) -> _Span:
        index, old = self._tensors.get(tensor.name, (NO_BASE, tensor))
        if index == NO_BASE or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            return _Span(tensor.offset, tensor.size, 1)
        return _Span(tensor.offset, tensor.size, tensor.width, index, old.offset)


def _cut(span: _Span) -> Iterator[_Span]:
    for start in range(0, span.length, BLOCK):
        yield _Span(
            span.offset + start,
            min(BLOCK, span.length - start),
            span.width,
            span.base_file,
            span.base_offset + start if span.base_file != NO_BASE else 0,
        )


def _encode_span(bases: list[int], fd: int, buffers: Buffers, span: _Span) -> bytes:
    from prime_broadcast import codec

    if span.same:
        block = Block(Kind.COPY)
    else:
        old_buffer, new_buffer = buffers.take(span.length), buffers.take(span.length)
        new = memoryview(new_buffer)[: span.length]
        read_into(fd, new, span.offset)
        old: memoryview | None = None
        if span.base_file != NO_BASE:
            old = memoryview(old_buffer)[: span.length]
            read_into(bases[span.base_file], old, span.base_offset)
        block = codec.encode_block(old, new, span.width)
        buffers.give_back(old_buffer)
        buffers.give_back(new_buffer)
    record = Record(
        block.kind,
        span.width,
        span.base_file,
        span.base_offset,
        span.length,
        len(block.first),
        len(block.second),
    )
    return b"".join((_RECORD.pack(*record), block.first, block.second))


class _Records:
    """Reads records in order and checks their bounds."""

    def __init__(self, fd: int, position: int, base_sizes: list[int]) -> None:
        self._fd = fd
        self._position = position
        self._size = os.fstat(fd).st_size
        self._base_sizes = base_sizes

    def of_file(self, size: int) -> Iterator[tuple[int, Record, bytes, bytes]]:
        """Yields (file offset, record, its two frames), covering exactly `size` bytes. Long copies
        come in pieces of BLOCK bytes."""
        covered = 0
        while covered < size:
            record, first, second = self._next()
            begin = covered
            covered += record.length
            if record.length == 0 or covered > size:
                raise MalformedError("the delta's records do not cover their file")
            if record.kind == Kind.COPY:
                for start in range(0, record.length, BLOCK):
                    piece = min(BLOCK, record.length - start)
                    part = record._replace(base_offset=record.base_offset + start, length=piece)
                    yield begin + start, part, b"", b""
            else:
                yield begin, record, first, second

    def end(self) -> None:
        """Raises MalformedError if bytes follow the last file."""
        if self._position != self._size:
            raise MalformedError("the delta has bytes after its last file")

    def _next(self) -> tuple[Record, bytes, bytes]:
        if self._position + _RECORD.size > self._size:
            raise MalformedError("the delta is truncated")
        raw = read_at(self._fd, self._position, _RECORD.size)
        record = Record(*_RECORD.unpack(raw))
        begin = self._position + _RECORD.size
        self._position = begin + record.first + record.second
        if record.kind > Kind.RAW or record.width not in WIDTHS:
            raise MalformedError("the delta has a record of an unknown kind")
        if record.kind != Kind.COPY and record.length > MAX_BLOCK:
            raise MalformedError("the delta has a record that is too long")
        if max(record.first, record.second) > 2 * MAX_BLOCK or self._position > self._size:
            raise MalformedError("the delta is truncated in a record")
        if record.kind != Kind.RAW:
            known = record.base_file < len(self._base_sizes)
            end = record.base_offset + record.length
            if not known or end > self._base_sizes[record.base_file]:
                raise MalformedError("the delta reads outside of its base")
        first = read_at(self._fd, begin, record.first)
        return record, first, read_at(self._fd, begin + record.first, record.second)


def _place_record(
    bases: list[int],
    buffers: Buffers,
    out: int,
    offset: int,
    record: Record,
    first: bytes,
    second: bytes,
) -> tuple[Buffer, bytearray]:
    """Writes a record's bytes to `out` at `offset`. Returns the bytes, and the pool buffer that
    holds them, if any."""
    from prime_broadcast import codec

    kind = Kind(record.kind)
    buffer = buffers.take(record.length if kind is not Kind.RAW else 0)
    old = memoryview(buffer)[: record.length]
    if kind is not Kind.RAW:
        read_into(bases[record.base_file], old, record.base_offset)
    data = codec.decode_block(Block(kind, first, second), old, record.length, record.width)
    write_at(out, data, offset)
    return data, buffer
