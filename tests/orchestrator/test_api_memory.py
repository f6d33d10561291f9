"""The proof of memory at admission: the time from vectors to commitment, and its verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from orchestrator_world import MakeWorld, Session, World
from test_api_cards import ASKED, MACHINE, TERA, TEST_CARD, Node, Silicon
from test_api_cards import known as known
from test_cards_again import Pool, two
from test_lease_slots import ask

from prime_core.encoding import sha256
from prime_core.errors import MalformedError
from prime_core.known_cards import FASTEST, KNOWN
from prime_core.messages import (
    AdmissionAnswer,
    CardsCommitment,
    CardsEcho,
    CardsRequest,
    MemoryAnswer,
    MemoryCommitment,
    MemoryDraw,
    MemoryProved,
    NodeInfo,
    SignedMemory,
)
from prime_core.node import Gpu, Requirements
from prime_core.run import Cards
from prime_orchestrator.api import cards as service
from prime_orchestrator.api import memory
from prime_orchestrator.store import schema
from prime_verify.proofs import memory as proof
from prime_verify.proofs.memory import Block, Fill, MemoryProver

SCALE = 0.01
"""Times of a real card, of 1 MiB instead of 60 GB: what takes 1 s there takes 10 ms here."""
BANDWIDTH, HOST = 40e9, 64e6
"""Bytes a second of the test card, and of its link to the memory of its machine."""


@pytest.fixture(autouse=True)
def small(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test card's fill is 1 MiB of its 1,000, and blocks of 64 bytes."""
    for name, value in {
        "FILLED_SHARE": 0.001, "WIDTH": 64, "COLUMNS": 16,
        "READING_SLACK": proof.READING_SLACK * SCALE,
        "MAKING_SECONDS": proof.MAKING_SECONDS * SCALE,
    }.items():  # fmt: skip
        monkeypatch.setattr(proof, name, value)
    swift = dataclasses.replace(TEST_CARD, bandwidth=int(BANDWIDTH / 1e9))
    monkeypatch.setitem(KNOWN, TEST_CARD.kind, swift)


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(cards=ASKED)


class Holder(Node):
    """A node under way to its passport, which proves its memory first."""

    def __init__(self, world: World, session: Session, count: int = 1, **more: Any) -> None:
        super().__init__(world, session, count, **more)
        assert self.begun.work is not None
        assert self.begun.memory is not None
        self.fill = Fill(**self.begun.memory.model_dump())
        seed = self.begun.work.operands
        self.holder = MemoryProver(seed, self.fill, ["numpy"] * count)
        self.vectors: Any = None

    def announce(self, trips: Callable[[], float] = lambda: 0.0) -> None:
        self.world.clock.advance(20.0)  # the cards are filled
        answer = MemoryAnswer(token=self.begun.token)
        while answer.vectors is None:
            answer = self.post(MemoryAnswer, "/filled", CardsEcho(token=answer.token))
            if answer.vectors is None:
                self.world.clock.advance(trips())
        self.vectors = answer.vectors

    def read(self, seconds: float | None = None) -> bytes:
        """Commits after so many seconds (default: as long as reading takes); the opening."""
        root = self.holder.commit(self.vectors)
        self.world.clock.advance(self.making(0.0) if seconds is None else seconds)
        body = MemoryCommitment(root=root, fill_ms=20_000, device_ms=1)
        drawn: MemoryDraw = self.post(MemoryDraw, "/memory", body)
        return self.holder.open([Block(*block) for block in drawn.blocks])

    def prove_memory(self, seconds: float | None = None) -> None:
        self.announce()
        proved: MemoryProved = self.post(MemoryProved, "/blocks", self.read(seconds))
        assert proved.proved_memory_mb == self.fill.card_bytes >> 20
        self.begun = self.begun.model_copy(update={"token": proved.token})

    def prove(self, silicon: Sequence[Silicon] = ()) -> AdmissionAnswer:
        self.prove_memory()
        return super().prove(list(silicon) or two(0.8 * TERA)[: self.fill.cards])

    def making(self, share: float, tera: float = FASTEST * TERA) -> float:
        """Seconds in which a card of this speed makes a share of its blocks, and reads the rest."""
        steps = share * self.fill.rounds * self.fill.width + self.fill.columns
        read = (1 - share) / BANDWIDTH
        return self.fill.card_bytes * (steps / (tera * 1e12) + read)

    def info(self) -> NodeInfo:
        raw = self.world.http.get(f"/v1/nodes/{self.session.account.address}").content
        return NodeInfo.model_validate_json(raw)

    def proved(self) -> SignedMemory | None:
        answer = self.world.http.get(f"/v1/nodes/{self.session.account.address}/memory")
        if answer.status_code == 404:
            return None
        return SignedMemory.model_validate_json(answer.content)


def no_harm(world: World) -> None:
    with world.backend.store.read() as connection:
        assert not connection.execute(schema.slashes.select()).all()
        assert not connection.execute(schema.passports.select()).all()


