"""The pool and chain that a process serves. Built once per process and passed down."""

from __future__ import annotations

from dataclasses import dataclass

from prime_core.deployment import Deployment
from prime_core.ids import Address, Digest
from prime_core.run import RunDefinition
from prime_core.signing import Domain, Statement
from prime_core.storage.base import ObjectStore, digest_key

MAX_OBJECT_BYTES = 32 << 20
"""Largest evidence, verdict table, leaves or settlement object that is read back."""


@dataclass(frozen=True)
class PoolContext:
    """One pool on one chain. Times in `run` are in seconds, prices in wei."""

    deployment: Deployment
    pool: int
    manager: Address
    run: RunDefinition

    def domain(self, statement: type[Statement] | Statement) -> Domain:
        """Returns the EIP-712 domain under which this kind of statement is signed."""
        return self.deployment.domain_of(statement)


def read_object(objects: ObjectStore, digest: Digest, limit: int = MAX_OBJECT_BYTES) -> bytes:
    """Returns an object's bytes, which the store checks against its digest.

    Raises NotFoundError, or UnavailableError if they do not hash to it.
    """
    return objects.get(digest_key(digest), limit)
