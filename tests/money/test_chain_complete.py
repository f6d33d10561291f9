"""The orchestrator's copy of the chain: whole, its own pool's only, and no larger for strangers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import ARBITER, World
from money_kit import MANAGER, RUN, TRAINER, VALIDATOR, key
from walk_kit import HONEST, LIAR, OTHER, OWNER, one

from devnet.chain import CHAIN_ID, dev_signer
from devnet.faulty import FaultyRpc
from prime_chain import codec
from prime_chain.client import ChainClient
from prime_chain.events import RootPosted
from prime_chain.watcher import Watcher
from prime_core.checkpoint import PolicyStatement
from prime_core.encoding import sha256
from prime_core.errors import UnavailableError
from prime_core.ids import Address
from prime_core.verdict import Reason
from prime_orchestrator.manager.completeness import CHECK_SECONDS, check_events
from prime_orchestrator.manager.indexer import run_indexer_tick
from prime_orchestrator.manager.members import active_stake
from prime_orchestrator.manager.settlement import chain_clock
from prime_orchestrator.store import chain, checks, meta, schema
from prime_orchestrator.store.chain import STATE_EVENTS

pytestmark = needs_anvil


def _topic(contract: str, name: str) -> str:
    events = codec.artifact(contract).events.values()
    return next("0x" + item.selector.hex() for item in events if item.name == name)


ROOT_POSTED = _topic("Work", "RootPosted")
CONTRACTS = ("Registry", "StakeVault", "Pools", "Work", "Rewards", "Slasher")


class Hiding(FaultyRpc):
    """Leaves the logs of chosen work roots out, or the logs of all events of `kinds`."""

    hidden: frozenset[int] = frozenset()
    kinds: Set[str] = frozenset()
    hid = 0

    def _falsified(self, method: str, result: Any, kinds: Any) -> Any:
        if method == "eth_getLogs":
            kept = [
                log
                for log in result
                if log["topics"][0] not in self.kinds
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


def _contract_of(event: str) -> str:
    return next(
        name
        for name in CONTRACTS
        if any(item.name == event for item in codec.artifact(name).events.values())
    )


def _watch(world: World, *urls: str) -> Watcher:
    client = ChainClient(urls, CHAIN_ID, quorum=1)
    return Watcher(client, world.deployment, pool=world.mgr.context.pool, of_all=STATE_EVENTS)


def _gaps(world: World) -> int:
    with world.mgr.store.read() as connection:
        return int(meta.get(connection, meta.CHAIN_GAPS) or 0)


def _tick(world: World, watcher: Watcher) -> list[Any]:
    return run_indexer_tick(world.mgr.store, world.mgr.context, watcher, world.mgr.now)


def _compare(world: World, *urls: str) -> list[Any]:
    """Reads the events, then compares them with the contracts."""
    world.mgr.now.time += int(CHECK_SECONDS)
    watcher = _watch(world, *urls)
    found = _tick(world, watcher)
    mgr = world.mgr
    return found + check_events(mgr.store, mgr.context, watcher, world.contracts, mgr.now)


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


def _stored(world: World, *names: str) -> list[tuple[str, str]]:
    with world.mgr.store.read() as connection:
        return [(name, one.args) for name in names for one in chain.events(connection, name)]


def _as_new(world: World) -> None:
    """As if other accounts had sent all transactions, and nothing had been read."""
    with world.mgr.store.begin() as connection:
        chain.forget_all(connection)
        for table in (schema.cursors, schema.intents, schema.reward_roots):
            connection.execute(sa.delete(table))
        checks.save(connection, checks.Progress())


@pytest.mark.slow
def test_events_that_were_left_out_are_found_by_what_the_contracts_say(
    members: World, hiding: Hiding
) -> None:
    world, mgr = members, members.mgr
    c, pool = world.contracts, mgr.context.pool
    world.start_of_an_epoch()
    policy = PolicyStatement(pool=pool, version=0, manifest_digest=sha256(b"policy"))
    signature = TRAINER.sign(policy, world.deployment.domain_of(policy))
    world.send(MANAGER, c.pools.publish_policy(policy, signature))
    mgr.judge(mgr.submit(HONEST))
    bad = mgr.submit(LIAR)
    mgr.judge(bad, Reason.WRONG_SKETCH)
    world.until_rooted()

    def hide(**facts: str) -> None:
        """The events of these names are left out, missed by these facts, and found again."""
        before, gaps = _stored(world, *facts), _gaps(world)
        assert {name for name, _ in before} == set(facts)
        _as_new(world)
        hiding.kinds = {_topic(_contract_of(name), name) for name in facts}
        with pytest.raises(UnavailableError, match="by the events") as refused:
            _compare(world, hiding.url)
        for name, fact in facts.items():
            assert fact in str(refused.value), name
        assert _gaps(world) == gaps + 1
        _compare(world, hiding.url, world.anvil.url)
        assert set(_stored(world, *facts)) == set(before)
        assert _gaps(world) == gaps + 2
        hiding.kinds = set()
        _compare(world, hiding.url)
        assert _gaps(world) == gaps + 2, "once it is known nothing is missing"

    hide(
        NodeJoined="seats taken: 2",
        PolicyPublished="policies: 1",
        ValidatorSet="number 1: 0x",
        RootPosted="work roots: 1",
    )

    # The contracts do not list proposals. A validator's pledges may be for another pool.
    before, gaps = _stored(world, "SlashProposed"), _gaps(world)
    _as_new(world)
    with mgr.store.begin() as connection:  # other validators judged it: no slash is queued
        connection.execute(sa.delete(schema.slashes))
    hiding.kinds = {_topic("Slasher", "SlashProposed")}
    _compare(world, hiding.url)
    assert (_stored(world, "SlashProposed"), _gaps(world)) == ([], gaps)
    with mgr.store.begin() as connection:
        assert checks.load(connection).elsewhere == {VALIDATOR.address: 1}
        checks.save(connection, checks.Progress())
    _compare(world, hiding.url, world.anvil.url)
    assert (_stored(world, "SlashProposed"), _gaps(world)) == (before, gaps + 1)

    world.send(OTHER, c.slasher.object(bad.digest))
    world.loops.chain_tick()
    hide(SlashObjected="OBJECTED by the contract, PROPOSED")
    world.send(ARBITER, c.slasher.cancel(bad.digest))
    world.send(OTHER, c.pools.leave(pool, LIAR.address))
    world.send(MANAGER, c.pools.end(pool))
    world.loops.chain_tick()
    hide(
        SlashCancelled="CANCELLED by the contract, OBJECTED",
        NodeLeft="seats taken: 1",
        PoolEnded="its end: True",
    )
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    root = one(world, schema.reward_roots)
    hide(RewardRootPosted="reward roots")
    assert one(world, schema.reward_roots)["claimable_at"] == root["claimable_at"]


def test_states_of_accounts_are_those_of_the_contracts_though_events_were_left_out(
    members: World, hiding: Hiding
) -> None:
    world, c = members, members.contracts
    world.send(HONEST, c.registry.set_revoked_before(HONEST.address, 77))
    world.loops.chain_tick()

    def states() -> list[Any]:
        with world.mgr.store.read() as connection:
            return [
                chain.state(connection, kind, account.address)
                for kind, account in (("provider", HONEST), ("stake", OWNER), ("revoked", HONEST))
            ]

    right = states()
    assert right == [OWNER.address, f"{c.vault.active(OWNER.address)} 0", "77"]
    for at, name in enumerate(("NodeAdded", "Deposited", "RevokedBefore")):
        _as_new(world)
        hiding.kinds = {_topic(_contract_of(name), name)}
        gaps = _gaps(world)
        _tick(world, _watch(world, hiding.url))
        assert states()[at] is None
        _compare(world, hiding.url)
        assert states() == right
        assert _gaps(world) > gaps
        with world.mgr.store.begin() as connection:
            known = chain.cursor(connection, "chain")
            assert known is not None
            chain.retract(connection, known[0])
        assert states()[at] is None, "a reorganization undoes it"

    # At most four nodes are compared at a time, each in its turn.
    mgr = world.mgr
    _as_new(world)
    _tick(world, _watch(world, world.anvil.url))
    for number in range(60, 70):
        mgr.admit(key(number), "admitted")
    watcher = _watch(world, world.anvil.url)
    asked: list[Any] = []

    def is_member(pool: int, node: Address, block: Any) -> bool:
        asked.append(node)
        return node in (HONEST.address, LIAR.address)

    pools, contracts = MagicMock(wraps=c.pools), MagicMock(wraps=c)
    pools.is_member.side_effect = is_member
    contracts.pools = pools
    rounds: list[int] = []
    for _ in range(3):
        mgr.now.time += int(CHECK_SECONDS)
        check_events(mgr.store, mgr.context, watcher, contracts, mgr.now)
        rounds.append(len(asked))
    check_events(mgr.store, mgr.context, watcher, contracts, mgr.now)
    assert rounds == [4, 8, 12], "and not before CHECK_SECONDS have passed"
    assert len(set(asked)) == 12


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
