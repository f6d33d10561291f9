"""Admission to a run with `cards`: claims, the time from order to commitment, and its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from orchestrator_world import MakeWorld, Session, World, signer

from prime_core import known_cards
from prime_core.errors import PolicyError
from prime_core.known_cards import KNOWN, KnownCard, check_rate, known_card
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    CardsAnswer,
    CardsCommitment,
    CardsDraw,
    CardsEcho,
    CardsRequest,
    ChallengeAnswer,
    SignedPassport,
)
from prime_core.node import Gpu, Hardware
from prime_core.run import Cards
from prime_orchestrator.api import admission
from prime_orchestrator.api import cards as service
from prime_orchestrator.store import shadows
from prime_verify.proofs.cards import Card, Cell, Prover, Work

TERA = 0.01
TEST_CARD = KnownCard("test-card", ("Test Card",), 1000, TERA, 1, "this test")
SLOWER = KnownCard("slower-card", ("Slower Card",), 1000, TERA / 4, 1, "this test")
PATIENT = KnownCard("patient-card", ("Patient Card",), 1000, TERA / 50, 1, "this test")
GPU = Gpu(model="Test Card", memory_mb=1000)
MACHINE = Hardware(cpu_model="x", cpu_count=2, memory_mb=100, disk_mb=100, gpus=(GPU,))
ASKED = Cards(kinds=("test-card", "h200"), counts=(1, 2), least_share_micro=500_000, work_ms=40)
TWO_SECONDS = Cards(kinds=("patient-card",), counts=(1,), least_share_micro=500_000, work_ms=2000)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that this machine's processor can play."""
    for one in (TEST_CARD, SLOWER, PATIENT):
        monkeypatch.setitem(KNOWN, one.kind, one)
    monkeypatch.setattr(service, "GPU_SIZES", (1024, 256, 64))


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(cards=ASKED)


