"""What the API's services share: built once by `serve` (or a test) and handed down.

Clock and randomness are part of it, so that every decision below can be repeated.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.context import PoolContext
from orchestrator.draws import DrawBoard
from orchestrator.lies import LiesReported
from orchestrator.planting import Planted
from orchestrator.store import Store
from protocol.core import ids
from protocol.core.ids import Address, Digest, Signature
from protocol.core.signing import Signer, Statement
from protocol.storage.base import ObjectStore


@dataclass(frozen=True)
class Backend:
    """One pool's services. `now` in Unix seconds; `random(n)` gives n unpredictable bytes."""

    context: PoolContext
    store: Store
    objects: ObjectStore
    manager: Signer
    trainer: Address
    audience: str
    """The name that session grants must carry."""
    relay_accounts: frozenset[Address] = frozenset()
    """Who may announce a relay without a seat in the pool."""
    now: Callable[[], float] = time.time
    random: Callable[[int], bytes] = secrets.token_bytes
    draws: DrawBoard = field(default_factory=DrawBoard)
    planted: Planted = field(default_factory=Planted)
    lies: LiesReported = field(default_factory=LiesReported)

    def sign(self, statement: Statement) -> Signature:
        """The manager's signature."""
        return self.manager.sign(statement, self.context.domain(statement))

    def digest(self, statement: Statement) -> Digest:
        """EIP-712 digest in this deployment."""
        return statement.digest(self.context.domain(statement))

    def signer_of(self, statement: Statement, signature: Signature) -> Address:
        """The account that signed. Raises UntrustedError if none did."""
        return statement.recover(self.context.domain(statement), signature)

    def salt(self) -> Digest:
        """32 unpredictable bytes."""
        return ids.digest(self.random(32))
