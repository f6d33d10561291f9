"""The socket between a task and its agent: what a hostile task can say, and what comes of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from bridge_kit import Kit, heartbeat_loop, take_lease
from node_world import NODE, publish_model, until
from other_user import as_another_user, open_path
from sqlalchemy import update

from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    PolicyError,
    UnavailableError,
)
from prime_core.gateway import Gateway, GatewayAnswer, GatewayCall, GatewayRequest
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import Heartbeat
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.run import Conversation
from prime_node.bridge import MAX_CONNECTIONS, _Handler
from prime_node.bridge_messages import Abandon, HandIn, LeaseOffer, LeaseWish
from prime_node.lease_broker import CLOCK_SECONDS, MOST_FAILURES, SILENCE_SHARE, speed
from prime_node.task import FINAL_STATUS
from prime_node.worker.client import BridgeClient
from prime_orchestrator import scheduler
from prime_orchestrator.store import leases, policies, schema


def test_worker_gets_the_run_and_the_same_lease_until_it_is_fulfilled(kit: Kit) -> None:
    assert kit.client.run() == kit.world.backend.context.run
    first = take_lease(kit)
    kit.client.abandon(Abandon(lease_digest=first, reason="test"))
    assert take_lease(kit) == first


def test_submitted_file_is_receipted_and_the_next_lease_is_another(kit: Kit) -> None:
    first = take_lease(kit)
    (kit.folder / "f.parquet").write_bytes(b"file")
    kit.uploader.start()
    answer = kit.client.submit(HandIn(lease_digest=first, file="f.parquet"))
    assert answer.receipt is not None
    assert answer.receipt.receipt.submission_digest == answer.submission_digest
    assert kit.world.submissions()[0]["digest"] == answer.submission_digest
    assert not (kit.folder / "f.parquet").exists()
    assert take_lease(kit) != first
    assert kit.uploader.stop(10) == 0


def test_waiting_worker_gets_its_lease_once_the_last_file_is_receipted(kit: Kit) -> None:
    first = take_lease(kit)
    (kit.folder / "f").write_bytes(b"file")
    handing_in = threading.Thread(
        target=lambda: kit.client.submit(HandIn(lease_digest=first, file="f"))
    )
    handing_in.start()
    until(lambda: kit.spool.waiting(), "the file is journalled")
    offers: list[LeaseOffer] = []
    asking = threading.Thread(target=lambda: offers.append(kit.client.lease(LeaseWish())))
    asking.start()
    assert not offers
    kit.uploader.start()
    handing_in.join(30)
    asking.join(30)
    (offer,) = offers
    assert offer.lease is not None
    assert kit.uploader.stop(10) == 0


def test_file_name_can_name_no_other_place(kit: Kit) -> None:
    (kit.folder.parent / "pw").write_text("secret")
    lease = take_lease(kit)
    for name in ("../pw", "/etc/passwd", "..", ".", "", "a/b", ".hidden", "x\0y", "é", "a" * 129):
        with pytest.raises(MalformedError, match="not a plain file name"):
            kit.client.submit(HandIn(lease_digest=lease, file=name))
    with pytest.raises(MalformedError, match="not a plain file name"):
        kit.client.submit(HandIn(lease_digest=lease, file="f\n"))
    assert not kit.spool.waiting()


def test_links_folders_and_pipes_are_no_files(kit: Kit) -> None:
    secret = kit.folder.parent / "secret"
    secret.write_text("secret")
    (kit.folder / "link").symlink_to(secret)
    (kit.folder / "folder").mkdir()
    os.mkfifo(kit.folder / "pipe")
    lease = take_lease(kit)
    for name in ("link", "folder", "pipe", "missing"):
        with pytest.raises(MalformedError, match="file"):
            kit.client.submit(HandIn(lease_digest=lease, file=name))
    (kit.folder / "empty").touch()
    with pytest.raises(MalformedError, match="is empty"):
        kit.client.submit(HandIn(lease_digest=lease, file="empty"))
    assert not kit.spool.waiting()


def test_oversized_file_is_refused_and_leaves_no_copy(kit: Kit) -> None:
    with (kit.folder / "big").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    lease = take_lease(kit)
    with pytest.raises(MalformedError, match="larger than a rollout file"):
        kit.client.submit(HandIn(lease_digest=lease, file="big"))
    assert [path.name for path in kit.socket_path.parent.parent.glob("outbox/*.parquet*")] == []


def test_only_the_open_lease_can_be_submitted_or_given_back(kit: Kit) -> None:
    (kit.folder / "f").write_bytes(b"file")
    other = Digest("0x" + "11" * 32)
    with pytest.raises(ConflictError, match="this lease is not open"):
        kit.client.submit(HandIn(lease_digest=other, file="f"))
    take_lease(kit)
    with pytest.raises(ConflictError, match="this lease is not open"):
        kit.client.submit(HandIn(lease_digest=other, file="f"))
    with pytest.raises(ConflictError, match="this lease is not open"):
        kit.client.abandon(Abandon(lease_digest=other))


def test_a_lease_that_the_orchestrator_does_not_take_back_is_closed_here(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_lease(kit)

    def refused(lease: Digest) -> None:
        raise MalformedError("a proxy's page")

    monkeypatch.setattr(kit.broker._api, "abandon", refused)
    kit.broker.give_back_open("a test")
    assert kit.broker.open_leases() == ()
    assert "did not take it back (a proxy's page)" in caplog.text


def test_file_changed_after_it_was_handed_in_does_not_matter(kit: Kit) -> None:
    lease = take_lease(kit)
    (kit.folder / "f").write_bytes(b"as hashed")
    thread = threading.Thread(
        target=lambda: kit.client.submit(HandIn(lease_digest=lease, file="f"))
    )
    thread.start()
    (entry,) = until(kit.spool.waiting, "the file is journalled")
    (kit.folder / "f").write_bytes(b"another")
    assert entry.path.read_bytes() == b"as hashed"
    kit.uploader.start()
    thread.join(30)
    assert kit.world.submissions()[0]["sha256"] == entry.body.submission.sha256
    assert kit.uploader.stop(10) == 0


def test_newer_wish_takes_the_place_of_the_one_before(kit: Kit) -> None:
    kit.broker.set_working(False)
    offers: list[LeaseOffer] = []
    left_by_a_dead_worker = threading.Thread(
        target=lambda: offers.append(kit.client.lease(LeaseWish(wait_seconds=30)))
    )
    left_by_a_dead_worker.start()
    until(lambda: kit.broker._wishes == 1, "the first waits")
    assert kit.client.lease(LeaseWish(wait_seconds=0)).lease is None
    left_by_a_dead_worker.join(10)
    assert [offer.reason for offer in offers] == ["a newer request took this one's place"]


BAD_REQUESTS = [
    (b"POST /lease HTTP/1.1\r\nContent-Length: 999999\r\n\r\n", "malformed"),
    (b"POST /lease HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "malformed"),
    (b"POST /lease HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", "malformed"),
    (b"POST /lease HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "malformed"),
    (b"POST /lease HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", "malformed"),
    (b"POST /lease HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyz", "malformed"),
    (b'POST /lease HTTP/1.1\r\nContent-Length: 20\r\n\r\n{"wait_seconds":999}', "malformed"),
    (b"POST /keys HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", "not-found"),
    (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", "not-found"),
    (b"GET /lease HTTP/1.1\r\n\r\n", "not-found"),
]


def versioned(request: bytes) -> bytes:
    """The request with the protocol's version in its head."""
    return request.replace(b"\r\n", b"\r\nPrime-Protocol: 1\r\n", 1)


