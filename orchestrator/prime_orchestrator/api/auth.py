"""Authentication: session grants, request signatures, nonces and revocations.

An account's Ethereum key signs a SessionGrant once (EIP-712). After that, its Ed25519 session key
signs every request (RFC 9421). Identity is always the recovered signer, never a field of a body.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_broadcast.peers import place_of
from prime_core.errors import PolicyError, PrimeError, UntrustedError
from prime_core.ids import Address, Digest
from prime_core.messages import RevokeRequest, SessionAnswer, SessionRequest
from prime_core.transport.signatures import MAX_SKEW_SECONDS, Verified, verify_headers
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import is_bounded
from prime_orchestrator.api.validators import require_appointed
from prime_orchestrator.store import Connection, chain, nodes, sessions
from prime_orchestrator.store.sessions import MAX_SESSION_SECONDS, SessionRow

MAX_SESSIONS = 64
"""Live sessions per account; it must revoke old ones to open more."""
STRANGERS_AN_HOUR = 256
"""Sessions that accounts without a node may open from one address per hour."""
MOST_PLACES = 100_000
"""Addresses that are counted; if there are more, counting starts over."""
SCOPES = frozenset({"node", "trainer", "relay", "manager", "validator"})
NONCE_MARGIN_SECONDS = MAX_SKEW_SECONDS + 60
"""A nonce is kept this much longer than its signature can be valid."""


@dataclass(frozen=True)
class Caller:
    """The account and session of an authenticated request."""

    account: Address
    scope: str
    key_id: Digest
    proven: Verified


class Strangers:
    """Limits how many sessions accounts without a node open per client address (an IPv6 /64) and
    hour. Each session is a row until a day after its end. Counted in this process only."""

    def __init__(self) -> None:
        self._hour = 0
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def count(self, connection: Connection, account: Address, host: str, now: float) -> None:
        """Counts a session of `account` from the address `host`, unless the account has a node here
        or the address is loopback. Raises PolicyError beyond STRANGERS_AN_HOUR."""
        if not is_bounded(host) or nodes.get(connection, account) is not None:
            return
        place, hour = place_of(host), int(now) // 3600
        with self._lock:
            if hour != self._hour or len(self._counts) >= MOST_PLACES:
                self._hour, self._counts = hour, {}
            self._counts[place] = self._counts.get(place, 0) + 1
            if self._counts[place] > STRANGERS_AN_HOUR:
                raise PolicyError(
                    f"accounts without a node opened {STRANGERS_AN_HOUR} sessions from this "
                    "address in this hour: try again in the next one"
                )


def open_session(
    backend: Backend, request: SessionRequest, strangers: Strangers, host: str
) -> SessionAnswer:
    """Opens a session from a grant that came from the address `host`. Repeating the same grant is
    harmless.

    Raises UntrustedError if the grant is not signed by the account or not valid now, PolicyError if
    the account has too many sessions or may not have this scope, or if too many strangers came from
    this address.
    """
    grant, now = request.grant, backend.now()
    if backend.signer_of(grant, request.signature) != grant.account:
        raise UntrustedError("the session grant is not signed by the account that it names")
    if grant.orchestrator not in backend.names:
        raise UntrustedError(
            f"the session grant is for {grant.orchestrator!r}, this orchestrator is "
            f"{backend.audience!r}"
        )
    if grant.scope not in SCOPES:
        raise UntrustedError(f"there is no scope {grant.scope[:20]!r}")
    if grant.scope == "trainer" and grant.account != backend.trainer:
        raise PolicyError("only the pool's trainer may open a trainer's session")
    if grant.scope == "manager" and grant.account != backend.manager.address:
        raise PolicyError("only the pool's manager may open a manager's session")
    if grant.scope == "validator":
        with backend.store.read() as connection:
            require_appointed(backend, connection, grant.account)
    if not grant.issued_at < grant.expiry <= grant.issued_at + MAX_SESSION_SECONDS:
        raise UntrustedError("a session lasts 24 hours at most")
    if grant.issued_at > now + MAX_SKEW_SECONDS:
        raise UntrustedError("the session grant is from the future: check the machine's clock")
    if grant.expiry <= now:
        raise UntrustedError("the session grant has expired: check the machine's clock")
    session = SessionRow(
        key_id=grant.session_key,
        account=grant.account,
        scope=grant.scope,
        issued_at=grant.issued_at,
        expiry=grant.expiry,
        revoked=False,
    )
    with backend.store.begin() as connection:
        before = max(
            sessions.revocation(connection, grant.account),
            chain.revoked_before(connection, grant.account),
        )
        if grant.issued_at < before:
            raise UntrustedError("the account has revoked sessions granted at that time")
        known = sessions.get(connection, grant.session_key)
        if known is None:
            if sessions.count(connection, grant.account, now) >= MAX_SESSIONS:
                raise PolicyError(f"the account already has {MAX_SESSIONS} sessions: revoke some")
            if grant.scope in ("node", "relay"):
                strangers.count(connection, grant.account, host, now)
            sessions.add(connection, session)
        elif known != session:
            raise UntrustedError("this session key belongs to another grant")
    return SessionAnswer(key_id=grant.session_key, expiry=grant.expiry, server_time=int(now))


def revoke(backend: Backend, request: RevokeRequest) -> None:
    """Permanently ends the account's sessions issued before a given time.

    Raises UntrustedError if the revocation is not signed by the account, is for another
    orchestrator, or has a time in the future.
    """
    revocation = request.revocation
    if backend.signer_of(revocation, request.signature) != revocation.account:
        raise UntrustedError("the revocation is not signed by the account that it names")
    if revocation.orchestrator not in backend.names:
        raise UntrustedError("the revocation is for another orchestrator")
    if revocation.revoked_before > backend.now() + MAX_SKEW_SECONDS:
        raise UntrustedError("the revocation reaches into the future")
    with backend.store.begin() as connection:
        sessions.revoke(connection, revocation.account, revocation.revoked_before)


@dataclass(frozen=True)
class Head:
    """A signed request without its body."""

    method: str
    authority: str
    target: str
    headers: Mapping[str, str]


def authenticate(
    backend: Backend, scope: str, requests: Sequence[Head]
) -> list[Caller | Exception]:
    """Returns the callers of signed requests, from their heads alone. A body is read only
    afterwards and must match `content_digest`.

    Sessions, revocations and nonces of all requests are looked up in one transaction. An entry is a
    MalformedError or UntrustedError if signature, session or nonce are invalid, a PolicyError if
    the session has another scope.
    """
    now = backend.now()
    proven: list[Verified | Exception] = []
    for request in requests:
        try:
            proven.append(prove(backend, request, now))
        except PrimeError as error:
            proven.append(error)
    if all(isinstance(one, Exception) for one in proven):
        return [one for one in proven if isinstance(one, Exception)]
    with backend.store.begin() as connection:
        return callers(connection, scope, proven, now)


def callers(
    connection: Connection, scope: str, proven: Sequence[Verified | Exception], now: float
) -> list[Caller | Exception]:
    """Returns the callers of requests with these signatures, see `authenticate`. Writes their
    nonces."""
    known = sessions.with_revocations(
        connection, {one.key_id for one in proven if isinstance(one, Verified)}
    )
    found: list[Caller | Exception] = []
    held: list[int] = []
    nonces: list[tuple[Digest, str, int]] = []
    for at, one in enumerate(proven):
        if isinstance(one, Exception):
            found.append(one)
            continue
        session, revoked_before = known.get(one.key_id, (None, 0))
        if session is None or session.revoked or session.expiry <= now:
            error = UntrustedError("the session is unknown, ended or revoked: open a new one")
            found.append(error)
        elif session.issued_at < revoked_before:
            found.append(UntrustedError("the session was revoked on chain: open a new one"))
        elif session.scope != scope:
            found.append(
                PolicyError(f"this needs a session of scope {scope!r}, not {session.scope!r}")
            )
        else:
            held.append(at)
            nonces.append((one.key_id, one.nonce, one.expires + NONCE_MARGIN_SECONDS))
            found.append(Caller(session.account, session.scope, one.key_id, one))
    for at, new in zip(held, sessions.use_nonces(connection, nonces), strict=True):
        if not new:
            found[at] = UntrustedError("this request was already made (its nonce is used up)")
    return found


def prove(backend: Backend, request: Head, now: float) -> Verified:
    """Returns what a request's signature proves. Raises MalformedError or UntrustedError if it is
    invalid, or if the request is for another server."""
    if backend.name_for(request.authority) is None:
        raise UntrustedError(
            f"the request is addressed to {request.authority[:200]!r}; this orchestrator is "
            f"{backend.audience} (its operator adds names with --also-known-as)"
        )
    return verify_headers(
        request.method, request.authority, request.target, request.headers, now=now
    )
