"""Checks Parquet's footer and page headers before pyarrow reads the file.

pyarrow allocates memory according to page headers, and some of its accessors abort the process on
unknown values. Therefore both are read here first (ids as in parquet-format's parquet.thrift) and
restricted to what a rollout file may contain: one row group, zstd, data pages of version 1 in plain
encoding, within a budget. With plain encoding, the unpacked size bounds the decoded size.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_core.errors import MalformedError
from prime_verify.thrift import (
    Reader,
    Struct,
    binary,
    integer,
    structure,
    structures,
)

MAX_VALUES = 1 << 23
"""Maximum number of values in all columns of a file, as declared by footer and page headers."""
MAX_FOOTER = 1 << 16
MAGIC = b"PAR1"
_DATA_PAGE = 0
_PLAIN, _RLE = 0, 3
ZSTD = 6
PHYSICAL_TYPES = range(8)


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
            raise MalformedError("a page is no data page of version 1")
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