def test_bad_request_is_a_problem_document(kit: Kit) -> None:
    for request, kind in BAD_REQUESTS:
        head, _, body = kit.raw(versioned(request)).partition(b"\r\n\r\n")
        assert b"application/problem+json" in head, request
        assert json.loads(body)["type"] == f"urn:prime:problem:{kind}", request


def test_more_connections_than_allowed_are_closed_and_the_bridge_lives(kit: Kit) -> None:
    import socket

    held = []
    for _ in range(MAX_CONNECTIONS + 4):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect(str(kit.socket_path))
        held.append(connection)
    assert held[-1].recv(1) == b""  # closed by the bridge
    for connection in held:
        connection.close()
    until(lambda: _answers(kit), "the bridge answers again")


def _answers(kit: Kit) -> bool:
    try:
        return kit.raw(versioned(b"GET /run HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.0 200")
    except (BrokenPipeError, ConnectionResetError):  # closed while its places were still taken
        return False


def test_another_user_cannot_connect(kit: Kit) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can try as another user")
    kit.socket_path.chmod(0o666)
    open_path(kit.socket_path)

    def ask() -> str:
        try:
            return "answered" if kit.raw(versioned(b"GET /run HTTP/1.1\r\n\r\n")) else "closed"
        except ConnectionError:
            return "closed"

    assert as_another_user(ask) == "closed"
    assert _answers(kit)


def test_policy_that_is_not_on_disk_is_fetched_before_work(kit: Kit) -> None:
    lease = take_lease(kit)
    digest = kit.policies.on_disk.pop(0)
    kit.policies.on_disk[7] = digest  # something is there, but not what the lease needs
    offer = kit.broker.lease(LeaseWish(wait_seconds=0))
    assert (offer.lease, kit.policies.wanted) == (None, [0])
    kit.policies.on_disk = {0: digest}
    assert take_lease(kit) == lease


def test_work_goes_on_with_the_policy_on_disk_while_newer_weights_are_on_their_way(
    kit: Kit,
) -> None:
    """No worker waits for weights to arrive while its files are fresh enough to be trained."""
    context, store = kit.world.backend.context, kit.world.store
    kit.uploader.start()
    for version in range(1, context.run.max_staleness + 2):
        signed = publish_model(kit.world.folder, context.deployment, context.pool, version=version)
        with store.begin() as connection:
            policies.add(connection, signed, now=time.time())
        offer = kit.client.lease(LeaseWish(wait_seconds=0))
        if version <= context.run.max_staleness:
            assert offer.lease is not None, offer.reason
            assert (offer.lease.policy_version, kit.policies.wanted) == (0, [])
            hand_in(kit, offer)
        else:
            assert offer.lease is None
            assert f"policy 0 is too old; load {version}" in offer.reason
    assert kit.uploader.stop(10) == 0


def test_no_work_is_begun_for_a_batch_that_its_policy_is_too_old_for(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would be void in any case (docs/adr/0006)."""
    allowed = kit.world.backend.context.run.max_staleness
    given = scheduler.decide
    for step, taken in ((allowed + 1, False), (allowed, True)):
        monkeypatch.setattr(scheduler, "decide", lambda *a, s=step: replace(given(*a), step=s))
        offer = kit.client.lease(LeaseWish(wait_seconds=0))
        assert (offer.lease is not None) == taken, offer.reason
        assert taken or f"policy 0 is too old for batch {step}" in offer.reason
        with kit.world.store.begin() as connection:
            connection.execute(update(schema.leases).values(status="expired"))


def test_a_lease_longer_than_the_pools_is_not_taken(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validators that were appointed after it was signed could judge its file."""
    monkeypatch.setattr(kit.broker, "_now", lambda: time.time() - 2 * CLOCK_SECONDS)
    offer = kit.client.lease(LeaseWish(wait_seconds=0))
    assert offer.lease is None
    assert "longer than the pool's" in offer.reason


def hand_in(kit: Kit, offer: LeaseOffer) -> None:
    assert offer.lease is not None
    assert offer.domain is not None
    digest = offer.lease.lease.digest(offer.domain)
    name = f"{digest[2:10]}.parquet"
    (kit.folder / name).write_bytes(digest.encode())
    assert kit.client.submit(HandIn(lease_digest=digest, file=name)).receipt is not None


def test_policy_other_than_the_leases_is_never_used(kit: Kit) -> None:
    kit.policies.on_disk[0] = Digest("0x" + "22" * 32)
    offer = kit.client.lease(LeaseWish(wait_seconds=0))
    assert offer.lease is None
    assert "not the one that the lease names" in offer.reason


def test_no_lease_before_the_first_policy(kit: Kit) -> None:
    kit.policies.on_disk.clear()
    offer = kit.client.lease(LeaseWish(wait_seconds=0))
    assert (offer.lease, offer.reason) == (None, "no policy has arrived yet")


def test_unknown_verb_is_refused(kit: Kit) -> None:
    assert b" 501 " in kit.raw(b"DELETE /run HTTP/1.1\r\n\r\n").splitlines()[0]
    with pytest.raises(NotFoundError):
        kit.client._request("POST", "/run", b"{}")


def test_what_the_worker_says_of_its_speed_always_fits_a_heartbeat() -> None:
    """A number that the orchestrator cannot take would silence the whole agent."""
    lease = Digest("0x" + "11" * 32)
    with pytest.raises(ValueError, match="less than"):
        HandIn(lease_digest=lease, file="f", tokens=2**70, milliseconds=1)
    most = HandIn(lease_digest=lease, file="f", tokens=2**40 - 1, milliseconds=1)
    Heartbeat(policy_version=0, tokens_per_second=speed(most))


# -- images of another age -------------------------------------------------------------------------


def test_a_worker_that_hands_in_what_it_never_sent_gets_no_lease_any_more(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    """As images did that wrote into a folder of the node's. It would make the file again and again;
    so it is said once, where `prime-node status` shows it too, and the lease goes back."""
    lease = take_lease(kit)
    with pytest.raises(MalformedError, match="no readable file"):
        kit.client.submit(HandIn(lease_digest=lease, file="f.parquet"))
    for _ in range(3):
        offer = kit.client.lease(LeaseWish(wait_seconds=0))
        assert offer.lease is None
        assert "does not fit this agent" in offer.reason
    assert kit.broker.open_leases() == ()
    assert caplog.text.count("the task's image does not fit this agent") == 2, (
        "said, and given back"
    )
    assert caplog.text.count("given back") == 1
    loop, data = heartbeat_loop(kit, lambda stop: stop.set())
    assert loop.run() == 0
    status = data.read_status()
    assert status is not None
    assert "does not fit this agent" in status.reason


def test_a_lease_whose_files_cannot_be_taken_is_not_offered_for_ever(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker makes the same file of it again. One that was cut off gets a second chance."""
    monkeypatch.setattr("prime_node.spool.MAX_FILE_BYTES", 100)
    (tmp_path / "f").write_bytes(b"x" * 101)
    first = take_lease(kit)
    for _ in range(MOST_FAILURES):
        assert take_lease(kit) == first
        with pytest.raises(MalformedError):
            kit.client.send_file(tmp_path / "f")
    offer = kit.client.lease(LeaseWish(wait_seconds=0))
    assert (offer.lease, "it runs out" in offer.reason) == (None, True)
    with kit.world.store.begin() as connection:
        leases.set_status(connection, first, "expired")
    assert take_lease(kit) != first, "the next lease is another file"


def test_a_worker_newer_than_its_agent_ends_for_good(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the exit status after which the agent starts no other, and says why."""
    monkeypatch.delattr(_Handler, "do_PUT")
    (tmp_path / "f").write_bytes(b"file")
    take_lease(kit)
    with pytest.raises(PolicyError, match="older than this image"):
        kit.client.send_file(tmp_path / "f")
    assert PolicyError.exit_code in FINAL_STATUS


def test_a_silent_gateway_takes_at_most_a_part_of_a_lease(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows end without answers, in time for the lease; the next lease asks again."""
    now, asked = [time.time()], []
    gateway = Gateway(url="http://127.0.0.1:1", key=NODE.address, tools=("fetch-1",))
    run = kit.broker._run.model_copy(
        update={"conversation": Conversation(turns=2, tools=("fetch-1",), gateway=gateway)}
    )

    class Silent:
        def call(self, gateway: Gateway, request: GatewayRequest) -> GatewayAnswer:
            asked.append(request.lease)
            now[0] += 15.0
            raise UnavailableError("it does not answer")

    take_lease(kit)
    monkeypatch.setattr(kit.broker, "_run", run)
    monkeypatch.setattr(kit.broker, "_now", lambda: now[0])
    monkeypatch.setattr(kit.broker, "_gateway_api", Silent())
    call = GatewayCall(
        group=0, sample=0, turn=0, prefix=ZERO_DIGEST, tool="fetch-1", arguments={"input": "x"}
    )
    began = now[0]
    reasons = [kit.broker.call(call).reason for _ in range(64)]
    assert now[0] - began <= run.lease_seconds / SILENCE_SHARE + 15.0
    assert reasons[-1] == "the gateway was silent too long in this lease"
    (signed,) = (held.signed for held in kit.open_leases.all().values())
    lease = signed.lease.model_copy(update={"index": signed.lease.index + 1})
    later = signed.model_copy(update={"lease": lease})
    kit.open_leases.add(lease.digest(kit.broker._domain), later)
    assert kit.broker.call(call).reason == "it does not answer"
    assert asked[-1] == later


def test_a_file_is_sent_without_holding_it_in_memory(kit: Kit, tmp_path: Path) -> None:
    """Neither end holds it: a worker's memory is its model's."""
    take_lease(kit)
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    tracemalloc.start()
    try:
        kit.client.send_file(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_an_answer_to_an_unread_body_is_received(tmp_path: Path) -> None:
    """An agent that refuses by the head alone closes while the body is still on its way."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()
    (tmp_path / "f").write_bytes(bytes(8 << 20))  # more than a socket holds

    def refuse() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        with pytest.raises(PolicyError, match="older than this image"):
            BridgeClient(tmp_path / "agent.sock").send_file(tmp_path / "f")
    finally:
        thread.join(30)
        listener.close()
