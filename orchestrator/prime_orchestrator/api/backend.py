"""Shared dependencies of the API's services, built once by `serve` (or a test) and passed down.

Clock and randomness are included, so that every decision can be reproduced.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import urlsplit

from prime_core import ids
from prime_core.ids import Address, Digest, Signature
from prime_core.run import RunDefinition
from prime_core.signing import Signer, Statement
from prime_core.storage.base import ObjectStore
from prime_core.transport.addresses import DEFAULT_PORTS, authority
from prime_orchestrator.api.idle import IdleCount
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.manager.history import Drifting
from prime_orchestrator.manager.planting import Planted
from prime_orchestrator.manager.speed import Medians, Turns
from prime_orchestrator.manager.standing import LEASE_SLOTS, Slots
from prime_orchestrator.manager.targets import KeptDifficulties
from prime_orchestrator.manager.uncalibrated import KeptQuota
from prime_orchestrator.store import Store
from prime_orchestrator.store.evaluations import KeptInfos

log = logging.getLogger(__name__)

MOST_RELAYS = 256
"""Number of relays whose reports are kept; beyond it, the one first reported is dropped."""


class RelayFaults:
    """Records since process start which nodes reported that which relay sent them a wrong chunk,
    for the last MOST_RELAYS relays, including nodes that have gone silent. Thread-safe.

    The reports are unverified and may be slander, and readers check every chunk anyway, so they
    have no consequences. A node counts once per relay, and only currently announced relays count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: dict[str, set[Address]] = {}

    def note(self, node: Address, named: Collection[str], announced: Collection[str]) -> None:
        """Records a node's reports; `announced` are the relays that count now."""
        known = {url.rstrip("/"): url for url in announced}
        new = []
        with self._lock:
            for url in {known[one] for one in named if one in known}:
                by = self._by.setdefault(url, set())
                if node not in by:
                    by.add(node)
                    new.append(url)
            for url in list(self._by)[:-MOST_RELAYS]:
                del self._by[url]
        for url in sorted(new):
            log.warning("node %s says that the relay %s sent it a wrong chunk", node, url)

    def counts(self) -> dict[str, int]:
        """Returns how many nodes reported each relay."""
        with self._lock:
            return {url: len(by) for url, by in self._by.items()}


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
    on_one_machine: bool = False
    """Whether only programs of this machine reach the API (serve.on_one_machine)."""
    relay_accounts: frozenset[Address] = frozenset()
    """Accounts that may announce a relay without a seat in the pool."""
    now: Callable[[], float] = time.time
    random: Callable[[int], bytes] = secrets.token_bytes
    draws: DrawBoard = field(default_factory=lambda: DrawBoard(secrets.token_bytes))
    planted: Planted = field(default_factory=Planted)
    lease_slots: int = LEASE_SLOTS
    """Most leases that a node holds open at once."""
    remeasure_seconds: float = 0.0
    """Mean time between two measurements of a node's cards (manager/remeasuring.py); 0: never."""
    relay_faults: RelayFaults = field(default_factory=RelayFaults)
    turns: Turns = field(default_factory=Turns)
    drifting: Drifting = field(default_factory=Drifting)
    quota: KeptQuota = field(default_factory=KeptQuota)
    idle: IdleCount = field(default_factory=IdleCount)
    medians: Medians = field(default_factory=Medians)
    difficulties: KeptDifficulties = field(default_factory=KeptDifficulties)
    evaluations: KeptInfos = field(default_factory=KeptInfos)
    arrivals: dict[Address, int] = field(default_factory=dict)
    """The last policy version of each node that api/reach.py recorded."""

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

    def slots(self, run: RunDefinition) -> Slots:
        """Returns how many leases of `run` nodes may hold."""
        return Slots(run, self.lease_slots, self.planted.accounts)

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