class Silicon:
    """A physical card of some speed (10¹² multiply-adds a second), and how long it was busy."""

    def __init__(self, tera: float) -> None:
        self.tera, self.busy = tera, 0.0

    def playing(self, card: Card, work: Work) -> Card:
        def marks(orders: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            done = len(orders) * work.card_multiply_adds / work.rounds
            self.busy += done / (self.tera * 1e12)
            return card.marks(orders)

        class Played:
            pass

        played: Any = Played()
        played.marks = marks
        return played  # type: ignore[no-any-return]


def request(*cards: Gpu) -> CardsRequest:
    return CardsRequest(hardware=MACHINE, task_runtime="process", cards=cards)


class Node:
    """A node under way to its passport."""

    def __init__(
        self, world: World, session: Session, count: int = 1, wish: CardsRequest | None = None
    ) -> None:
        self.world, self.session = world, session
        self.begun = self.post(CardsAnswer, "", wish or request(*[GPU] * count))
        assert self.begun.work is not None
        self.work = Work(**self.begun.work.model_dump(exclude={"operands"}))
        self.prover = Prover(self.begun.work.operands, self.work, ["numpy"] * count)
        self.order: Any = None

    def post(self, kind: Any, path: str, body: Any) -> Any:
        name = f"/{self.begun.id}{path}" if path else ""
        answer = self.world.post(f"/v1/admission/cards{name}", body, self.session)
        assert answer.status_code == 200, answer.text
        return kind.model_validate_json(answer.content)

    def refused(self, path: str, body: Any, status: int) -> str:
        path = f"/v1/admission/cards/{self.begun.id}{path}"
        answer = self.world.post(path, body, self.session)
        assert answer.status_code == status, answer.text
        return str(answer.json()["detail"])

    def start(self, trips: Callable[[], float] = lambda: 0.0) -> None:
        answer = self.begun
        self.world.clock.advance(5.0)  # operands are prepared
        while answer.order is None:
            answer = self.post(CardsAnswer, "/echo", CardsEcho(token=answer.token))
            if answer.order is None:
                self.world.clock.advance(trips())
        self.order = answer.order

    def commit(self, silicon: list[Silicon], order: Any = None) -> CardsDraw:
        played = [s.playing(c, self.work) for s, c in zip(silicon, self.prover._cards, strict=True)]
        self.prover._cards = played
        root = self.prover.commit(order or self.order)
        self.world.clock.advance(max(one.busy for one in silicon))
        body = CardsCommitment(root=root, device_ms=123)
        draw: CardsDraw = self.post(CardsDraw, "/commitment", body)
        return draw

    def opening(self, draw: CardsDraw) -> bytes:
        return self.prover.open([Cell(*cell) for cell in draw.cells])

    def prove(self, silicon: list[Silicon]) -> AdmissionAnswer:
        self.start()
        opening = self.opening(self.commit(silicon))
        answer: AdmissionAnswer = self.post(AdmissionAnswer, "/opening", opening)
        return answer

    def passport(self) -> SignedPassport:
        address = self.session.account.address
        raw = self.world.http.get(f"/v1/nodes/{address}/passport").content
        return SignedPassport.model_validate_json(raw)


def test_two_cards_that_are_there_give_an_invite_and_a_signed_passport(world: World) -> None:
    node = Node(world, world.newcomer(1), count=2)
    assert (
        node.world.http.get(f"/v1/nodes/{node.session.account.address}/passport").status_code == 404
    )
    answer = node.prove([Silicon(0.8 * TERA), Silicon(0.7 * TERA)])
    assert answer.invite is not None
    assert answer.mmacs_per_second == pytest.approx(2 * 0.7 * TERA * 1e6, rel=1e-3)
    signed = node.passport()
    said = signed.passport
    assert said.recover(world.domain("pools"), signed.signature) == world.manager.address
    assert (said.node, said.kind, said.cards) == (node.session.account.address, "test-card", 2)
    assert said.card_gmacs == pytest.approx(0.7 * TERA * 1000, abs=1)
    assert said.claimed_ms == 123
    work_ms = node.work.card_multiply_adds / (TERA * 1e9)
    assert work_ms >= ASKED.work_ms


def test_one_card_does_not_pass_for_two(world: World) -> None:
    """A card as fast as it can be, at the vendor's rate, computes for both."""
    node = Node(world, world.newcomer(1), count=2)
    one = Silicon(0.99 * TERA)
    node.start()
    opening = node.opening(node.commit([one, one]))
    said = node.refused("/opening", opening, 403)
    assert "2 x test-card measured 0.0 tera" in said
    assert "fewer or slower cards" in said
    address = node.session.account.address
    assert world.http.get(f"/v1/nodes/{address}/passport").status_code == 404
    assert world.http.get(f"/v1/nodes/{address}").status_code == 404


def test_a_slower_or_faster_card_than_claimed_is_refused_with_the_numbers(world: World) -> None:
    for number, tera, words in (
        (1, 0.4 * TERA, "fewer or slower"),
        (2, 1.3 * TERA, "another card than claimed"),
    ):
        node = Node(world, world.newcomer(number))
        node.start()
        opening = node.opening(node.commit([Silicon(tera)]))
        assert words in node.refused("/opening", opening, 403)
    with pytest.raises(PolicyError, match=r"measured 312\.0 .* expects 494\.8 to 1137\.9"):
        check_rate(KNOWN["h100-sxm"], 1, 312.0, 0.5)


def test_an_answer_for_another_order_is_refused(world: World) -> None:
    """Computed before the order was out, from the sizes and operands that came first."""
    node = Node(world, world.newcomer(1))
    node.start()
    draw = node.commit([Silicon(TERA)], order=node.begun.work.operands)
    said = node.refused("/opening", node.opening(draw), 401)
    assert "is not the product's" in said
    assert "answered before" in node.refused("/opening", node.opening(draw), 409)


def test_nothing_is_taken_before_its_turn_or_twice(world: World) -> None:
    node = Node(world, world.newcomer(1))
    early = CardsCommitment(root=node.begun.work.operands, device_ms=1)
    assert "order is not out" in node.refused("/commitment", early, 409)
    assert "not committed" in node.refused("/opening", b"x", 409)
    stale = CardsEcho(token=node.begun.work.operands)
    assert "token" in node.refused("/echo", stale, 409)
    node.start()
    assert "token" in node.refused("/echo", CardsEcho(token=node.begun.token), 409)
    draw = node.commit([Silicon(TERA)])
    assert "committed to already" in node.refused("/commitment", early, 409)
    opening = node.opening(draw)
    node.refused("/opening", opening[:-1], 400)  # the time is measured: it may not try again
    assert "answered before" in node.refused("/opening", opening, 409)


def test_a_proof_is_its_nodes_own_and_ends(world: World) -> None:
    node, other = Node(world, world.newcomer(1)), world.newcomer(2)
    echo = CardsEcho(token=node.begun.token)
    path = f"/v1/admission/cards/{node.begun.id}/echo"
    assert world.post(path, echo, other).status_code == 403
    assert world.post("/v1/admission/cards/none/echo", echo, other).status_code == 404
    world.clock.advance(121)
    assert "deadline" in node.refused("/echo", echo, 403)


def with_round_trips(node: Node, trips: list[float], waited: float) -> SignedPassport:
    """Proves with these round trips, and this time between order and commitment."""
    left = iter(trips)
    node.start(lambda: next(left))
    root = node.prover.commit(node.order)
    node.world.clock.advance(waited)
    draw = node.post(CardsDraw, "/commitment", CardsCommitment(root=root, device_ms=1))
    node.post(AdmissionAnswer, "/opening", node.opening(draw))
    return node.passport()


def test_the_smallest_round_trip_is_subtracted_up_to_a_limit(make_world: MakeWorld) -> None:
    world = make_world(cards=TWO_SECONDS)
    wish = request(Gpu(model="Patient Card", memory_mb=1000))
    for number, trips, subtracted in (
        (1, [0.09, 0.05, 0.07, 0.3], 50), (2, [3.0] * 4, 200), (3, [0.0] * 4, 0)
    ):  # fmt: skip
        node = Node(world, world.newcomer(number), wish=wish)
        said = with_round_trips(node, trips, 2.5 + subtracted / 1000).passport
        assert said.round_trip_ms == subtracted
        assert said.measured_ms == pytest.approx(2500, abs=1.5)


def test_delayed_echoes_of_short_work_gain_a_tenth_at_most(world: World) -> None:
    """The work takes 50 ms: 200 ms subtracted would leave nothing."""
    said = with_round_trips(Node(world, world.newcomer(1)), [3.0] * 4, 0.05).passport
    assert (said.round_trip_ms, said.measured_ms) == (5, 45)
    assert said.card_gmacs == 8  # 8.9, and 10 is the vendor's


@pytest.mark.slow
def test_a_node_cannot_try_until_it_is_lucky(world: World) -> None:
    """One that skips half of the rows and drops each proof whose drawn cells it did not compute.
    Refused, it does not hold the turn of its address."""
    session = world.newcomer(1)
    for _ in range(admission.MOST_UNPROVEN):
        node = Node(world, session)
        node.start()
        node.commit([Silicon(TERA)], order=node.begun.work.operands)
        world.clock.advance(125)  # it is left open until its end
    answer = world.post("/v1/admission/cards", request(GPU), session)
    assert answer.status_code == 403
    assert "6 proofs of this node's cards failed or were left" in answer.json()["detail"]
    assert Node(world, world.newcomer(2)).prove([Silicon(0.8 * TERA)]).invite
    world.clock.advance(3600)
    session = world.login(session.account)
    assert Node(world, session).prove([Silicon(0.8 * TERA)]).invite
    for _ in range(admission.MOST_UNPROVEN):  # what is passed does not count
        Node(world, session).prove([Silicon(0.8 * TERA)])


def test_round_trips_of_another_connection_do_not_count(world: World) -> None:
    node = Node(world, world.newcomer(1))
    node.start(lambda: 0.1)
    account = node.session.account.address
    root = node.prover.commit(node.order)
    service.commitment(
        world.backend, account, node.begun.id, CardsCommitment(root=root, device_ms=1),
        arrived_at=world.clock() + 0.05, connection="elsewhere 1",
    )  # fmt: skip
    with world.backend.store.read() as connection:
        _, state = service.open_proof(connection, account, node.begun.id, world.clock())
    assert (state.subtracted, round(state.seconds, 3)) == (0.0, 0.05)
    again = Node(world, world.newcomer(2))
    answer, account = again.begun, again.session.account.address
    for number in range(service.ECHOES + 1):
        answer = service.echo(
            world.backend, account, again.begun.id, CardsEcho(token=answer.token),
            arrived_at=world.clock(), connection="a" if number < 3 else "b",
        )  # fmt: skip
    assert answer.order is None, "the measurement began again"


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([GPU] * 3, "the pool asks for 1 or 2 x test-card or h200, and this machine claims 3 x"),
        ([Gpu(model="Slower Card", memory_mb=1000)], "claims 1 x slower-card"),
        ([GPU, Gpu(model="Slower Card", memory_mb=1000)], "of one model"),
        ([Gpu(model="Test Card", memory_mb=1100)], "has 1000 MiB of memory, and this one claims"),
        ([Gpu(model="Test Card Ultra", memory_mb=1000)], "not in the table of known cards"),
        ([Gpu(model="NVIDIA H200 MIG 1g.18gb", memory_mb=18_000)], "not in the table"),
    ],
)
def test_claims_that_do_not_fit_are_refused(world: World, cards: list[Gpu], words: str) -> None:
    answer = world.post("/v1/admission/cards", request(*cards), world.newcomer(1))
    assert answer.status_code == 403
    assert words in answer.json()["detail"]


