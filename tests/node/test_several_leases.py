"""An agent and a worker that hold several leases, and either with an older peer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bridge_kit import Kit, bridge_kit, heartbeat_loop
from node_world import NODE, NodeWorld
from sqlalchemy import update

from prime_core.encoding import sha256
from prime_core.errors import ConflictError, MalformedError, NotFoundError
from prime_core.gateway import Gateway, GatewayAnswer, GatewayCall, GatewayRequest
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import MOST_SLOTS, HeartbeatAnswer
from prime_core.run import Conversation
from prime_node import config
from prime_node.bridge_messages import (
    Abandon,
    HandIn,
    HandInAnswer,
    LeaseOffer,
    LeaseWish,
    Pauses,
    file_name,
)
from prime_node.overview import overview
from prime_orchestrator.manager import speed
from prime_orchestrator.store import leases, schema

SLOTS = 3


@pytest.fixture
def kit(world: NodeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    """The orchestrator has measured that this node makes leases fast."""
    monkeypatch.setattr(speed, "refresh", lambda connection, run, node, *a, **k: node.speed_class)
    with bridge_kit(world, tmp_path / "k") as made:
        with world.store.begin() as connection:
            connection.execute(update(schema.nodes).values(token_rate=1e6, kept=2.0))
        made.broker.set_working(True, slots=SLOTS)
        yield made


def wish(kit: Kit, *holds: Digest, seconds: int = 0) -> LeaseOffer:
    return kit.client.lease(LeaseWish(wait_seconds=seconds, holds=holds))


def digest_of(offer: LeaseOffer) -> Digest:
    assert offer.lease is not None, offer.reason
    assert offer.domain is not None
    return offer.lease.lease.digest(offer.domain)


def fill(kit: Kit) -> list[Digest]:
    """Leases of a worker that takes as many as it is given."""
    held: list[Digest] = []
    while (offer := wish(kit, *held)).lease is not None:
        held.append(digest_of(offer))
    return held


def sent(kit: Kit, lease: Digest) -> str:
    """Sends the file of a lease; its name."""
    path = kit.world.folder / file_name(lease)
    path.write_bytes(b"file of " + lease.encode())
    kit.client.send_file(path)
    return path.name


def hand_in(kit: Kit, lease: Digest, **counts: int) -> HandInAnswer:
    """Hands in a file that was sent, without waiting for its receipt."""
    kit.broker._closed = True
    try:
        return kit.client.submit(HandIn(lease_digest=lease, file=file_name(lease), **counts))
    finally:
        kit.broker._closed = False


def open_there(kit: Kit) -> set[Digest]:
    """The leases that the orchestrator counts as open."""
    with kit.world.store.read() as connection:
        return {row.digest for row in leases.open_among(connection, [NODE.address])[NODE.address]}


def test_a_worker_gets_as_many_leases_as_it_may_hold(kit: Kit) -> None:
    held = fill(kit)
    assert len(set(held)) == SLOTS
    assert {*kit.broker.open_leases()} == {*held} == open_there(kit)
    offer = wish(kit, *held)
    assert offer.reason == "3 leases are open, as many as this node may hold"
    assert offer.slots == SLOTS
    assert kit.open_leases.versions() == {0}


def test_files_of_several_leases_are_sent_and_submitted_in_any_order(kit: Kit) -> None:
    held = fill(kit)
    for lease in held:
        sent(kit, lease)
    assert {path.name for path in kit.folder.iterdir()} == {file_name(one) for one in held}
    kit.uploader.start()
    for lease in (held[1], held[2], held[0]):
        answer = kit.client.submit(HandIn(lease_digest=lease, file=file_name(lease)))
        assert answer.receipt is not None, answer
    files = {row["lease_digest"]: row["sha256"] for row in kit.world.submissions()}
    assert files == {one: sha256(b"file of " + one.encode()) for one in held}
    assert not list(kit.folder.iterdir())
    assert kit.uploader.stop(10) == 0


def test_a_file_is_taken_for_an_open_lease_only(kit: Kit, tmp_path: Path) -> None:
    held = fill(kit)
    sent(kit, held[0])
    other = tmp_path / file_name(Digest("0x" + "11" * 32))
    for name in (other.name, "f"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ConflictError, match="no open lease has a file of this name"):
            kit.client.send_file(tmp_path / name)
    assert [path.name for path in kit.folder.iterdir()] == [file_name(held[0])]
    with pytest.raises(ConflictError, match="this lease is not open"):
        kit.client.submit(HandIn(lease_digest=Digest("0x" + "11" * 32), file=file_name(held[0])))


def test_a_lease_is_open_until_its_file_is_delivered(kit: Kit) -> None:
    """The worker gets another one meanwhile if the node may hold it."""
    kit.broker.set_working(True, slots=2)
    first = digest_of(wish(kit))
    sent(kit, first)
    hand_in(kit, first)
    second = digest_of(wish(kit))
    assert second != first
    assert {*kit.broker.open_leases()} == {first, second} == open_there(kit)
    assert "as many as this node may hold" in wish(kit, second).reason
    offers: list[LeaseOffer] = []
    asking = threading.Thread(target=lambda: offers.append(wish(kit, second, seconds=30)))
    asking.start()
    kit.uploader.start()
    asking.join(60)
    assert digest_of(offers[0]) not in (first, second)
    assert kit.uploader.stop(10) == 0


def test_a_restarted_worker_gets_its_open_leases_first(kit: Kit) -> None:
    held = fill(kit)
    assert fill(kit) == held, "the same ones, the oldest first"
    assert digest_of(wish(kit, held[0], held[2])) == held[1]
    kit.client.abandon(Abandon(lease_digest=held[1]))
    assert {*kit.broker.open_leases()} == {held[0], held[2]}
    assert digest_of(wish(kit, held[0], held[2])) == held[1]
    kit.broker.give_back_open("a test")
    assert kit.broker.open_leases() == ()
    assert fill(kit) == held


def test_what_a_worker_says_it_holds_gives_it_nothing(kit: Kit) -> None:
    """Only what is open here counts, so made-up leases neither free nor take a place."""
    made_up = [Digest(f"0x{at:064x}") for at in range(MOST_SLOTS)]
    first = digest_of(wish(kit, *made_up))
    assert digest_of(wish(kit, *made_up)) == first
    assert len(open_there(kit)) == 1
    with pytest.raises(ValueError, match="at most 16"):
        LeaseWish(holds=(*made_up, ZERO_DIGEST))


def test_a_lease_that_ended_meanwhile_makes_room(kit: Kit) -> None:
    held = fill(kit)
    with kit.world.store.begin() as connection:
        leases.set_status(connection, held[1], "expired", excused=True)
    new = digest_of(wish(kit, held[0], held[2]))
    assert new not in held
    assert {*kit.broker.open_leases()} == {held[0], held[2], new}


def test_fewer_slots_end_no_lease(kit: Kit) -> None:
    held = fill(kit)
    kit.broker.set_working(True, slots=1)
    offer = wish(kit, *held)
    assert (offer.lease, offer.slots) == (None, 1)
    for lease in held[:2]:
        sent(kit, lease)
        hand_in(kit, lease)
    assert wish(kit, held[2]).lease is None
    assert kit.broker.open_leases() == tuple(sorted(held))


def test_unpaid_work_stops_new_leases_and_no_open_one(kit: Kit) -> None:
    first = digest_of(wish(kit))
    second = digest_of(wish(kit, first))
    unpaid: Any = SimpleNamespace(why_not=lambda: "too much is unpaid")
    kit.broker.unpaid = unpaid
    assert wish(kit, first, second).reason == "too much is unpaid"
    assert digest_of(wish(kit, first)) == second
    kit.broker.give_back_open("a test")
    assert [digest_of(wish(kit)), digest_of(wish(kit, first))] == [first, second]
    assert wish(kit, first, second).lease is None


def test_a_lease_of_another_run_waits_for_those_of_the_run_before(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of the other run takes the place of this one, whose leases would be lost."""
    first, run = digest_of(wish(kit)), kit.broker._run
    before = run.model_copy(update={"name": "before"})
    monkeypatch.setattr(kit.broker, "_run", before)
    assert "the leases of the run before it come first" in wish(kit, first).reason
    assert kit.broker.wanted_run() is None
    assert "its task takes this one's place" in wish(kit).reason
    assert kit.broker.wanted_run() == run


