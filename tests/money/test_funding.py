"""No lease while the pool owes more than its bond and free funds; leases again once funded."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import DEPLOYER, FUNDS, World
from money_kit import GROUPS, RUN, SAMPLES
from walk_kit import HONEST, LIAR

from prime_core.encoding import sha256
from prime_core.ids import ZERO_DIGEST, Address
from prime_core.messages import LeaseAnswer, LeaseRequest
from prime_core.settlement import is_short
from prime_core.verdict import Reason
from prime_orchestrator.api.leasing import lease
from prime_orchestrator.manager.funding import (
    CHECK_SECONDS,
    LONGEST_REST,
    REST,
    Funding,
    OwedSum,
    funding,
    owed_by,
)
from prime_orchestrator.store import schema, slashes
from prime_orchestrator.store.slashes import SlashRow

pytestmark = needs_anvil


def owed(world: World, planted: tuple[Address, ...] = ()) -> int:
    with world.mgr.store.read() as connection:
        return owed_by(connection, world.mgr.context, planted)


def compared(world: World) -> Funding:
    world.mgr.now.time += CHECK_SECONDS
    world.loops.chain_tick()
    with world.mgr.store.read() as connection:
        found = funding(connection)
    assert found is not None
    return found


def asked(world: World) -> LeaseAnswer:
    return lease(world.mgr.backend, HONEST.address, LeaseRequest(policy_version=0))


def test_a_sum_that_takes_long_is_kept_for_a_while_but_not_while_leases_are_stopped() -> None:
    moment, takes, sums = 0.0, 0.1, 0

    def sum_again() -> int:
        nonlocal moment, sums
        moment, sums = moment + takes, sums + 1
        return sums

    kept = OwedSum(clock=lambda: moment)
    assert kept.current(sum_again, stopped=False) == 1
    takes = 2.0
    assert kept.current(sum_again, stopped=False) == 2, "0.1 s: it is summed each time"
    moment += 2.0 * REST - 1
    assert kept.current(sum_again, stopped=False) == 2
    assert kept.current(sum_again, stopped=True) == 3
    takes = 1000.0
    moment += 2.0 * REST
    assert kept.current(sum_again, stopped=False) == 4
    moment += LONGEST_REST
    assert kept.current(sum_again, stopped=False) == 5


def test_leases_stop_while_the_pool_owes_more_than_its_money_and_go_on_once_it_is_funded(
    members: World, caplog: pytest.LogCaptureFixture
) -> None:
    world, rewards = members, members.contracts.rewards
    world.start_of_an_epoch()
    first = world.mgr.submit(HONEST)
    assert owed(world) in {RUN.price_per_unit * GROUPS * SAMPLES * t for t in RUN.budgets.targets}
    assert owed(world, (HONEST.address,)) == 0, "planted files are not paid"
    accepted = world.mgr.judge(first)
    assert owed(world) == RUN.worth(accepted.units, accepted.prompt_units)
    world.mgr.judge(world.mgr.submit(LIAR), Reason.WRONG_SKETCH)
    assert owed(world) == RUN.worth(accepted.units, accepted.prompt_units), "a rejected file"
    found = compared(world)
    assert (found.owed, found.money) == (owed(world), FUNDS)
    assert not found.objection()
    assert asked(world).lease is not None

    files, leases = schema.submissions, schema.leases
    with world.mgr.store.begin() as connection:
        worth = FUNDS + RUN.price_per_unit
        connection.execute(
            sa.update(files).where(files.c.digest == first.digest)
            .values(units=worth // RUN.price_per_unit)
        )  # fmt: skip
        connection.execute(sa.update(leases).values(status="submitted"))
    with caplog.at_level(logging.WARNING):
        assert is_short(compared(world).owed, FUNDS)
        compared(world)
    refused = asked(world)
    assert refused.lease is None
    assert "it owes 1000.001 PRIME, more than its bond and free funds, 1000 PRIME" in refused.reason
    assert sum("gives no lease" in line for line in caplog.messages) == 1, "said once"

    c = world.contracts
    world.send(DEPLOYER, c.token.approve(rewards.address, RUN.price_per_unit))
    world.send(DEPLOYER, rewards.bond(1, RUN.price_per_unit))
    world.anvil.mine(2)
    assert compared(world).money == FUNDS + RUN.price_per_unit
    assert "gives leases again" in caplog.text
    assert asked(world).lease is not None


def test_what_a_reward_root_settles_is_owed_no_longer(members: World) -> None:
    world = members
    world.start_of_an_epoch()
    world.mgr.judge(world.mgr.submit(HONEST))
    world.until_rooted()
    before = compared(world)
    assert before.owed > 0
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    after = compared(world)
    assert (after.owed, after.money) == (0, FUNDS - before.owed)

    bad, credits = sha256(b"a lie"), schema.credits
    with world.mgr.store.begin() as connection:
        connection.execute(sa.update(credits).values(status="held"))
        slashes.add(
            connection,
            SlashRow(
                bad, HONEST.address, "", ZERO_DIGEST, Reason.WRONG_SKETCH, "1", "proposed", 0.0
            ),
        )
    assert owed(world) == before.owed, "the slash may end either way"
    with world.mgr.store.begin() as connection:
        slashes.change(connection, bad, status="executed")
    assert owed(world) == 0
