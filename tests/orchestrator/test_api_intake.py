"""Uploads and submissions: what is taken, what is refused, and that nothing accepted is lost."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from fastapi.testclient import TestClient
from orchestrator_world import AUDIENCE, Session, World, signer

from prime_core.encoding import sha256
from prime_core.ids import Digest
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.storage.base import CHUNK_BYTES, ObjectStat, digest_key
from prime_core.task import SignedLease
from prime_orchestrator.api import intake
from prime_orchestrator.api.app import create_app
from prime_orchestrator.manager import uploads
from prime_orchestrator.manager.uploads import staged_key
from prime_orchestrator.store import jobs, leases, nodes, submissions


def status_of(world: World, digest: Digest) -> str:
    with world.backend.store.read() as connection:
        row = leases.get(connection, digest)
    assert row is not None
    return row.status


@pytest.fixture
def node(world: World) -> Session:
    return world.member(1)


@pytest.fixture
def lease(world: World, node: Session) -> SignedLease:
    return world.lease(node)


def target(world: World, node: Session, lease: SignedLease, data: bytes) -> dict[str, Any]:
    body = b'{"sha256":"%s","size":%d}' % (sha256(data).encode(), len(data))
    answer = world.post(f"/v1/leases/{world.lease_digest(lease)}/upload", body, node)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# -- submissions -------------------------------------------------------------------------------


def test_a_receipt_is_the_managers_and_a_job_waits(
    world: World, node: Session, lease: SignedLease
) -> None:
    world.upload(node, lease, b"file")
    signed = world.claim(node.account, lease, b"file")
    answer = world.post("/v1/submissions", signed)
    receipt = ReceiptAnswer.model_validate_json(answer.content)
    digest = signed.submission.digest(world.domain("work"))
    assert receipt.receipt.submission_digest == digest
    assert receipt.receipt.received_at == int(world.clock())
    assert receipt.receipt.recover(world.domain("work"), receipt.signature) == (
        world.manager.address
    )
    with world.backend.store.read() as connection:
        job = jobs.get(connection, digest)
        assert job is not None
        assert job.status == "open"
    assert status_of(world, world.lease_digest(lease)) == "submitted"


def test_the_same_submission_twice_gives_the_same_receipt_even_late(
    world: World, node: Session, lease: SignedLease
) -> None:
    world.upload(node, lease, b"file")
    signed = world.claim(node.account, lease, b"file")
    first = world.post("/v1/submissions", signed)
    world.clock.advance(100_000)
    again = world.post("/v1/submissions", signed)
    assert (again.status_code, again.content) == (200, first.content)


def test_another_file_for_the_same_lease_is_a_conflict(
    world: World, node: Session, lease: SignedLease
) -> None:
    for data in (b"one", b"two"):
        world.upload(node, lease, data)
    assert world.post("/v1/submissions", world.claim(node.account, lease, b"one")).is_success
    other = world.post("/v1/submissions", world.claim(node.account, lease, b"two"))
    assert other.status_code == 409
    with world.backend.store.read() as connection:
        assert submissions.counts(connection) == {"submitted": 1}


@pytest.mark.parametrize(
    ("changes", "code", "complaint"),
    [
        ({"pool": 2}, 401, "pool"),
        ({"step": 7}, 401, "step"),
        ({"policy_digest": sha256(b"other")}, 401, "policy"),
        ({"rows": 3}, 400, "4 rows"),
        ({"size": 5}, 401, "another size"),
        ({"size": 0}, 400, "bytes"),
        ({"size": MAX_FILE_BYTES + 1}, 400, "bytes"),
        ({"sha256": sha256(b"elsewhere")}, 404, "upload it first"),
        ({"lease_digest": sha256(b"none")}, 404, "no lease"),
        ({"valid_until": 1_799_999_999}, 403, "validity"),
    ],
)
def test_a_claim_that_does_not_fit_its_lease_or_file_is_refused(
    world: World,
    node: Session,
    lease: SignedLease,
    changes: dict[str, Any],
    code: int,
    complaint: str,
) -> None:
    world.upload(node, lease, b"file")
    answer = world.post("/v1/submissions", world.claim(node.account, lease, b"file", **changes))
    assert (answer.status_code, complaint in answer.json()["detail"]) == (code, True), answer.text
    assert status_of(world, world.lease_digest(lease)) == "open"
    with world.backend.store.read() as connection:
        assert submissions.counts(connection) == {}
        assert jobs.counts(connection) == {}


def test_a_file_whose_validity_ends_while_it_is_looked_up_is_refused(
    world: World, node: Session, lease: SignedLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = uploads.stat

    def slow(*words: Any) -> ObjectStat:
        world.clock.advance(20)
        return found(*words)

    monkeypatch.setattr(uploads, "stat", slow)
    world.upload(node, lease, b"file")
    claim = world.claim(node.account, lease, b"file", valid_until=int(world.clock()) + 10)
    answer = world.post("/v1/submissions", claim)
    assert (answer.status_code, "validity" in answer.text) == (403, True)
    with world.backend.store.read() as connection:
        assert submissions.counts(connection) == {}


def test_another_nodes_signature_is_refused(
    world: World, node: Session, lease: SignedLease
) -> None:
    world.upload(node, lease, b"file")
    other = world.member(2)
    stolen = world.claim(other.account, lease, b"file")
    assert world.post("/v1/submissions", stolen).status_code == 401
    posing = stolen.model_copy(update={"node": node.account.address})
    answer = world.post("/v1/submissions", posing)
    assert (answer.status_code, "not signed by the node" in answer.text) == (401, True)


def test_a_file_after_the_deadline_is_too_late(
    world: World, node: Session, lease: SignedLease
) -> None:
    world.upload(node, lease, b"file")
    world.clock.advance(61)
    answer = world.post("/v1/submissions", world.claim(node.account, lease, b"file"))
    assert (answer.status_code, "too late" in answer.text) == (409, True)


@pytest.mark.parametrize("status", ["quarantined", "ejected", "left"])
def test_nothing_is_taken_from_who_is_out(
    world: World, node: Session, lease: SignedLease, status: Any
) -> None:
    world.upload(node, lease, b"file")
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, node.account.address, status, last_heartbeat=world.clock())
    answer = world.post("/v1/submissions", world.claim(node.account, lease, b"file"))
    assert answer.status_code == 403


def test_a_file_damaged_in_the_store_is_refused(
    world: World, node: Session, lease: SignedLease
) -> None:
    world.upload(node, lease, b"file")
    root = world.backend.objects.root  # type: ignore[attr-defined]
    (root / staged_key(lease.lease.deadline, sha256(b"file"))).write_bytes(b"fil3")
    answer = world.post("/v1/submissions", world.claim(node.account, lease, b"file"))
    assert (answer.status_code, "SHA-256" in answer.text) == (401, True)


@pytest.mark.parametrize("broken", ["jobs.add", "leases.set_statuses", "submissions.add"])
def test_a_crash_inside_the_intake_leaves_nothing_half_done(
    world: World,
    node: Session,
    lease: SignedLease,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world.upload(node, lease, b"file")
    signed = world.claim(node.account, lease, b"file")
    module, name = broken.split(".")

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(getattr(intake, module), name, crash)
    with pytest.raises(KeyboardInterrupt):
        intake.submit(world.backend, signed)
    monkeypatch.undo()
    assert status_of(world, world.lease_digest(lease)) == "open"
    with world.backend.store.read() as connection:
        assert submissions.counts(connection) == {}
        assert jobs.counts(connection) == {}
    assert world.post("/v1/submissions", signed).status_code == 200


# -- uploads -----------------------------------------------------------------------------------


def test_a_large_file_arrives_whole_in_pieces(
    world: World, node: Session, lease: SignedLease
) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 5)
    assert world.upload(node, lease, data).status_code == 204
    where = f"/v1/objects/{sha256(data)}"
    assert world.http.get(where).status_code == 404, "no one else sees it before it is handed in"
    signed = world.claim(node.account, lease, data)
    assert world.post("/v1/submissions", signed).status_code == 200
    url = world.http.get(where).headers["location"]
    assert world.http.get(url).content == data


def test_an_upload_that_was_made_already_need_not_be_made_again(
    world: World, node: Session, lease: SignedLease
) -> None:
    world.upload(node, lease, b"file")
    assert target(world, node, lease, b"file")["exists"]
    world.post("/v1/submissions", world.claim(node.account, lease, b"file"))
    world.clock.advance(3600)
    later = world.login(signer(1))
    assert target(world, later, lease, b"file")["exists"]  # a crash between receipt and journal


@pytest.mark.parametrize("sent", [b"fil", b"files", b"FILE", b""])
def test_a_truncated_oversized_or_other_upload_leaves_nothing(
    world: World, node: Session, lease: SignedLease, sent: bytes
) -> None:
    where = target(world, node, lease, b"file")
    before = list(world.backend.objects.keys())
    with_its_length = world.http.put(where["url"], content=sent)
    pretending = world.http.put(where["url"], content=iter([sent]))  # chunked: no length is given
    assert (with_its_length.status_code, pretending.status_code) == (400, 400)
    assert not world.backend.objects.exists(digest_key(sha256(b"file")))
    assert list(world.backend.objects.keys()) == before


def full(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_refuses_an_upload_with_a_problem_and_loses_nothing_accepted(
    world: World, node: Session, lease: SignedLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.upload(node, lease, b"file")
    signed = world.claim(node.account, lease, b"file")
    receipt = world.post("/v1/submissions", signed).content
    other = world.lease(world.member(2))
    where = target(world, world.login(signer(2)), other, b"more")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        answer = world.http.put(where["url"], content=b"more", headers=where["headers"])
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert "disk is full; free some space" in answer.json()["detail"]
    assert world.post("/v1/submissions", signed).content == receipt
    assert status_of(world, world.lease_digest(other)) == "open"
    assert world.http.put(where["url"], content=b"more", headers=where["headers"]).is_success


def test_an_upload_url_ends_with_its_lease_and_serves_its_own_file(
    world: World, node: Session, lease: SignedLease
) -> None:
    where = target(world, node, lease, b"file")
    url: str = where["url"]
    other = url.replace(sha256(b"file")[2:], sha256(b"else")[2:], 1)
    assert world.http.put(other, content=b"else").status_code == 401
    assert world.http.get(url).status_code == 400
    world.clock.advance(61)
    late = world.http.put(url, content=b"file")
    assert (late.status_code, "expired" in late.text) == (401, True)


def test_uploads_for_one_lease_are_bounded_in_size_and_number(
    world: World, node: Session, lease: SignedLease
) -> None:
    path = f"/v1/leases/{world.lease_digest(lease)}/upload"
    huge = b'{"sha256":"%s","size":%d}' % (sha256(b"x").encode(), MAX_FILE_BYTES + 1)
    assert world.post(path, huge, node).status_code == 403
    for number in range(4):
        target(world, node, lease, b"%d" % number)
    body = b'{"sha256":"%s","size":1}' % sha256(b"5").encode()
    assert world.post(path, body, node).status_code == 403
    assert target(world, node, lease, b"3")["url"]


@pytest.mark.parametrize(
    "key",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/x", "sha256/%2e%2e/x", ".tmp-0", "a//b",
     "sha256/" + "0" * 63, "a%00b", "%2Fetc%2Fpasswd"],
)  # fmt: skip
def test_tricks_in_store_paths_reach_nothing(world: World, key: str) -> None:
    for method in ("GET", "PUT"):
        answer = world.http.request(
            method,
            f"/v1/store/{key}?expires=9999999999&size=1&sha256={sha256(b'x')}&signature={'0' * 64}",
            content=b"x",
        )
        assert answer.status_code in (400, 404, 405), (method, answer.status_code)


def test_objects_are_found_by_digest_only(world: World) -> None:
    assert world.http.get(f"/v1/objects/{sha256(b'none')}").status_code == 404
    assert world.http.get("/v1/objects/abc").status_code == 400


# -- bodies ------------------------------------------------------------------------------------


def test_a_body_over_its_limit_is_refused_before_it_is_read(world: World, node: Session) -> None:
    huge = b" " * (65 << 10)
    assert world.post("/v1/submissions", huge).status_code == 400
    assert world.http.post("/v1/submissions", content=iter([huge, huge])).status_code == 400
    lying = world.http.post("/v1/submissions", content=b"{}", headers={"Content-Length": "1e3"})
    assert lying.status_code == 400
    assert world.post("/v1/heartbeat", huge, node).status_code == 400


def test_an_unknown_field_of_a_submission_is_refused(
    world: World, node: Session, lease: SignedLease
) -> None:
    raw = world.claim(node.account, lease, b"file").model_dump_json()
    answer = world.post(
        "/v1/submissions", raw.replace('{"submission":', '{"x":1,"submission":').encode()
    )
    assert (answer.status_code, "SignedSubmission" in answer.text) == (400, True)


def test_routes_that_do_not_exist_answer_with_problems(world: World) -> None:
    for method, path, code in (("GET", "/v1/none", 404), ("DELETE", "/v1/leases", 405)):
        answer = world.http.request(method, path)
        assert answer.status_code == code
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_defect_is_a_bare_500(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("prime_orchestrator.api.status.status", defect)
    quiet = TestClient(create_app(world.backend), base_url=AUDIENCE, raise_server_exceptions=False)
    answer = quiet.get("/v1/status")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text


def test_one_client_cannot_take_all_the_time(world: World) -> None:
    bounded = TestClient(create_app(world.backend, requests_per_second=5), base_url=AUDIENCE)
    codes = [bounded.get("/healthz").status_code for _ in range(30)]
    assert codes[:10] == [200] * 10
    assert 429 in codes
