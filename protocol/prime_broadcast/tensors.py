"""Where the tensors lie in a safetensors file: header length (u64, little-endian), JSON, data."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass

from prime_broadcast.files import read_at

MAX_HEADER = 100 << 20
"""The limit of the safetensors library."""

_WIDTH = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4,
    "U32": 4, "I64": 8, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """`offset` and `size` in bytes from the file's beginning; `width` of one element in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    width: int


def read_tensors(fd: int) -> list[Tensor]:
    """The tensors of an open file in the order of their data; empty if it is not a well-formed
    safetensors file (it is then treated as plain bytes, so nothing is lost)."""
    size = os.fstat(fd).st_size
    if size < 8:
        return []
    (length,) = struct.unpack("<Q", read_at(fd, 0, 8))
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        return []
    try:
        return _tensors(json.loads(read_at(fd, 8, length)), 8 + length, size)
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _tensors(header: object, start: int, size: int) -> list[Tensor]:
    if not isinstance(header, dict):
        raise TypeError("the header is not an object")
    found: list[Tensor] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):
            raise TypeError(f"tensor {name} is not an object")
        begin, end = (_natural(value) for value in _list(entry["data_offsets"]))
        shape = tuple(_natural(value) for value in _list(entry["shape"]))
        dtype = str(entry["dtype"])
        width = _WIDTH[dtype]
        if end - begin != width * math.prod(shape):
            raise ValueError(f"tensor {name} has {end - begin} bytes for {shape} of {dtype}")
        if end > begin:
            found.append(Tensor(name, dtype, shape, start + begin, end - begin, width))
    found.sort(key=lambda tensor: tensor.offset)
    position = start
    for tensor in found:
        if tensor.offset < position or tensor.offset + tensor.size > size:
            raise ValueError(f"tensor {tensor.name} overlaps another or leaves the file")
        position = tensor.offset + tensor.size
    return found


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"not a natural number: {value!r}")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value
