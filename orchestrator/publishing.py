"""Policies as the trainer publishes them, and the relays that carry them."""

from __future__ import annotations

from urllib.parse import urlsplit

from orchestrator.backend import Backend
from orchestrator.intents import queue_intent
from orchestrator.store import lock, policies
from protocol.core.checkpoint import SignedManifest
from protocol.core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    PolicyError,
    UntrustedError,
)
from protocol.core.ids import Address
from protocol.core.messages import PolicyList, RelayInfo

MAX_RELAYS_EACH = 8
LISTED = 16


def publish(backend: Backend, signed: SignedManifest) -> None:
    """Takes the next policy and queues its digest for the chain. The same one may come twice.

    Raises UntrustedError if the trainer did not sign it, MalformedError if it is another pool's,
    ConflictError if its version is not the next one or is taken by another policy.
    """
    manifest = signed.manifest
    if backend.signer_of(signed.statement(), signed.signature) != backend.trainer:
        raise UntrustedError("the policy is not signed by the pool's trainer")
    if manifest.pool != backend.context.pool:
        raise MalformedError(f"the policy is of pool {manifest.pool}, not {backend.context.pool}")
    run = backend.context.run
    if manifest.version == 0 and manifest.result_digest != run.base_model:
        raise UntrustedError("policy 0 is not the base model that the run definition names")
    now = backend.now()
    with backend.store.begin() as connection:
        lock(connection, "policies")
        known = policies.get(connection, manifest.version)
        if known is not None:
            if known.digest != manifest.digest():
                raise ConflictError(f"policy {manifest.version} is published with other contents")
            return
        latest = policies.latest_version(connection)
        due = 0 if latest is None else latest + 1
        if manifest.version != due:
            raise ConflictError(f"the next policy is {due}, not {manifest.version}")
        policies.add(connection, signed, now=now)
        queue_intent(
            connection,
            lane=backend.manager.address,
            kind="policy",
            key=str(manifest.version),
            payload={
                "statement": signed.statement().model_dump(mode="json"),
                "signature": signed.signature,
            },
            now=now,
        )


def listing(backend: Backend) -> PolicyList:
    """The newest policies, newest first."""
    with backend.store.read() as connection:
        rows = policies.newest(connection, LISTED)
    return PolicyList(policies=tuple(row.signed() for row in rows))


def manifest(backend: Backend, version: int) -> SignedManifest:
    """One policy's signed manifest, however old. Raises NotFoundError if it was never published."""
    with backend.store.read() as connection:
        row = policies.get(connection, version)
    if row is None:
        raise NotFoundError(f"policy {version} was not published")
    return row.signed()


def announce_relay(backend: Backend, account: Address, relay: RelayInfo) -> None:
    """Notes a relay; it says so again before `presence.RELAY_SECONDS` have passed.

    Nodes trust no relay (every byte is checked against the trainer's manifest), so any account may
    run one. Raises MalformedError on a URL that is not plain http(s), PolicyError if the URL is
    another account's or the account names too many.
    """
    parts = urlsplit(relay.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise MalformedError("a relay's URL is http(s)://host[:port][/path]")
    if len(relay.versions) > 1024:
        raise MalformedError("a relay lists at most 1,024 versions")
    now = backend.now()
    with backend.store.begin() as connection:
        owner = policies.relay_owner(connection, relay.url)
        if owner not in (None, account):
            raise PolicyError("this relay's URL was announced by another account")
        if owner is None and policies.relay_count(connection, account) >= MAX_RELAYS_EACH:
            raise PolicyError(f"an account announces at most {MAX_RELAYS_EACH} relays")
        policies.see_relay(connection, relay.url, account, relay.versions, now=now)
