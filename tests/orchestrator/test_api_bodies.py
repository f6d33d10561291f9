"""Who asks is known before a byte of the body is read, and large bodies are few and expected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from orchestrator_world import AUDIENCE, Session, World, signer

from prime_core.messages import AdmissionRequest, Challenge, ChallengeAnswer
from prime_core.node import Hardware
from prime_core.transport.signatures import sign_headers
from prime_orchestrator.api.routes import http
from prime_orchestrator.store import schema

BEAT = b'{"policy_version":0}'
MACHINE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


class Body:
    """A body that notes whether anybody asked for it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked = False

    async def receive(self) -> dict[str, Any]:
        self.asked = True
        return {"type": "http.request", "body": self.content, "more_body": False}


def send(world: World, path: str, headers: dict[str, str], body: Body) -> tuple[int, str]:
    """One request straight into the application; status and the problem's sentence."""
    sent: list[dict[str, Any]] = []

    async def out(message: dict[str, Any]) -> None:
        sent.append(message)

    given = {"host": AUDIENCE.removeprefix("http://"), **headers}
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "client": ("127.0.0.1", 1), "server": ("testserver", 80),
        "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
    }  # fmt: skip
    asyncio.run(world.http.app(scope, body.receive, out))  # type: ignore[arg-type]
    raw = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    answer = json.loads(raw)
    return int(sent[0]["status"]), str(answer.get("detail", ""))


def challenge(world: World, session: Session) -> Challenge:
    wish = AdmissionRequest(hardware=MACHINE, task_runtime="process")
    answer = world.post("/v1/admission/challenge", wish, session)
    found = ChallengeAnswer.model_validate_json(answer.content).challenge
    assert found is not None, answer.text
    return found


def unsigned(world: World, session: Session, path: str) -> dict[str, str]:
    return {}


def strangers(world: World, session: Session, path: str) -> dict[str, str]:
    return world.signature("POST", path, BEAT, Session(signer(9)))


def of_another_path(world: World, session: Session, path: str) -> dict[str, str]:
    return world.signature("POST", "/v1/submissions", BEAT, session)


def stale(world: World, session: Session, path: str) -> dict[str, str]:
    then = world.clock() - 3600
    return sign_headers(
        session.key, "POST", AUDIENCE + path, BEAT, now=then, nonce="nonce-of-long-ago"
    )


def replayed(world: World, session: Session, path: str) -> dict[str, str]:
    headers = world.signature("POST", path, BEAT, session)
    world.http.post(path, content=BEAT, headers=headers)
    return headers


@pytest.mark.parametrize("headers", [unsigned, strangers, of_another_path, stale, replayed])
@pytest.mark.parametrize("path", ["/v1/leases", "/v1/heartbeat"])
def test_the_body_of_a_request_that_does_not_hold_is_never_read(
    world: World, headers: Callable[[World, Session, str], dict[str, str]], path: str
) -> None:
    """But a heartbeat's session and nonce are looked up together with its answer."""
    session = world.member(1)
    body = Body(BEAT)
    status, _ = send(world, path, headers(world, session, path), body)
    assert status in (400, 401, 403)
    assert body.asked == (path == "/v1/heartbeat" and headers in (strangers, replayed))


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/heartbeat"])
def test_a_body_that_is_not_the_signed_one_is_refused_once_it_is_read(
    world: World, path: str
) -> None:
    session = world.member(1)
    headers = world.signature("POST", path, BEAT, session)
    body = Body(b'{"policy_version":1}')
    status, sentence = send(world, path, headers, body)
    assert (status, body.asked) == (401, True)
    assert "Content-Digest" in sentence
    again = Body(BEAT)
    if path == "/v1/heartbeat":
        assert send(world, path, headers, again)[0] == 200
    else:
        assert send(world, path, headers, again)[0] == 401, "its nonce is used up"
        assert not again.asked


def test_only_the_solution_that_is_awaited_is_read(world: World) -> None:
    """A challenge of another, of no one, answered or late: not a byte is taken."""
    session, other = world.newcomer(1), world.newcomer(2)
    mine, late = challenge(world, session), challenge(world, session)

    def answer(caller: Session, name: str, content: bytes) -> tuple[int, bool]:
        path = f"/v1/admission/solution/{name}"
        body = Body(content)
        return send(world, path, world.signature("POST", path, content, caller), body)[
            0
        ], body.asked

    size = 8 * mine.size**2 * mine.rounds
    assert answer(other, mine.id, bytes(size)) == (403, False)
    assert answer(session, "none", bytes(size)) == (404, False)
    assert answer(session, mine.id, bytes(size + 1)) == (400, True), "stopped at the awaited size"
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.challenges.update().where(schema.challenges.c.id == mine.id).values(used=True)
        )
    assert answer(session, mine.id, bytes(size)) == (409, False)
    world.clock.advance(late.deadline - world.clock() + 1)
    assert answer(session, late.id, bytes(size)) == (403, False)


def test_few_large_bodies_are_taken_into_memory_at_once(world: World) -> None:
    session = world.newcomer(1)
    path = f"/v1/admission/solution/{challenge(world, session).id}"
    held = [http._large.one("") for _ in range(http.MAX_LARGE_BODIES)]
    for one in held:
        one.__enter__()
    try:
        body = Body(b"x")
        status, sentence = send(world, path, world.signature("POST", path, b"x", session), body)
        assert (status, body.asked) == (503, False)
        assert "try again" in sentence
    finally:
        for one in held:
            one.__exit__(None, None, None)
