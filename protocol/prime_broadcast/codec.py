"""One block of a delta: how the bit patterns of a run of numbers changed. Pure; numpy and zstd.

A block is a run of little-endian words of 1, 2, 4 or 8 bytes (the bit patterns of fp8, bf16/fp16,
fp32, fp64). After one optimizer step most words of a published bf16 policy are the same and the
others differ by one or two units in the last place, so a block is written as

SPARSE  gaps between changed positions, one byte each (255 means "255 and go on"), and the zigzag
        differences (new − old, wrapping) of the changed words, low byte plane first
DENSE   the zigzag differences of all words, by byte plane: cheaper once half of them changed
RAW     the new bytes
COPY    nothing: the bytes of the base

each compressed with zstd level 1, whose entropy stage does the work (measured on N(0, 0.02) weights
in bf16: within 15 % of the entropy of positions and differences; higher levels give no more).

Every numpy and zstd call here releases the interpreter's lock, so that blocks run side by side in
threads. Half of the encoder's time goes to finding the changed positions (`flatnonzero`).
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from prime_broadcast.blocks import MAX_BLOCK, WIDTHS, Block, Buffer, Kind
from prime_core.errors import MalformedError

__all__ = ["MAX_BLOCK", "WIDTHS", "Block", "Buffer", "Kind", "decode_block", "encode_block"]

DENSE_FROM = 0.5
"""Share of changed words from which the dense form is smaller."""
LEVEL = 1

_UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def encode_block(old: Buffer | None, new: Buffer, width: int) -> Block:
    """The block that turns `old` into `new` (equal lengths, a multiple of `width` bytes); without
    `old`, the bytes themselves."""
    if old is None:
        return Block(Kind.RAW, _compress(new))
    before = np.frombuffer(old, _UNSIGNED[width])
    after = np.frombuffer(new, _UNSIGNED[width])
    changed = before != after
    count = int(np.count_nonzero(changed))
    if count == 0:
        return Block(Kind.COPY)
    if count >= DENSE_FROM * after.size:
        block = Block(Kind.DENSE, _compress(_planes(_zigzag(after - before, width), width)))
    else:
        positions = np.flatnonzero(changed)
        values = _zigzag(after.take(positions) - before.take(positions), width)
        block = Block(
            Kind.SPARSE, _compress(_pack_gaps(positions)), _compress(_planes(values, width))
        )
    if len(block.first) + len(block.second) >= len(new):
        raw = Block(Kind.RAW, _compress(new))
        return min(raw, block, key=lambda b: len(b.first) + len(b.second))
    return block


def decode_block(block: Block, old: Buffer, length: int, width: int) -> Buffer:
    """The new bytes. `old` are the base's (`length` of them; ignored by RAW) and, where they can
    be written to, are changed in place. Raises MalformedError if the block is not what
    `encode_block` makes; allocates at most a few times `length`."""
    if block.kind is Kind.COPY:
        return old
    if block.kind is Kind.RAW:
        return _decompress(block.first, length, length)
    count = length // width
    if count * width != length or memoryview(old).nbytes != length:
        raise MalformedError("the delta's block does not fit its base")
    words = np.frombuffer(old, _UNSIGNED[width])
    after = words if words.flags.writeable else words.copy()
    if block.kind is Kind.DENSE:
        raw = _decompress(block.first, length, length)
        after += _unzigzag(_unplanes(raw, width), width)
    else:
        positions = _unpack_gaps(_decompress(block.first, 1, 2 * count + 1), count)
        size = positions.size * width
        values = _unzigzag(_unplanes(_decompress(block.second, size, size), width), width)
        values += after.take(positions)
        after[positions] = values
    return _bytes_of(after)


def _bytes_of(words: NDArray[np.unsignedinteger]) -> memoryview:
    return memoryview(words.view(np.uint8).data)


def _zigzag(difference: NDArray[np.unsignedinteger], width: int) -> NDArray[np.unsignedinteger]:
    """Signed n-bit differences (wrapping) as unsigned: 0, −1, 1, −2, … → 0, 1, 2, 3, … `difference`
    is overwritten."""
    signed = difference.view(f"<i{width}")
    sign = signed >> (8 * width - 1)
    signed <<= 1
    signed ^= sign
    return difference


def _unzigzag(values: NDArray[np.unsignedinteger], width: int) -> NDArray[np.unsignedinteger]:
    """The differences; `values` is overwritten."""
    signed = values.view(f"<i{width}")
    sign = -(signed & 1)
    values >>= values.dtype.type(1)
    signed ^= sign
    return values


def _planes(values: NDArray[np.unsignedinteger], width: int) -> bytes | memoryview:
    """(n,) words → width byte planes of n bytes each, lowest first."""
    octets = values.view(np.uint8)
    if width == 1:
        return memoryview(octets.data)
    planes = np.empty((width, values.size), np.uint8)
    for place in range(width):
        planes[place] = octets[place::width]
    return memoryview(planes.reshape(-1).data)


def _unplanes(raw: bytes, width: int) -> NDArray[np.unsignedinteger]:
    planes = np.frombuffer(raw, np.uint8).reshape(width, -1)
    octets = np.empty(planes.size, np.uint8)
    for place in range(width):
        octets[place::width] = planes[place]
    return octets.view(_UNSIGNED[width])


def _pack_gaps(positions: NDArray[np.int64]) -> Buffer:
    """Ascending positions (n,) → one byte a gap (unchanged words between), 255 = go on."""
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    if int(gaps.max()) < 255:
        return memoryview(gaps.astype(np.uint8).data)
    ends = np.cumsum(gaps // 255 + 1)
    packed = np.full(int(ends[-1]), 255, np.uint8)
    packed[ends - 1] = gaps % 255
    return memoryview(packed.data)


def _unpack_gaps(raw: bytes, count: int) -> NDArray[np.int64]:
    """The positions, ascending and below `count`. Raises MalformedError otherwise."""
    packed = np.frombuffer(raw, np.uint8)
    if packed[-1] == 255:
        raise MalformedError("the delta's gaps end in the middle")
    positions: NDArray[np.int64] = packed.astype(np.int64)
    if int(packed.max()) == 255:
        ends = packed != 255
        positions += ends
        np.cumsum(positions, out=positions)
        positions = positions[ends]
    else:
        positions += 1
        np.cumsum(positions, out=positions)
    positions -= 1
    if positions[-1] >= count:
        raise MalformedError("the delta's gaps leave their block")
    return positions


def _compress(data: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def _decompress(frame: bytes, at_least: int, at_most: int) -> bytes:
    """One zstd frame whose header states a size within the bounds, so that a crafted one cannot
    fill the memory. Raises MalformedError."""
    try:
        size = zstandard.frame_content_size(frame)
        if not at_least <= size <= at_most:
            raise MalformedError(f"a delta's block states {size} bytes, expected {at_most}")
        data: bytes = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise MalformedError(f"a delta's block does not decompress: {error}") from error
    if len(data) != size:
        raise MalformedError("a delta's block is shorter than it states")
    return data
