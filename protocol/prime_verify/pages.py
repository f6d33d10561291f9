"""Checks Parquet's footer and page headers before pyarrow reads the file.

pyarrow allocates memory according to page headers, and some of its accessors abort the process on
unknown values. Therefore both are read here first (ids as in parquet-format's parquet.thrift) and
restricted to what a rollout file may contain: one row group, zstd, data pages of version 1 in plain
encoding, within a budget. With plain encoding, the unpacked size bounds the decoded size.

`Reader` reads just as much of Thrift as that needs. Structs become dicts by field id, lists Python
lists, binaries bytes, booleans 0 and 1; doubles are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_core.errors import MalformedError

MAX_VALUES = 1 << 23
"""Maximum number of values in all columns of a file, as declared by footer and page headers."""
MAX_FOOTER = 1 << 16
MAGIC = b"PAR1"
_DATA_PAGE = 0
_PLAIN, _RLE = 0, 3
ZSTD = 6
PHYSICAL_TYPES = range(8)
Value = int | bytes | list["Value"] | dict[int, "Value"]
Struct = dict[int, Value]

MAX_DEPTH = 12
MAX_NODES = 20_000
"""Maximum number of values in one top-level struct; a footer of ours has about 600."""


class Reader:
    """Cursor over data[at:end]. Every method raises MalformedError at the first error."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        if not 0 <= at <= end <= len(data):
            raise MalformedError("a Thrift structure lies outside the file")
        self.data, self.at, self.end = data, at, end
        self._nodes = 0

    def struct(self) -> Struct:
        """Reads one top-level struct at the cursor."""
        self._nodes = 0
        return self._struct(0)

    def skip(self, count: int) -> None:
        """Advances the cursor by `count` bytes."""
        if not 0 <= count <= self.end - self.at:
            raise MalformedError("a Thrift structure is cut off")
        self.at += count

    def _byte(self) -> int:
        self.skip(1)
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
            shift += 7
            if shift > 63:
                raise MalformedError("a Thrift number is overlong")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _struct(self, depth: int) -> Struct:
        result: Struct = {}
        last = 0
        while True:
            head = self._byte()
            if head == 0:
                return result
            kind, delta = head & 0x0F, head >> 4
            last = last + delta if delta else self._zigzag()
            if last in result:
                raise MalformedError("a Thrift struct repeats a field")
            result[last] = 2 - kind if kind in (1, 2) else self._value(kind, depth + 1)

    def _value(self, kind: int, depth: int) -> Value:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise MalformedError("a Thrift structure is too deep or too large")
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            self.skip(8)
            return 0
        if kind == 8:
            length = self._varint()
            start = self.at
            self.skip(length)
            return self.data[start : self.at]
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            if count > MAX_NODES:
                raise MalformedError("a Thrift list is too long")
            return [self._value(head & 0x0F, depth + 1) for _ in range(count)]
        if kind == 12:
            return self._struct(depth)
        raise MalformedError(f"Thrift type {kind} has no place here")


def integer(struct: Struct, field: int) -> int:
    """Field as an integer. Raises MalformedError if it is absent or of another type."""
    value = struct.get(field)
    if not isinstance(value, int):
        raise MalformedError(f"Thrift field {field} is not an integer")
    return value


def structure(struct: Struct, field: int) -> Struct:
    """Field as a struct. Raises MalformedError if it is absent or of another type."""
    value = struct.get(field)
    if not isinstance(value, dict):
        raise MalformedError(f"Thrift field {field} is not a struct")
    return value


def structures(struct: Struct, field: int) -> list[Struct]:
    """Field as a list of structs. Raises MalformedError if it is anything else."""
    value = struct.get(field, [])
    if not isinstance(value, list):
        raise MalformedError(f"Thrift field {field} is not a list")
    items = [item for item in value if isinstance(item, dict)]
    if len(items) != len(value):
        raise MalformedError(f"Thrift field {field} is not a list of structs")
    return items


def binary(struct: Struct, field: int) -> bytes:
    """Field as bytes. Raises MalformedError if it is absent or of another type."""
    value = struct.get(field)
    if not isinstance(value, bytes):
        raise MalformedError(f"Thrift field {field} is not a binary")
    return value


@dataclass(frozen=True)
class Column:
    """One column chunk as declared by the footer; our files never have `dictionary` or
    `elsewhere`."""

    codec: int
    values: int
    start: int
    length: int
    dictionary: bool
    elsewhere: bool


@dataclass(frozen=True)
class Footer:
    """The footer's declarations. `groups` is the number of row groups; `columns` are those of the
    first."""

    rows: int
    groups: int
    columns: tuple[Column, ...]
    pairs: dict[str, str]


def read_footer(data: bytes) -> Footer:
    """Reads the footer of a Parquet file. Raises MalformedError if it is invalid or over its
    limits."""
    if len(data) < 12 or data[:4] != MAGIC or data[-4:] != MAGIC:
        raise MalformedError("not a Parquet file")
    length = int.from_bytes(data[-8:-4], "little")
    if not 0 < length <= min(MAX_FOOTER, len(data) - 12):
        raise MalformedError(f"a Parquet footer of {length} bytes")
    meta = Reader(data, len(data) - 8 - length, len(data) - 8).struct()
    groups = structures(meta, 4)
    pairs: dict[str, str] = {}
    for pair in structures(meta, 5):
        try:
            key, value = binary(pair, 1).decode(), binary(pair, 2).decode()
        except UnicodeDecodeError as error:
            raise MalformedError("the metadata is not UTF-8") from error
        if key in pairs:
            raise MalformedError("the metadata repeats a key")
        pairs[key] = value
    columns = tuple(_column(chunk) for group in groups[:1] for chunk in structures(group, 1))
    rows = integer(meta, 3)
    if rows < 0 or sum(integer(group, 3) for group in groups) != rows:
        raise MalformedError("the row groups do not add up")
    return Footer(rows, len(groups), columns, pairs)


def _column(chunk: Struct) -> Column:
    meta = structure(chunk, 3)
    if integer(meta, 1) not in PHYSICAL_TYPES:
        raise MalformedError("a column has an unknown physical type")
    return Column(
        codec=integer(meta, 4),
        values=integer(meta, 5),
        start=integer(meta, 9),
        length=integer(meta, 7),
        dictionary=11 in meta,
        elsewhere=1 in chunk,
    )


def require_plain_pages(data: bytes, *, start: int, length: int, values: int, budget: int) -> int:
    """Checks the pages of one column chunk, `length` bytes of `data` from `start`.

    Returns their unpacked size in bytes. Raises MalformedError unless all are plainly encoded data
    pages, hold `values` values in total and unpack to at most `budget` bytes.
    """
    reader = Reader(data, start, start + length)
    unpacked = counted = 0
    while reader.at < reader.end:
        header = reader.struct()
        page = structure(header, 5)  # data_page_header
        if integer(header, 1) != _DATA_PAGE:
            raise MalformedError("a page is not a data page of version 1")
        if [integer(page, i) for i in (2, 3, 4)] != [_PLAIN, _RLE, _RLE]:
            raise MalformedError("a page is not plainly encoded")
        size, count = integer(header, 2), integer(page, 1)
        if size < 0 or count < 0:
            raise MalformedError("a page header holds a negative size")
        unpacked += size
        counted += count
        if unpacked > budget or counted > values:
            raise MalformedError("pages unpack to more than a file may hold")
        reader.skip(integer(header, 3))
    if counted != values:
        raise MalformedError(f"pages hold {counted} values, the footer says {values}")
    return unpacked
