"""A stranger's events: how many there are, and which of them an orchestrator asks for."""

from __future__ import annotations

import time
from collections import Counter

from devnet.deployed import EVIDENCE, Deployed, pool_config
from devnet.foreign import CALLS, STRANGER, ForeignEvents
from prime_chain.history import read_events
from prime_chain.watcher import Confirmed, Watcher
from prime_orchestrator.store.chain import STATE_EVENTS


def test_an_orchestrator_reads_only_those_events_of_strangers_that_sessions_need(
    deployed: Deployed,
) -> None:
    first = deployed.client.block_number() + 1
    config = pool_config(deployed.accounts[1].address, EVIDENCE, 1)
    for _ in range(2):
        deployed.send(deployed.accounts[0], deployed.contracts.pools.create(config))
    other, ours = (
        event.pool
        for event in read_events(deployed.client, deployed.deployment, first=first)
        if event.name == "PoolCreated"
    )
    foreign = ForeignEvents(deployed.anvil, deployed.contracts, ours, other)
    foreign.begin(3 * CALLS - 1, 0.0)
    deadline = time.monotonic() + 60
    while not foreign.over():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    foreign.close()
    deployed.anvil.mine()  # the state is there before its block can be read
    assert foreign.emitted() == 3 * CALLS
    every = Counter(
        event.name for event in read_events(deployed.client, deployed.deployment, first=first)
    )
    assert (every["SeatsAllowed"], every["RevokedBefore"]) == (2 * CALLS, CALLS)
    watcher = Watcher(deployed.client, deployed.deployment, pool=ours, of_all=STATE_EVENTS)
    asked = Counter(
        event.name
        for step in watcher.poll()
        if isinstance(step, Confirmed)
        for event in step.events
        if event.block >= first
    )
    assert asked == {"PoolCreated": 1, "RevokedBefore": CALLS}
    assert deployed.contracts.registry.revoked_before(STRANGER) == 3 * CALLS
