"""The orchestrator's client: polite to a busy server, strict with what comes back."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from prime_broadcast.transfer import Link, TransferError
from prime_core.clock import Clock
from prime_core.encoding import sha256
from prime_core.errors import (
    MalformedError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.messages import (
    ContractAddresses,
    FileEnding,
    PoolInfo,
    RewardInfo,
    UploadAnswer,
)
from prime_core.signing import CONTRACT_NAMES, LocalSigner
from prime_core.transport.client import (
    MAX_ANSWER_BYTES,
    POLITE_TRIES,
    Empty,
    OrchestratorClient,
)
from prime_core.transport.signatures import SessionKey
from prime_core.version import HEADER, SPOKEN


def signer(number: int) -> LocalSigner:
    return LocalSigner(bytes([number]) * 32)


VERSIONED = {HEADER: str(SPOKEN[-1])}


def _client(handler: httpx.MockTransport, waits: list[float]) -> OrchestratorClient:
    """A client whose requests `handler` answers; all else of its HTTP client is the program's."""
    client = OrchestratorClient("http://pool", clock=Clock(sleep=waits.append))
    client._http._transport, client._http._mounts = handler, {}
    return client


def test_a_busy_server_is_asked_again_when_it_says_so() -> None:
    answers = [
        httpx.Response(429, headers={"Retry-After": "2"}),
        httpx.Response(200, headers=VERSIONED, text="{}"),
    ]
    waits: list[float] = []
    client = _client(httpx.MockTransport(lambda _: answers.pop(0)), waits)
    assert client.get("/x", Empty) == Empty()
    assert waits == [2.0]


def test_a_pause_that_is_no_number_is_one_of_a_second() -> None:
    answers = [
        httpx.Response(429, headers={"Retry-After": "²".encode("latin-1")}),
        httpx.Response(200, headers=VERSIONED, text="{}"),
    ]
    waits: list[float] = []
    client = _client(httpx.MockTransport(lambda _: answers.pop(0)), waits)
    assert client.get("/x", Empty) == Empty()
    assert waits == [1.0]


@pytest.mark.parametrize(("given", "kept"), [(b'"a"', '"a"'), (b'"\xe4"', None), (b"", None)])
def test_an_entity_tag_that_no_request_can_hold_is_not_kept(given: bytes, kept: str | None) -> None:
    headers = [(HEADER.encode(), str(SPOKEN[-1]).encode()), (b"etag", given)]
    client = _client(
        httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, text="{}")), []
    )
    first = client.get_changed("/x", Empty, None)
    assert first == (Empty(), kept)
    assert client.get_changed("/x", Empty, first[1]) == first


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
    [
        "http://[bad",
        "http://",
        "https:///x",
        "pool:8000",
        "ftp://pool",
        "",
        "http://pool:port",
        "http://xn--",
        "http://a..b",
        f"http://{'a' * 64}.org",
    ],
)
def test_an_address_that_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(UserError, match="is not a URL"):
        OrchestratorClient(url)
    with pytest.raises(MalformedError):
        _client(httpx.MockTransport(lambda _: httpx.Response(200)), [])._absolute(url or "?")


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


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"x"),
        (b"HTTP/1.1 ", b"100 Continue\r\n\r\nHTTP/1.1 "),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"x"),
    ],
    ids=["head", "interim responses", "head of a chunk"],
)
def test_an_answer_that_drips_is_given_up(begin: bytes, again: bytes) -> None:
    """Each byte comes in time, and the answer has no end."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(begin)
                while not ended.wait(0.02):
                    connection.sendall(again)

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        try:
            with (
                OrchestratorClient(url, timeout=0.3) as client,
                pytest.raises(UnavailableError, match="does not answer"),
            ):
                client.get("/x", Empty)
        finally:
            ended.set()
            thread.join()


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


POOL = PoolInfo(
    chain_id=1, contracts=ContractAddresses(**dict.fromkeys(CONTRACT_NAMES, signer(9).address)),
    pool=1, manager=signer(8).address, trainer=signer(7).address, run_digest=sha256(b""),
    name="pool", orchestrator="https://Real.example:443", latest_version=None,
    stake_per_seat="1",
)  # fmt: skip


@pytest.mark.parametrize("field", ["chain_id", "pool"])
@pytest.mark.parametrize("value", [-1, 2**256])
def test_a_pool_of_a_number_that_no_statement_holds_is_malformed(field: str, value: int) -> None:
    body = POOL.model_dump(mode="json") | {field: value}
    serve = httpx.MockTransport(lambda _: httpx.Response(200, headers=VERSIONED, json=body))
    client = OrchestratorClient("https://real.example", signer(1))
    client._http = httpx.Client(transport=serve)
    with pytest.raises(MalformedError, match=field):
        client.post("/v1/heartbeat", b"{}", Empty)


def test_a_server_that_passes_on_another_orchestrator_s_pool_is_refused() -> None:
    """A man in the middle: everything it relays is genuine, but the pool names its orchestrator."""
    genuine = POOL.model_dump_json()
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, headers=VERSIONED, text=genuine)

    client = OrchestratorClient("http://middle.example", signer(1))
    client._http = httpx.Client(transport=httpx.MockTransport(handler))
    with pytest.raises(UntrustedError, match="says that it is"):
        client.post("/v1/heartbeat", b"{}", Empty)
    assert asked == ["/v1/pool"], "no grant is signed for it"
    right = OrchestratorClient("https://real.example/", signer(1))
    right._http = httpx.Client(transport=httpx.MockTransport(handler))
    assert right.pool().name == "pool"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:192.168.1.1]",
     "[64:ff9b::a00:1]", "[fd00::1]", "0.0.0.0", "rebound.example"],
)  # fmt: skip
def test_no_named_url_leads_into_a_private_network(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def resolver(name: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if name == "rebound.example" else name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://{host}:{listener.getsockname()[1]}/object"
        client = OrchestratorClient("https://orchestrator.example", timeout=2.0)
        target = UploadAnswer(url=url, headers={}, expiry=1, exists=False)
        with pytest.raises(UntrustedError, match="private address"):
            client.upload(target, b"file")
        with pytest.raises(UntrustedError, match="private address"):
            client.download(url, limit=10)
        with pytest.raises(TransferError, match="private address"):
            Link(url.removesuffix("/object"), public_only=True).read_small("/object", 10)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_what_is_sent_with_an_upload_is_the_node_s_own_choice() -> None:
    seen: list[httpx.Headers] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(307, headers={"Location": "http://127.0.0.1/elsewhere"})

    client = _client(httpx.MockTransport(handler), [])
    target = UploadAnswer(
        url="/upload",
        headers={"Authorization": "Basic x", "X-Api-Key": "y"},
        expiry=1,
        exists=False,
    )
    with pytest.raises(PrimeError):
        client.upload(target, b"file")
    assert len(seen) == 1, "a redirect is not followed"
    assert not {"authorization", "x-api-key"} & set(seen[0])
    assert seen[0]["content-length"] == "4"


@pytest.mark.parametrize(
    "location", ["", "http://[", "ftp://pool/x", "//x y", "http://p\u00f6\u00f6l/"]
)
def test_a_redirect_to_what_is_no_url_is_malformed(location: str) -> None:
    headers = {**VERSIONED, **({"location": location.encode()} if location else {})}
    serve = httpx.MockTransport(lambda _: httpx.Response(307, headers=headers))
    with pytest.raises(MalformedError):
        _client(serve, []).get_object(sha256(b"asked for"))


def test_a_name_of_the_server_s_that_fits_no_url_is_malformed() -> None:
    serve = httpx.MockTransport(lambda _: httpx.Response(200, headers=VERSIONED))
    with pytest.raises(MalformedError, match="not a URL"):
        _client(serve, []).request("POST", "/v1/admission/solution/a\nb", b"{}", signed=False)


def test_a_time_that_no_journal_can_hold_is_malformed() -> None:
    """A node's agent writes it into SQLite, whose integers have 64 bits."""
    body = {
        "submission_digest": sha256(b"file"), "lease_digest": sha256(b"lease"), "status": "void",
        "reason": 50, "detail": "", "judged_at": 2**63,
    }  # fmt: skip
    serve = httpx.MockTransport(lambda _: httpx.Response(200, headers=VERSIONED, json=body))
    with pytest.raises(MalformedError, match="judged_at"):
        _client(serve, []).get("/x", FileEnding)