@pytest.mark.slow
def test_older_nodes_join_where_no_cards_are_asked_for_and_learn_it_where_they_are(
    make_world: MakeWorld,
) -> None:
    asking, old = make_world(cards=ASKED), make_world()
    wish = AdmissionRequest(hardware=MACHINE, task_runtime="process")
    answer = asking.post("/v1/admission/challenge", wish, asking.newcomer(1))
    assert answer.status_code == 403
    assert "upgrade it" in answer.json()["detail"]
    answer = old.post("/v1/admission/challenge", wish, old.newcomer(1))
    assert ChallengeAnswer.model_validate_json(answer.content).challenge is not None
    answer = old.post("/v1/admission/cards", request(GPU), old.newcomer(2))
    assert answer.status_code == 403
    assert "no proof of cards" in answer.json()["detail"]


def test_a_proof_of_cards_is_no_challenge_and_the_reverse(make_world: MakeWorld) -> None:
    world = make_world()
    session = world.newcomer(1)
    wish = AdmissionRequest(hardware=MACHINE, task_runtime="process")
    raw = world.post("/v1/admission/challenge", wish, session).content
    challenge = ChallengeAnswer.model_validate_json(raw).challenge
    assert challenge is not None
    echo = CardsEcho(token=challenge.seed)
    answer = world.post(f"/v1/admission/cards/{challenge.id}/echo", echo, session)
    assert (answer.status_code, answer.json()["detail"]) == (
        409, "the challenge is not a proof of cards",
    )  # fmt: skip


