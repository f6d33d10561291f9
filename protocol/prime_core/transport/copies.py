"""Several published things in one answer: `GET /v1/copies?names=KIND/DIGEST,…`.

A name is the path of one thing under `/v1/`: `objects/0x…` (its bytes), `submissions/0x…` or
`leases/0x…` (their JSON). The answer is one line of JSON, a list of [name, number of bytes], then
the bytes in that order. The number is null where the server has no such thing. Names that the
answer lacks had no room or no time in it: they can be asked for again, or by their own paths.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence

from pydantic import NonNegativeInt, TypeAdapter

from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, UnavailableError
from prime_core.ids import Digest

MOST_NAMES = 64
MOST_BYTES = 256 << 10
"""Of the things in one answer that a server gives. Clients that do not read keep it in memory."""
MOST_TAKEN = 4 << 20
"""Bytes that a client takes, in one answer and in the answers to one list of names."""
READ_SECONDS = 1.0
"""A server begins to read no further thing after this time."""
_MOST_HEAD = MOST_NAMES << 7
_PLACES = TypeAdapter(list[tuple[str, NonNegativeInt | None]])
_NAME = re.compile(r"(objects|submissions|leases)/(0x[0-9a-f]{64})")


def parse_names(text: str) -> list[tuple[str, Digest]]:
    """Returns kind and digest of each name of a query. Raises MalformedError."""
    names = list(dict.fromkeys(text.split(",", MOST_NAMES - 1)))  # the last part has the rest
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    if len(found) < len(names):
        raise MalformedError(f"names are at most {MOST_NAMES} of KIND/DIGEST, with commas between")
    return [(match[1], Digest(match[2])) for match in found]


def pack(
    names: Sequence[tuple[str, Digest]],
    read: Callable[[str, Digest, int], bytes],
    seconds: float = READ_SECONDS,
) -> bytes:
    """Returns the answer. `read` returns the bytes of a thing, at most as many as its last
    argument says. It raises NotFoundError where there is none and MalformedError where it is
    larger. The answer ends at the first thing that no longer fits, after `seconds` (but not before
    the first name), and at an UnavailableError, so that a store that fails is asked once."""
    end = time.monotonic() + seconds
    places: list[tuple[str, int | None]] = []
    parts: list[bytes] = []
    left = MOST_BYTES
    for at, (kind, digest) in enumerate(names):
        if at and time.monotonic() >= end:
            break
        try:
            data: bytes | None = read(kind, digest, left)
        except NotFoundError:
            places.append((f"{kind}/{digest}", None))
            continue
        except MalformedError:
            data = None
        except UnavailableError:
            break
        if data is not None and len(data) <= left:
            places.append((f"{kind}/{digest}", len(data)))
            parts.append(data)
            left -= len(data)
        elif parts:  # else it fits no answer: the next name may
            break
    return b"".join([json.dumps(places).encode(), b"\n", *parts])


def unpack(answer: bytes) -> dict[str, bytes | None]:
    """Returns the bytes of each name in an answer, None for what the server does not have. Objects
    are checked against their digests. Raises MalformedError, also beyond MOST_TAKEN bytes."""
    head, _, body = answer.partition(b"\n")
    if len(head) > _MOST_HEAD or len(body) > MOST_TAKEN:
        raise MalformedError("the answer is larger than any list of copies")
    found: dict[str, bytes | None] = {}
    at = 0
    try:
        places = _PLACES.validate_json(head)
    except ValueError as error:
        raise MalformedError("the answer does not begin with a list of copies") from error
    for name, size in places:
        if size is None:
            found[name] = None
            continue
        data = body[at : at + size]
        at += size
        if name.startswith("objects/") and name != f"objects/{sha256(data)}":
            raise MalformedError(f"the copy of {name[:80]} has another digest")
        found[name] = data
    if at != len(body):
        raise MalformedError("the answer's copies are not as long as it says")
    return found
