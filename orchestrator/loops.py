"""The manager's background work, as ticks that `serve` calls: no thread, no clock, no sleep here.

    chain_tick   every 0.5–1 s   chain → store (indexer), store → chain (outbox)
    batch_tick   after verdicts and policies, and every 0.3–1 s   seal what is full
    money_tick   every 1–5 s     work roots, reward roots, what fell due by the chain's clock

Each is safe to stop between any two statements and to run again. An unreachable chain raises
UnavailableError from `chain_tick` after the outbox had its turn; the other two never ask the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.batches import seal_ready_batches
from orchestrator.context import PoolContext
from orchestrator.indexer import run_indexer_tick
from orchestrator.outbox import run_outbox_tick
from orchestrator.planting import Planted, reveal
from orchestrator.roots import post_roots, void_unrooted
from orchestrator.settlement import settle_epochs, void_unjudged
from orchestrator.slashing import drop_expired
from orchestrator.store.engine import Store
from protocol.chain.contracts import Contracts
from protocol.chain.events import Event
from protocol.chain.sender import Sender
from protocol.chain.watcher import Watcher
from protocol.core.signing import Signer
from protocol.storage.base import ObjectStore


@dataclass(frozen=True)
class ManagerLoops:
    """Everything the ticks need. `sender` and `signer` hold the manager's key."""

    store: Store
    objects: ObjectStore
    context: PoolContext
    contracts: Contracts
    watcher: Watcher
    sender: Sender
    signer: Signer
    now: Callable[[], float]
    planted: Planted = field(default_factory=Planted)

    def chain_tick(self) -> list[Event]:
        """Sends what is queued, then takes in what the chain shows; returns new events."""
        run_outbox_tick(self.store, self.context, self.contracts, self.sender, self.now)
        return run_indexer_tick(self.store, self.context, self.watcher, self.now)

    def batch_tick(self) -> list[int]:
        """Seals every batch that is full and may be sealed; returns the steps."""
        return seal_ready_batches(
            self.store, self.objects, self.signer, self.context, self.now, self.planted.accounts
        )

    def money_tick(self) -> None:
        """Work roots, reward roots, files voided that nobody judged or rooted in time, slashes that
        came too late dropped, what planted files were."""
        reveal(self.store, self.context, self.planted, self.now)
        post_roots(self.store, self.objects, self.context, self.now, self.planted.accounts)
        settle_epochs(self.store, self.objects, self.context, self.now)
        void_unjudged(self.store, self.context, self.now)
        void_unrooted(self.store, self.context, self.now, self.planted.accounts)
        drop_expired(self.store, self.context, self.now, self.planted.accounts)
