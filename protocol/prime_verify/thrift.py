"""Strict reader of Thrift's compact protocol, bounded in depth, number of values, and bytes.

It supports just enough to inspect Parquet's footer and page headers before a larger library does.
Structs become dicts by field id, lists Python lists, binaries bytes, booleans 0 and 1; doubles are
skipped.
"""

from __future__ import annotations

from prime_core.errors import MalformedError

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
        raise MalformedError(f"Thrift field {field} is no integer")
    return value


def structure(struct: Struct, field: int) -> Struct:
    """Field as a struct. Raises MalformedError if it is absent or of another type."""
    value = struct.get(field)
    if not isinstance(value, dict):
        raise MalformedError(f"Thrift field {field} is no struct")
    return value


def structures(struct: Struct, field: int) -> list[Struct]:
    """Field as a list of structs. Raises MalformedError if it is anything else."""
    value = struct.get(field, [])
    if not isinstance(value, list):
        raise MalformedError(f"Thrift field {field} is no list")
    items = [item for item in value if isinstance(item, dict)]
    if len(items) != len(value):
        raise MalformedError(f"Thrift field {field} is no list of structs")
    return items


def binary(struct: Struct, field: int) -> bytes:
    """Field as bytes. Raises MalformedError if it is absent or of another type."""
    value = struct.get(field)
    if not isinstance(value, bytes):
        raise MalformedError(f"Thrift field {field} is no binary")
    return value
