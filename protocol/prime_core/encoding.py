"""Canonical bytes, digests, Merkle trees.

Canonical JSON is the subset of RFC 8785 without floats: sorted keys, no spaces, UTF-8, integers
only. Signatures and digests always cover the original bytes, never a re-encoding of parsed ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from blake3 import blake3
from eth_hash.auto import keccak

from prime_core.errors import MalformedError
from prime_core.ids import Digest, digest, to_bytes

MAX_JSON_BYTES = 4 << 20


def canonical_json(value: Any) -> bytes:
    """Encodes a JSON value without floats as canonical bytes. Raises MalformedError on any other
    value."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse_canonical_json(data: bytes) -> Any:
    """Parses canonical JSON. Raises MalformedError if `data` is not canonical or longer than
    MAX_JSON_BYTES."""
    if len(data) > MAX_JSON_BYTES:
        raise MalformedError(f"JSON of {len(data)} bytes exceeds the limit of {MAX_JSON_BYTES}")
    try:
        value = json.loads(data)
        if canonical_json(value) != data:
            raise MalformedError("JSON is not in canonical form")
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from error
    return value


_SCALARS = frozenset({str, int, bool, type(None)})


def _refuse_floats(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise MalformedError("canonical JSON has text keys only")
            if type(item) not in _SCALARS:
                _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            if type(item) not in _SCALARS:
                _refuse_floats(item)
    elif value is not None and not isinstance(value, str | bool | int):
        raise MalformedError(f"canonical JSON holds no {type(value).__name__}")


def sha256(data: bytes) -> Digest:
    """SHA-256 (FIPS 180-4): for rollout files, evidence, and small or on-chain objects."""
    return digest(hashlib.sha256(data).digest())


def blake3_digest(data: bytes) -> Digest:
    """BLAKE3: for policies and their chunks."""
    return digest(blake3(data).digest())


def keccak256(data: bytes) -> Digest:
    """Keccak-256, as in the EVM."""
    return digest(keccak(data))


def _pair(a: bytes, b: bytes) -> bytes:
    return keccak(a + b if a < b else b + a)


class MerkleTree:
    """A tree over 32-byte leaves with sorted keccak pairs, as OpenZeppelin's MerkleProof verifies.

    An odd node moves up unchanged. Leaves are EIP-712 digests (66-byte preimage) or double-hashed,
    so an inner node (64-byte preimage) cannot pass as a leaf.
    """

    def __init__(self, leaves: Sequence[Digest]) -> None:
        level = [to_bytes(leaf) for leaf in leaves]
        self._levels = [level]
        while len(level) > 1:
            level = [
                _pair(level[i], level[i + 1]) if i + 1 < len(level) else level[i]
                for i in range(0, len(level), 2)
            ]
            self._levels.append(level)

    def root(self) -> Digest:
        """The root. Raises MalformedError if there are no leaves."""
        if not self._levels[0]:
            raise MalformedError("a Merkle tree needs at least one leaf")
        return digest(self._levels[-1][0])

    def proof(self, index: int) -> list[Digest]:
        """Sibling path from leaf `index` to the root. Raises MalformedError if out of range."""
        if not 0 <= index < len(self._levels[0]):
            raise MalformedError(f"leaf {index} is not among {len(self._levels[0])}")
        path = []
        for height, level in enumerate(self._levels[:-1]):
            sibling = (index >> height) ^ 1
            if sibling < len(level):
                path.append(digest(level[sibling]))
        return path


def merkle_root(leaves: Sequence[Digest]) -> Digest:
    """Root of the MerkleTree over `leaves`. Raises MalformedError if there are none."""
    return MerkleTree(leaves).root()


def merkle_proof(leaves: Sequence[Digest], index: int) -> list[Digest]:
    """Proof of leaf `index` in the MerkleTree over `leaves`. Raises MalformedError if out of
    range."""
    return MerkleTree(leaves).proof(index)


def merkle_verify(root: Digest, leaf: Digest, proof: Sequence[Digest]) -> bool:
    """True if `proof` leads from `leaf` to `root`."""
    node = to_bytes(leaf)
    for sibling in proof:
        node = _pair(node, to_bytes(sibling))
    return digest(node) == root


def reward_leaf(node: str, cumulative: int) -> Digest:
    """keccak256(keccak256(abi.encode(node, cumulative))): leaf of a reward root (Rewards.sol)."""
    encoded = bytes(12) + bytes.fromhex(node[2:]) + cumulative.to_bytes(32, "big")
    return digest(keccak(keccak(encoded)))
