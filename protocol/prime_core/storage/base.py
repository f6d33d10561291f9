"""The object-store port, its keys and its signed URLs.

Keys are slash-separated plain names. Keys under `sha256/` are content-addressed: the store refuses
bytes whose digest is not the name, so whoever reads `sha256/<hex>` gets what the name says or an
error. Everything else (policies/<version>/…) is replaced whole, never changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from prime_core.encoding import sha256
from prime_core.errors import MalformedError
from prime_core.ids import Digest

CHUNK_BYTES = 1 << 18
"""Objects are read and written in pieces of this size."""
MAX_KEY_LENGTH = 512
DIGEST_PREFIX = "sha256/"
CHECKSUM_HEADER = "x-amz-checksum-sha256"
"""Header of an upload with the base64 of the body's SHA-256; an S3 server refuses other bytes."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")
_DIGEST_KEY = re.compile(r"sha256/[0-9a-f]{64}\Z")


def digest_key(name: Digest) -> str:
    """Key of the object whose SHA-256 is `name`."""
    return DIGEST_PREFIX + name[2:]


def check_key(key: str) -> str:
    """Returns `key`. Raises MalformedError unless every segment is a plain name.

    No segment may begin with a dot, so neither `..` nor a hidden file can be named; keys under
    `sha256/` must be exactly 64 lowercase hex digits.
    """
    if len(key) > MAX_KEY_LENGTH or not _KEY.match(key):
        raise MalformedError(f"not an object key: {key[:80]!r}")
    if any(len(part) > 200 for part in key.split("/")):
        raise MalformedError("a segment of the object key is longer than 200 characters")
    if key.startswith(DIGEST_PREFIX) and not _DIGEST_KEY.match(key):
        raise MalformedError("a key under sha256/ is 64 lowercase hex digits")
    return key


def check_prefix(prefix: str) -> str:
    """Returns `prefix`. Raises MalformedError if it leaves the store."""
    if prefix.startswith("/") or ".." in prefix.split("/"):
        raise MalformedError(f"not a key prefix: {prefix[:80]!r}")
    return prefix


def named_digest(key: str) -> Digest | None:
    """The SHA-256 that `key` promises, or None if the key is not content-addressed."""
    return Digest("0x" + key[len(DIGEST_PREFIX) :]) if _DIGEST_KEY.match(key) else None


@dataclass(frozen=True)
class SignedUrl:
    """Where to send a request and with exactly which headers; `expires_at` in Unix seconds."""

    url: str
    expires_at: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectStat:
    """What an object is: its bytes and their digest."""

    size: int
    sha256: Digest


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes under keys. Calls are safe from several threads and processes at once.

    Every method raises MalformedError on a bad key and UnavailableError when the medium fails
    (full disk, network); `copy`, `get`, `chunks`, `size` and `stat` raise NotFoundError if there
    is no such object. A key that names an object must not be the folder of another key.
    """

    def put(self, key: str, data: bytes) -> None:
        """Stores the object whole or not at all; putting the same bytes again changes nothing."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Stores a copy of the file at `path`, whole or not at all."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Stores the bytes of one object under a second key, inside the store. Raises
        MalformedError if the second key names another digest."""
        ...

    def get(self, key: str, limit: int) -> bytes:
        """The whole object. Raises MalformedError if it is larger than `limit` bytes."""
        ...

    def chunks(self, key: str) -> Iterator[bytes]:
        """The object in pieces of at most CHUNK_BYTES. NotFoundError comes with this call."""
        ...

    def exists(self, key: str) -> bool: ...

    def size(self, key: str) -> int: ...

    def stat(self, key: str) -> ObjectStat:
        """Size and SHA-256 of the object as it lies there now, or as the server checked it on
        arrival."""
        ...

    def delete(self, key: str) -> None:
        """Removes the object if it is there."""
        ...

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with `prefix`, in no stated order."""
        ...

    def signed_put(self, key: str, size: int, sha256: Digest, expires_at: int) -> SignedUrl:
        """Lets its holder PUT exactly these bytes until `expires_at` (Unix seconds), or for as long
        as the store can sign for; the answer says until when."""
        ...

    def signed_get(self, key: str, expires_at: int) -> str:
        """A URL that lets its holder GET the object until `expires_at` (Unix seconds)."""
        ...


def put_object(store: ObjectStore, data: bytes) -> Digest:
    """Stores `data` under its own SHA-256 and returns that digest."""
    name = sha256(data)
    store.put(digest_key(name), data)
    return name
