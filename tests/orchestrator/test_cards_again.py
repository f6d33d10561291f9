"""Cards of admitted nodes are measured again at random: the draw, the leases in flight, what a
slower card, a silent node and one that never says that it knows get."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchestrator_world import MakeWorld, World
from prometheus_client import generate_latest
from test_api_cards import ASKED, TERA, Node, Silicon, request
from test_api_cards import known as known
from test_lease_slots import BOTH, ask
from test_lease_slots import store as store

from prime_core.ids import address
from prime_core.messages import Heartbeat, HeartbeatAnswer, NodeInfo
from prime_core.node import Gpu
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.api.metrics import PoolMetrics, RequestCounts
from prime_orchestrator.manager import remeasuring
from prime_orchestrator.manager.remeasuring import (
    AWAITED,
    FIRST_PAUSE,
    IGNORED,
    MOST_UNANSWERED,
    PROOF_SECONDS,
    UNANSWERED,
)
from prime_orchestrator.store import measurements, nodes, schema
from prime_orchestrator.store.measurements import MeasurementRow

WAIT = 60 + PROOF_SECONDS
"""A lease's time, and that of the proof."""


def two(tera: float) -> list[Silicon]:
    return [Silicon(tera), Silicon(tera)]


class Pool:
    """A pool whose nodes are drawn at every tick that has room, and node 1, which proved two cards
    at admission."""

    def __init__(self, make_world: MakeWorld, period: float = 1e-9) -> None:
        made = make_world(cards=ASKED)
        self.world: World = replace(made, backend=replace(made.backend, remeasure_seconds=period))
        self.world.publish(0)
        self.life = LifeTicks(self.world.backend)
        self.node = self.world.newcomer(1)
        self.admitted = Node(self.world, self.node, count=2)
        self.admitted.prove(two(0.8 * TERA))
        with self.world.backend.store.begin() as connection:
            now = self.world.clock()
            nodes.set_status(connection, self.node.account.address, "active", last_heartbeat=now)
        for number in (2, 3, 4):
            self.world.member(number)

    def tick(self, seconds: float = 11.0) -> None:
        """Time passes, in which all nodes live and the orchestrator ticks."""
        self.world.clock.advance(seconds)
        self.life._ticked_at = self.world.clock()
        with self.world.backend.store.begin() as connection:
            for row in nodes.every(connection, ["active", "silent"]):
                nodes.set_status(
                    connection, row.address, "active", last_heartbeat=self.world.clock()
                )
        self.life.tick()

    def beat(self, *, proves: bool) -> HeartbeatAnswer:
        self.node = self.world.login(self.node.account)
        answer = self.world.post(
            "/v1/heartbeat", Heartbeat(policy_version=0, proves=proves), self.node
        )
        return HeartbeatAnswer.model_validate_json(answer.content)

    def row(self) -> MeasurementRow | None:
        with self.world.backend.store.read() as connection:
            return measurements.get(connection, self.node.account.address)

    def info(self) -> NodeInfo:
        raw = self.world.http.get(f"/v1/nodes/{self.node.account.address}").content
        return NodeInfo.model_validate_json(raw)

    def measured(self) -> str:
        text = generate_latest(PoolMetrics(self.world.backend, RequestCounts())).decode()
        found = [line for line in text.splitlines() if line.startswith("prime_cards_measured")]
        return " ".join(line.partition('"')[2].replace('"}', "") for line in found)

    def no_harm(self) -> None:
        """The node keeps its seat and its stake."""
        assert self.info().status == "active"
        with self.world.backend.store.read() as connection:
            for table in (schema.slashes, schema.intents):
                kinds = [row.get("kind") for row in connection.execute(table.select()).mappings()]
                assert set(kinds) <= {"join"}


@given(st.integers(0, 2**32), st.floats(10, 10_000))
def test_nodes_are_drawn_once_in_a_period_on_average(seed: int, every: float) -> None:
    """However often the pool draws: 200 nodes over a period of an hour."""
    period, source = 3600.0, random.Random(seed).randbytes
    pool = [address(f"0x{number:040x}") for number in range(200)]
    share = remeasuring.chance(every, period)
    rounds = max(1, min(20, round(period / every)))
    drawn = [remeasuring.draw(pool, share, source) for _ in range(rounds)]
    expected = rounds * len(pool) * share
    assert abs(sum(map(len, drawn)) - expected) <= 7 * expected**0.5 + 7
    assert 1 - (1 - share) ** (period / every) == pytest.approx(1 - math.exp(-1))


@BOTH
def test_a_drawn_node_delivers_its_leases_proves_its_cards_and_works_on(
    make_world: MakeWorld,
) -> None:
    pool = Pool(make_world)
    world, old = pool.world, pool.admitted.passport()
    held = world.lease(pool.node)
    assert pool.beat(proves=False).prove_cards_by is None
    pool.tick()
    row = pool.row()
    assert row is not None
    asked_at = world.clock()
    assert pool.beat(proves=False).prove_cards_by == int(asked_at) + WAIT
    assert pool.beat(proves=True).reason == AWAITED
    assert ask(world, pool.node).lease == held, "a worker that ended gets its lease again"
    assert ask(world, pool.node, held).reason == "it works on 1 open leases, and may hold 1 at once"
    assert world.upload(pool.node, held, b"file").status_code == 204
    handed_in = world.post("/v1/submissions", world.claim(pool.node.account, held, b"file"))
    assert handed_in.status_code == 200
    assert ask(world, pool.node).reason == AWAITED
    with world.backend.store.read() as connection:
        assert {one.asked_at for one in measurements.asked(connection)} == {asked_at}
    again = Node(world, pool.node, count=2)
    assert again.prove(two(0.7 * TERA)).invite is None
    new = again.passport()
    assert new.passport.measured_at > old.passport.measured_at
    assert new.passport.card_gmacs < old.passport.card_gmacs
    assert new.passport.recover(world.domain("pools"), new.signature) == world.manager.address
    beat = pool.beat(proves=True)
    assert (beat.directive, beat.reason, beat.prove_cards_by) == ("work", "", None)
    assert ask(world, pool.node).lease is not None
    assert pool.measured() == "ignored 0.0 passed 1.0 refused 0.0 unanswered 0.0"
    assert pool.info().cards_measured_at == new.passport.measured_at


