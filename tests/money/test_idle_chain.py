"""An orchestrator that awaits nothing reads the chain's events seldom, and at once otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from anvil_kit import needs_anvil
from chain_kit import World
from money_kit import RUN
from walk_kit import HONEST

from prime_chain import watcher as chain_watcher
from prime_chain.watcher import Watcher
from prime_orchestrator.manager.indexer import run_indexer_tick
from prime_orchestrator.manager.loops import BUSY_SECONDS, Pace
from prime_orchestrator.store import chain, meta
from prime_orchestrator.store.chain import STATE_EVENTS

pytestmark = needs_anvil


def test_events_are_read_every_idle_seconds_unless_a_transaction_or_event_is_expected(
    members: World,
) -> None:
    world, clock = members, members.mgr.now
    loops = replace(world.loops, pace=Pace(idle_seconds=12.0))

    def read() -> bool:
        """Runs a tick on a chain with a new block; whether the block was read."""
        world.anvil.mine()
        before = position()
        loops.chain_tick()
        return position() > before

    def position() -> int:
        with world.mgr.store.read() as connection:
            found = chain.cursor(connection, "chain")
        return 0 if found is None else found[0]

    assert read(), "nothing has been read yet"
    clock.time += BUSY_SECONDS  # events of the start no longer count as recent
    assert read()
    assert not read()
    clock.time += 11
    assert not read()
    clock.time += 1
    assert read()
    assert not read()

    world.mgr.judge(world.mgr.submit(HONEST))
    clock.time += min(RUN.root_seconds, 11)
    assert not read(), "nothing is awaited yet"
    clock.time += RUN.root_seconds
    loops.pace.read_at = clock.time
    loops.money_tick()  # decides to post a root
    assert read(), "the root's transaction is awaited"
    clock.time += 1
    assert read(), "its event is recent, or it is still awaited"


def test_the_chain_counts_as_read_once_its_newest_block_is(
    members: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mgr = members.mgr
    with mgr.store.begin() as connection:
        meta.drop(connection, meta.CHAIN_READ)
    members.anvil.mine(3)
    monkeypatch.setattr(chain_watcher, "MAX_STEPS", 1)
    watcher = Watcher(
        members.client, members.deployment, max_span=1, pool=mgr.context.pool, of_all=STATE_EVENTS
    )

    def is_read() -> bool:
        run_indexer_tick(mgr.store, mgr.context, watcher, mgr.now)
        with mgr.store.read() as connection:
            return meta.get(connection, meta.CHAIN_READ) is not None

    assert [is_read() for _ in range(3)] == [False, False, True]
