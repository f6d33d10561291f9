"""Parquet page headers, walked before any page is decoded.

A page header says how large the page unpacks and how many values it holds, and pyarrow allocates by
what it says. So they are read here first (Thrift compact protocol; parquet.thrift's PageHeader) and
held to what a rollout file may be: data pages of version 1, plainly encoded, within a budget.
Plain encoding is what makes the unpacked size a bound on the decoded one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.core.errors import MalformedError

MAX_VALUES = 1 << 23
"""Values of all columns of a file together, as declared by footer and page headers alike."""
_MAX_DEPTH = 8
_DATA_PAGE = 0
_PLAIN = 0
_RLE = 3


@dataclass
class _Reader:
    """Cursor over Thrift compact bytes; every read is bounds-checked."""

    data: bytes
    at: int
    end: int

    def byte(self) -> int:
        if self.at >= self.end:
            raise MalformedError("a page header is cut off")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
            shift += 7
            if shift > 63:
                raise MalformedError("a page header holds an overlong number")

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def skip_bytes(self, count: int) -> None:
        if count < 0 or count > self.end - self.at:
            raise MalformedError("a page header is cut off")
        self.at += count


@dataclass
class _Struct:
    """Integer and struct fields of a Thrift struct, by field id; the rest is skipped."""

    integers: dict[int, int] = field(default_factory=dict)
    structs: dict[int, _Struct] = field(default_factory=dict)


def _read_struct(reader: _Reader, depth: int = 0) -> _Struct:
    if depth > _MAX_DEPTH:
        raise MalformedError("a page header is nested too deeply")
    result = _Struct()
    last = 0
    while True:
        head = reader.byte()
        if head == 0:
            return result
        kind, delta = head & 0x0F, head >> 4
        last = last + delta if delta else reader.zigzag()
        if last in result.integers or last in result.structs:
            raise MalformedError("a page header repeats a field")
        if kind in (1, 2):
            result.integers[last] = 2 - kind  # booleans: 1 is true, 2 is false
        elif kind == 3:
            result.integers[last] = reader.byte()
        elif kind in (4, 5, 6):
            result.integers[last] = reader.zigzag()
        elif kind == 7:
            reader.skip_bytes(8)
        elif kind == 8:
            reader.skip_bytes(reader.varint())
        elif kind == 12:
            result.structs[last] = _read_struct(reader, depth + 1)
        else:
            raise MalformedError("a page header holds a list or map, which it never does")


def require_plain_pages(data: bytes, *, start: int, length: int, values: int, budget: int) -> int:
    """Walks the pages of one column chunk, `length` bytes of `data` from `start`.

    Returns their unpacked size in bytes. Raises MalformedError unless all are plainly encoded data
    pages, hold `values` values in total and unpack to at most `budget` bytes.
    """
    end = start + length
    if start < 0 or length < 0 or end > len(data) or values < 0:
        raise MalformedError("a column chunk lies outside the file")
    reader = _Reader(data, start, end)
    unpacked = counted = 0
    while reader.at < end:
        header = _read_struct(reader)
        page = header.structs.get(5)  # data_page_header
        try:
            kind, size, packed = header.integers[1], header.integers[2], header.integers[3]
            if page is None or kind != _DATA_PAGE:
                raise MalformedError("a page is no data page of version 1")
            count, encodings = page.integers[1], [page.integers[i] for i in (2, 3, 4)]
        except KeyError as error:
            raise MalformedError(f"a page header lacks field {error}") from error
        if encodings != [_PLAIN, _RLE, _RLE]:
            raise MalformedError("a page is not plainly encoded")
        if size < 0 or count < 0:
            raise MalformedError("a page header holds a negative size")
        unpacked += size
        counted += count
        if unpacked > budget or counted > values:
            raise MalformedError("pages unpack to more than a file may hold")
        reader.skip_bytes(packed)
    if counted != values:
        raise MalformedError(f"pages hold {counted} values, the footer says {values}")
    return unpacked
