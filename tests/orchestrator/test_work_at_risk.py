"""Work at risk: what a provider's nodes hold and may still lose is worth at most its stake times
the run's risk factor."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from orchestrator_world import MakeWorld, Session, World
from test_api_leases import ask

from prime_core.ids import Address
from prime_core.run import MICRO
from prime_orchestrator.store import nodes, schema

LEASE = 2 * 2 * 16 * 10
"""What one lease earns at most: rows, tokens, price."""
OWNER = Address("0x" + "7" * 40)


@pytest.fixture
def risky(make_world: MakeWorld) -> World:
    """A run whose stake of one seat covers two leases, half a seat's stake one."""
    world = make_world(stake_per_seat=4 * LEASE, risk_factor_micro=MICRO // 2)
    world.publish(0)
    return world


def seat(world: World, number: int) -> Session:
    session = world.member(number)
    with world.backend.store.begin() as connection:
        nodes.set_member(connection, session.account.address, provider=OWNER)
    return session


def stake(world: World, leases: float) -> None:
    """Gives the provider what covers so many leases more."""
    world.on_chain("Deposited", provider=OWNER, amount=int(2 * LEASE * leases))


def test_a_provider_holds_as_many_leases_as_its_stake_covers(risky: World) -> None:
    seats = [seat(risky, number) for number in (1, 2, 3)]
    refused = ask(risky, seats[0])
    assert refused.lease is None, "no stake, no lease"
    assert "stake covers" in refused.reason
    stake(risky, 2.9)
    assert [ask(risky, one).lease is not None for one in seats] == [True, True, False]
    assert ask(risky, seats[0]).lease is not None, "its open lease comes back"
    stake(risky, 0.2)
    assert ask(risky, seats[2]).lease is not None


def test_files_count_until_they_are_judged_and_past_their_validity(risky: World) -> None:
    stake(risky, 1)
    session = seat(risky, 1)
    digest = risky.hand_in(session)
    assert ask(risky, session).lease is None, "a file without a verdict"
    files = schema.submissions

    def become(**values: object) -> None:
        with risky.backend.store.begin() as connection:
            connection.execute(sa.update(files).where(files.c.digest == digest).values(**values))

    become(status="accepted", units=1)
    assert ask(risky, session).lease is None, "it may still be found to be a lie"
    stake(risky, 1 / 64)  # a token of one of the 64
    held = ask(risky, session).lease
    assert held is not None
    become(status="void", units=0)
    with risky.backend.store.begin() as connection:
        connection.execute(sa.delete(schema.leases))
    assert ask(risky, session).lease is not None


def test_a_run_whose_seat_covers_no_lease_is_refused(make_world: MakeWorld) -> None:
    with pytest.raises(ValueError, match="covers no lease"):
        make_world(stake_per_seat=2 * LEASE - 1, risk_factor_micro=MICRO // 2)
