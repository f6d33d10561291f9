"""The API against its own OpenAPI document: signed and unsigned requests of every shape get the
answers that it states, and never a defect. `make soak ARGS=fuzz` goes on for longer."""

from __future__ import annotations

import itertools
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import schemathesis
from api_walk import Call, Walk, walked
from httpx import Response
from hypothesis import HealthCheck, Phase, given, seed, settings
from judges import appoint
from orchestrator_world import AUDIENCE, VERSIONED, MakeWorld, Session, World, signer
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from strategies import altered, as_bytes

from prime_core.draws import DrawReveal
from prime_core.ids import ZERO_DIGEST
from prime_core.transport.signatures import sign_headers
from prime_orchestrator.api.app import create_app
from prime_orchestrator.store import Store

ENDLESS = "/v1/events"
CONFORMS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)
SECONDS = 240
"""For one answer: a hang fails, a busy machine does not."""
EXAMPLES, ALTERED = 6, 4


class Peers:
    """Signs each request: mostly as the party that may make it, else as another or not at all.
    Where a request names digests and accounts, it mostly puts in some that there are."""

    def __init__(self, app: ASGIApp, walk: Walk) -> None:
        self._app = app
        self._world = world = walk.world
        node, newcomer = world.member(1), world.newcomer(2)
        validator = walk.validator
        trainer = world.login(world.trainer, "trainer")
        self._by_path: dict[str, list[Session | None]] = {
            "/v1/validators": [validator],
            "/v1/policies": [trainer],
            "/v1/batches": [trainer],
            "/v1/revisions": [world.login(world.manager, "manager")],
            "/v1/relays": [world.login(signer(5), "relay")],
            "/v1/": [node, newcomer],
            "/": [None],
        }
        self._others: list[Session | None] = [node, validator, trainer, None]
        self._digests = [*walk.digests, ZERO_DIGEST]
        self._accounts = [signer(number).address for number in (1, 2, 22, *range(30, 37), 202)]
        self._numbers = itertools.count()

    def _known(self, text: bytes) -> bytes:
        def of(choices: Sequence[str]) -> Callable[[re.Match[bytes]], bytes]:
            return lambda found: choices[zlib.crc32(found[0]) % len(choices)].encode()

        text = re.sub(rb"0x[0-9a-fA-F]{64}(?![0-9a-fA-F])", of(self._digests), text)
        return re.sub(rb"0x[0-9a-fA-F]{40}(?![0-9a-fA-F])", of(self._accounts), text)

    def _known_path(self, raw: bytes, number: int) -> bytes:
        if number % 5 == 0:
            return raw
        for names, value in (
            (b"leases|objects|submissions|runs", b"0x%064x" % number),
            (b"nodes|rewards", b"0x%040x" % number),
            (b"batches|policies", b"0"),
        ):
            raw = re.sub(rb"^(/v1/(?:" + names + rb"))/[^/]+", rb"\1/" + value, raw)
        return raw

    def _session(self, path: str, number: int) -> Session | None:
        if number % 4 == 0:
            return self._others[number // 4 % len(self._others)]
        right = next(found for start, found in self._by_path.items() if path.startswith(start))
        return right[number % len(right)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = self._known(body)
        number = next(self._numbers)
        raw_path = scope["raw_path"].partition(b"?")[0]
        raw_path = self._known(self._known_path(raw_path, number))
        session = self._session(raw_path.decode("latin-1"), number)
        target = raw_path.decode("latin-1")
        if query := scope["query_string"].decode("latin-1"):
            target += f"?{query}"
        headers = dict(scope["headers"]) | {b"content-length": str(len(body)).encode()}
        headers[b"host"] = AUDIENCE.partition("//")[2].encode()
        headers |= {name.lower().encode(): value.encode() for name, value in VERSIONED.items()}
        if session is not None:
            signed = sign_headers(
                session.key, scope["method"], AUDIENCE + target, body,
                now=self._world.clock(), nonce=f"openapi-{number:012d}",
            )  # fmt: skip
            headers |= {name.lower().encode(): value.encode() for name, value in signed.items()}
        changed = scope | {
            "headers": list(headers.items()),
            "raw_path": raw_path,
            "path": unquote(target.partition("?")[0]),
        }
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(changed, again, send)


@pytest.fixture
def store(either_store: Store) -> Store:
    """SQLite and PostgreSQL take different text and numbers."""
    return either_store


@pytest.fixture
def walk(make_world: MakeWorld, tmp_path: Path) -> Iterator[Walk]:
    world = make_world(max_staleness=4)
    world.publish(0)
    with walked(world, tmp_path / "validator") as done:
        done.cards()
        done.classes()
        done.together()
        done.evaluation()
        done.memory()
        yield done


def reseeded(number: int, examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hypothesis' settings of one operation's requests."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        health = list(HealthCheck)
        bounds = settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=health,
            phases=[Phase.generate],
        )  # fmt: skip
        return seed(number)(bounds(test))

    return decorate


@pytest.mark.slow
def test_every_operation_answers_as_its_document_says(
    walk: Walk, request: pytest.FixtureRequest
) -> None:
    """First valid requests, each of which succeeds; then those with one value changed, signed by
    the same party; then any that the document allows, and others."""
    peers = Peers(create_app(walk.world.backend), walk)
    document = schemathesis.openapi.from_asgi("/openapi.json", peers)
    every = {found.ok().label: found.ok() for found in document.get_all_operations()}
    del every[f"GET {ENDLESS}"]
    assert {call.operation for call in walk.calls} == every.keys()

    def check(call: Call, answer: Response) -> None:
        case = every[call.operation].Case()
        case.validate_response(answer, checks=CONFORMS)

    for call in walk.calls:
        check(call, call.answer)
    with_json = {
        call.operation: call
        for call in walk.calls
        if every[call.operation].get_request_payload_content_types() == ["application/json"]
    }

    def change(call: Call, number: int) -> None:
        method = call.operation.partition(" ")[0]

        @reseeded(number, ALTERED)
        @given(body=altered(json.loads(call.body or b"{}")))
        def attempt(body: Any) -> None:
            check(call, walk.world.send(method, call.path, as_bytes(body), call.session))

        attempt()

    def make(operation: Any, number: int) -> None:
        @reseeded(number, EXAMPLES)
        @given(case=operation.as_strategy())
        def attempt(case: Any) -> None:
            case.call_and_validate(checks=CONFORMS, timeout=SECONDS)

        attempt()

    seconds = request.config.getoption("--fuzz-seconds")
    end, numbers = time.monotonic() + seconds, itertools.count()
    while next(numbers) == 0 or time.monotonic() < end:
        for call in with_json.values():
            change(call, next(numbers))
        for operation in every.values():
            make(operation, next(numbers))


def test_what_no_database_holds_is_the_senders_mistake(world: World) -> None:
    """U+0000 is valid in JSON and in a URL and is not text of PostgreSQL; integers have 31 or 63
    bits. Heartbeats are stored together: one that cannot be stored would cost all others."""
    node = world.member(1)
    assert world.post("/v1/admission/solution/a%00", b"x", node).status_code == 404
    appoint(world.backend.store, world.backend.context.pool, signer(202).address)
    validator = world.login(signer(202), "validator")
    body = b'{"worker": "a\\u0000", "most": 1}'
    assert world.post("/v1/validators/claims", body, validator).status_code == 400
    reveal = DrawReveal(pool=1, validator=signer(202).address, epoch=5, secret=ZERO_DIGEST)
    body = reveal.model_dump_json().replace(":5,", f":{2**63},").encode()
    assert world.post("/v1/validators/reveals", body, validator).status_code == 400
    beat = b'{"policy_version": 0, "tokens_per_second": %d}'
    assert world.post("/v1/heartbeat", beat % 2**31, node).status_code == 400
    assert world.post("/v1/heartbeat", beat % (2**31 - 1), node).status_code == 200
