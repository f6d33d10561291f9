"""Identifiers and units, each with one name and one representation.

A 32-byte value is always the text "0x" + 64 lowercase hex digits; an account is always its EIP-55
checksummed text. Raw bytes appear only where they are hashed or sent.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NewType

from prime_core.errors import MalformedError

Address = NewType("Address", str)
"""An Ethereum account, EIP-55 checksummed."""
Digest = NewType("Digest", str)
"""32 bytes as "0x" + 64 lowercase hex digits (SHA-256, BLAKE3, keccak-256, EIP-712 digest)."""
Signature = NewType("Signature", str)
"""65 bytes r‖s‖v (ECDSA), or an ERC-1271 blob, as "0x" + lowercase hex."""
Step = NewType("Step", int)
"""Number of a training batch. Batch s is trained on policy version s and produces version s + 1."""
Units = NewType("Units", int)
"""Generated tokens of accepted rows, as counted by a validator."""

ZERO_DIGEST = Digest("0x" + "00" * 32)
ZERO_ADDRESS = Address("0x" + "00" * 20)

_DIGEST = re.compile(r"0x[0-9a-f]{64}\Z")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}\Z")
_HEX = re.compile(r"0x(?:[0-9a-f]{2})*\Z")


def digest(value: str | bytes) -> Digest:
    """Returns `value` as a Digest. Raises MalformedError unless it is exactly 32 bytes."""
    text = "0x" + value.hex() if isinstance(value, bytes) else value
    plain = len(value) == 32 if isinstance(value, bytes) else _DIGEST.match(text)
    if not plain:
        raise MalformedError(f"not a 32-byte lowercase hex digest: {text[:80]!r}")
    return Digest(text)


def address(value: str | bytes) -> Address:
    """Returns `value` checksummed (EIP-55). Raises MalformedError unless it is an Ethereum address
    in all lower case, all upper case, or mixed case with the correct checksum."""
    text = "0x" + value.hex() if isinstance(value, bytes) else value
    if isinstance(value, bytes) and len(value) == 20:
        return _checksummed(text)
    if isinstance(text, str) and _ADDRESS.match(text):
        checked = _checksummed(text.lower())
        if text == checked or text[2:] in (text[2:].lower(), text[2:].upper()):
            return checked
    raise MalformedError(f"not an Ethereum address: {str(text)[:80]!r}")


@lru_cache(maxsize=65536)
def _checksummed(lower: str) -> Address:
    from eth_hash.auto import keccak  # most commands' --help needs none

    marks = keccak(lower[2:].encode()).hex()
    pairs = zip(lower[2:], marks, strict=False)
    return Address("0x" + "".join(c.upper() if mark > "7" else c for c, mark in pairs))


def signature(value: str | bytes) -> Signature:
    """Returns `value` as hex text. Raises MalformedError unless it is hex of 65 to 4096 bytes."""
    text = "0x" + value.hex() if isinstance(value, bytes) else value
    if not _HEX.match(text) or not 65 <= (len(text) - 2) // 2 <= 4096:
        raise MalformedError("not a signature: expected 0x and 65 to 4096 bytes of lowercase hex")
    return Signature(text)


def to_bytes(value: Digest | Signature | Address) -> bytes:
    """The raw bytes of a digest, signature or address."""
    return bytes.fromhex(value[2:])
