"""Sources that speak the protocol in bad faith: none may hold a fetch up, take memory, or get a
byte past the digests."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broadcast_world import DOMAIN, STRANGER, Run, same_files

from prime_broadcast import transfer
from prime_broadcast.access import SCOPE, Rules, SignedPass
from prime_broadcast.client import fetch
from prime_broadcast.server import Origin, Serving
from prime_broadcast.sources import SourceBook
from prime_broadcast.transfer import Link, TransferError
from prime_core import ids
from prime_core.node import SessionGrant

Speak = Callable[[socket.socket, threading.Event], None]
"""Gets a connection on which a request has been read, and an event set when the test is over."""


@contextmanager
def raw_server(speak: Speak) -> Iterator[str]:
    """Reads one request a connection, then lets `speak` say what it likes."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked:
                part = connection.recv(4096)
                if not part:
                    return
                asked += part
            speak(connection, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
                threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()


def slow_status(connection: socket.socket, over: threading.Event) -> None:
    """A status line that never ends, one letter at a time."""
    connection.sendall(b"HTTP/1.1 200 ")
    while not over.wait(0.02):
        connection.sendall(b"O")


def slow_headers(connection: socket.socket, over: threading.Event) -> None:
    """Headers that never end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not over.wait(0.02):
        connection.sendall(b"x")


def endless_continue(connection: socket.socket, over: threading.Event) -> None:
    """Interim answers forever (RFC 9110 §15.2 sets no bound)."""
    while not over.wait(0.001):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 10)


def slow_body(connection: socket.socket, over: threading.Event) -> None:
    """A small body, one byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")


def painted(connection: socket.socket, over: threading.Event) -> None:
    """A refusal that would clear the reader's terminal."""
    connection.sendall(
        b"HTTP/1.1 403 \x1b[2J\x9b\r\nPrime-Reason: \x1b]0;mine\x07 go\r\nContent-Length: 0\r\n\r\n"
    )


SLOW = pytest.mark.parametrize(
    "speak", [slow_status, slow_headers, endless_continue, slow_body], ids=lambda s: s.__name__
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a second instead of many."""
    monkeypatch.setattr(transfer, "HEAD_TIMEOUT", 0.5)
    monkeypatch.setattr(transfer, "SMALL_TIMEOUT", 1.0)


@SLOW
@pytest.mark.timeout(60)
def test_a_small_object_is_not_waited_for_longer_than_its_deadline(
    speak: Speak, impatient: None
) -> None:
    with raw_server(speak) as url:
        link = Link(url)
        with pytest.raises(TransferError, match="did not answer in time"):
            link.read_small("/policies/index.json", 1 << 20)
        link.close()


@pytest.mark.parametrize(
    "speak", [slow_status, slow_headers, endless_continue], ids=lambda s: s.__name__
)
@pytest.mark.timeout(60)
def test_the_head_of_a_range_is_not_waited_for_longer_than_its_deadline(
    speak: Speak, impatient: None
) -> None:
    with raw_server(speak) as url:
        link = Link(url)
        with pytest.raises(TransferError, match="did not answer in time"):
            link.read_range("/policies/0/x", 0, 100, memoryview(bytearray(10)))
        link.close()


@pytest.mark.slow
@SLOW
@pytest.mark.timeout(120)
def test_relays_that_never_finish_their_heads_cannot_hold_a_fetch(
    speak: Speak, run: Run, tmp_path: Path, impatient: None
) -> None:
    signed = run.publish()
    with contextlib.ExitStack() as stack:
        hostile = [stack.enter_context(raw_server(speak)) for _ in range(5)]
        origin = stack.enter_context(Origin(run.root))
        stats = fetch(
            signed, [*hostile, origin.url], tmp_path / "0", book=SourceBook(), patience=60.0
        )
    assert same_files(tmp_path / "0", run, 0)
    assert set(stats.by_source) == {origin.url}


def test_what_a_source_says_of_itself_reaches_no_terminal_unescaped() -> None:
    with raw_server(painted) as url:
        link = Link(url)
        with pytest.raises(TransferError) as caught:
            link.read_small("/policies/index.json", 1 << 20)
        link.close()
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()


def test_a_pass_cannot_write_headers_into_its_refusal(run: Run) -> None:
    now = int(time.time())
    grant = SessionGrant(
        account=STRANGER.address,
        session_key=ids.digest(b"\1" * 32),
        orchestrator="http://elsewhere/\r\nSet-Cookie: stolen=1\r\n\r\n<html>",
        scope=SCOPE,
        issued_at=now,
        expiry=now + 60,
    )
    made = SignedPass(grant=grant, signature=STRANGER.sign(grant, DOMAIN))
    token = base64.urlsafe_b64encode(made.model_dump_json().encode()).decode().rstrip("=")
    run.publish()
    with (
        Origin(run.root, Serving(rules=Rules(DOMAIN))) as origin,
        socket.create_connection(("127.0.0.1", origin.port)) as connection,
    ):
        asked = f"GET /policies/index.json?pass={token} HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(asked.encode())
        said = b""
        while part := connection.recv(4096):
            said += part
    lines = said.decode("latin-1").split("\r\n")
    assert lines[0].startswith("HTTP/1.1 401")
    assert not any(line.lower().startswith("set-cookie") for line in lines)
    assert lines[-2:] == ["", ""]  # one head, and nothing after it
