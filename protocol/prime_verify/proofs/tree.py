"""The hash tree of a proof's commitment: SHA-256; leaves and nodes have different prefixes, and a
level is filled up with zeros."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def leaf(marks: bytes | memoryview) -> bytes:
    return hashlib.sha256(b"\x00" + marks).digest()


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def depth(count: int) -> int:
    return (count - 1).bit_length()


def _levels(hashes: Sequence[bytes]) -> list[list[bytes]]:
    levels = [list(hashes) + [bytes(32)] * ((1 << depth(len(hashes))) - len(hashes))]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([node(below[i], below[i + 1]) for i in range(0, len(below), 2)])
    return levels


def root(hashes: Sequence[bytes]) -> bytes:
    return _levels(hashes)[-1][0]


def path(hashes: Sequence[bytes], index: int) -> list[bytes]:
    levels = _levels(hashes)[:-1]
    return [below[(index >> level) ^ 1] for level, below in enumerate(levels)]


def climb(at: bytes, places: Sequence[tuple[int, int]], path: bytes) -> bytes:
    """Returns the root that the path of the hash `at` leads to. Each of `places` is its index in a
    tree and that tree's number of hashes; a tree's root is a hash of the next tree. `path` holds
    the siblings."""
    used = 0
    for index, count in places:
        for level in range(depth(count)):
            sibling, used = path[used : used + 32], used + 32
            at = node(sibling, at) if index >> level & 1 else node(at, sibling)
    return at
