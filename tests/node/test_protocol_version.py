"""Programs of different releases: versions are agreed on or refused in one sentence, and a peer of
today reads answers of a later release of the same version."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bridge_kit import bridge_kit, hand_in
from node_world import NODE, NodeWorld
from pydantic import BaseModel
from test_node_cli import fails

from prime_broadcast.pool import PoolNames
from prime_broadcast.server import Origin
from prime_broadcast.transfer import Link, TransferError
from prime_core import batch, checkpoint, messages, task, validator_messages
from prime_core.encoding import sha256
from prime_core.errors import MalformedError, ProtocolError
from prime_core.messages import Heartbeat, PoolInfo
from prime_core.signing import Answer, Domain, Statement
from prime_core.transport.client import Empty, OrchestratorClient
from prime_core.version import HEADER, UPGRADE
from prime_node import bridge_messages
from prime_node.api import NodeApi
from prime_node.bridge_messages import Abandon, LeaseWish
from prime_node.uploader import deliver
from prime_orchestrator.api.app import BODIES, create_app


def serve(world: NodeWorld, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]) -> None:
    """Serves the world's pool by another application, made of its backend."""
    world.stop_api()
    monkeypatch.setattr("node_world.create_app", make)
    world.start_api()


def test_a_client_that_is_too_old_gets_one_sentence_and_the_command(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(world, monkeypatch, lambda backend: create_app(backend, spoken=range(2, 4)))
    (tmp_path / "file.parquet").write_bytes(b"x")
    said = fails(
        76, "this program is too old: it speaks protocol 1, the server needs at least 2",
        *("join", "--orchestrator", world.url, "--wallet", str(world.keystore)),
        *("--password-file", str(world.password_file), "--runtime", "process"),
        *("--data", str(tmp_path / "data"), "--rpc", "http://127.0.0.1:9"),
    )  # fmt: skip
    [line] = said.strip().splitlines()
    assert line.startswith("prime-node: ")
    assert line.endswith(f"; upgrade it: {UPGRADE}"), "what to type next comes last"
    document = httpx.get(f"{world.url}/v1/pool", headers={HEADER: "1"})
    assert document.status_code == 400
    assert document.headers[HEADER] == "3"
    assert document.json()["type"] == "urn:prime:problem:protocol"
    assert document.json()["spoken"] == [2, 3]


def test_a_newer_client_steps_down_to_what_an_older_server_speaks(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = OrchestratorClient(world.url).pool()
    monkeypatch.setattr("prime_core.transport.client.SPOKEN", range(1, 4))
    assert OrchestratorClient(world.url, NODE).pool() == same
    monkeypatch.setattr("prime_core.transport.client.SPOKEN", range(2, 4))
    newest = OrchestratorClient(world.url, NODE)
    with pytest.raises(ProtocolError, match="newer than the server") as caught:
        newest.pool()
    assert caught.value.spoken == (1, 1)


@pytest.mark.parametrize("named", [None, "", "0", "01", "1.0", "-1", "2", "9" * 4000, "one"])
def test_a_change_is_refused_without_a_version_that_is_spoken(
    world: NodeWorld, named: str | None
) -> None:
    headers = {} if named is None else {HEADER: named}
    answer = httpx.post(f"{world.url}/v1/sessions", headers=headers, content=b"{}")
    assert (answer.status_code, answer.json()["title"]) == (400, "protocol")


def test_every_answer_names_the_version_and_anyone_may_read_without_one(world: NodeWorld) -> None:
    for path, status in (
        ("/v1/pool", 200), ("/v1/run", 200), ("/", 200), ("/healthz", 200), ("/nowhere", 404),
        ("/v1/policies/x", 400), (f"/v1/objects/{sha256(b'')}", 404), ("/v1/batches/0", 400),
    ):  # fmt: skip
        answer = httpx.get(world.url + path)
        assert (path, answer.status_code, answer.headers[HEADER]) == (path, status, "1")


def test_an_answer_of_another_program_is_no_reason_to_end(world: NodeWorld) -> None:
    client = OrchestratorClient(world.url)
    client._http = httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json={}))
    )
    with pytest.raises(MalformedError, match="another program"):
        client.get("/v1/pool", Empty)