def test_a_card_that_holds_its_blocks_is_admitted_and_what_it_proved_is_signed(
    world: World,
) -> None:
    node = Holder(world, world.newcomer(1), count=2)
    assert node.proved() is None
    assert node.prove().invite is not None
    signed = node.proved()
    assert signed is not None
    said = signed.memory
    assert said.recover(world.domain("pools"), signed.signature) == world.manager.address
    assert (said.node, said.kind, said.cards) == (node.session.account.address, "test-card", 2)
    assert said.proved_memory_mb == node.fill.card_bytes >> 20 == 1
    assert 0 <= said.measured_ms <= said.most_ms == 6
    assert said.measured_at == node.passport().passport.measured_at
    info = node.info()
    assert (info.claimed_memory_mb, info.proved_memory_mb) == (1000, 1)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_making_missing_blocks_again_takes_too_long(world: World, share: float) -> None:
    """Even at the highest rate that this pool believes of such a card. Its answer is right."""
    node = Holder(world, world.newcomer(1))
    seconds = node.making(share)
    assert seconds > 4 * share * proof.MAKING_SECONDS
    node.announce()
    said = node.refused("/blocks", node.read(seconds), 403)
    assert f"of each card of test-card took {seconds:.3f} s" in said
    assert "this pool allows 0.006 s: there is less memory than claimed" in said
    assert "answered before" in node.refused("/echo", CardsEcho(token=node.begun.token), 409)
    no_harm(world)
    assert Holder(world, node.session).prove().invite, "it may try again at once"


def test_blocks_in_the_memory_of_the_machine_come_too_late(world: World) -> None:
    """All blocks pass over the card's link."""
    node = Holder(world, world.newcomer(1))
    seconds = node.fill.card_bytes / HOST
    assert seconds > 1.3 * SCALE
    node.announce()
    assert "less memory than claimed" in node.refused("/blocks", node.read(seconds), 403)


def test_one_card_does_not_hold_the_blocks_of_two(world: World) -> None:
    """It plays its own blocks for those of the other, or makes them again."""
    node = Holder(world, world.newcomer(1), count=2)
    node.holder.cards[1] = node.holder.cards[0]
    node.announce()
    assert "card 1 did not hold its block" in node.refused("/blocks", node.read(), 401)
    node = Holder(world, world.newcomer(2), count=2)
    node.announce()
    said = node.refused("/blocks", node.read(node.making(1.0)), 403)
    assert "reading 1 MiB of each card of 2 x test-card took" in said
    no_harm(world)


def test_a_fill_of_before_the_challenge_or_marks_of_before_the_vectors_are_refused(
    world: World,
) -> None:
    node = Holder(world, world.newcomer(2))
    node.holder = MemoryProver(sha256(b"an earlier challenge"), node.fill, ["numpy"])
    node.announce()
    assert "did not hold its block" in node.refused("/blocks", node.read(), 401)
    node = Holder(world, world.newcomer(3))
    node.announce()
    node.vectors = node.begun.work.operands  # type: ignore[union-attr]
    assert "did not hold its block" in node.refused("/blocks", node.read(), 401)


def test_nothing_is_taken_before_its_turn_or_twice_and_bodies_are_bounded(world: World) -> None:
    node = Holder(world, world.newcomer(1))
    assert node.begun.work is not None
    early = MemoryCommitment(root=node.begun.work.operands, fill_ms=1, device_ms=1)
    assert "vectors have not been sent" in node.refused("/memory", early, 409)
    assert "have no commitment" in node.refused("/blocks", b"x", 409)
    stale = CardsEcho(token=node.begun.work.operands)
    assert "token" in node.refused("/filled", stale, 409)
    node.announce()
    assert "already announced as filled" in node.refused("/filled", stale, 409)
    assert "token" in node.refused("/echo", stale, 409), "the cards come after the memory"
    cards = CardsCommitment(root=node.begun.work.operands, device_ms=1)
    assert "order is not out" in node.refused("/commitment", cards, 409)
    opening = node.read()
    assert "already have a commitment" in node.refused("/memory", early, 409)
    path = f"/v1/admission/cards/{node.begun.id}/blocks"
    for wrong in (opening + b"x", b"x" * (memory.MAX_BLOCKS + 1)):
        answer = world.post(path, wrong, node.session)
        assert answer.status_code == 400
        assert f"{len(opening)}" in answer.json()["detail"]
    node.refused("/blocks", opening[:-1], 400)
    assert "answered before" in node.refused("/blocks", opening, 409)


def test_an_opening_counts_once(world: World) -> None:
    node = Holder(world, world.newcomer(1))
    node.announce()
    opening = node.read()
    node.post(MemoryProved, "/blocks", opening)
    assert "already open" in node.refused("/blocks", opening, 409)
    assert node.proved() is None, "the passport comes with the proof of cards"


def test_a_proof_of_memory_is_its_nodes_own_and_ends(world: World) -> None:
    node, other = Holder(world, world.newcomer(1)), world.newcomer(2)
    path = f"/v1/admission/cards/{node.begun.id}/filled"
    echo = CardsEcho(token=node.begun.token)
    assert world.post(path, echo, other).status_code == 403
    world.clock.advance(121)
    assert "deadline" in node.refused("/filled", echo, 403)


