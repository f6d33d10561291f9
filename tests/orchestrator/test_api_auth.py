"""Sessions: what opens one, what a signed request must carry, what ends it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from judges import appoint
from orchestrator_world import AUDIENCE, VERSIONED, Session, World, signer

from prime_core.encoding import sha256
from prime_core.messages import RevokeRequest
from prime_core.node import SessionRevocation
from prime_core.signing import LocalSigner
from prime_core.transport.signatures import sign_headers
from prime_orchestrator.api.app import create_app
from prime_orchestrator.store import chain, meta, schema, sessions

BEAT = b'{"policy_version":null}'


def problem(answer: Any) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    return answer.status_code, document["detail"]


def revocation(world: World, session: Session, **changes: Any) -> RevokeRequest:
    values = {
        "account": session.account.address,
        "orchestrator": AUDIENCE,
        "revoked_before": int(world.clock()) + 1,
    }
    body = SessionRevocation(**(values | changes))
    return RevokeRequest(
        revocation=body, signature=session.account.sign(body, world.domain("registry"))
    )


def test_a_session_signs_requests_until_it_ends(world: World) -> None:
    session = world.login(signer(1))
    assert world.post("/v1/heartbeat", BEAT, session).status_code == 200
    world.clock.advance(3599)
    assert world.post("/v1/heartbeat", BEAT, session).status_code == 200
    world.clock.advance(2)
    assert problem(world.post("/v1/heartbeat", BEAT, session))[0] == 401


@pytest.mark.parametrize(
    ("changes", "status", "complaint"),
    [
        ({"orchestrator": "http://other"}, 401, "is for"),
        ({"scope": "owner"}, 401, "no scope"),
        ({"scope": "trainer"}, 403, "only the pool's trainer"),
        ({"expiry": 1_800_000_000 + 86_401}, 401, "24 hours"),
        ({"expiry": 1_800_000_000}, 401, "24 hours"),
        ({"issued_at": 1_799_990_000, "expiry": 1_799_999_999}, 401, "expired"),
        ({"issued_at": 1_800_000_031, "expiry": 1_800_000_100}, 401, "future"),
        ({"account": signer(2).address}, 401, "not signed by the account"),
    ],
)
def test_a_grant_that_does_not_hold_opens_nothing(
    world: World, changes: dict[str, Any], status: int, complaint: str
) -> None:
    scope = changes.pop("scope", "node")
    request = world.grant(Session(signer(1)), scope, **changes)
    code, detail = problem(world.post("/v1/sessions", request))
    assert (code, complaint in detail) == (status, True), detail


def test_no_one_is_called_not_appointed_before_the_chain_is_read(world: World) -> None:
    store = world.backend.store
    with store.begin() as connection:
        meta.drop(connection, meta.CHAIN_READ)
    request = world.grant(Session(signer(1)), "validator")
    code, detail = problem(world.post("/v1/sessions", request))
    assert (code, "has not read from the chain yet" in detail) == (503, True), detail
    appoint(store, world.backend.context.pool, signer(1).address)
    assert world.post("/v1/sessions", request).status_code == 200
    code, detail = problem(world.post("/v1/sessions", world.grant(Session(signer(2)), "validator")))
    assert (code, "not appointed" in detail) == (403, True), detail


def test_a_grant_with_a_changed_field_or_signature_is_refused(world: World) -> None:
    request = world.grant(Session(signer(1)))
    longer = request.grant.model_copy(update={"expiry": request.grant.expiry + 1})
    forged = request.model_copy(update={"grant": longer})
    assert problem(world.post("/v1/sessions", forged))[0] == 401
    high_s = request.signature[:66] + "f" * 64 + request.signature[130:]
    tampered = request.model_copy(update={"signature": high_s})
    assert problem(world.post("/v1/sessions", tampered))[0] == 401


def test_a_request_addressed_to_another_host_is_refused_however_well_it_is_signed(
    world: World,
) -> None:
    session = world.login(signer(1))
    for host in ("evil.example", "testserver.evil.example", "testserver:8080", ""):
        signed = sign_headers(
            session.key, "POST", f"http://{host}/v1/heartbeat", BEAT,
            now=world.clock(), nonce=f"nonce-of-sixteen-{len(host):04d}",
        )  # fmt: skip
        reply = world.http.post("/v1/heartbeat", content=BEAT, headers={**signed, "Host": host})
        assert reply.status_code == 401, host
        assert problem(reply)[1].startswith("the request is addressed to"), host
    assert world.post("/v1/heartbeat", BEAT, session).status_code == 200


def test_the_same_grant_may_come_twice_but_its_key_has_one_owner(world: World) -> None:
    session = Session(signer(1))
    request = world.grant(session)
    assert world.post("/v1/sessions", request).status_code == 200
    assert world.post("/v1/sessions", request).status_code == 200
    thief = Session(signer(2), session.key)
    assert problem(world.post("/v1/sessions", world.grant(thief)))[0] == 401


def test_sessions_of_one_account_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_orchestrator.api.auth.MAX_SESSIONS", 2)
    for _ in range(2):
        world.login(signer(1))
    code, detail = problem(world.post("/v1/sessions", world.grant(Session(signer(1)))))
    assert (code, "2 sessions" in detail) == (403, True)
    world.login(signer(2))


def test_strangers_of_one_address_open_few_sessions_an_hour(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_orchestrator.api.auth.STRANGERS_AN_HOUR", 2)
    app, numbers = create_app(world.backend), itertools.count(100)

    def opened(host: str, account: LocalSigner | None = None) -> int:
        http = TestClient(app, AUDIENCE, headers=VERSIONED, client=(host, 1))
        grant = world.grant(Session(account or signer(next(numbers))))
        return http.post("/v1/sessions", content=grant.model_dump_json()).status_code

    assert [opened(f"2001:db8::{end}") for end in (1, 2, 3)] == [200, 200, 403]
    assert opened("2001:db8:0:1::1") == 200, "another address"
    assert {opened("127.0.0.1") for _ in range(3)} == {200}
    member = world.member(1).account
    assert opened("2001:db8::1", member) == 200, "it has a node in the pool"
    world.clock.advance(3600)
    assert opened("2001:db8::3") == 200


def test_a_nonce_cannot_be_replayed_even_after_the_signature_expired(world: World) -> None:
    session = world.login(signer(1))
    headers = world.signature("POST", "/v1/heartbeat", BEAT, session)
    assert world.send("POST", "/v1/heartbeat", BEAT, **headers).status_code == 200
    for wait in (0, 59, 30):  # the last moment that skew allows
        world.clock.advance(wait)
        with world.backend.store.begin() as connection:
            sessions.forget(connection, world.clock())
        code, detail = problem(world.send("POST", "/v1/heartbeat", BEAT, **headers))
        assert (code, "already made" in detail) == (401, True), detail
    world.clock.advance(2)
    assert "expired" in problem(world.send("POST", "/v1/heartbeat", BEAT, **headers))[1]


def test_a_signature_covers_method_path_query_body_and_host(world: World) -> None:
    session = world.login(signer(1))

    def headers() -> dict[str, str]:
        return world.signature("POST", "/v1/heartbeat", BEAT, session)

    for attempt in (
        world.send("POST", "/v1/leases", BEAT, **headers()),
        world.send("POST", "/v1/heartbeat?x=1", BEAT, **headers()),
        world.send("POST", "/v1/heartbeat", b'{"policy_version":1}', **headers()),
        world.send("POST", "/v1/heartbeat", BEAT, **(headers() | {"Host": "elsewhere"})),
    ):
        assert problem(attempt)[0] == 401


def test_a_request_without_signature_is_malformed(world: World) -> None:
    assert problem(world.post("/v1/heartbeat", BEAT))[0] == 400


@pytest.mark.parametrize(("offset", "word"), [(31, "future"), (-91, "expired")])
def test_a_signature_from_another_time_is_refused(world: World, offset: int, word: str) -> None:
    session = world.login(signer(1))
    headers = sign_headers(
        session.key,
        "POST",
        AUDIENCE + "/v1/heartbeat",
        BEAT,
        now=world.clock() + offset,
        nonce="n" * 16,
    )
    code, detail = problem(world.send("POST", "/v1/heartbeat", BEAT, **headers))
    assert (code, word in detail) == (401, True)


def test_an_unknown_session_key_is_refused(world: World) -> None:
    assert problem(world.post("/v1/heartbeat", BEAT, Session(signer(1))))[0] == 401


def test_a_session_serves_its_scope_only(world: World) -> None:
    relay = world.login(signer(1), "relay")
    code, detail = problem(world.post("/v1/heartbeat", BEAT, relay))
    assert (code, "scope" in detail) == (403, True)
    trainer = world.login(world.trainer, "trainer")
    assert problem(world.post("/v1/leases", b'{"policy_version":0}', trainer))[0] == 403


def test_a_revocation_acts_at_once_and_old_grants_stay_void(world: World) -> None:
    session = Session(signer(1))
    grant = world.grant(session)
    world.post("/v1/sessions", grant)
    world.clock.advance(5)
    assert world.post("/v1/sessions/revoke", revocation(world, session)).json() == {}
    assert problem(world.post("/v1/heartbeat", BEAT, session))[0] == 401
    code, detail = problem(world.post("/v1/sessions", grant))
    assert (code, "revoked" in detail) == (401, True)
    world.clock.advance(5)
    assert world.post("/v1/heartbeat", BEAT, world.login(signer(1))).status_code == 200


def test_no_account_revokes_for_another(world: World) -> None:
    victim = world.login(signer(1))
    attacker = Session(signer(2))
    forged = revocation(world, attacker, account=victim.account.address)
    assert problem(world.post("/v1/sessions/revoke", forged))[0] == 401
    for changes in ({"orchestrator": "x"}, {"revoked_before": int(world.clock()) + 99}):
        body = revocation(world, victim, **changes)
        assert problem(world.post("/v1/sessions/revoke", body))[0] == 401
    assert world.post("/v1/heartbeat", BEAT, victim).status_code == 200


def test_a_revocation_on_chain_ends_sessions_and_grants(world: World) -> None:
    session = world.login(signer(1))
    with world.backend.store.begin() as connection:
        chain.add_event(
            connection,
            block_hash=sha256(b"block"),
            log_index=0,
            block=1,
            block_time=1,
            tx_hash=sha256(b"tx"),
            name="RevokedBefore",
            args={"node": signer(1).address, "at": int(world.clock()) + 10},
        )
    code, detail = problem(world.post("/v1/heartbeat", BEAT, session))
    assert (code, "on chain" in detail) == (401, True)
    assert problem(world.post("/v1/sessions", world.grant(Session(signer(1)))))[0] == 401
    world.clock.advance(11)
    assert world.post("/v1/heartbeat", BEAT, world.login(signer(1))).status_code == 200


def test_revocations_leave_nothing_behind_for_ever(world: World) -> None:
    def rows() -> int:
        with world.backend.store.read() as connection:
            query = sa.select(sa.func.count()).select_from(schema.revocations)
            return int(connection.execute(query).scalar_one())

    for number in range(30, 60):
        stranger = Session(signer(number))
        assert world.post("/v1/sessions/revoke", revocation(world, stranger)).status_code == 200
    assert rows() == 0, "who has no session here has none to end"
    known = world.login(signer(1))
    world.clock.advance(1)
    assert world.post("/v1/sessions/revoke", revocation(world, known)).status_code == 200
    assert world.post("/v1/heartbeat", BEAT, known).status_code == 401
    assert rows() == 1
    world.clock.advance(24 * 3600 + 2)
    with world.backend.store.begin() as connection:
        sessions.forget(connection, world.clock())
    assert rows() == 0, "no grant from before it can be alive"