def test_the_bridge_and_the_broadcast_refuse_other_versions(
    world: NodeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bridge_kit(world, tmp_path / "k") as kit:
        assert b"\r\nPrime-Protocol: 1\r\n" in kit.raw(b"GET /run HTTP/1.1\r\n\r\n")
        assert b"problem:protocol" in kit.raw(b"GET /run HTTP/1.1\r\n\r\n")
        monkeypatch.setattr("prime_node.worker.client.SPOKEN", range(2, 3))
        with pytest.raises(ProtocolError, match="newer than the server"):
            kit.client.run()
    (tmp_path / "empty").mkdir()
    with Origin(tmp_path / "empty") as origin:
        assert httpx.get(f"{origin.url}/healthz").headers[HEADER] == "1"
        assert httpx.get(f"{origin.url}/healthz", headers={HEADER: "2"}).status_code == 400
        monkeypatch.setattr("prime_broadcast.transfer.SPOKEN", range(2, 3))
        with pytest.raises(TransferError, match="protocol 2, newer than the server"):
            Link(origin.url).read_small("/healthz", 100)


def grown(value: Any) -> Any:
    """JSON of an answer with a field more in each object that a later release may extend."""
    if isinstance(value, list):
        return [grown(one) for one in value]
    if not isinstance(value, dict) or "signature" in value:
        return value
    exact = {"lease", "receipt", "opening", "invite", "headers", "domain", "submission"}
    return {k: v if k in exact else grown(v) for k, v in value.items()} | {"added_later": {"x": 1}}


class Later:
    """A server of a later release: every JSON answer has fields that no peer of today knows."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start: dict[str, Any] = {}
        body = b""

        async def growing(message: Any) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            kind = dict(start["headers"]).get(b"content-type", b"")
            exact = scope["path"] == "/v1/run" or scope["path"].startswith("/v1/runs/")
            if kind == b"application/json" and not exact:
                body = json.dumps(grown(json.loads(body))).encode()
            kept = [(k, v) for k, v in start["headers"] if k != b"content-length"]
            size = (b"content-length", str(len(body)).encode())
            await send(start | {"headers": [*kept, size]})
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, growing if scope["type"] == "http" else send)


def test_a_node_of_today_works_under_a_server_whose_answers_have_grown(
    world: NodeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(world, monkeypatch, lambda backend: Later(create_app(backend)))
    assert "added_later" in httpx.get(f"{world.url}/v1/pool").json()
    world.admit()
    with bridge_kit(world, tmp_path / "k") as kit:
        api = NodeApi(world.url, NODE)
        beat = Heartbeat(policy_version=0)
        assert api.heartbeat(beat).directive == "work"
        hand_in(kit)
        (entry,) = kit.spool.waiting()
        assert deliver(entry, kit.spool, api) is not None, "uploaded, submitted, receipted"
        assert kit.client.lease(LeaseWish(wait_seconds=10)).lease is not None
        assert [one.node for one in api.client.nodes()] == [NODE.address]
        assert api.policies().policies[0].manifest.version == 0
        assert PoolNames(api.client).relays()
        api.close()


def models_within(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model and every model among its fields' types, down to what is signed."""
    yield model
    if "signature" in model.model_fields and not issubclass(model, Answer):
        return
    for info in model.model_fields.values():
        waiting = [info.annotation]
        while waiting:
            one = waiting.pop()
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from models_within(one)
            waiting.extend(typing.get_args(one))


def answers(world: NodeWorld) -> set[type[BaseModel]]:
    """Every model that a route of the API or the bridge answers with."""
    modules = (messages, validator_messages, batch, checkpoint, task)
    kinds = {one.__name__: one for one in models_of(*modules)}
    document = create_app(world.backend).openapi()
    found = {bridge_messages.LeaseOffer, bridge_messages.HandInAnswer, bridge_messages.Done, Empty}
    for path in document["paths"].values():
        for operation in path.values():
            said = json.dumps(operation["responses"].get("200", ""))
            found |= {kinds[name] for name in re.findall(r"schemas/(\w+)", said)}
    return found


def models_of(*modules: Any) -> Iterator[type[BaseModel]]:
    """The models that the modules define."""
    for module in modules:
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield one


def test_answers_may_grow_requests_may_not_and_what_is_signed_is_exact(world: NodeWorld) -> None:
    found = answers(world)
    assert PoolInfo in found
    assert len(found) > 15
    for top in found:
        for model in models_within(top):
            exact = issubclass(model, Statement | Domain) or "signature" in model.model_fields
            if model.__name__ in ("ReceiptAnswer", "AdmissionAnswer"):
                exact = False  # an answer around one statement, not an object that travels on
            assert issubclass(model, Answer) != exact, model
            assert model.model_config["extra"] == ("forbid" if exact else "ignore"), model
    requests = {*BODIES, LeaseWish, Abandon, bridge_messages.HandIn}
    for request in requests:
        for model in models_within(request):
            assert model.model_config["extra"] == "forbid", model
    with pytest.raises(ValueError, match="added_later"):
        Heartbeat.model_validate_json(b'{"policy_version": 0, "added_later": 1}')
