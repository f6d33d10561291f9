"""Connections that say nothing, or half of something, do not keep others out."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn
from orchestrator_world import World
from served import running

from prime_core.errors import UnavailableError
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.connections import PatientHttp, Places

LIMIT = 6


class Quick(PatientHttp):
    HEADER_SECONDS = 1.0


class Counted(PatientHttp):
    HEADER_SECONDS = 60.0
    MOST_EACH = 2

    @staticmethod
    def is_bounded(host: str) -> bool:
        return host == "127.0.0.1"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """Answers nothing; returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def served(protocol: type[PatientHttp], app: Any = hello) -> Iterator[int]:
    """The port of a server that takes LIMIT connections at most."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=protocol, log_config=None, lifespan="off", limit_concurrency=LIMIT,
        timeout_keep_alive=30,
    )  # fmt: skip
    with running(uvicorn.Server(config), listener):
        yield int(listener.getsockname()[1])


def connect(stack: ExitStack, port: int, said: bytes = b"") -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
    connection.sendall(said)
    return connection


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x"])
def test_connections_without_a_whole_request_end(said: bytes) -> None:
    with served(Quick) as port, ExitStack() as stack:
        held = [connect(stack, port, said) for _ in range(2 * LIMIT)]
        for connection in held:
            assert connection.recv(1) == b"", "the server ended it"
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "hello"


def test_a_connection_that_asks_in_time_is_kept_for_the_next_request() -> None:
    with served(Quick) as port, ExitStack() as stack:
        connection = connect(stack, port)
        for _ in range(3):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                piece = connection.recv(4096)
                assert piece, "it was ended between two requests"
                answer += piece
        connection.sendall(b"GET / HT")  # and never the rest
        assert connection.recv(1) == b""


def test_one_address_holds_no_more_than_its_share() -> None:
    with served(Counted) as port, ExitStack() as stack:
        held = [connect(stack, port) for _ in range(Counted.MOST_EACH)]
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/")
        held[0].close()
        until_answered(lambda: httpx.get(f"http://127.0.0.1:{port}/").text == "hello")


def until_answered(ask: Callable[[], bool], tries: int = 200) -> None:
    """The server needs a moment to see that a connection has ended."""
    for _ in range(tries):
        try:
            if ask():
                return
        except httpx.TransportError:
            continue
    raise AssertionError("it never answered")


def test_only_foreign_addresses_are_counted() -> None:
    assert not PatientHttp.is_bounded("127.0.0.1")
    assert not PatientHttp.is_bounded("::1")
    assert not PatientHttp.is_bounded("")
    assert PatientHttp.is_bounded("203.0.113.7")
    assert PatientHttp.is_bounded("2001:db8::1")


def test_a_foreign_address_takes_its_share_of_places_and_no_more() -> None:
    places = Places(most=5, each=2, what="full")
    with ExitStack() as held:
        for host in ("203.0.113.7", "203.0.113.7", "2001:db8::1"):
            held.enter_context(places.one(host))
        with pytest.raises(UnavailableError, match="full; try again"):
            held.enter_context(places.one("203.0.113.7"))
        held.enter_context(places.one("2001:db8::2"))  # one network of IPv6 counts as one address
        with pytest.raises(UnavailableError):
            held.enter_context(places.one("2001:db8::3"))
        held.enter_context(places.one("127.0.0.1"))
        with pytest.raises(UnavailableError):
            held.enter_context(places.one("127.0.0.1"))  # a proxy's, unbounded but for the whole
    with places.one("203.0.113.7"), places.one("203.0.113.7"):
        pass


class Few(PatientHttp):
    HEADER_SECONDS = 60.0
    MOST_WAITING = 3
    _waiting: ClassVar[dict[PatientHttp, None]] = {}


def test_of_many_silent_connections_the_oldest_are_closed_and_requests_are_answered() -> None:
    with served(Few) as port, ExitStack() as stack:
        silent = [connect(stack, port) for _ in range(3)]
        half = connect(stack, port, b"GET / HTTP/1.1\r\nHost: x\r\n")
        later = [connect(stack, port) for _ in range(3)]
        for one in silent:
            assert one.recv(1) == b"", "it waited longest"
        with suppress(ConnectionResetError):  # its half request was never read
            assert half.recv(1) == b""
        later[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert later[0].recv(12) == b"HTTP/1.1 200"


def test_a_header_that_grows_without_end_is_refused() -> None:
    with served(PatientHttp) as port, ExitStack() as stack:
        connection = connect(stack, port, b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        connection.sendall(b"a" * PatientHttp.HEADER_BYTES)
        assert connection.recv(12) == b"HTTP/1.1 400"


@pytest.mark.parametrize("endless", [b"1;" + b"x" * 600_000, b"0\r\nX: " + b"a" * 600_000])
def test_a_chunks_frame_or_trailer_that_grows_without_end_ends_the_connection(
    endless: bytes,
) -> None:
    with served(PatientHttp, silent) as port, ExitStack() as stack:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection = connect(stack, port)
        with suppress(ConnectionError):
            connection.sendall(head + endless)
            assert connection.recv(1) == b""


def test_a_client_that_sends_many_requests_before_an_answer_is_refused() -> None:
    with served(PatientHttp, silent) as port, ExitStack() as stack:
        one = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        connection = connect(stack, port, one * (PatientHttp.MOST_AHEAD + 2))
        assert connection.recv(12) == b"HTTP/1.1 400"
    with served(PatientHttp) as port, ExitStack() as stack:
        connection, answers = connect(stack, port, one * PatientHttp.MOST_AHEAD), b""
        while answers.count(b"hello") < PatientHttp.MOST_AHEAD:
            answers += connection.recv(4096)


DEEP = b"[" * 30_000 + b"]" * 30_000
PROMISED = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nPrime-Protocol: 1\r\n"
RAW_REQUESTS = {
    "a head without end": b"GET /v1/pool HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000,
    "many fields": b"GET /v1/pool HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    "a field folded over lines": b"GET /v1/pool HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "two lengths": PROMISED + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and pieces": PROMISED
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length in other digits": PROMISED + b"Content-Length: \xb2\r\n\r\n{}",
    "a piece without end": PROMISED + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "deep JSON": PROMISED + b"Content-Length: %d\r\n\r\n" % len(DEEP) + DEEP,
    "a key twice": PROMISED + b'Content-Length: 21\r\n\r\n{"grant":1,"grant":2}',
    "half a surrogate pair": PROMISED + b'Content-Length: 21\r\n\r\n{"signature":"\\ud800"}',
    "a path out": b"GET /dashboard/..%2f..%2fconfig.py HTTP/1.1\r\nHost: x\r\n\r\n",
    "an object out": b"GET /v1/store/sha256/..%2f..%2fx HTTP/1.1\r\nHost: x\r\n\r\n",
    "a null in a path": b"GET /v1/nodes/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no UTF-8 in a path": b"GET /v1/nodes/%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
    "letters like digits": b"GET /v1/batches/%D9%A1/manifest HTTP/1.1\r\nHost: x\r\n\r\n",
    "another host's URL": b"GET http://169.254.169.254/v1/x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(64),
}


@contextmanager
def closing_allowed() -> Iterator[None]:
    """Ignores that the peer closed the connection; a time-out stays an error."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
            raise


def test_requests_that_no_client_sends_are_refused_and_the_api_answers_on(world: World) -> None:
    """None is a defect (5xx), none gets data, and none keeps its place or the server busy."""
    with served(PatientHttp, create_app(world.backend)) as port:
        for name, raw in RAW_REQUESTS.items():
            with ExitStack() as stack:
                connection = connect(stack, port)
                with closing_allowed():  # it may refuse and close before all has come
                    connection.sendall(raw)
                    connection.shutdown(socket.SHUT_WR)
                answer = b""
                with closing_allowed():
                    while piece := connection.recv(4096):
                        answer += piece
            assert re.match(rb"HTTP/1\.1 4\d\d ", answer) or not answer, (name, answer[:300])
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
