"""Publication of the trainer's policies."""

from __future__ import annotations

from prime_core.checkpoint import SignedManifest
from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    UntrustedError,
)
from prime_core.messages import PolicyList
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.store import lock, policies
from prime_orchestrator.store.intents import queue_intent

LISTED = 16


def publish(backend: Backend, signed: SignedManifest) -> None:
    """Stores the next policy and queues its digest for the chain. Repeating it is harmless.

    Raises UntrustedError if the trainer did not sign it or policy 0 is not the run's base model,
    MalformedError if it belongs to another pool, ConflictError if its version is not the next one
    or is taken, or if its step is before the newest policy's (a policy of an older run). The same
    step may be published again.
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
                "statement": signed.statement().model_dump(mode="json"),
                "signature": signed.signature,
            },
            now=now,
        )


def listing(backend: Backend) -> PolicyList:
    """Returns the newest policies, newest first."""
    with backend.store.read() as connection:
        rows = policies.newest(connection, LISTED)
    return PolicyList(policies=tuple(row.signed() for row in rows))


def listing_tag(backend: Backend) -> str:
    """Returns the entity tag of `listing`. Published policies never change, so the newest
    identifies it."""
    with backend.store.read() as connection:
        newest = policies.newest(connection, 1)
    return f'"{newest[0].version}-{newest[0].digest}"' if newest else '"none"'


def manifest(backend: Backend, version: int) -> SignedManifest:
    """Returns a policy's signed manifest, however old. Raises NotFoundError if it was never
    published."""
    with backend.store.read() as connection:
        row = policies.get(connection, version)
    if row is None:
        raise NotFoundError(f"policy {version} was not published")
    return row.signed()
