"""Shared dependencies of the API's services, built once by `serve` (or a test) and passed down.

Clock and randomness are included, so that every decision can be reproduced.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import urlsplit

from prime_core import ids
from prime_core.ids import Address, Digest, Signature
from prime_core.signing import Signer, Statement
from prime_core.storage.base import ObjectStore
from prime_core.transport.addresses import DEFAULT_PORTS, authority
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.manager.history import Drifting
from prime_orchestrator.manager.lies import LiesReported
from prime_orchestrator.manager.planting import Planted
from prime_orchestrator.manager.speed import Turns
from prime_orchestrator.store import Store


@dataclass(frozen=True)
class Backend:
    """One pool's services. `now` returns Unix seconds; `random(n)` returns n unpredictable
    bytes."""

    context: PoolContext
    store: Store
    objects: ObjectStore
    manager: Signer
    trainer: Address
    audience: str
    """This orchestrator's URL, which session grants name."""
    also_known_as: frozenset[str] = frozenset()
    """Additional URLs of this orchestrator that clients may use."""
    relay_accounts: frozenset[Address] = frozenset()
    """Accounts that may announce a relay without a seat in the pool."""
    now: Callable[[], float] = time.time
    random: Callable[[int], bytes] = secrets.token_bytes
    draws: DrawBoard = field(default_factory=lambda: DrawBoard(secrets.token_bytes))
    planted: Planted = field(default_factory=Planted)
    lies: LiesReported = field(default_factory=LiesReported)
    turns: Turns = field(default_factory=Turns)
    drifting: Drifting = field(default_factory=Drifting)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every URL that a session grant may name."""
        return self.also_known_as | {self.audience}

    @cached_property
    def own_accounts(self) -> frozenset[Address]:
        """The pool's own keys and the accounts that the operator allows to announce relays."""
        return self.relay_accounts | {self.trainer, self.context.manager}

    def name_for(self, host: str) -> str | None:
        """Returns our URL for a request with this Host header, or None if it does not name us."""
        return self._by_authority.get(host.lower())

    @cached_property
    def _by_authority(self) -> dict[str, str]:
        named: dict[str, str] = {}
        for url in (*sorted(self.also_known_as), self.audience):
            host, port = authority(url), DEFAULT_PORTS.get(urlsplit(url).scheme)
            named[host] = url
            if urlsplit(url).port in (None, port):  # clients may include the default port
                named[f"{host}:{port}"] = url
        return named

    def sign(self, statement: Statement) -> Signature:
        """Signs with the manager's key."""
        return self.manager.sign(statement, self.context.domain(statement))

    def digest(self, statement: Statement) -> Digest:
        """Returns the statement's EIP-712 digest in this deployment."""
        return statement.digest(self.context.domain(statement))

    def signer_of(self, statement: Statement, signature: Signature) -> Address:
        """Returns the account that signed. Raises UntrustedError if the signature is invalid."""
        return statement.recover(self.context.domain(statement), signature)

    def salt(self) -> Digest:
        """Returns 32 unpredictable bytes."""
        return ids.digest(self.random(32))