def test_a_file_that_is_refused_counts_for_its_lease_alone(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fill(kit)
    monkeypatch.setattr("prime_node.spool.MAX_FILE_BYTES", 100)
    for _ in range(2):
        (tmp_path / file_name(held[0])).write_bytes(b"x" * 101)
        with pytest.raises(MalformedError):
            kit.client.send_file(tmp_path / file_name(held[0]))
    assert "it runs out" in wish(kit, *held[1:]).reason
    sent(kit, held[1])
    assert hand_in(kit, held[1]).refused == ""
    assert not kit.broker.trouble


def test_the_speeds_of_leases_that_are_open_together_add_up(kit: Kit) -> None:
    held, shown = fill(kit), []
    for lease, tokens in zip(held, (10, 20, 40), strict=True):
        sent(kit, lease)
        hand_in(kit, lease, tokens=tokens, milliseconds=1000)
        shown.append(kit.broker.tokens_per_second)
    assert shown == [10, 30, 40], "of three, then two, then one at once"


# -- the gateway ----------------------------------------------------------------------------------


class Echo:
    """A gateway that notes which leases call. The agent does not get its signature."""

    def __init__(self) -> None:
        self.asked: list[tuple[Digest, GatewayCall]] = []

    def call(self, gateway: Gateway, request: GatewayRequest) -> GatewayAnswer:
        self.asked.append((Digest(request.lease.lease.salt), request.call))
        return request.call.answered(DIGESTS[Digest(request.lease.lease.salt)], "yes", NODE)


DIGESTS: dict[Digest, Digest] = {}
"""The lease of each salt that a test saw."""


def conversation(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Echo:
    gateway = Gateway(url="http://127.0.0.1:1", key=NODE.address, tools=("fetch-1",))
    talk = Conversation(turns=2, tools=("fetch-1",), gateway=gateway)
    echo = Echo()
    monkeypatch.setattr(kit.broker, "_gateway_api", echo)
    run = kit.broker._run.model_copy(update={"conversation": talk})
    monkeypatch.setattr(kit.broker, "_run", run)
    return echo


def call_of(turn: int) -> GatewayCall:
    return GatewayCall(
        group=0, sample=0, turn=turn, prefix=ZERO_DIGEST, tool="fetch-1", arguments={"input": "x"}
    )


def test_each_lease_calls_the_gateway_for_itself(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    held = fill(kit)
    salts = {d: Digest(h.signed.lease.salt) for d, h in kit.open_leases.all().items()}
    DIGESTS.update({salt: digest for digest, salt in salts.items()})
    echo = conversation(kit, monkeypatch)
    for turn, lease in enumerate(held):
        answer = kit.client.for_lease(lease).answer(call_of(turn))
        assert answer is not None
        assert answer.text == "yes"
    assert echo.asked == [(salts[lease], call_of(turn)) for turn, lease in enumerate(held)]
    with pytest.raises(ConflictError, match="the call names none of them"):
        kit.client.answer(call_of(0))
    with pytest.raises(ConflictError, match="this lease is not open"):
        kit.client.for_lease(Digest("0x" + "11" * 32)).answer(call_of(0))
    with pytest.raises(MalformedError, match="digest"):
        kit.client.for_lease(Digest("0x11")).answer(call_of(0))


def test_one_lease_does_not_wait_for_a_call_of_another(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = fill(kit)
    held = kit.open_leases.all()
    DIGESTS.update({Digest(held[one].signed.lease.salt): one for one in (first, second)})
    echo, both = conversation(kit, monkeypatch), threading.Barrier(2, timeout=30)
    answer_of = echo.call

    def call(gateway: Gateway, request: GatewayRequest) -> GatewayAnswer:
        both.wait()  # BrokenBarrierError if the calls come one after the other
        return answer_of(gateway, request)

    monkeypatch.setattr(echo, "call", call)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda one: kit.broker.call(call_of(0), one), (first, second)))
    assert [one.reason for one in answers] == ["", ""]


# -- peers of another age -------------------------------------------------------------------------


def test_an_older_worker_has_one_lease_at_a_time(kit: Kit) -> None:
    """It sends `holds` never, and names its file as it likes."""
    assert json.loads(LeaseWish(wait_seconds=7).model_dump_json()) == {"wait_seconds": 7}
    first = digest_of(wish(kit))
    assert digest_of(wish(kit)) == first
    assert open_there(kit) == {first}
    (kit.world.folder / "its-file").write_bytes(b"file")
    kit.client.send_file(kit.world.folder / "its-file")
    kit.uploader.start()
    answer = kit.client.submit(HandIn(lease_digest=first, file="its-file"))
    assert answer.receipt is not None
    assert digest_of(wish(kit)) != first
    assert len(open_there(kit)) == 1
    assert kit.uploader.stop(10) == 0


class Tape:
    """What a client sends over HTTP: its requests' paths and bodies."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send, self.bodies = send, list[tuple[str, dict[str, Any]]]()

    def __call__(self, method: str, path: str, body: Any = b"", *a: Any, **k: Any) -> Any:
        raw = body if isinstance(body, bytes) else body.model_dump_json().encode()
        self.bodies.append((path, json.loads(raw or b"{}")))
        return self._send(method, path, body, *a, **k)


def test_an_older_orchestrator_is_sent_what_it_knows(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats name no slots: it would refuse `holds`."""
    older = HeartbeatAnswer.model_validate_json(
        b'{"directive":"work","reason":"","status":"active","latest_version":0,"relays":[],'
        b'"server_time":1}'
    )
    kit.broker.set_working(True, slots=older.lease_slots)
    tape = Tape(kit.broker._api.client.send)
    monkeypatch.setattr(kit.broker._api.client, "send", tape)
    offer = wish(kit)
    first = digest_of(offer)
    assert offer.slots == 1
    assert wish(kit, first).lease is None
    assert digest_of(wish(kit)) == first
    sent(kit, first)
    hand_in(kit, first)
    assert "is on its way" in wish(kit).reason
    asked = [body for path, body in tape.bodies if path == "/v1/leases"]
    assert len(asked) == 3
    assert all({*body} == {"policy_version", "runs"} for body in asked)


def test_what_the_engine_paused_is_shown_and_an_older_agent_is_asked_once(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, data = heartbeat_loop(kit, lambda stop: stop.set())
    loop._beat()
    assert {"swap_seconds", "idle_seconds"}.isdisjoint(overview(config.load({"data": data.root})))
    kit.client.pauses(Pauses(policy_version=3, swap_ms=1800, idle_ms=250))
    loop._beat()
    data.lock()
    shown = overview(config.load({"data": data.root}))
    data.unlock()
    assert (shown["swap_seconds"], shown["idle_seconds"]) == (1.8, 0.25)

    def unknown(method: str, path: str, body: bytes) -> bytes:
        asked.append(path)
        raise NotFoundError(f"the bridge has no {method} {path}")

    asked: list[str] = []
    monkeypatch.setattr(kit.client, "_request", unknown)
    for _ in range(2):
        kit.client.pauses(Pauses(policy_version=3, swap_ms=0, idle_ms=0))
    assert asked == ["/pauses"]


def test_an_older_agent_is_sent_what_it_knows(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offers name no slots: it would refuse the lease of a call."""
    kit.broker.set_working(True, slots=1)
    first = digest_of(wish(kit))
    (salt,) = (Digest(held.signed.lease.salt) for held in kit.open_leases.all().values())
    DIGESTS[salt] = first
    echo = conversation(kit, monkeypatch)
    tape = Tape(kit.client._request)
    monkeypatch.setattr(kit.client, "_request", tape)
    assert kit.client.for_lease(first).answer(call_of(0)) is not None
    assert echo.asked == [(salt, call_of(0))]
    assert [path for path, _ in tape.bodies] == ["/call"]


# -- settings -------------------------------------------------------------------------------------


def test_the_owners_limit_holds_against_the_orchestrators(kit: Kit, tmp_path: Path) -> None:
    assert config.load({"data": tmp_path}).lease_slots == 0
    settings = config.load({"data": tmp_path, "lease_slots": 2})
    assert settings.to_remember()["lease_slots"] == 2
    kit.broker._most_slots = settings.lease_slots
    kit.broker.set_working(True, slots=4)
    assert len(fill(kit)) == 2


def test_the_heartbeat_names_the_slots(kit: Kit) -> None:
    kit.broker.set_working(False)
    loop, _ = heartbeat_loop(kit, lambda stop: stop.set())
    assert loop.run() == 0
    assert (kit.broker._working, kit.broker._slots) == (True, 4)
    assert len(fill(kit)) == 4
