"""Publication of the trainer's policies, and announcements of the relays that serve them.

Readers verify what a relay serves, so it needs no trust, but its address is given to every node. It
must therefore come from an account with a seat in the pool or the operator's permission. It must
not point into a private network, except on a local chain; where the API serves one machine only, it
may be a loopback address.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from prime_broadcast.sources import normal_url
from prime_chain.networks import LOCAL
from prime_core.checkpoint import SignedManifest
from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    PolicyError,
    UntrustedError,
)
from prime_core.ids import Address
from prime_core.logs import fields
from prime_core.messages import RelayAnnouncement
from prime_core.transport.addresses import PrivateAddressError, is_loopback, public_address
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.kept import KeptFor
from prime_orchestrator.store import Connection, Store, lock, nodes, policies
from prime_orchestrator.store.intents import queue_intent

log = logging.getLogger(__name__)

LISTED = 16
MAX_RELAYS_EACH = 8
MAX_VERSIONS = 1024
NO_LEAVE = (
    "{account} has neither a seat in the pool nor a node that has one: the operator can allow it "
    "with orchestrator serve --allow-relay {account}"
)


def publish(backend: Backend, signed: SignedManifest) -> None:
    """Stores the next policy and queues its digest for the chain. Repeating it is harmless.

    Raises UntrustedError if the trainer did not sign it or policy 0 is not the run's base model,
    MalformedError if it belongs to another pool, ConflictError if its version is not the next one
    or is taken, or if its step is before the newest policy's (a policy of an older run). The same
    step may be published again.
    """
    manifest = signed.manifest
    if backend.signer_of(manifest.statement(), signed.signature) != backend.trainer:
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
        newest = policies.newest(connection, 1)
        due = newest[0].version + 1 if newest else 0
        if manifest.version != due:
            raise ConflictError(f"the next policy is {due}, not {manifest.version}")
        if newest and manifest.step < newest[0].step:
            raise ConflictError(
                f"policy {manifest.version} is of step {manifest.step}, but policy "
                f"{newest[0].version} is of step {newest[0].step}: steps never run backwards"
            )
        policies.add(connection, signed, now=now)
        queue_intent(
            connection,
            kind="policy",
            key=str(manifest.version),
            payload={
                "statement": manifest.statement().model_dump(mode="json"),
                "signature": signed.signature,
            },
            now=now,
        )
    about = fields(kind="policy", status="published", policy=manifest.version, step=manifest.step)
    log.info("policy %d of step %d is published", manifest.version, manifest.step, extra=about)


def listing(store: Store, kept: KeptFor[str, str]) -> tuple[str, str]:
    """Returns the entity tag and the JSON of the list of the newest policies, a PolicyList with the
    newest first. Published policies never change, so the newest identifies the list. It is made
    once for each newest policy: every node asks for it when one is published, and the manifests of
    a large model take megabytes."""
    with store.read() as connection:
        newest = policies.newest_name(connection)
        tag = f'"{newest[0]}-{newest[1]}"' if newest else '"none"'

        def made() -> str:
            bodies = ",".join(row.body for row in policies.newest(connection, LISTED))
            return f'{{"policies":[{bodies}]}}'

        return tag, kept.get(tag, made)


def manifest(backend: Backend, version: int) -> str:
    """Returns the JSON of a policy's signed manifest, however old. Raises NotFoundError if it was
    never published."""
    with backend.store.read() as connection:
        row = policies.get(connection, version)
    if row is None:
        raise NotFoundError(f"policy {version} was not published")
    return row.body


def announce_relay(backend: Backend, account: Address, relay: RelayAnnouncement) -> None:
    """Records a relay, which must announce itself again within `liveness.RELAY_SECONDS`.

    Raises MalformedError if the URL is not plain http(s) or lists too many versions; PolicyError if
    the account may not announce, the address is private, the URL belongs to another account, or the
    account names too many.
    """
    local = backend.context.deployment.chain_id == LOCAL.chain_id
    here = backend.on_one_machine and is_loopback(relay.url)
    url = check_url(relay.url, local=local or here)
    if len(relay.versions) > MAX_VERSIONS:
        raise MalformedError(f"a relay lists at most {MAX_VERSIONS} versions")
    now = backend.now()
    with backend.store.begin() as connection:
        if not has_leave(connection, backend, account):
            raise PolicyError(NO_LEAVE.format(account=account))
        owner = policies.relay_owner(connection, url)
        if owner not in (None, account):
            raise PolicyError("this relay's URL was announced by another account")
        if owner is None and policies.relay_count(connection, account) >= MAX_RELAYS_EACH:
            raise PolicyError(f"an account announces at most {MAX_RELAYS_EACH} relays")
        policies.see_relay(connection, url, account, relay.versions, now=now)


def has_leave(connection: Connection, backend: Backend, account: Address) -> bool:
    """Whether the account may announce: the pool's own keys, accounts that the operator allows,
    nodes with a seat and their providers."""
    return account in backend.own_accounts or nodes.seated(connection, account)


def check_url(url: str, *, local: bool) -> str:
    """Returns the normalized URL. Raises MalformedError unless it is a printable http(s) base URL
    without credentials, PolicyError if it points to a private address and the pool is not
    `local`."""
    url = normal_url(url)
    if local:
        return url
    try:
        public_address(urlsplit(url).hostname or "")
    except PrivateAddressError as error:
        raise PolicyError(
            f"{error}: nodes cannot or must not reach it; announce a public address with "
            "--public-url"
        ) from error
    except OSError as error:
        raise PolicyError(f"{url} has no address: announce one that others reach") from error
    return url
