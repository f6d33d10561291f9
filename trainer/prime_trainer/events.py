"""TensorBoard event files, written without TensorBoard: records of scalar summaries.

A file is a row of records: length (u64), masked CRC-32C of it, payload, masked CRC-32C of that. A
payload is a protobuf `Event` (wall_time = 1, step = 2, file_version = 3, summary = 5), a summary's
value a tag (1) and a float (2). tensorflow/core/util/event.proto, lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

POLYNOMIAL = 0x82F63B78
MASK = 0xA282EAD8


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return found


TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    """One record around a payload."""
    length = struct.pack("<Q", len(payload))
    return length + _masked(length) + payload + _masked(payload)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def version_event(wall_time: float) -> bytes:
    """The first event of every file."""
    return b"\x09" + struct.pack("<d", wall_time) + _bytes_field(3, b"brain.Event:2")


def scalars_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """One event with a value for each tag."""
    values = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in scalars.items()
    )
    head = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
    return head + _bytes_field(5, values)


def flat(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of every number in a step's line; nested names are joined by a slash."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float):
            yield prefix + name, float(value)


class EventFile:
    """Appends events to a new file in `folder`; one a start of the trainer."""

    def __init__(self, folder: Path, wall_time: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{wall_time:.6f}.trainer"
        self.path.write_bytes(record(version_event(wall_time)))

    def add(self, wall_time: float, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one event, at once."""
        with self.path.open("ab") as file:
            file.write(record(scalars_event(wall_time, step, scalars)))
