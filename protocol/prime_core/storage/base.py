"""The object-store interface, its keys and its signed URLs.

Keys are slash-separated plain names. Keys under `sha256/` are content-addressed: the store rejects
bytes whose digest is not the name, so a reader of `sha256/<hex>` gets matching bytes or an error.
All other objects (policies/<version>/…) are replaced as a whole, never modified in place.
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
"""Objects are read and written in chunks of this size."""
MAX_KEY_LENGTH = 512
DIGEST_PREFIX = "sha256/"
CHECKSUM_HEADER = "x-amz-checksum-sha256"
"""Upload header with the base64 of the body's SHA-256; an S3 server rejects other bytes."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")
_DIGEST_KEY = re.compile(r"sha256/[0-9a-f]{64}\Z")


def digest_key(name: Digest) -> str:
    """Key of the object whose SHA-256 is `name`."""
    return DIGEST_PREFIX + name[2:]


def check_key(key: str) -> str:
    """Returns `key`. Raises MalformedError unless every segment is a plain name.

    Segments may not begin with a dot, which excludes `..` and hidden files. Keys under `sha256/`
    must be exactly 64 lowercase hex digits.
    """
    if _DIGEST_KEY.match(key):
        return key
    if len(key) > MAX_KEY_LENGTH or not _KEY.match(key):
        raise MalformedError(f"not an object key: {key[:80]!r}")
    if any(len(part) > 200 for part in key.split("/")):
        raise MalformedError("a segment of the object key is longer than 200 characters")
    if key.startswith(DIGEST_PREFIX):
        raise MalformedError("a key under sha256/ is 64 lowercase hex digits")
    return key


def check_prefix(prefix: str) -> str:
    """Returns `prefix`. Raises MalformedError if it points outside the store."""
    if prefix.startswith("/") or ".." in prefix.split("/"):
        raise MalformedError(f"not a key prefix: {prefix[:80]!r}")
    return prefix


def named_digest(key: str) -> Digest | None:
    """The SHA-256 that `key` names, or None if the key is not content-addressed."""
    return Digest("0x" + key[len(DIGEST_PREFIX) :]) if _DIGEST_KEY.match(key) else None


@dataclass(frozen=True)
class SignedUrl:
    """A request's URL and its required headers; `expires_at` is in Unix seconds."""

    url: str
    expires_at: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectStat:
    """Size and digest of an object's bytes. `tag` is the store's own name of them; empty: none."""

    size: int
    sha256: Digest
    tag: str = field(default="", compare=False)


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes under keys. Safe for concurrent use by several threads and processes.

    Every method raises MalformedError on a bad key and UnavailableError if the medium fails (full
    disk, network). `copy`, `get`, `chunks`, `size` and `stat` raise NotFoundError if there is no
    such object. A key that names an object must not be the folder of another key.
    """

    def put(self, key: str, data: bytes) -> None:
        """Stores the object atomically; idempotent for the same bytes."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Stores a copy of the file at `path`, atomically."""
        ...

    def copy(self, source: str, target: str, seen: ObjectStat | None = None) -> None:
        """Stores an object's bytes under a second key, within the store. `seen`: what `stat`
        returned for the source, so that the store need not look again; other bytes are not copied.
        Raises MalformedError if the second key names another digest."""
        ...

    def get(self, key: str, limit: int) -> bytes:
        """Returns the whole object. Raises MalformedError if it is larger than `limit` bytes, and
        UnavailableError if its key names a digest that its bytes do not have."""
        ...

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yields the object in pieces of at most CHUNK_BYTES. NotFoundError is raised by the call
        itself."""
        ...

    def exists(self, key: str) -> bool: ...

    def size(self, key: str) -> int: ...

    def stat(self, key: str) -> ObjectStat:
        """Size and SHA-256 of the object as currently stored, or as checked by the server on
        upload."""
        ...

    def delete(self, key: str) -> None:
        """Removes the object if it exists."""
        ...

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with `prefix`, in arbitrary order."""
        ...

    def signed_put(self, key: str, size: int, sha256: Digest, expires_at: int) -> SignedUrl:
        """Returns a URL for a PUT of exactly these bytes until `expires_at` (Unix seconds), or for
        as long as the store can sign for; the answer states the actual expiry."""
        ...

    def signed_get(self, key: str, expires_at: int) -> str:
        """Returns a URL for a GET of the object until `expires_at` (Unix seconds)."""
        ...


def put_object(store: ObjectStore, data: bytes) -> Digest:
    """Stores `data` under its own SHA-256 and returns that digest."""
    name = sha256(data)
    store.put(digest_key(name), data)
    return name
