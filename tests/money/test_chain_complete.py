"""The orchestrator's copy of the chain: whole, its own pool's only, and no larger for strangers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import World
from money_kit import RUN
from walk_kit import HONEST, OWNER, one

from devnet.chain import CHAIN_ID, dev_signer
from prime_chain import codec
from prime_chain.client import ChainClient
from prime_chain.events import RootPosted
from prime_chain.faulty import FaultyRpc
from prime_chain.watcher import Watcher
from prime_core.errors import UnavailableError
from prime_orchestrator.manager.indexer import check_reward_roots, run_indexer_tick
from prime_orchestrator.manager.members import active_stake
from prime_orchestrator.manager.settlement import chain_clock
from prime_orchestrator.store import chain, meta, schema
from prime_orchestrator.store.chain import STATE_EVENTS

pytestmark = needs_anvil


def _topic(contract: str, name: str) -> str:
    events = codec.artifact(contract).events.values()
    return next("0x" + item.selector.hex() for item in events if item.name == name)


ROOT_POSTED = _topic("Work", "RootPosted")
REWARD_ROOT_POSTED = _topic("Rewards", "RewardRootPosted")


class Hiding(FaultyRpc):
    """Leaves the logs of chosen work roots out, or those of every event `kind`."""

    hidden: frozenset[int] = frozenset()
    kind: str | None = None
    hid = 0

    def _falsified(self, method: str, result: Any, kinds: Any) -> Any:
        if method == "eth_getLogs":
            kept = [
                log
                for log in result
                if log["topics"][0] != self.kind
                and (
                    log["topics"][0] != ROOT_POSTED or int(log["topics"][2], 16) not in self.hidden
                )
            ]
            self.hid += len(result) - len(kept)
            return kept
        return super()._falsified(method, result, kinds)


@pytest.fixture
def hiding(members: World) -> Iterator[Hiding]:
    proxy = Hiding(members.anvil.url)
    yield proxy
    proxy.close()


def _watch(world: World, *urls: str) -> Watcher:
    client = ChainClient(urls, CHAIN_ID, quorum=1)
    return Watcher(client, world.deployment, pool=world.mgr.context.pool, of_all=STATE_EVENTS)


def _gaps(world: World) -> int:
    with world.mgr.store.read() as connection:
        return int(meta.get(connection, meta.CHAIN_GAPS) or 0)


def _tick(world: World, watcher: Watcher) -> list[Any]:
    return run_indexer_tick(world.mgr.store, world.mgr.context, watcher, world.mgr.now)


def test_the_logs_of_our_own_transaction_that_were_left_out_are_fetched_again_and_alarm(
    members: World, hiding: Hiding
) -> None:
    world = members
    world.start_of_an_epoch()
    world.mgr.submit(HONEST)
    hiding.hidden = frozenset({1})
    world.loops = replace(world.loops, watcher=_watch(world, hiding.url))
    with pytest.raises(UnavailableError, match="our own transaction"):
        world.until_rooted()
    assert hiding.hid > 0
    assert one(world, schema.roots)["chain_seq"] is None
    assert _gaps(world) > 0
    hiding.hidden = frozenset()
    world.ticks()
    assert one(world, schema.roots)["chain_seq"] == 1


def test_windows_close_by_the_contracts_time_and_never_later_than_the_blocks(
    members: World,
) -> None:
    """Around an outage of the L2 the contracts' time stands still."""
    mgr = members.mgr

    def closing(window_time: Callable[[], int] | None) -> int:
        members.anvil.mine()
        run_indexer_tick(mgr.store, mgr.context, members.loops.watcher, mgr.now, window_time)
        with mgr.store.read() as connection:
            clock = chain_clock(connection)
        assert clock is not None
        return clock.time

    assert closing(lambda: 1000) == 1000
    assert closing(lambda: 2**40) <= members.loops.contracts.client.block("latest").time
    assert members.loops.window_time is None, "no feed on a local chain"
    assert closing(None) > 1000


def test_a_work_root_that_was_left_out_is_found_by_its_number(
    members: World, hiding: Hiding
) -> None:
    """Not ours: no receipt says that it is missing. The next one does."""
    world = members
    store = world.mgr.store
    world.start_of_an_epoch()
    world.mgr.submit(HONEST)
    world.until_rooted()
    world.mgr.submit(HONEST)
    world.until_rooted()
    with store.begin() as connection:  # as if another account had posted them
        chain.forget_all(connection)
        connection.execute(sa.delete(schema.cursors))
        connection.execute(sa.delete(schema.intents))
    hiding.hidden = frozenset({1})
    with pytest.raises(UnavailableError, match="work roots \\[1\\]"):
        _tick(world, _watch(world, hiding.url))
    taken = _tick(world, _watch(world, hiding.url, world.anvil.url))
    seen = [event.seq for event in taken if isinstance(event, RootPosted)]
    assert sorted(seen) == [1, 2]
    assert _gaps(world) >= 1


def test_a_reward_root_of_others_that_was_left_out_is_found_by_the_contracts_total(
    members: World, hiding: Hiding
) -> None:
    world, store = members, members.mgr.store
    world.start_of_an_epoch()
    world.mgr.judge(world.mgr.submit(HONEST))
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    posted = one(world, schema.reward_roots)
    with store.begin() as connection:  # as if another account had posted it, in a table
        chain.forget_all(connection)
        for table in (schema.cursors, schema.intents, schema.reward_roots):
            connection.execute(sa.delete(table))
    world.forward(RUN.epoch_seconds)
    world.anvil.mine(2)
    rewards = world.contracts.rewards

    def tick(*urls: str) -> list[Any]:
        watcher = _watch(world, *urls)
        found = _tick(world, watcher)
        return found + check_reward_roots(store, world.mgr.context, watcher, rewards, world.mgr.now)

    hiding.kind = REWARD_ROOT_POSTED
    with pytest.raises(UnavailableError, match="reward roots of pool 1 are missing"):
        tick(hiding.url)
    assert _gaps(world) == 1
    tick(hiding.url, world.anvil.url)
    found = one(world, schema.reward_roots)
    assert _gaps(world) == 2
    assert [found[name] for name in ("epoch", "object", "claimable_at")] == [
        posted[name] for name in ("epoch", "object", "claimable_at")
    ]
    world.ticks()
    assert _gaps(world) == 2, "once it is known nothing is missing"


def test_events_of_strangers_leave_one_row_an_account(members: World) -> None:
    world, store = members, members.mgr.store
    c, stranger = world.contracts, dev_signer(8)
    world.ticks(1)
    table = [schema.chain_events, schema.chain_state]

    def rows() -> list[int]:
        with store.read() as connection:
            return [
                connection.execute(sa.select(sa.func.count()).select_from(one)).scalar_one()
                for one in table
            ]

    before = rows()
    world.send(stranger, c.token.faucet())
    world.send(stranger, c.token.approve(c.vault.address, 100))
    world.send(stranger, c.registry.register_provider(stranger.address))
    for _ in range(8):  # the most unbondings at a time
        world.send(stranger, c.vault.deposit(2))
        world.send(stranger, c.vault.unbond(1))
    world.loops.chain_tick()
    with store.read() as connection:
        assert active_stake(connection, stranger.address) == 8
        assert active_stake(connection, OWNER.address) == c.vault.active(OWNER.address)
    assert [after - was for after, was in zip(rows(), before, strict=True)] == [0, 1]
