"""The watcher: nothing missed, nothing doubled, even if the chain changes while it is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import deployment

from devnet.deployed import TEST_PERIODS, Deployed, pool_config
from prime_chain import codec
from prime_chain.client import Block, ChainClient, Log
from prime_chain.errors import NotThereError, RpcError
from prime_chain.events import Event, PayoutChanged, ProviderRegistered, RevokedBefore
from prime_chain.networks import LOCAL
from prime_chain.watcher import (
    BlockRef,
    Confirmed,
    Retracted,
    Watcher,
    common_ancestor,
    next_span,
)
from prime_core.deployment import Deployment
from prime_core.encoding import keccak256
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_DIGEST, Address, Digest


@dataclass
class Reader:
    """A consumer as the rules ask: stores each step before it asks for the next."""

    trail: list[BlockRef] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    retractions: int = 0
    remembers: int = 1000
    check: Callable[[BlockRef | None, Confirmed], None] = lambda cursor, step: None

    def drain(self, watcher: Watcher) -> None:
        for step in watcher.poll(self.trail):
            if isinstance(step, Confirmed):
                self.check(self.trail[-1] if self.trail else None, step)
                assert all(event.block <= step.block.number for event in step.events)
                self.events += step.events
                self.trail.append(step.block)
            else:
                self.retractions += 1
                self.events = [e for e in self.events if e.block <= step.block.number]
                self.trail = [r for r in self.trail if r.number <= step.block.number]
                if not self.trail or self.trail[-1] != step.block:
                    self.trail.append(step.block)
            self.trail = self.trail[-self.remembers :]


def _register(deployed: Deployed, account: int) -> Address:
    signer = deployed.accounts[account]
    deployed.send(signer, deployed.contracts.registry.register_provider(signer.address))
    return signer.address


def test_every_event_is_read_once_in_order_over_many_small_ranges(deployed: Deployed) -> None:
    expected = []
    for account in (1, 2, 3):
        expected.append(_register(deployed, account))
        deployed.anvil.mine(account)
    reader = Reader()
    watcher = Watcher(deployed.client, deployed.deployment, max_span=2)
    reader.drain(watcher)
    registered = [e for e in reader.events if isinstance(e, ProviderRegistered)]
    assert [e.provider for e in registered] == expected
    head = deployed.client.block("latest")
    assert reader.trail[-1] == BlockRef(head.number, head.hash)
    for event in registered:
        block = deployed.client.block(event.block)
        assert (event.block_hash, event.block_time) == (block.hash, block.time)
    reader.drain(watcher)  # nothing new: nothing comes twice
    assert len([e for e in reader.events if isinstance(e, ProviderRegistered)]) == 3
    assert reader.retractions == 0


def test_events_are_reported_only_under_enough_confirmations(deployed: Deployed) -> None:
    reader = Reader()
    watcher = Watcher(deployed.client, deployed.deployment, confirmations=2)
    _register(deployed, 1)
    reader.drain(watcher)
    deployed.anvil.mine()
    reader.drain(watcher)
    assert not any(isinstance(e, ProviderRegistered) for e in reader.events)
    deployed.anvil.mine()
    reader.drain(watcher)
    assert sum(isinstance(e, ProviderRegistered) for e in reader.events) == 1


def test_a_reorg_retracts_what_left_the_chain_and_keeps_the_rest(deployed: Deployed) -> None:
    kept = _register(deployed, 1)
    deployed.anvil.mine(3)
    reader = Reader()
    watcher = Watcher(deployed.client, deployed.deployment)
    reader.drain(watcher)
    _register(deployed, 2)
    reader.drain(watcher)
    assert sum(isinstance(e, ProviderRegistered) for e in reader.events) == 2
    deployed.anvil.rpc("anvil_reorg", 2, [])
    reader.drain(watcher)
    assert reader.retractions == 1
    assert [e.provider for e in reader.events if isinstance(e, ProviderRegistered)] == [kept]
    head = deployed.client.block("latest")
    assert reader.trail[-1] == BlockRef(head.number, head.hash)


def test_with_only_its_cursor_left_it_still_recovers_from_a_reorg(deployed: Deployed) -> None:
    kept = _register(deployed, 1)
    deployed.anvil.mine(3)
    _register(deployed, 2)
    reader = Reader(remembers=1)
    watcher = Watcher(deployed.client, deployed.deployment)
    reader.drain(watcher)
    deployed.anvil.rpc("anvil_reorg", 2, [])
    reader.drain(watcher)
    assert [e.provider for e in reader.events if isinstance(e, ProviderRegistered)] == [kept]


def test_a_chain_that_shrank_is_trouble_until_it_has_grown_past_the_cursor(
    deployed: Deployed,
) -> None:
    revert = deployed.anvil.snapshot()
    _register(deployed, 1)
    deployed.anvil.mine(2)
    reader = Reader()
    watcher = Watcher(deployed.client, deployed.deployment)
    reader.drain(watcher)
    before = list(reader.events)
    revert()
    with pytest.raises(UnavailableError, match="behind"):
        reader.drain(watcher)
    assert reader.events == before  # a lagging endpoint must not look like a reorg
    deployed.anvil.mine(5)
    reader.drain(watcher)
    assert not any(isinstance(e, ProviderRegistered) for e in reader.events)


def test_an_endpoint_that_refuses_large_ranges_is_asked_for_smaller_ones(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = _register(deployed, 1)
    deployed.anvil.mine(40)
    real = ChainClient.logs
    spans: list[int] = []

    def limited(
        self: ChainClient, first: int, last: int, addresses: Sequence[Address], topics: Any = ()
    ) -> list[Log]:
        spans.append(last - first + 1)
        if last - first + 1 > 7:
            raise RpcError("eth_getLogs", -32005, "query returned more than 10000 results")
        return real(self, first, last, addresses, topics)

    monkeypatch.setattr(ChainClient, "logs", limited)
    reader = Reader()
    watcher = Watcher(deployed.client, deployed.deployment)
    while not reader.trail or reader.trail[-1].number < deployed.client.block_number():
        reader.drain(watcher)
    assert [e.provider for e in reader.events if isinstance(e, ProviderRegistered)] == [provider]
    assert max(spans) > 7 >= min(spans)


def test_events_of_several_contracts_come_in_chain_order(deployed: Deployed) -> None:
    reader = Reader()
    watcher = Watcher(deployed.client, deployed.deployment)
    signer = deployed.accounts[1]
    _register(deployed, 1)
    deployed.send(
        signer,
        deployed.contracts.pools.create(pool_config(signer.address, keccak256(b"run"), 1)),
    )
    deployed.send(signer, deployed.contracts.registry.set_payout(deployed.accounts[3].address))
    reader.drain(watcher)
    assert [e.name for e in reader.events[-3:]] == [
        "ProviderRegistered", "PoolCreated", "PayoutChanged",
    ]  # fmt: skip
    last = reader.events[-1]
    assert isinstance(last, PayoutChanged)
    assert last.payout == deployed.accounts[3].address


# ── the rules alone, on a chain that may do anything between two requests ──────────────────────


class FakeChain:
    """A chain in memory that answers like ChainClient. `meddle` runs before each answer."""

    network = LOCAL

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._item = next(
            item
            for item in codec.artifact("Registry").events.values()
            if item.name == "RevokedBefore"
        )
        self._serial = 0
        self.blocks: list[Block] = []
        self.ever: dict[Digest, Block] = {}
        self.events: dict[Digest, list[int]] = {}
        self.span_limit = 1000
        self.meddle: Callable[[], None] = lambda: None
        self.mine(0)

    def mine(self, events: int) -> None:
        self._serial += 1
        number = len(self.blocks)
        parent = self.blocks[-1].hash if self.blocks else ZERO_DIGEST
        block_hash = keccak256(f"{number}/{self._serial}".encode())
        self.blocks.append(Block(number, block_hash, parent, 1000 + self._serial, 1))
        self.ever[block_hash] = self.blocks[-1]
        self.events[block_hash] = [self._serial * 100 + i for i in range(events)]

    def reorg(self, depth: int, events: Sequence[int]) -> None:
        """Replaces the newest `depth` blocks by others, at least as many."""
        depth = min(depth, len(self.blocks) - 1)
        del self.blocks[len(self.blocks) - depth :]
        for count in [*events, *([0] * max(0, depth - len(events)))]:
            self.mine(count)

    def canonical(self) -> list[int]:
        return [at for block in self.blocks[1:] for at in self.events[block.hash]]

    def between(self, after: BlockRef | None, block: BlockRef) -> list[int]:
        """The events after one block up to another, on the branch of the latter."""
        found: list[int] = []
        here = self.ever[block.hash]
        while here.number > (after.number if after else 0):
            found = self.events[here.hash] + found
            here = self.ever[here.parent_hash]
        if after is not None and after.hash != ZERO_DIGEST:
            assert here.hash == after.hash  # a step never jumps to another branch
        return found

    def block_number(self) -> int:
        self.meddle()
        return len(self.blocks) - 1

    def block(self, number: int) -> Block:
        self.meddle()
        if number >= len(self.blocks):
            raise NotThereError("no such block")
        return self.blocks[number]

    def agreed_block(self, number: int) -> Block:
        return self.block(number)

    def agreed_logs(
        self, first: int, last: int, addresses: Sequence[Address], topics: Sequence[Any]
    ) -> list[Log]:
        return self.logs(first, last, addresses)

    def logs(self, first: int, last: int, addresses: Sequence[Address]) -> list[Log]:
        self.meddle()
        if last - first + 1 > self.span_limit:
            raise RpcError("eth_getLogs", -32005, "range too large")
        registry = self._deployment.address("registry")
        assert registry in addresses
        found = []
        for block in self.blocks[first : last + 1]:
            for index, at in enumerate(self.events[block.hash]):
                topics = (self._item.selector, bytes(31) + b"\x07")
                data = at.to_bytes(32, "big")
                found.append(
                    Log(registry, topics, data, block.number, block.hash, index, block.hash)
                )
        return found


Moves = st.lists(
    st.one_of(
        st.tuples(st.just("mine"), st.lists(st.integers(0, 2), max_size=4)),
        st.tuples(st.just("reorg"), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        st.tuples(st.just("poll"), st.just([])),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    moves=Moves,
    seed=st.integers(0, 2**32),
    remembers=st.integers(1, 6),
    span=st.integers(1, 5),
    limit=st.integers(1, 5),
)
def test_after_any_mining_and_reorgs_even_between_requests_the_reader_holds_the_chains_events(
    moves: list[tuple[str, list[int]]], seed: int, remembers: int, span: int, limit: int
) -> None:
    place = deployment(TEST_PERIODS, block=1)
    chain = FakeChain(place)
    chain.span_limit = limit
    rng = random.Random(seed)
    watcher = Watcher(chain, place, confirmations=0, max_span=span)  # type: ignore[arg-type]
    reader = Reader(remembers=remembers)

    def exact(cursor: BlockRef | None, step: Confirmed) -> None:
        ats = [e.at for e in step.events if isinstance(e, RevokedBefore)]
        assert ats == chain.between(cursor, step.block)

    reader.check = exact

    def meddle() -> None:
        roll = rng.random()
        if roll < 0.12:
            chain.reorg(rng.randint(1, 5), [rng.randint(0, 2) for _ in range(rng.randint(1, 4))])
        elif roll < 0.25:
            chain.mine(rng.randint(0, 2))

    for kind, counts in moves:
        if kind == "mine":
            for count in counts:
                chain.mine(count)
        elif kind == "reorg":
            chain.reorg(len(counts), counts)
        else:
            chain.meddle = meddle
            try:
                reader.drain(watcher)
            except UnavailableError:
                pass  # as its caller would: poll again later
            finally:
                chain.meddle = lambda: None
    for _ in range(200):  # the chain stands still: it must catch up
        reader.drain(watcher)
        if reader.trail and reader.trail[-1].number == len(chain.blocks) - 1:
            break
    found = [e.at for e in reader.events if isinstance(e, RevokedBefore)]
    assert found == chain.canonical()
    if len(chain.blocks) > 1:
        assert reader.trail[-1].hash == chain.blocks[-1].hash


@given(
    common=st.integers(0, 20),
    lost=st.integers(0, 20),
    keep=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_common_ancestor_is_the_newest_remembered_block_still_on_the_chain(
    common: int, lost: int, keep: list[bool]
) -> None:
    def hash_of(number: int, fork: str) -> Digest:
        return keccak256(f"{fork}{number}".encode())

    trail = [
        BlockRef(n, hash_of(n, "ours" if n < common else "lost"))
        for n in range(common + lost)
        if keep[n]
    ]
    start = BlockRef(0, ZERO_DIGEST)
    found = common_ancestor(trail, lambda n: hash_of(n, "ours"), start)
    still = [ref for ref in trail if ref.number < common]
    assert found == (still[-1] if still else start)


def test_span_halves_on_refusal_and_grows_back_to_the_limit() -> None:
    assert next_span(100, False, 1000) == 50
    assert next_span(1, False, 1000) == 1
    size = 1
    for _ in range(30):
        size = next_span(size, True, 1000)
    assert size == 1000


def test_a_retraction_names_the_block_to_go_back_to(deployed: Deployed) -> None:
    deployed.anvil.mine(2)
    watcher = Watcher(deployed.client, deployed.deployment)
    reader = Reader()
    reader.drain(watcher)
    older = deployed.client.block(reader.trail[-1].number - 2)
    trail = [BlockRef(older.number, older.hash), reader.trail[-1]]
    deployed.anvil.rpc("anvil_reorg", 1, [])
    deployed.anvil.mine()
    first = next(watcher.poll(trail))
    assert first == Retracted(BlockRef(older.number, older.hash))
