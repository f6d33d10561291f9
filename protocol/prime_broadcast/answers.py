"""The head of an answer to a request for a file: strict, bounded, and cheap to parse.

http.client parses heads with the email package, which costs more than all else that Python does for
a chunk. Only what a file server needs is understood: a body of a stated length, no codings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from prime_core.errors import MalformedError

MAX_HEAD = 64 << 10
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?\Z")
_LENGTH = re.compile(rb"[0-9]{1,19}\Z")


@dataclass(frozen=True)
class Head:
    """Status and fields (names in lower case) of an answer. `length` of its body, None if it does
    not say; `closes`: no other answer will come on its connection."""

    status: int
    reason: str
    fields: dict[str, str]
    length: int | None
    closes: bool


def parse_answer(raw: bytes) -> Head:
    """One head, up to and including its blank line. Raises MalformedError."""
    lines = raw[:-4].split(b"\r\n")
    match = _STATUS.match(lines[0])
    if match is None:
        raise MalformedError("it does not answer in HTTP/1.1")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise MalformedError("its answer's head cannot be read")
        key, text = name.decode("latin-1").lower(), value.strip(b" \t").decode("latin-1")
        if key == "content-length" and fields.get(key, text) != text:
            raise MalformedError("its answer states two lengths")
        fields[key] = text
    length = fields.get("content-length")
    if length is not None and not _LENGTH.match(length.encode("latin-1")):
        raise MalformedError("its answer states no length that could be")
    coded = "transfer-encoding" in fields
    connection = fields.get("connection", "").lower()
    return Head(
        int(match[2]),
        (match[3] or b"").decode("latin-1"),
        fields,
        None if length is None or coded else int(length),
        connection == "close" or (match[1] == b"0" and connection != "keep-alive"),
    )


def read_answer(receive: Callable[[memoryview], int]) -> tuple[Head, bytes]:
    """The next final answer's head, interim ones (1xx) skipped, and what came of its body with it.
    `receive` fills some of a buffer and returns how much. Raises ConnectionError if the stream ends
    before, MalformedError, and what `receive` raises."""
    buffer = memoryview(bytearray(4096))
    held = b""
    while True:
        while (end := held.find(b"\r\n\r\n")) < 0:
            if len(held) > MAX_HEAD:
                raise MalformedError("its answer's head is too long")
            count = receive(buffer)
            if not count:
                raise ConnectionResetError("it closed the connection without an answer")
            held += buffer[:count]
        head = parse_answer(held[: end + 4])
        held = held[end + 4 :]
        if head.status >= 200:
            return head, held
