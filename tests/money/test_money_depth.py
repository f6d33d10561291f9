"""How deep facts lie before money follows from them, on a real chain."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import STAKE, World
from money_kit import MANAGER, RUN, TOKEN
from walk_kit import HONEST, LIAR, OWNER, one, rebuild_root, settled

from prime_core.verdict import Reason
from prime_orchestrator.manager.depth import Depths, Staked
from prime_orchestrator.manager.transactions import forget_unsent, run_transactions_tick
from prime_orchestrator.store import schema

pytestmark = needs_anvil


@pytest.mark.slow
def test_money_waits_until_its_facts_are_deep_enough(members: World) -> None:
    """A slash waits for its root to be safe, a reward root for its facts to be final."""
    world, mgr = members, members.mgr

    def status(kind: str) -> str | None:
        with mgr.store.read() as connection:
            return connection.execute(
                sa.select(schema.intents.c.status).where(schema.intents.c.kind == kind)
            ).scalar()

    world.start_of_an_epoch()
    good, bad = mgr.submit(HONEST), mgr.submit(LIAR)
    mgr.judge(good)
    mgr.judge(bad, Reason.WRONG_SKETCH)
    world.forward(RUN.root_seconds)
    world.loops.money_tick()
    world.loops.chain_tick()  # sends the root, which anvil mines at once
    world.loops.chain_tick()
    root = one(world, schema.roots)
    assert root["block"] == world.client.block_number()

    def send() -> None:
        run_transactions_tick(
            mgr.store, mgr.context, world.contracts, world.sender(MANAGER), mgr.now
        )

    send()
    assert status("propose") == "waiting", "the root's block is not safe yet"
    world.anvil.mine(1)
    send()
    assert status("propose") == "sent"

    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.loops.chain_tick()
    world.loops.money_tick()
    world.loops.chain_tick()
    assert status("reward_root") == "waiting", "the settlement's block is not final yet"
    world.anvil.mine(2)
    world.loops.chain_tick()
    assert status("reward_root") in ("sent", "confirmed")


def test_a_reward_root_whose_facts_left_the_chain_before_sending_is_settled_again(
    members: World,
) -> None:
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    mgr.judge(mgr.submit(HONEST))
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.loops.chain_tick()
    block = world.client.block_number()
    world.loops.money_tick()
    with mgr.store.begin() as connection:
        assert forget_unsent(connection, block) == [], "its facts are all there still"
        (dropped,) = forget_unsent(connection, block - 1)
    assert dropped.startswith("reward_root:")
    world.loops.money_tick()
    for _ in range(2):
        world.anvil.mine(2)
        world.loops.chain_tick()
    assert rebuild_root(world, settled(world).epoch).match


def test_a_seat_is_asked_for_once_the_stake_is_safe(members: World) -> None:
    world = members
    seat = Staked(HONEST.address, STAKE + TOKEN)
    assert not Depths(world.contracts).meets(seat)
    world.send(OWNER, world.contracts.token.approve(world.contracts.vault.address, TOKEN))
    world.send(OWNER, world.contracts.vault.deposit(TOKEN))
    assert world.contracts.vault.active(OWNER.address) == STAKE + TOKEN
    assert not Depths(world.contracts).meets(seat), "its block may still leave the chain"
    world.anvil.mine(1)
    assert Depths(world.contracts).meets(seat)
