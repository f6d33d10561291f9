"""Several open leases of one node: how many, which comes back first, what an expired one costs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from orchestrator_world import MakeWorld, Session, World
from stores import migrate
from test_dropped_leases import Watch, owned

from prime_core.encoding import sha256
from prime_core.ids import Address, Digest
from prime_core.messages import HeartbeatAnswer, LeaseAnswer, LeaseRequest
from prime_core.run import MICRO
from prime_core.task import SignedLease
from prime_core.verdict import Outcome, Reason
from prime_orchestrator import scheduler
from prime_orchestrator.api import leasing
from prime_orchestrator.manager import speed, standing
from prime_orchestrator.manager.planting import Planted
from prime_orchestrator.store import Store, leases, nodes, open_store, sqlite_url, submissions

LONGEST = 2 * 2 * 6
"""Tokens of a lease of the run's longest target."""


BOTH = pytest.mark.parametrize(
    "store", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A migrated store: SQLite, or both kinds for tests that are marked BOTH."""
    postgres = getattr(request, "param", "") == "postgres"
    url = request.getfixturevalue("empty_postgres") if postgres else sqlite_url(tmp_path / "s")
    opened = open_store(url)
    migrate(opened)
    yield opened
    opened.close()


def ask(world: World, session: Session, *holds: SignedLease) -> LeaseAnswer:
    """A request of a node that works on the leases `holds`."""
    named = tuple(world.lease_digest(one) for one in holds)
    wish = LeaseRequest(policy_version=0, holds=named)
    answer = world.post("/v1/leases", wish, session)
    assert answer.status_code == 200, answer.text
    return LeaseAnswer.model_validate_json(answer.content)


def fill(world: World, session: Session) -> tuple[list[SignedLease], str]:
    """Takes leases and works on all of them until there are no more; the leases, and why."""
    held: list[SignedLease] = []
    while (answer := ask(world, session, *held)).lease is not None:
        assert answer.lease not in held
        held.append(answer.lease)
    return held, answer.reason


def deliver(world: World, session: Session, lease: SignedLease, *, tokens: int = LONGEST) -> None:
    """The file of an open lease arrives and is accepted."""
    data = world.lease_digest(lease).encode()
    assert world.upload(session, lease, data).status_code == 204
    answer = world.post("/v1/submissions", world.claim(session.account, lease, data))
    assert answer.status_code == 200, answer.text
    digest = Digest(answer.json()["receipt"]["submission_digest"])
    with world.backend.store.begin() as connection:
        submissions.change(connection, digest, status="accepted", units=tokens)
        standing.judged(connection, session.account.address, Outcome.ACCEPTED, Reason.NONE)


def proven(world: World, number: int, seconds: float = 1.0) -> Session:
    """A node with accepted files, and with a measured speed."""
    session = world.member(number)
    work(world, session, seconds)
    return session


def work(world: World, session: Session, seconds: float = 1.0) -> None:
    """The node makes files of the longest target in `seconds` each."""
    for _ in range(speed.LEAST_FILES + 1):  # the rate is computed when the next lease is given
        lease = world.lease(session)
        world.clock.advance(seconds)
        deliver(world, session, lease)


def row_of(world: World, session: Session) -> Any:
    with world.backend.store.read() as connection:
        return nodes.get(connection, session.account.address)


def slots_heard(world: World, session: Session) -> int:
    """The slots that a heartbeat's answer names."""
    answer = world.post("/v1/heartbeat", b'{"policy_version":0}', session)
    return HeartbeatAnswer.model_validate_json(answer.content).lease_slots


def test_a_node_without_a_record_holds_one_lease_despite_its_claims(world: World) -> None:
    session = world.member(1)
    (held,), reason = fill(world, session)
    assert reason == "it works on 1 open leases, and may hold 1 at once"
    made_up = LeaseRequest(policy_version=0, holds=tuple(sha256(b"%d" % n) for n in range(16)))
    answer = world.post("/v1/leases", made_up, session)
    assert LeaseAnswer.model_validate_json(answer.content).lease == held
    assert slots_heard(world, session) == 1


@pytest.mark.parametrize(("seconds", "slots"), [(21, 1), (19, 1), (9, 2), (6, 3), (4.9, 4), (1, 4)])
def test_slots_follow_the_measured_speed(world: World, seconds: float, slots: int) -> None:
    """All open leases are made within a third of a lease's time of 60 s."""
    session = proven(world, 1, seconds)
    held, reason = fill(world, session)
    assert len(held) == slots == slots_heard(world, session)
    assert reason == f"it works on {slots} open leases, and may hold {slots} at once"
    assert len({world.lease_digest(one) for one in held}) == slots
    with world.backend.store.read() as connection:
        opened = leases.open_among(connection, [session.account.address])
        assert leases.held_by(connection, opened, world.clock()) == {session.account.address: slots}


@pytest.mark.slow
@pytest.mark.parametrize("idle", [0, 7, 12])
def test_scarce_work_goes_to_idle_nodes_first(make_world: MakeWorld, idle: int) -> None:
    """Some nine leases fill the batches within reach."""
    world = make_world(stake_per_seat=1)
    world.publish(0)
    fast, *others = [proven(world, number) for number in range(1, 2 + idle)]
    held, reason = fill(world, fast)
    given = [ask(world, other).lease for other in others]
    needed = len(held) + sum(lease is not None for lease in given)
    if idle == 0:
        assert len(held) == 4
    elif idle == 7:
        assert all(given), "what the fast node left is enough for all"
        assert 1 < len(held) < 4
        assert reason == scheduler.ENOUGH
    else:
        assert len(held) == 1
        assert needed < 1 + idle, "not even one lease for each"


def test_the_operators_limit_holds(make_world: MakeWorld) -> None:
    world = make_world()
    world.publish(0)
    session = proven(world, 1)
    limited = replace(world, backend=replace(world.backend, lease_slots=2))
    view = limited.backend.slots(world.backend.context.run)
    assert view.of(row_of(world, session)) == 2
    assert world.backend.slots(world.backend.context.run).of(row_of(world, session)) == 4


def test_planted_and_shadow_nodes_hold_one(world: World) -> None:
    row = row_of(world, proven(world, 1))
    run = world.backend.context.run
    assert world.backend.slots(run).of(row) == 4
    planted = replace(world.backend, planted=Planted(frozenset({row.address}), b"x" * 32))
    assert planted.slots(run).of(row) == 1
    assert world.backend.slots(run).of(replace(row, status="shadow")) == 1
    assert world.backend.slots(run).of(replace(row, kept=0.4)) == 1
    assert world.backend.slots(run).of(replace(row, token_rate=None)) == 1


def test_a_lease_that_the_node_does_not_work_on_comes_back_before_a_new_one(world: World) -> None:
    """Dropping a lease gains nothing, however many are open."""
    session = proven(world, 1)
    first = ask(world, session).lease
    assert first is not None
    second = ask(world, session, first).lease
    assert second is not None
    third = ask(world, session, first, second).lease
    assert third is not None
    assert ask(world, session, first, third).lease == second
    assert ask(world, session, third).lease == first, "the oldest first"
    assert ask(world, session).lease == first
    assert world.lease(session) == first, "a node that knows only one lease"
    assert len(open_leases(world, session)) == 3


def open_leases(world: World, session: Session) -> list[Any]:
    with world.backend.store.read() as connection:
        return leases.open_among(connection, [session.account.address]).get(
            session.account.address, []
        )


def test_one_of_several_expires_and_the_others_go_on(world: World) -> None:
    session = proven(world, 1)
    watch = Watch(world)
    dropped = world.lease(session)
    watch.wait(30)
    second = ask(world, session, dropped).lease
    assert second is not None
    watch.wait(30)
    assert ask(world, session, dropped, second).lease is not None, "none has expired yet"
    watch.wait(1)
    row = row_of(world, session)
    assert (row.misses, row.rests_until) == (1, dropped.lease.deadline + 60)
    assert slots_heard(world, session) == 1
    assert ask(world, session).lease == second, "its open leases still come back"
    refused = ask(world, session, *(one.signed() for one in open_leases(world, session)))
    assert refused.lease is None
    assert refused.reason == "it works on 2 open leases, and may hold 1 at once"
    for row in open_leases(world, session):
        deliver(world, session, row.signed())
    refused = ask(world, session)
    assert refused.lease is None
    assert "expired without a file" in refused.reason
    watch.wait(60)
    assert len(fill(world, session)[0]) == 4, "accepted files end the count"


@BOTH
def test_leases_dropped_together_cost_the_node_all_its_slots_for_one_rest(world: World) -> None:
    session = proven(world, 1)
    watch = Watch(world)
    held, _ = fill(world, session)
    watch.wait(61)
    row = row_of(world, session)
    assert (row.misses, row.rests_until) == (1, held[0].lease.deadline + 60)
    kept, missed = 0.0, 0.0
    for _ in range(4):
        kept, missed = kept * 15 / 16 + 1, missed * 15 / 16
    for _ in range(4):
        kept, missed = kept * 15 / 16, missed * 15 / 16 + 1
    assert (row.kept, row.missed) == pytest.approx((kept, missed)), "each is on its record"
    watch.wait(58)
    assert ask(world, session).lease is None
    watch.wait(1)
    (only,), _ = fill(world, session)
    watch.wait(61)
    row = row_of(world, session)
    assert (row.misses, row.rests_until) == (2, only.lease.deadline + 120)


def test_a_provider_gains_nothing_by_replacing_a_node_that_dropped_its_leases(
    world: World,
) -> None:
    dropper, sibling = proven(world, 1), proven(world, 2)
    watch = Watch(world)
    owned(world, dropper, 7)
    owned(world, sibling, 7)
    assert len(fill(world, dropper)[0]) == 4
    watch.wait(61)
    held, _ = fill(world, sibling)
    assert len(held) == 4, "the sibling's own"
    for one in held:
        deliver(world, sibling, one)
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, dropper.account.address, "left", last_heartbeat=world.clock())
    fresh = world.member(3)
    owned(world, fresh, 7)
    (one,), reason = fill(world, fresh)
    assert one is not None
    assert "may hold 1 at once" in reason
    refused = ask(world, sibling)
    assert refused.lease is None
    assert "this provider's nodes expired" in refused.reason