@pytest.mark.parametrize(
    "changes",
    [{"cumulative": "abc"}, {"cumulative": "-1"}, {"forfeited": "9" * 5000}, {"epoch": -1}],
)
def test_an_amount_that_no_contract_takes_is_malformed(changes: dict[str, object]) -> None:
    body = {
        "node": "0x" + "11" * 20, "epoch": 1, "cumulative": "10", "proof": [],
        "claimable_at": None, "pending_units": 0, "forfeited": "0",
    }  # fmt: skip
    answers = [body, body | changes]
    serve = httpx.MockTransport(
        lambda _: httpx.Response(200, headers=VERSIONED, json=answers.pop(0))
    )
    client = _client(serve, [])
    assert client.get("/x", RewardInfo).cumulative == "10"
    with pytest.raises(MalformedError, match=next(iter(changes))):
        client.get("/x", RewardInfo)


def test_a_defect_of_the_server_is_an_outage_for_its_clients() -> None:
    """A FatalError would end trainers and validators over one failed request."""
    problem = {"type": "urn:prime:problem:fatal", "detail": "half of a pair: \ud800"}
    serve = httpx.MockTransport(lambda _: httpx.Response(500, content=json.dumps(problem)))
    with pytest.raises(UnavailableError, match="half of a pair") as caught:
        _client(serve, []).get("/x", Empty)
    assert caught.value.problem == "fatal"
    assert str(caught.value).encode(), "it can be printed and stored"


@pytest.mark.parametrize(
    ("ahead", "kind", "words"),
    [
        (600, UnavailableError, "600 s ahead of"),
        (-600, UnavailableError, "600 s behind"),
        (5, UntrustedError, "expired"),
    ],
)
def test_a_signature_refused_for_a_wrong_clock_is_an_outage(
    ahead: int, kind: type[PrimeError], words: str
) -> None:
    """Nothing is wrong with the key, and the clock may be set right."""
    date = format_datetime(datetime.fromtimestamp(1_000_000, UTC), usegmt=True)
    with pytest.raises(kind, match=words):
        _refused_at(date, 1_000_000 + ahead)


@pytest.mark.parametrize("date", ["", f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT"])
def test_a_refusal_with_no_date_is_only_a_refusal(date: str) -> None:
    with pytest.raises(UntrustedError, match="expired"):
        _refused_at(date, 1_000_000)


def _refused_at(date: str, now: float) -> None:
    """A request whose signature the server refuses, with this date in its answer."""
    problem = {"type": "urn:prime:problem:untrusted", "detail": "the signature has expired"}
    serve = httpx.MockTransport(
        lambda _: httpx.Response(401, headers={"date": date}, content=json.dumps(problem))
    )
    client = OrchestratorClient("http://pool", signer(1), "node", clock=Clock(now=lambda: now))
    client._http._transport, client._http._mounts = serve, {}
    client._session = (SessionKey.generate(), 2_000_000)
    client.post("/x", Empty(), Empty)
