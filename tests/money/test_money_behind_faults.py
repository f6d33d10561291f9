"""The money side of a pool while its RPC endpoints fail in every way, one of three at a time:
nothing is lost, no one is paid twice, no one is slashed wrongly."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import STAKE, World
from money_kit import MANAGER, RUN, TOKEN
from walk_kit import HONEST, LIAR, OTHER, OWNER, rebuild_root, settled

from devnet.chain import CHAIN_ID
from devnet.faulty import KINDS, FaultyRpc, RpcFault
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.events import RootPosted, SlashProposed
from prime_chain.history import read_events
from prime_chain.watcher import Watcher
from prime_core.errors import UnavailableError
from prime_core.verdict import Reason
from prime_orchestrator.store import schema
from prime_orchestrator.store.chain import STATE_EVENTS

pytestmark = [needs_anvil, pytest.mark.slow]


def _behind(world: World, client: ChainClient) -> None:
    """Has the manager of `world` ask `client`."""
    world.senders.clear()
    world.client, world.contracts = client, Contracts(client, world.deployment)
    watcher = Watcher(client, world.deployment, pool=world.mgr.context.pool, of_all=STATE_EVENTS)
    world.loops = replace(
        world.loops, contracts=world.contracts, watcher=watcher, sender=world.sender(MANAGER)
    )


def _tick(world: World) -> None:
    with contextlib.suppress(UnavailableError):
        world.ticks(1)


def test_a_pool_behind_failing_endpoints_loses_nothing_and_pays_and_slashes_once(
    members: World, request: pytest.FixtureRequest
) -> None:
    """For --faults-seconds; `make soak ARGS=money-faults` takes ten minutes."""
    world, mgr = members, members.mgr
    seconds_of_faults = request.config.getoption("--faults-seconds")
    honest_client, honest_contracts = world.client, world.contracts
    dice = random.Random(7)
    proxies = [FaultyRpc(world.anvil.url, seed=at) for at in range(3)]
    client = ChainClient([one.url for one in proxies], CHAIN_ID, timeout=0.4)
    _behind(world, client)
    world.start_of_an_epoch()
    accepted: Counter[str] = Counter()
    bad = mgr.submit(LIAR)
    mgr.judge(bad, Reason.WRONG_ACTIVATIONS)
    end = time.monotonic() + seconds_of_faults
    while time.monotonic() < end:
        kind, victim = dice.choice(KINDS), dice.choice(proxies)
        for one in proxies:
            one.faults = ()
        seconds = 0.2 if kind == "delay" else 20
        victim.faults = (RpcFault(kind, dice.choice([0.3, 1.0]), seconds=seconds),)
        for _ in range(dice.randint(0, 2)):
            row = mgr.submit(HONEST)
            mgr.judge(row)
            accepted[row.digest] += 1
        for _ in range(2):
            _tick(world)
        world.forward(RUN.root_seconds)
    injected = sum((one.injected for one in proxies), Counter())
    assert len(injected) >= min(5, int(seconds_of_faults / 8)), injected
    for one in proxies:
        one.faults = ()
    _behind(world, honest_client)
    world.contracts = honest_contracts
    for _ in range(6):
        world.ticks(2)
        world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)

    events = read_events(honest_client, world.deployment)
    roots = [event for event in events if isinstance(event, RootPosted)]
    assert [root.seq for root in roots] == list(range(1, len(roots) + 1))
    assert len({root.root for root in roots}) == len(roots), "a root was posted twice"
    with mgr.store.read() as connection:
        stored = connection.execute(
            sa.select(schema.roots.c.root).where(schema.roots.c.chain_seq.is_not(None))
        ).scalars()
        assert set(stored) == {root.root for root in roots}
        digests = connection.execute(
            sa.select(schema.submissions.c.digest).where(schema.submissions.c.root_id.is_not(None))
        ).scalars()
        assert set(digests) >= set(accepted), "an accepted file is in no root"
    assert sum(root.count for root in roots) == len(accepted) + 1
    slashes = [event for event in events if isinstance(event, SlashProposed)]
    assert [(slash.node, slash.leaf) for slash in slashes] == [(LIAR.address, bad.digest)]
    assert honest_contracts.vault.active(OWNER.address) == STAKE
    assert honest_contracts.vault.active(OTHER.address) == STAKE - RUN.slash_amount
    last = settled(world)
    assert last.amounts().get(HONEST.address, 0) == len(accepted) * 20 * TOKEN // 1000
    assert rebuild_root(world, last.epoch).match
    client.close()
    for one in proxies:
        one.close()