def test_stake_covers_all_open_leases(make_world: MakeWorld) -> None:
    one = 2 * 2 * 16 * 10  # what a lease earns at most: rows, tokens, price
    world = make_world(stake_per_seat=one, risk_factor_micro=MICRO)
    world.publish(0)
    session, owner = world.member(1), Address("0x" + "7" * 40)
    owned(world, session, int(owner, 16))
    world.on_chain("Deposited", provider=owner, amount=2 * one + 4 * 10 * LONGEST)
    work(world, session)
    held, reason = fill(world, session)
    assert (len(held), slots_heard(world, session)) == (2, 4)
    assert "all that its stake covers" in reason


def test_a_node_that_works_on_several_gets_other_targets_than_after_a_failure(
    world: World,
) -> None:
    """An open lease is no failed one: the target is picked as for any node."""
    session = proven(world, 1)
    held, _ = fill(world, session)
    assert len({one.lease.target for one in held}) == 2


def test_the_speed_of_a_node_is_the_same_however_many_leases_it_holds() -> None:
    alone = [(24, 10.0 * at, 10.0 * (at + 1)) for at in range(8)]
    assert speed.rates_of(alone) == pytest.approx([2.4] * 8)
    together = [(24, 40.0 * (at // 4), 40.0 * (at // 4) + 40.0) for at in range(8)]
    assert speed.rates_of(together) == pytest.approx([2.4] * 8)
    staggered = [(24, 10.0 * at, 10.0 * at + 40.0) for at in range(12)]
    rates = speed.rates_of(staggered)
    assert rates[3:9] == pytest.approx([2.4] * 6)
    assert max(rates) == pytest.approx(2.4), "what is missing lowers it"
    straggler = [*alone, (24, 0.0, 80.0)]
    assert max(speed.rates_of(straggler)) == pytest.approx(2.4 + 0.3)
    burst = [(24, 0.0, 40.0 + at / 1000) for at in range(4)]
    assert max(speed.rates_of(burst)) == pytest.approx(2.4, rel=1e-3)
    assert speed.rates_of([(24, 5.0, 5.0)]) == [pytest.approx(24_000)]
    assert speed.rates_of([]) == []


def test_an_older_node_asks_as_ever() -> None:
    """`holds` is written only if there is something in it: an older orchestrator refuses it."""
    assert json.loads(LeaseRequest(policy_version=3).model_dump_json()) == {
        "policy_version": 3,
        "runs": [],
    }


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_never_more_than_the_slots_are_open_and_nothing_is_gained_by_dropping(
    world: World, seed: int
) -> None:
    """A node and its sibling ask, claim to work on some of their leases, deliver and wait, at
    random."""
    sessions = [proven(world, 1, 1.0), proven(world, 2, 9.0), world.member(3)]
    rng, watch = random.Random(seed), Watch(world)
    slots = world.backend.slots(world.backend.context.run)
    for session in sessions:
        owned(world, session, 7)
    for _ in range(40):
        session = rng.choice(sessions)
        opened = open_leases(world, session)
        alive = [row for row in opened if row.deadline >= world.clock()]
        match rng.randrange(4):
            case 0 | 1:
                held = [row.signed() for row in alive if rng.random() < 0.9]
                row = row_of(world, session)
                with world.backend.store.read() as connection:
                    own = nodes.of_providers(connection, {row.provider})[row.provider]
                answer = ask(world, session, *held)
                dropped = [row.signed() for row in alive if row.signed() not in held]
                if dropped:
                    assert answer.lease == dropped[0]
                if answer.lease is not None and not dropped:
                    assert len(open_leases(world, session)) <= slots.of(row) <= 4
                    assert row.rests_until <= world.clock()
                    names = [one.address for one in own]
                    with world.backend.store.read() as connection:
                        all_held = leases.held_by(connection, names, world.clock())
                    assert sum(all_held.values()) <= slots.of_provider(own, world.clock())
            case 2 if alive:
                deliver(world, session, rng.choice(alive).signed())
            case _:
                watch.wait(rng.choice((1, 7, 20)))


def test_two_leases_of_one_transaction_are_two(world: World) -> None:
    """Requests that are answered together see one another's leases."""
    session = proven(world, 1)
    account = session.account.address
    first, again = leasing.lease_all(
        world.backend, [leasing.Ask(account, LeaseRequest(policy_version=0))] * 2
    )
    assert isinstance(first, LeaseAnswer)
    assert first == again
    assert first.lease is not None
    holds = (world.lease_digest(first.lease),)
    wish = LeaseRequest(policy_version=0, holds=holds)
    second, third = leasing.lease_all(world.backend, [leasing.Ask(account, wish)] * 2)
    assert isinstance(second, LeaseAnswer)
    assert second == third
    assert second.lease not in (None, first.lease)