def test_the_passport_of_a_shadow_node_goes_with_it(world: World) -> None:
    session = world.login(signer(1))
    shadow = request(GPU).model_copy(update={"shadow": True})
    node = Node(world, session, wish=shadow)
    assert node.prove([Silicon(0.8 * TERA)]).invite is None
    address = session.account.address
    assert node.passport().passport.named == "1 x test-card"
    assert world.http.get(f"/v1/nodes/{address}").json()["cards"] == "1 x test-card"
    with world.backend.store.begin() as connection:
        shadows.forget_nodes(connection, silent_since=world.clock() + 1)
    assert world.http.get(f"/v1/nodes/{address}/passport").status_code == 404


def test_the_table_names_each_model_once_and_fits_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    models = [model for card in KNOWN.values() for model in card.models]
    assert len(models) == len(set(models))
    for card in KNOWN.values():
        for count in (1, 8, 64):
            for seconds in (2, 10):
                asked = Cards(kinds=("cpu",), counts=(1,), work_ms=1000 * seconds)
                work = service._work(asked, card, count)
                assert work.card_multiply_adds >= seconds * card.tera * 1e12
        assert card.kind != "a40" or known_card([Gpu(model="NVIDIA A40", memory_mb=46_068)]) is card
        claimed = Gpu(model=card.models[0], memory_mb=card.memory_mb)
        assert known_card([claimed, claimed]) is card
        assert card.source
    assert known_cards.FASTEST < 2
