"""A column for signed JSON that is kept forever, in about half the space.

    JSON     digests, signatures and addresses as hexadecimal text, names of fields
    packed   "1:" and base64 of a raw DEFLATE stream of the text, whose hexadecimal values are bytes
             behind a mark of their kind; the names of fields are in the stream's dictionary

A value that is not JSON, or that would not come back exactly, is kept as it is. So are values that
were written before there was this column.
"""

from __future__ import annotations

import re
import zlib
from binascii import a2b_base64, b2a_base64, hexlify
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

from prime_core.ids import address

_MARK = "1:"
_HEX = re.compile(r"0x(?:[0-9a-f]{130}|[0-9a-f]{64}|[0-9a-fA-F]{40})(?![0-9a-fA-F])")
_KINDS = {20: b"\x01", 32: b"\x02", 65: b"\x03"}
"""Marks of an address, a digest and a signature, by their bytes. JSON text contains no mark."""
_RAW = re.compile(rb"\x01.{20}|\x02.{32}|\x03.{65}", re.DOTALL)
_MARKED = re.compile("[\x01\x02\x03]")
_ZERO = b"\x02" + bytes(32)
_DICTIONARY = (
    b'{"receipt":{"submission_digest":"\x02","received_at":1795633357},"signature":"\x03"}'
    b'"problems":"\x02"}}{"lease":{"pool":1,"step":1,"node":"\x01","index":1,"policy_digest":"\x02'
    b'","run_digest":"\x02","target":6,"salt":"\x02","deadline":1795633957},"signature":"\x03",'
    b'"policy_version":1,"opening":{"random":"\x02","draws":"\x02","problems":null}}{"submission":'
    b'{"pool":1,"lease_digest":"\x02","node":"\x01","step":1,"policy_digest":"\x02","sha256":"\x02'
    b'","size":65536,"rows":8,"valid_until":1795634557},"node":"\x01","signature":"\x03"}'
    b'{"opinion":{"pool":1,"submission":"\x02","law":"\x02","outcome":1,"reason":"\x02","table":"'
    b'\x02","evidence":"' + _ZERO + b'","judged_at":1795633358},"law":{"lease":"\x02","run":"\x02",'
    b'"verification_class":"\x02","verifier":"\x02","draws":"\x02"},"validator":"\x01",'
    b'"signature":"\x03"}'
)
"""Part of the form: a value is read with the dictionary that it was written with."""


def pack(text: str) -> str:
    """Returns the form that is stored."""
    if not text.startswith("{") or _MARKED.search(text):
        return text
    stream = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_DICTIONARY)
    packed = b2a_base64(stream.compress(_to_bytes(text)) + stream.flush(), newline=False).decode()
    found = _MARK + packed
    return found if len(found) < len(text) and unpack(found) == text else text


@lru_cache(maxsize=4096)
def unpack(stored: str) -> str:
    """Returns the text that was packed."""
    if not stored.startswith(_MARK):
        return stored
    stream = zlib.decompressobj(-15, zdict=_DICTIONARY)
    return _to_text(stream.decompress(a2b_base64(stored[len(_MARK) :])) + stream.flush())


def _to_bytes(text: str) -> bytes:
    parts, at = [], 0
    for match in _HEX.finditer(text):
        raw = bytes.fromhex(match[0][2:])
        parts += [text[at : match.start()].encode(), _KINDS[len(raw)], raw]
        at = match.end()
    return b"".join([*parts, text[at:].encode()])


def _to_text(found: bytes) -> str:
    return _RAW.sub(_name, found).decode()


def _name(match: re.Match[bytes]) -> bytes:
    raw = match[0][1:]
    return address(raw).encode() if len(raw) == 20 else b"0x" + hexlify(raw)


class Packed(TypeDecorator[str]):
    """Text that is packed in the database. Conditions on such a column compare the stored form."""

    impl = sa.Text
    cache_ok = True

    @property
    def python_type(self) -> type[str]:
        return str

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else pack(value)

    def process_result_value(self, value: Any | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else unpack(value)