def test_a_slower_card_gets_no_lease_and_the_numbers_until_it_passes(make_world: MakeWorld) -> None:
    pool = Pool(make_world)
    world = pool.world
    pool.tick()
    pool.beat(proves=True)
    swapped = Node(world, pool.node, count=2)
    swapped.start()
    opening = swapped.opening(swapped.commit(two(TERA / 4)))
    swapped.refused("/opening", opening, 403)
    beat = pool.beat(proves=True)
    assert beat.directive == "work"
    assert "2 x test-card measured 0.0 tera multiply-adds a second" in beat.reason
    assert "fewer or slower cards than claimed" in beat.reason
    assert ask(world, pool.node).reason == beat.reason == pool.info().cards_trouble
    assert beat.prove_cards_by is None, "it is asked again after a pause"
    pool.no_harm()
    assert pool.admitted.passport().passport.measured_at < world.clock() - 10, "the old one stays"
    pool.tick(FIRST_PAUSE + 1)
    assert pool.beat(proves=True).prove_cards_by is not None
    claim = world.post(
        "/v1/admission/cards",
        request(Gpu(model="Slower Card", memory_mb=1000)),
        pool.node,
    )
    assert claim.status_code == 403
    assert "this machine claims 1 x slower-card" in ask(world, pool.node).reason
    pool.tick(2 * FIRST_PAUSE + 1)
    pool.beat(proves=True)
    Node(world, pool.node, count=2).prove(two(0.8 * TERA))
    assert ask(world, pool.node).lease is not None
    assert pool.measured() == "ignored 0.0 passed 1.0 refused 2.0 unanswered 0.0"


@BOTH
def test_a_node_that_does_not_answer_is_asked_again_then_waits_and_is_never_accused(
    make_world: MakeWorld,
) -> None:
    pool = Pool(make_world)
    world = pool.world
    pool.tick()
    pool.beat(proves=True)
    for missed in range(1, MOST_UNANSWERED + 1):
        pool.tick(WAIT)
        row = pool.row()
        assert row is not None
        assert (row.unanswered, row.asked_at) == (missed, None)
        if missed < MOST_UNANSWERED:
            assert world.lease(pool.node), "it works on in between"
        pool.tick(FIRST_PAUSE * 2 ** (missed - 1))
        assert pool.beat(proves=True).prove_cards_by is not None
    assert ask(world, pool.node).reason == UNANSWERED == pool.info().cards_trouble
    pool.no_harm()
    Node(world, pool.node, count=2).prove(two(0.8 * TERA))
    assert ask(world, pool.node).lease is not None
    assert pool.measured() == "ignored 0.0 passed 1.0 refused 0.0 unanswered 3.0"


def test_our_own_absence_does_not_count_as_silence(make_world: MakeWorld) -> None:
    pool = Pool(make_world)
    pool.tick()
    pool.beat(proves=True)
    pool.world.clock.advance(2 * WAIT)
    pool.life = LifeTicks(pool.world.backend)  # the orchestrator comes up again
    pool.tick()
    row = pool.row()
    assert row is not None
    assert (row.unanswered, row.awaited) == (0, True)


def test_a_node_that_never_says_that_it_knows_gets_no_lease_in_the_end_until_it_passes(
    make_world: MakeWorld,
) -> None:
    """So does an older one, and one that poses as such, to keep an earlier machine's passport."""
    pool = Pool(make_world)
    world = pool.world
    pool.tick()
    for missed in range(MOST_UNANSWERED):
        assert pool.beat(proves=False).prove_cards_by is not None
        assert world.lease(pool.node), "it works on"
        pool.tick(WAIT)
        pool.tick(FIRST_PAUSE * 2**missed)
    assert ask(world, pool.node).reason == IGNORED == pool.info().cards_trouble
    pool.no_harm()
    assert pool.beat(proves=True).prove_cards_by is not None, "it has a newer program"
    Node(world, pool.node, count=2).prove(two(0.8 * TERA))
    assert ask(world, pool.node).lease is not None
    assert pool.measured() == "ignored 3.0 passed 1.0 refused 0.0 unanswered 0.0"


def test_a_pool_of_few_nodes_or_without_the_setting_asks_nothing(make_world: MakeWorld) -> None:
    pool = Pool(make_world)
    with pool.world.backend.store.begin() as connection:
        fourth = nodes.every(connection)[-1].address
        nodes.set_status(connection, fourth, "left", last_heartbeat=0.0)
    pool.tick()
    assert pool.beat(proves=False).prove_cards_by is None, "three nodes bear no measurement"
    with pool.world.backend.store.begin() as connection:
        nodes.set_status(connection, fourth, "active", last_heartbeat=0.0)
    pool.tick()
    assert pool.beat(proves=True).reason == AWAITED
    off = replace(pool.world.backend, remeasure_seconds=0.0)
    pool.life = LifeTicks(off)
    pool.tick()
    beat = pool.beat(proves=True)
    assert (beat.reason, beat.prove_cards_by) == ("", None)
