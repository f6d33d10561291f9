"""Several published things in one answer: `GET /v1/copies?names=KIND/DIGEST,…`.

A name is the path of one thing under `/v1/`: `objects/0x…` (its bytes), `submissions/0x…` or
`leases/0x…` (their JSON). The answer is one line of JSON, a list of [name, number of bytes], then
the bytes in that order. The number is null where the server has no such thing. Names that the
answer lacks had no room in it: they can be asked for again, or by their own paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from pydantic import NonNegativeInt, TypeAdapter

from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, UnavailableError
from prime_core.ids import Digest

MOST_NAMES = 64
MOST_BYTES = 4 << 20
"""Of the things in one answer together."""
_PLACES = TypeAdapter(list[tuple[str, NonNegativeInt | None]])
_NAME = re.compile(r"(objects|submissions|leases)/(0x[0-9a-f]{64})")


def parse_names(text: str) -> list[tuple[str, Digest]]:
    """Returns kind and digest of each name of a query. Raises MalformedError."""
    names = list(dict.fromkeys(text.split(",", MOST_NAMES - 1)))  # the last part has the rest
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    if len(found) < len(names):
        raise MalformedError(f"names are at most {MOST_NAMES} of KIND/DIGEST, with commas between")
    return [(match[1], Digest(match[2])) for match in found]


def pack(names: Sequence[tuple[str, Digest]], read: Callable[[str, Digest, int], bytes]) -> bytes:
    """Returns the answer. `read` returns the bytes of a thing, at most as many as its last
    argument says. It raises NotFoundError where there is none and MalformedError where it is
    larger. An UnavailableError ends the answer, so that a store that fails is asked once."""
    places: list[tuple[str, int | None]] = []
    parts: list[bytes] = []
    left = MOST_BYTES
    for kind, digest in names:
        try:
            data = read(kind, digest, left)
        except NotFoundError:
            places.append((f"{kind}/{digest}", None))
            continue
        except MalformedError:
            continue
        except UnavailableError:
            break
        if len(data) <= left:
            places.append((f"{kind}/{digest}", len(data)))
            parts.append(data)
            left -= len(data)
    return b"".join([json.dumps(places).encode(), b"\n", *parts])


def unpack(answer: bytes) -> dict[str, bytes | None]:
    """Returns the bytes of each name in an answer, None for what the server does not have. Objects
    are checked against their digests. Raises MalformedError."""
    head, _, body = answer.partition(b"\n")
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
