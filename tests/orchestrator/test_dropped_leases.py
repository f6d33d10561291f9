"""Leases that are dropped: what dropping costs the pool and the node, and who gets the groups."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from full_disk import a_full_disk
from orchestrator_world import Session, World
from test_api_leases import ask

from bench.seats import measure
from prime_core import seeds
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.task import SignedLease
from prime_core.verdict import Outcome, Reason
from prime_orchestrator.api import liveness
from prime_orchestrator.api.liveness import PROBE_BYTES, LifeTicks, get_probe
from prime_orchestrator.manager import standing
from prime_orchestrator.store import leases, nodes


@pytest.mark.soak
def test_ten_seats_that_drop_their_leases_cost_a_pool_little(tmp_path: Path) -> None:
    established, fresh = measure(tmp_path, lives=3)
    assert established.after <= 0.1
    assert fresh.after <= 0.1
    assert established.first <= 0.5, "newcomers hold half of the lead at most"
    # their leases count for half of a lease's life, and then the first files take a while
    assert fresh.first <= 2 / 3


class Watch:
    """An orchestrator that is up all the time, and nodes that send heartbeats."""

    def __init__(self, world: World) -> None:
        self.world, self.life = world, LifeTicks(world.backend)

    def wait(self, seconds: float) -> None:
        end = self.world.clock() + seconds
        while self.world.clock() < end:
            self.world.clock.advance(min(5.0, end - self.world.clock()))
            with self.world.backend.store.begin() as connection:
                for node in nodes.every(connection, ("active",)):
                    nodes.set_status(
                        connection, node.address, "active", last_heartbeat=self.world.clock()
                    )
            self.life.tick()


def owned(world: World, session: Session, owner: int) -> None:
    with world.backend.store.begin() as connection:
        provider = f"0x{owner:040x}"
        nodes.set_member(connection, session.account.address, provider=provider)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_node_that_drops_a_lease_rests_twice_as_long_each_time(world: World) -> None:
    watch, session = Watch(world), world.member(1)
    rests = []
    for _ in range(4):
        assert ask(world, session).lease is not None
        watch.wait(60)
        watch.wait(1)
        start = world.clock()
        while (answer := ask(world, session)).lease is None:
            assert "expired without a file" in answer.reason
            watch.wait(answer.retry_after_ms / 1000)
        rests.append(round(world.clock() - start))
        world.hand_in(session, str(len(rests)).encode())  # judged later: ends no count
        world.clock.advance(1)
    assert rests == [59, 119, 239, 239]


def test_an_accepted_file_ends_the_count_of_dropped_leases(world: World) -> None:
    watch, session = Watch(world), world.member(1)
    node = session.account.address
    for _ in range(2):
        world.lease(session)
        watch.wait(300)
    with world.backend.store.begin() as connection:
        standing.judged(connection, node, Outcome.ACCEPTED, Reason.NONE)
        row = nodes.get(connection, node)
    assert row is not None
    assert row.kept == 1
    assert row.missed == pytest.approx((15 / 16) * (1 + 15 / 16))
    assert row.misses == 0


def assert_excused(world: World, session: Session, lease: Digest) -> None:
    with world.backend.store.read() as connection:
        row, node = leases.get(connection, lease), nodes.get(connection, session.account.address)
    assert row is not None
    assert row.status == "expired"
    assert node is not None
    assert (node.missed, node.misses) == (0, 0)


def test_a_lease_that_expired_while_the_orchestrator_was_away_is_excused(world: World) -> None:
    session = world.member(1)
    digest = world.lease_digest(world.lease(session))
    world.clock.advance(61)
    LifeTicks(world.backend).tick()
    assert_excused(world, session, digest)


@pytest.mark.parametrize("back", ["before its deadline", "later", "after a hang"])
def test_a_lease_that_expires_after_the_object_store_failed_is_excused(
    world: World, monkeypatch: pytest.MonkeyPatch, back: str
) -> None:
    watch, session = Watch(world), world.member(1)
    given = world.lease_digest(world.lease(session))
    put = world.backend.objects.put

    def hang(key: str, data: bytes) -> None:
        watch.wait(61)
        put(key, data)

    if back == "after a hang":
        with monkeypatch.context() as outage:
            outage.setattr(world.backend.objects, "put", hang)
            watch.life.probe()
    else:
        with a_full_disk(), pytest.raises(UnavailableError):
            watch.life.probe()
        watch.wait(10 if back == "before its deadline" else 61)
        watch.life.probe()
        watch.wait(61)
    assert_excused(world, session, given)
    world.lease(session)  # after the outage: this one counts
    watch.wait(61)
    with world.backend.store.read() as connection:
        node = nodes.get(connection, session.account.address)
    assert node is not None
    assert node.misses == 1


def test_a_lease_that_expires_after_the_store_s_public_address_failed_is_excused(
    world: World,
) -> None:
    """But only if the address answered before: a machine may be unable to reach its own."""
    down = True

    def fetch(url: str) -> bytes:
        if down:
            watch.wait(6)  # it times out
            raise UnavailableError("no route")
        return world.http.get(url).content

    watch, session = Watch(world), world.member(1)
    watch.life = LifeTicks(world.backend, fetch)
    first = world.lease_digest(world.lease(session))
    for _ in range(3):
        watch.life.probe()
    watch.wait(61)
    with world.backend.store.read() as connection:
        row = leases.get(connection, first)
    assert row is not None
    assert (row.status, row.excused) == ("expired", 0)
    watch.wait(300)
    down = False
    watch.life.probe()
    for failures, excused in ((1, 0), (2, 1)):  # once may be an accident
        given = world.lease_digest(world.lease(session))
        down = True
        watch.life.probe()
        if failures == 2:
            with pytest.raises(UnavailableError, match="no route"):
                watch.life.probe()
        down = False
        watch.life.probe()
        watch.wait(61)
        with world.backend.store.read() as connection:
            row = leases.get(connection, given)
        assert row is not None
        assert (row.status, row.excused) == ("expired", excused)
        watch.wait(600)


@pytest.mark.parametrize(
    ("status", "size", "said"),
    [(200, len(PROBE_BYTES), ""), (200, 1 << 20, ""), (200, 9, "slow"), (503, 0, "answered 503")],
)
def test_the_probe_reads_no_more_than_its_object_and_shows_no_signed_url(
    status: int, size: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        parts = [bytes(1)] * size if said else [bytes(size)]
        return httpx.Response(status, content=iter(parts))

    if said == "slow":
        monkeypatch.setattr(liveness, "PROBE_PATIENCE", 0.0)

    with httpx.Client(transport=httpx.MockTransport(serve)) as client:
        if not said:
            found = get_probe(client, "http://store/probe?signature=secret")
            assert found == bytes(min(size, len(PROBE_BYTES) + 1))
            return
        with pytest.raises(UnavailableError, match=said) as refused:
            get_probe(client, "http://store/probe?signature=secret")
        assert "secret" not in str(refused.value)
        for url in ("http://127.0.0.1:1/probe?signature=secret", "http://[x/?signature=secret"):
            with httpx.Client() as real, pytest.raises(UnavailableError) as refused:
                get_probe(real, url)
            assert "secret" not in str(refused.value)


def test_a_fresh_seat_of_the_same_provider_gains_nothing(world: World) -> None:
    watch, first = Watch(world), world.member(1)
    owned(world, first, 7)
    world.lease(first)
    watch.wait(61)
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, first.account.address, "left", last_heartbeat=world.clock())
    second, third = world.member(2), world.member(3)
    owned(world, second, 7)
    owned(world, third, 8)
    refused = ask(world, second)
    assert refused.lease is None
    assert "this provider's nodes expired" in refused.reason
    assert ask(world, third).lease is not None
    watch.wait(60)
    assert ask(world, second).lease is not None


def test_the_groups_of_an_expired_lease_are_made_by_another_provider(world: World) -> None:
    watch, dropper, other = Watch(world), world.member(1), world.member(2)
    owned(world, dropper, 7)
    owned(world, other, 8)
    dropped = world.lease(dropper)
    watch.wait(61)
    again = world.lease(other)
    assert problems(world, again) == problems(world, dropped)
    assert again.lease.target == dropped.lease.target
    assert again.opens()
    assert again.opening is not None
    other_problems = again.opening.model_copy(update={"problems": None})
    assert not again.model_copy(update={"opening": other_problems}).opens()
    mine, theirs = (seeds.lease_seed(world.lease_digest(one)) for one in (again, dropped))
    assert seeds.noise_seed(mine, 0, 0) != seeds.noise_seed(theirs, 0, 0)
    watch.wait(61)  # the other one drops them too: they go to a third
    third = world.member(3)
    owned(world, third, 9)
    assert problems(world, world.lease(third)) == problems(world, dropped)
    watch.wait(60)  # the first node rests no longer and gets none of its own back
    assert problems(world, world.lease(dropper)) != problems(world, dropped)


def test_no_provider_gets_its_own_dropped_groups(world: World) -> None:
    watch, dropper, sibling = Watch(world), world.member(1), world.member(2)
    owned(world, dropper, 7)
    owned(world, sibling, 7)
    dropped = problems(world, world.lease(dropper))
    watch.wait(121)
    assert problems(world, world.lease(sibling)) != dropped
    assert problems(world, world.lease(dropper)) != dropped


def problems(world: World, signed: SignedLease) -> list[int]:
    """The problems of a lease, as every worker and validator draws them."""
    assert signed.opening is not None
    seed = signed.opening.problems or seeds.lease_seed(world.lease_digest(signed))
    return seeds.problem_indices(seed, 2, 100)
