"""HTTP Message Signatures (RFC 9421) in one fixed profile, with Content-Digest (RFC 9530).

Every signed request covers method, authority, path, query and body digest, and carries created,
expires, nonce and the Ed25519 session key that signed (its digest text is the `keyid`). There is no
negotiation: any other profile is refused. The libraries of the keys are imported when one is used:
commands that only read need none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import Digest, digest, to_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

COMPONENTS = '("@method" "@authority" "@path" "@query" "content-digest")'
LIFETIME_SECONDS = 60
"""Lifetime of a signature; servers remember its nonce for longer."""
MAX_SKEW_SECONDS = 30

_INPUT = re.compile(
    r'sig1=(\("@method" "@authority" "@path" "@query" "content-digest"\)'
    r";created=(\d{1,12});expires=(\d{1,12})"
    r';nonce="([A-Za-z0-9_-]{16,64})";keyid="(0x[0-9a-f]{64})";alg="ed25519")\Z'
)
_CONTENT_DIGEST = re.compile(r"sha-256=:[A-Za-z0-9+/]{43}=:\Z")
_SIGNATURE = re.compile(r"sig1=:([A-Za-z0-9+/]{86}==):\Z")


@dataclass(frozen=True)
class Verified:
    """Facts proved by a valid signature. `expires` is in Unix seconds; `content_digest` is the
    signed field value, which must still be compared with the body (`check_body`)."""

    key_id: Digest
    nonce: str
    expires: int
    content_digest: str


class SessionKey:
    """An Ed25519 key pair of one session; kept in memory only."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.key_id: Digest = digest(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> SessionKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


def content_digest(body: bytes) -> str:
    """RFC 9530 Content-Digest field value of a body (SHA-256)."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def _base(method: str, authority: str, target: str, body_digest: str, params: str) -> bytes:
    """The signature base of RFC 9421 section 2.5. `target` is path plus optional ?query."""
    path, _, query = target.partition("?")
    lines = (
        f'"@method": {method.upper()}',
        f'"@authority": {authority.lower()}',
        f'"@path": {path or "/"}',
        f'"@query": ?{query}',
        f'"content-digest": {body_digest}',
        f'"@signature-params": {params}',
    )
    return "\n".join(lines).encode()


def sign_headers(
    key: SessionKey, method: str, url: str, body: bytes, *, now: float, nonce: str
) -> dict[str, str]:
    """Headers that sign one request. `nonce` is 16 to 64 URL-safe characters, used once."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    created = int(now)
    params = (
        f"{COMPONENTS};created={created};expires={created + LIFETIME_SECONDS}"
        f';nonce="{nonce}";keyid="{key.key_id}";alg="ed25519"'
    )
    body_digest = content_digest(body)
    signature = key.sign(_base(method, parts.netloc, target, body_digest, params))
    return {
        "Content-Digest": body_digest,
        "Signature-Input": f"sig1={params}",
        "Signature": f"sig1=:{base64.b64encode(signature).decode()}:",
    }


def check_body(verified: Verified, body: bytes) -> None:
    """Raises UntrustedError unless `body` is the one that was signed."""
    if verified.content_digest != content_digest(body):
        raise UntrustedError("the body does not match its Content-Digest")


def verify_headers(
    method: str, authority: str, target: str, headers: Mapping[str, str], *, now: float
) -> Verified:
    """Checks a request's signature and freshness against the key that it names, before its body is
    read: the signature covers the body's digest.

    The caller must still check that a session owns `key_id` and that the nonce is new. `target` is
    the raw path with its query; `headers` has lower-case names. Raises MalformedError if the
    headers do not follow the profile, UntrustedError if they do not verify.
    """
    given = _INPUT.match(headers.get("signature-input", ""))
    signed = _SIGNATURE.match(headers.get("signature", ""))
    if given is None or signed is None:
        raise MalformedError("the request carries no signature of the accepted form (RFC 9421)")
    params, created, expires, nonce, key_id = given.groups()
    body_digest = headers.get("content-digest", "")
    if not _CONTENT_DIGEST.match(body_digest):
        raise MalformedError("the request carries no SHA-256 Content-Digest (RFC 9530)")
    if not int(created) < int(expires) <= int(created) + LIFETIME_SECONDS:
        raise UntrustedError(f"a signature may live at most {LIFETIME_SECONDS} s")
    if int(created) > now + MAX_SKEW_SECONDS:
        raise UntrustedError("the signature was made in the future: check the machine's clock")
    if int(expires) < now - MAX_SKEW_SECONDS:
        raise UntrustedError("the signature has expired: check the machine's clock")
    base = _base(method, authority, target, body_digest, params)
    try:
        raw = base64.b64decode(signed.group(1), validate=True)
        genuine = _verifier()(to_bytes(digest(key_id)), raw, base)
    except (ValueError, binascii.Error):
        genuine = False
    if not genuine:
        raise UntrustedError("the request's signature does not verify")
    return Verified(digest(key_id), nonce, int(expires), body_digest)


@cache
def _verifier() -> Callable[[bytes, bytes, bytes], bool]:
    """Returns a function that says whether a key's signature of a message is genuine. libsodium
    takes half of OpenSSL's time; only orchestrators have it, which verify thousands a second."""
    try:
        from nacl.exceptions import BadSignatureError
        from nacl.signing import VerifyKey
    except ModuleNotFoundError:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        def by_openssl(key: bytes, signature: bytes, message: bytes) -> bool:
            try:
                Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
            except InvalidSignature:
                return False
            return True

        return by_openssl

    def by_libsodium(key: bytes, signature: bytes, message: bytes) -> bool:
        try:
            VerifyKey(key).verify(message, signature)
        except BadSignatureError:
            return False
        return True

    return by_libsodium