def test_the_smallest_round_trip_is_subtracted_up_to_a_limit(world: World) -> None:
    for number, trips, more in ((1, [0.09, 0.05, 0.07, 0.3], 0.05), (2, [3.0] * 4, 0.1)):
        left = iter(trips)
        node = Holder(world, world.newcomer(number))
        node.announce(lambda left=left: next(left))
        proved = node.post(MemoryProved, "/blocks", node.read(0.001 + more))
        node.begun = node.begun.model_copy(update={"token": proved.token})
        Node.prove(node, [Silicon(0.8 * TERA)])
        signed = node.proved()
        assert signed is not None
        assert (signed.memory.measured_ms, signed.memory.round_trip_ms) == (1, 1000 * more)
    left = iter([3.0] * 4)
    node = Holder(world, world.newcomer(3))
    node.announce(lambda: next(left))
    node.refused("/blocks", node.read(0.11), 403)


def test_an_older_node_is_admitted_with_memory_that_is_claimed(world: World) -> None:
    node = Node(world, world.newcomer(1))
    assert node.begun.memory is not None, "it does not know this field"
    assert node.prove([Silicon(0.8 * TERA)]).invite is not None
    path = f"/v1/nodes/{node.session.account.address}"
    assert world.http.get(f"{path}/memory").status_code == 404
    info = NodeInfo.model_validate_json(world.http.get(path).content)
    assert (info.claimed_memory_mb, info.proved_memory_mb) == (1000, 0)
    newer = Holder(world, node.session)
    newer.prove()
    assert newer.info().proved_memory_mb == 1
    Node(world, node.session).prove([Silicon(0.8 * TERA)])
    assert (newer.info().proved_memory_mb, newer.proved()) == (0, None), "the newest proof counts"


def test_a_run_may_ask_for_the_proof(make_world: MakeWorld) -> None:
    world = make_world(cards=ASKED.model_copy(update={"prove_memory": True}))
    older = Node(world, world.newcomer(1))
    said = older.refused("/echo", CardsEcho(token=older.begun.token), 403)
    assert "asks each node to prove its cards' memory" in said
    assert "upgrade it" in said
    assert Holder(world, older.session).prove().invite is not None
    plain = Cards(kinds=("test-card",), counts=(1,))
    assert "prove_memory" not in plain.model_dump(mode="json"), "older runs keep their bytes"


def test_a_run_that_names_memory_means_that_of_the_proved_cards(make_world: MakeWorld) -> None:
    """A machine may describe other cards than it proves."""
    needs = Requirements(gpu_count=1, gpu_memory_mb=980)
    world = make_world(cards=ASKED, requirements=needs)
    less = Gpu(model="Test Card", memory_mb=950)
    wish = CardsRequest(hardware=MACHINE, task_runtime="process", cards=(less,))
    answer = world.post("/v1/admission/cards", wish, world.newcomer(1))
    assert answer.status_code == 403
    assert "1 GPU(s) with 980 MiB, found 0" in answer.json()["detail"]
    assert Holder(world, world.newcomer(2)).prove().invite is not None


def test_an_admitted_node_whose_memory_is_gone_gets_no_lease_and_the_numbers(
    make_world: MakeWorld,
) -> None:
    pool = Pool(make_world)
    pool.tick()
    pool.beat(proves=True)
    node = Holder(pool.world, pool.node, count=2)
    node.announce()
    node.refused("/blocks", node.read(node.making(0.5)), 403)
    beat = pool.beat(proves=True)
    assert "measured again: reading 1 MiB of each card of 2 x test-card took" in beat.reason
    assert ask(pool.world, pool.node).reason == beat.reason == pool.info().cards_trouble
    pool.no_harm()
    pool.tick(601)
    pool.beat(proves=True)
    Holder(pool.world, pool.node, count=2).prove(two(0.8 * TERA))
    assert ask(pool.world, pool.node).lease is not None
    assert pool.info().proved_memory_mb == 1


def test_sizes_fit_every_known_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    asked = Cards(kinds=("cpu",), counts=(1,))
    for card in KNOWN.values():
        for count in (1, 8, 64):
            state = service._memory(asked, card, count, card.memory_mb)
            fill = state.fill
            drawn = max(1, min(memory.DRAWN, memory.MOST_DRAWN // count))
            assert drawn * count * fill.opened_bytes <= memory.MAX_BLOCKS
            if not card.judged:
                assert (fill.card_bytes, state.most_seconds) == (1 << 20, 0.0)
                continue
            claimed = card.memory_mb << 20
            assert 0.84 * claimed < fill.card_bytes <= 0.85 * claimed
            assert claimed - fill.card_bytes > 3 << 30, "room for driver, blocks under way"
            quarter = fill.card_bytes * fill.rounds * fill.width / 4
            assert 1.5 <= quarter / (FASTEST * card.tera * 1e12) < 1.75
            assert 0.35 < state.most_seconds < 0.75
            # by a check in float32: 24 blocks take 0.14 s of one core at 40 billion a second
            assert 24 * fill.rounds * fill.width**2 < 6e9
    with pytest.raises(MalformedError):
        service._memory(asked, KNOWN["h200"], 65, 143_771)
