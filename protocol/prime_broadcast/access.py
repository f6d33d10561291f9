"""Read access to a server: requests carry a pass signed by the reader's account.

A pass is a SessionGrant, the EIP-712 statement that also opens sessions with the orchestrator. Its
scope is "read", it names one server's URL, and it is valid for at most an hour. It travels as

    Authorization: Pass <base64url of the signed grant>          (a signed request)
    GET …?pass=<the same>                                        (a signed URL, for curl)

A reader makes one pass per server and uses it for every request until it expires. A server recovers
the signer once and caches the result. A pass identifies the reader, so that a server can limit
requests per account and admit members only. It protects no secret: policies are public. Over plain
HTTP an observer can reuse a pass, at that server only, until it expires.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydantic import ValidationError

from prime_broadcast.sources import normal_url
from prime_core import ids
from prime_core.errors import MalformedError, PrimeError, UntrustedError
from prime_core.ids import Address
from prime_core.node import SessionGrant
from prime_core.signing import Domain, LocalSigner, SignatureField, Signer, Strict

SCOPE = "read"
SCHEME = "Pass "
LIFETIME = 3600
"""Maximum validity of a pass, in seconds."""
SKEW = 300
"""Accepted difference between the clocks of reader and server, in seconds."""
MAX_TOKEN = 2048
REMEMBERED = 4096


class SignedPass(Strict):
    """The content of a token."""

    grant: SessionGrant
    signature: SignatureField


class Passes:
    """Makes and caches a reader's passes, one per server. Thread-safe. `domain` is the registry
    contract's EIP-712 domain; `now` returns Unix time in seconds."""

    def __init__(
        self, signer: Signer, domain: Domain, *, now: Callable[[], float] = time.time
    ) -> None:
        self._signer = signer
        self._domain = domain
        self._now = now
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[str, float]] = {}

    def token(self, url: str) -> str:
        """Returns a token that is valid now for the server at base URL `url`. Raises MalformedError
        if `url` is not a base URL."""
        url, now = normal_url(url), self._now()
        with self._lock:
            known = self._tokens.get(url)
            if known is not None and known[1] > now + SKEW:
                return known[0]
            grant = SessionGrant(
                account=Address(self._signer.address),
                session_key=ids.digest(secrets.token_bytes(32)),
                orchestrator=url,
                scope=SCOPE,
                issued_at=int(now),
                expiry=int(now) + LIFETIME,
            )
            made = SignedPass(grant=grant, signature=self._signer.sign(grant, self._domain))
            token = base64.urlsafe_b64encode(made.model_dump_json().encode()).decode().rstrip("=")
            self._tokens[url] = (token, now + LIFETIME)
            return token

    def header(self, url: str) -> str:
        """Returns the Authorization header value for requests to `url`."""
        return SCHEME + self.token(url)


def ephemeral_signer() -> LocalSigner:
    """Returns a random key for readers without an account: auditors, relays without a wallet."""
    return LocalSigner(secrets.token_bytes(32))


@dataclass(frozen=True)
class Rules:
    """Who may read. `members` is called on each request and must be fast; None admits every
    signer."""

    domain: Domain
    members: Callable[[], Collection[Address]] | None = None


class Gate:
    """Checks the passes that a server receives. Not thread-safe. `audience` is the server's public
    URL; `now` returns Unix time in seconds."""

    def __init__(self, rules: Rules, audience: str, now: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._audience = normal_url(audience)
        self._now = now
        self._known: OrderedDict[str, SessionGrant] = OrderedDict()

    @property
    def exclusive(self) -> bool:
        """Whether only members are admitted."""
        return self._rules.members is not None

    def admit(self, token: str | None) -> Address:
        """Returns the account that signed the token. Raises UntrustedError if the token is missing,
        expired, for another server, badly signed or not a member's; MalformedError if it does not
        parse."""
        if not token:
            raise UntrustedError("sign the request: this server takes a pass")
        grant = self._known.get(token)
        if grant is None:
            grant = self._verified(token)
            self._known[token] = grant
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        now = self._now()
        if grant.expiry < now - SKEW:
            raise UntrustedError("the pass has expired: check the machine's clock")
        if grant.issued_at > now + SKEW:
            raise UntrustedError("the pass is from the future: check the machine's clock")
        members = self._rules.members
        if members is not None and grant.account not in members():
            raise UntrustedError(f"{grant.account} is not a member here")
        return grant.account

    def _verified(self, token: str) -> SessionGrant:
        if len(token) > MAX_TOKEN:
            raise MalformedError("the pass is too long")
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            signed = SignedPass.model_validate_json(raw)
        except (binascii.Error, ValidationError, ValueError) as error:
            raise MalformedError("not a pass") from error
        grant = signed.grant
        if grant.scope != SCOPE or not 0 < grant.expiry - grant.issued_at <= LIFETIME:
            raise UntrustedError(f"a pass has the scope {SCOPE!r} and lives an hour at most")
        if grant.orchestrator != self._audience:
            raise UntrustedError(f"the pass is for {grant.orchestrator[:120]}")
        try:
            signer = grant.recover(self._rules.domain, signed.signature)
        except PrimeError as error:
            raise UntrustedError("the pass's signature does not hold") from error
        if signer != grant.account:
            raise UntrustedError("the pass is not signed by the account that it names")
        return grant


def token_of(authorization: str | None, query: str | None) -> str | None:
    """Returns a request's token: from its Authorization header, else from its `pass` query
    parameter."""
    if authorization is not None and authorization.startswith(SCHEME):
        return authorization.removeprefix(SCHEME).strip()
    return query
