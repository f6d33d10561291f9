"""Signed URLs of our own server: HMAC-SHA256 over method, key, expiry, size and digest.

The path is `/v1/store/<key>`; the query carries the signed fields, each exactly once. The secret is
created on first use, readable by its owner only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from prime_core import ids
from prime_core.errors import FatalError, MalformedError, UntrustedError
from prime_core.ids import Digest
from prime_core.storage.base import check_key

PATH = "/v1/store/"
SECRET_BYTES = 32

_NUMBER = re.compile(r"(?:0|[1-9]\d{0,14})\Z", re.ASCII)
_MAC = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class UrlGrant:
    """What a valid URL permits. For PUT: `size` bytes whose SHA-256 is `sha256`."""

    method: str
    key: str
    expires_at: int
    size: int | None = None
    sha256: Digest | None = None


def _mac(secret: bytes, grant: UrlGrant) -> str:
    size = "" if grant.size is None else str(grant.size)
    fields = (grant.method, grant.key, str(grant.expires_at), size, grant.sha256 or "")
    message = "\n".join(("prime/store/v1", *fields)).encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def sign_url(base_url: str, secret: bytes, grant: UrlGrant) -> str:
    """The URL that carries `grant`."""
    query: dict[str, str] = {"expires": str(grant.expires_at)}
    if grant.size is not None and grant.sha256 is not None:
        query |= {"size": str(grant.size), "sha256": grant.sha256}
    query["signature"] = _mac(secret, grant)
    return f"{base_url}{PATH}{grant.key}?{urlencode(query)}"


def verify_url(
    secret: bytes, method: str, key: str, query: Iterable[tuple[str, str]], *, now: float
) -> UrlGrant:
    """Returns the grant of a requested URL.

    Raises MalformedError if key or query fail strict parsing, UntrustedError if the signature is
    not ours or has expired.
    """
    check_key(key)
    given: dict[str, str] = {}
    for name, value in query:
        if name in given:
            raise MalformedError(f"the signed URL names {name[:20]!r} twice")
        given[name] = value
    wanted = {"expires", "signature"} | ({"size", "sha256"} if method == "PUT" else set())
    if set(given) != wanted:
        raise MalformedError("the URL does not carry the fields of a signed URL")
    numbers = [given[name] for name in ("expires", "size") if name in given]
    if not all(_NUMBER.match(number) for number in numbers) or not _MAC.match(given["signature"]):
        raise MalformedError("a field of the signed URL is not of its form")
    is_put = method == "PUT"
    grant = UrlGrant(
        method=method,
        key=key,
        expires_at=int(given["expires"]),
        size=int(given["size"]) if is_put else None,
        sha256=ids.digest(given["sha256"]) if is_put else None,
    )
    if not hmac.compare_digest(_mac(secret, grant), given["signature"]):
        raise UntrustedError("the URL's signature does not hold")
    if now > grant.expires_at:
        raise UntrustedError("the signed URL has expired; ask for a new one")
    return grant


def load_secret(path: Path) -> bytes:
    """Returns the secret at `path`, created on first use (mode 0600).

    Two processes that start at once agree: the first link wins. Raises FatalError if the file does
    not hold a secret.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        made = secrets.token_bytes(SECRET_BYTES)
        with _draft(path, made) as draft, suppress(FileExistsError):  # another may have been first
            os.link(draft, path)
    text = path.read_text().strip()
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise FatalError(f"{path} does not hold a secret of {SECRET_BYTES} bytes in hex")
    return bytes.fromhex(text)


def save_secret(path: Path, secret: bytes) -> None:
    """Writes `secret` to `path` (mode 0600) in place of what is there."""
    with _draft(path, secret) as draft:
        draft.rename(path)


@contextmanager
def _draft(path: Path, secret: bytes) -> Iterator[Path]:
    """Yields a synced private file next to `path` that holds `secret`; removes it at the end."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.hex())
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
