"""What the judging and money side is handed: a pool's identity, a store, an object store.

Everything here is a port or plain data; the processes (`serve`, `validate`) build it once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy.engine import Connection

from protocol.core import encoding
from protocol.core.errors import UntrustedError
from protocol.core.ids import Address, Digest
from protocol.core.messages import ContractAddresses
from protocol.core.run import RunDefinition
from protocol.core.signing import Domain, Statement

MAX_OBJECT_BYTES = 32 << 20
"""Largest evidence, verdict table, leaves or settlement object that is read back."""


class Transactions(Protocol):
    """The store as this side sees it: `begin()` commits at the end of the block, or rolls back.

    A SQLAlchemy `Engine` is one. On SQLite the transaction must take the write lock at its start
    (BEGIN IMMEDIATE), else two processes that read before they write fail with "locked".
    """

    def begin(self) -> AbstractContextManager[Connection]: ...


class Objects(Protocol):
    """The part of protocol.storage's port that is used here."""

    def put(self, key: str, data: bytes) -> Any: ...

    def get(self, key: str, limit: int) -> bytes: ...

    def exists(self, key: str) -> bool: ...


@dataclass(frozen=True)
class PoolContext:
    """One pool on one chain. Times of `run` in seconds, prices in wei."""

    chain_id: int
    contracts: ContractAddresses
    pool: int
    manager: Address
    run: RunDefinition

    def domain(self, statement: type[Statement] | Statement) -> Domain:
        """EIP-712 domain under which this kind of statement is signed."""
        return Domain(chain_id=self.chain_id, contract=getattr(self.contracts, statement.CONTRACT))


def object_key(digest: Digest) -> str:
    """Key of an object named by its SHA-256: "sha256/" and 64 hex digits."""
    return f"sha256/{digest[2:]}"


def publish(objects: Objects, data: bytes) -> Digest:
    """Writes `data` under its SHA-256 and returns it. Doing it twice changes nothing."""
    digest = encoding.sha256(data)
    key = object_key(digest)
    if not objects.exists(key):
        objects.put(key, data)
    return digest


def read_object(objects: Objects, digest: Digest, limit: int = MAX_OBJECT_BYTES) -> bytes:
    """Bytes of an object, checked against its name.

    Raises UntrustedError if they do not hash to it, UnavailableError if there are none.
    """
    data = objects.get(object_key(digest), limit)
    if encoding.sha256(data) != digest:
        raise UntrustedError(f"object {digest} does not hash to its name")
    return data
