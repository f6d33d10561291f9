"""The orchestrator's client: polite to a busy server, strict with what comes back."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import httpx
import pytest

from protocol.core.encoding import sha256
from protocol.core.errors import MalformedError, UnavailableError, UntrustedError, UserError
from protocol.core.messages import UploadAnswer
from protocol.transport.client import (
    MAX_ANSWER_BYTES,
    POLITE_TRIES,
    Empty,
    OrchestratorClient,
)


def _client(handler: httpx.MockTransport, waits: list[float]) -> OrchestratorClient:
    client = OrchestratorClient("http://pool", sleep=waits.append)
    client._http = httpx.Client(transport=handler)
    return client


def test_a_busy_server_is_asked_again_when_it_says_so() -> None:
    answers = [httpx.Response(429, headers={"Retry-After": "2"}), httpx.Response(200, text="{}")]
    waits: list[float] = []
    client = _client(httpx.MockTransport(lambda _: answers.pop(0)), waits)
    assert client.get("/x", Empty) == Empty()
    assert waits == [2.0]


def test_a_server_that_stays_busy_is_unavailable_in_the_end() -> None:
    waits: list[float] = []
    client = _client(httpx.MockTransport(lambda _: httpx.Response(429)), waits)
    with pytest.raises(UnavailableError):
        client.get("/x", Empty)
    assert len(waits) == POLITE_TRIES
    with pytest.raises(UnavailableError):
        client.download("/object", limit=10)


def test_an_object_that_is_not_the_named_one_is_refused() -> None:
    client = _client(
        httpx.MockTransport(lambda _: httpx.Response(200, content=iter([b"other"]))), []
    )
    with pytest.raises(UntrustedError):
        client.download("/object", limit=10, sha256=sha256(b"asked for"))
    with pytest.raises(MalformedError):
        client.download("/object", limit=2)


@pytest.mark.parametrize(
    "url",
    ["http://[bad", "http://", "https:///x", "pool:8000", "ftp://pool", "", "http://pool:port"],
)
def test_an_address_that_is_no_url_is_told_at_once(url: str) -> None:
    with pytest.raises(UserError, match="is no URL"):
        OrchestratorClient(url)


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_without_end_is_read_no_further_than_the_limit(status: int) -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while read < 4 * MAX_ANSWER_BYTES:  # a reader without a limit comes to the end
            read += 1 << 16
            yield bytes(1 << 16)

    def serve(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=endless())

    client = _client(httpx.MockTransport(serve), [])
    for ask in (
        lambda: client.get("/x", Empty),
        lambda: client.request("GET", "/x", b"", signed=False),
        lambda: client.get_object(sha256(b"asked for")),
        lambda: client.upload(UploadAnswer(url="/x", headers={}, expiry=0), b"body"),
    ):
        read = 0
        with pytest.raises(MalformedError, match="more than"):
            ask()
        assert read <= MAX_ANSWER_BYTES + (2 << 16)


def test_a_compressed_answer_is_not_asked_for_and_not_unfolded() -> None:
    asked: list[str] = []
    status = 200

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["accept-encoding"])
        folded = gzip.compress(b"{}")
        return httpx.Response(status, headers={"content-encoding": "gzip"}, content=iter([folded]))

    client = _client(httpx.MockTransport(serve), [])
    with pytest.raises(MalformedError, match="compressed"):
        client.get("/x", Empty)
    status = 503
    with pytest.raises(UnavailableError):
        client.get("/x", Empty)
    assert set(asked) == {"identity"}
