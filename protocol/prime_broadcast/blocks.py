"""Types of a delta's blocks. Encoding and decoding are in codec.py, which needs numpy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

WIDTHS = (1, 2, 4, 8)
MAX_BLOCK = 16 << 20

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """How a block is encoded."""

    COPY = 0
    SPARSE = 1
    DENSE = 2
    RAW = 3


@dataclass(frozen=True)
class Block:
    """`first` and `second` are zstd frames: gaps and values (SPARSE), values (DENSE), bytes (RAW);
    unused ones are empty."""

    kind: Kind
    first: bytes = b""
    second: bytes = b""
