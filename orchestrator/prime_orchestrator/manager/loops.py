"""The manager's background work, as ticks that `serve` calls. There are no threads or sleeps here.

    chain_tick   every 0.5–1 s   store → chain (transactions), chain → store (indexer, see Pace)
    judge_tick   every 0.2 s     opinions of validators → verdicts
    draw_tick    every 2 s       draw secrets that are due; acceptances against published ones
    batch_tick   after verdicts and policies, and every 0.3–1 s   seals full batches
    money_tick   every 1–5 s     work roots, reward roots, expirations by the chain's clock
    archive_tick every 10 s      rows of files that are over → objects

Each can be stopped between any two statements and run again. If the chain is unreachable,
`chain_tick` raises UnavailableError after the transactions have been sent; the others never query
the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from prime_chain.contracts import Contracts
from prime_chain.events import Event
from prime_chain.sender import Sender
from prime_chain.watcher import Watcher
from prime_core.ids import Address, Digest
from prime_core.signing import Signer
from prime_core.storage.base import ObjectStore
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import reviews, suspicion, targets, uploads
from prime_orchestrator.manager.appointments import end_appointments
from prime_orchestrator.manager.archiving import Archiver
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.manager.completeness import check_events
from prime_orchestrator.manager.draws import DrawBoard, compare_acceptances, reveal_second
from prime_orchestrator.manager.endings import void_unjudged
from prime_orchestrator.manager.funding import OwedSum, compare_funding
from prime_orchestrator.manager.indexer import run_indexer_tick
from prime_orchestrator.manager.judging import Judge
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.revisions import current, settle_revisions
from prime_orchestrator.manager.roots import post_roots, void_unrooted
from prime_orchestrator.manager.settlement import settle_epochs
from prime_orchestrator.manager.slashing import drop_expired, queue_executions
from prime_orchestrator.manager.transactions import run_transactions_tick
from prime_orchestrator.store.engine import Store

BUSY_SECONDS = 60.0
"""Time after an event of the pool for which more are expected."""


@dataclass
class Pace:
    """Decides when the chain's events are read: in each tick while a transaction is awaited or for
    BUSY_SECONDS after an event, otherwise `idle_seconds` after the last read."""

    idle_seconds: float = 0.0
    read_at: float = float("-inf")
    event_at: float = float("-inf")

    def due(self, awaited: int, now: float) -> bool:
        """Whether to read at `now`, with `awaited` transactions unfinished."""
        busy = awaited > 0 or now - self.event_at < BUSY_SECONDS
        return busy or not 0 <= now - self.read_at < self.idle_seconds

    def record(self, events: int, now: float) -> None:
        """Notes that a read has succeeded and found `events` events."""
        self.read_at = now
        if events:
            self.event_at = now


@dataclass(frozen=True)
class ManagerLoops:
    """The ticks and their dependencies. `sender` and `signer` hold the manager's key."""

    store: Store
    objects: ObjectStore
    context: PoolContext
    contracts: Contracts
    watcher: Watcher
    sender: Sender
    signer: Signer
    now: Callable[[], float]
    board: DrawBoard
    planted: Planted = field(default_factory=Planted)
    pace: Pace = field(default_factory=Pace)
    owed: OwedSum = field(default_factory=OwedSum)

    def chain_tick(self) -> list[Event]:
        """Sends queued intents, then reads the chain if that is due; returns new events. The
        comparison with the contracts comes last, since it fails in each tick until an endpoint
        shows what is missing."""
        queue_executions(self.store, self.context, self.now)
        awaited = run_transactions_tick(
            self.store, self.context, self.contracts, self.sender, self.now
        )
        if not self.pace.due(awaited, self.now()):
            return []
        events = run_indexer_tick(
            self.store, self.context, self.watcher, self.now, self.window_time
        )
        self.pace.record(len(events), self.now())
        end_appointments(self.store, self.context, lambda: self.quorum, self.now)
        settle_revisions(self.store, self.contracts)
        compare_funding(
            self.store, self.context, self.contracts.rewards, self.planted.accounts, self.now,
            self.owed,
        )  # fmt: skip
        return events + check_events(
            self.store, self.context, self.watcher, self.contracts, self.now
        )

    @cached_property
    def quorum(self) -> int:
        """The pool's quorum of validators, which never changes."""
        return self.contracts.pools.judgement_of(self.context.pool).quorum

    @cached_property
    def window_time(self) -> Callable[[], int] | None:
        """Function returning the contracts' time that closes windows, if it may differ from the
        chain's."""
        vault = self.contracts.vault
        return None if vault.uptime_feed() is None else vault.window_time

    @cached_property
    def judge(self) -> Judge:
        """Turns opinions into verdicts."""
        return Judge(
            self.store, self.objects, self.context, self.board, self.now, lambda: self.quorum
        )

    def judge_tick(self) -> list[Digest]:
        """Decides files whose opinions are complete."""
        return self.judge.tick()

    def draw_tick(self) -> Address | None:
        """Reveals draw secrets that are due, and compares acceptances with a published one; returns
        the validator that they contradict."""
        reveal_second(self.store, self.objects, self.context, self.now)
        return compare_acceptances(self.store, self.objects, self.context, self.now)

    def batch_tick(self) -> list[int]:
        """Seals every batch that is full and may be sealed; returns the steps. Warns of starving
        target lengths."""
        sealed = seal_ready_batches(
            self.store, self.objects, self.signer, self.context, self.now, self.planted.accounts
        )
        if sealed:
            with self.store.read() as connection:
                targets.warn(connection, current(connection, self.context), self.now())
        return sealed

    def upload_tick(self) -> int:
        """Deletes expired uploads that no submission names; returns how many."""
        return uploads.sweep(self.store, self.objects, self.now)

    @cached_property
    def archiver(self) -> Archiver:
        """Archives files that are over."""
        return Archiver(self.store, self.objects, self.context, self.now)

    def archive_tick(self) -> int:
        """Archives a page of files that are over; returns how many."""
        return self.archiver.tick()

    def money_tick(self) -> None:
        """Reveals planted files, posts work roots, voids files not judged or rooted in time, ends
        late reviews, drops expired slashes and those of suspect classes, and posts reward roots.
        Reward roots come last, since settling fails while the object of a table that others posted
        cannot be read."""
        reveal(self.store, self.context, self.planted, self.now)
        post_roots(self.store, self.objects, self.context, self.now, self.planted.accounts)
        void_unjudged(self.store, self.context, self.now, self.judge.given_up())
        void_unrooted(self.store, self.context, self.now, self.planted.accounts)
        reviews.end_late(self.store, self.context)
        suspicion.give_up_slashes(self.store, self.context, self.now)
        drop_expired(self.store, self.context, self.now, self.planted.accounts)
        settle_epochs(self.store, self.objects, self.context, self.now)
