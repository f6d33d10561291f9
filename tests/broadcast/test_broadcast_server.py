"""The server: ranges, bounds on everything, and no client can hold it up."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from broadcast_world import Run, until

from prime_broadcast.content import Arrival, DirectoryContent, Resource
from prime_broadcast.peers import Peer
from prime_broadcast.server import Limits, Origin, Server, Serving
from prime_core.errors import UserError

FILE = "/policies/0/model.safetensors"


@pytest.fixture
def origin(run: Run) -> Iterator[Origin]:
    run.publish()
    with Origin(run.root) as server:
        yield server


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(server: Server, data: bytes) -> bytes:
    """What comes back for these bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(data)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


def ended(sock: socket.socket) -> bool:
    """True once the server has closed or reset the connection."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_files_come_whole_and_in_ranges(origin: Origin, run: Run) -> None:
    data = run.file(0)
    status, headers, body = ask(origin, FILE)
    assert (status, body) == (200, data)
    assert headers["Accept-Ranges"] == "bytes"
    assert "immutable" in headers["Cache-Control"]
    for text, start, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=100-1099", 100, 1100),
        ("bytes=399000-", 399000, len(data)),
        ("bytes=399000-99999999", 399000, len(data)),
        ("bytes=-7", len(data) - 7, len(data)),
    ):
        status, headers, body = ask(origin, FILE, Range=text)
        assert (status, body) == (206, data[start:end])
        assert headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(data)}"


def test_ranges_that_cannot_be_had_are_416_and_odd_ones_are_ignored(
    origin: Origin, run: Run
) -> None:
    size = len(run.file(0))
    for text in (f"bytes={size}-", f"bytes={size + 5}-{size + 9}", "bytes=-0"):
        status, headers, _ = ask(origin, FILE, Range=text)
        assert (status, headers["Content-Range"]) == (416, f"bytes */{size}")
    for text in ("bytes=5-4", "bytes=0-1,4-5", "items=0-1", "bytes=-", "bytes=a-b"):
        assert ask(origin, FILE, Range=text)[0] == 200


def test_head_etag_health_and_missing_files(origin: Origin, run: Run) -> None:
    status, headers, body = ask(origin, FILE, "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(run.file(0))))
    assert ask(origin, FILE, If_None_Match=headers["ETag"])[0] == 304
    status, _, body = ask(origin, "/healthz")
    assert json.loads(body) == {"role": "origin", "versions": [0], "complete": [0]}
    for path in ("/policies/1/model.safetensors", "/policies/0/nothing", "/", "/policies"):
        assert ask(origin, path)[0] == 404
    assert ask(origin, FILE + "?x=1")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/policies/../secret", "/policies/0/%2e%2e/%2e%2e/secret", "/policies/0/..%2f..%2fsecret"],
)
def test_nothing_outside_of_the_layout_is_served(origin: Origin, run: Run, path: str) -> None:
    (run.root / "secret").write_text("secret")
    assert ask(origin, path)[0] == 404


def test_a_link_in_the_layout_is_not_followed(origin: Origin, run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run.root / "policies" / "0" / "link").symlink_to(tmp_path / "secret")
    assert ask(origin, "/policies/0/link")[0] == 404


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\n\r\n", b"505"),
        (b"GET policies HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nBroken header\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"400"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5_000 + b"\r\n", b"431"),
    ],
)
def test_bad_requests_get_one_answer_and_a_closed_connection(
    origin: Origin, request_bytes: bytes, status: bytes
) -> None:
    try:
        answer = raw(origin, request_bytes)
    except ConnectionResetError:
        # The server closed with our excess unread; the kernel may drop the answer then.
        assert len(request_bytes) > 10_000
        answer = b"HTTP/1.1 " + status
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert ask(origin, FILE, "HEAD")[0] == 200


def test_requests_on_one_connection_are_answered_in_order(origin: Origin, run: Run) -> None:
    one = f"GET {FILE} HTTP/1.1\r\nRange: bytes=%d-%d\r\n%s\r\n"
    answer = raw(
        origin,
        (one % (0, 9, "") + one % (10, 19, "") + one % (20, 29, "Connection: close\r\n")).encode(),
    )
    data = run.file(0)
    bodies = [part[:10] for part in answer.split(b"\r\n\r\n")[1:]]
    assert bodies == [data[0:10], data[10:20], data[20:30]]


def test_slowloris_is_cut_off_and_delays_no_other_client(run: Run) -> None:
    run.publish()
    with (
        Origin(run.root, Serving(limits=Limits(request_timeout=2))) as server,
        ExitStack() as stack,
    ):
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            for _ in range(20)
        ]
        for sock in slow:
            sock.sendall(b"GET / HTTP/1.1\r\nX-a: b\r\n")
        assert ask(server, FILE)[2] == run.file(0)
        for sock in slow:
            assert sock.recv(1000).startswith(b"HTTP/1.1 408")
            assert sock.recv(1000) == b""


def test_two_hundred_idle_connections_cost_others_nothing(run: Run) -> None:
    run.publish()
    with Origin(run.root) as server, ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        until(lambda: server.counters.connections >= 200, "200 connections")
        assert ask(server, FILE)[2] == run.file(0)
        assert server.counters.refused == 0


def test_when_full_the_longest_idle_connection_gives_way(run: Run) -> None:
    run.publish()
    with Origin(run.root, Serving(limits=Limits(connections=3))) as server, ExitStack() as stack:
        idle = []
        for number in range(3):
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            idle.append(stack.enter_context(sock))
            until(lambda n=number: server.counters.connections == n + 1, "a connection")
        assert ask(server, FILE)[2] == run.file(0)
        assert ended(idle[0])
        idle[2].sendall(b"HEAD / HTTP/1.1\r\n\r\n")
        assert idle[2].recv(100).startswith(b"HTTP/1.1 404")


def test_silent_connections_are_closed_after_their_time(run: Run) -> None:
    run.publish()
    limits = Limits(idle_timeout=0.2)
    with (
        Origin(run.root, Serving(limits=limits)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock,
    ):
        assert sock.recv(1) == b""


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path, size=20_000_000)  # 40 MB: more than the socket buffers hold
    run.publish(chunk_size=1 << 20)
    with (
        Origin(run.root, Serving(limits=Limits(slice_timeout=0.3))) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock,
    ):
        sock.sendall(f"GET {FILE} HTTP/1.1\r\n\r\n".encode())
        until(lambda: not server.connected, "the connection's end")
        assert server.counters.bytes_sent < 40_000_000


def test_one_address_may_ask_only_so_often(run: Run) -> None:
    run.publish()
    moments = [0.0]
    server = Server(
        DirectoryContent(run.root),
        Serving(limits=Limits(requests_per_second=5)),
        clock=lambda: moments[0],
    )
    with server:
        statuses = [ask(server, FILE, "HEAD")[0] for _ in range(7)]
        assert statuses == [200] * 5 + [429] * 2
        moments[0] += 10
        status, headers, _ = ask(server, FILE, "HEAD")
        assert status == 200, headers


def test_a_taken_port_is_said_in_one_sentence(origin: Origin, run: Run) -> None:
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{origin.port}"):
        Origin(run.root, Serving(port=origin.port)).start()


def test_stopping_frees_the_port_and_ends_the_thread_quietly(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish()
    before = threading.active_count()
    server = Origin(run.root)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20):
        until(lambda: server.counters.connections == 1, "a connection")
        server.stop()
        server.stop()
    assert threading.active_count() == before
    assert not caplog.records
    with Origin(run.root, Serving(port=server.port)) as again:
        assert ask(again, FILE, "HEAD")[0] == 200


class Growing:
    """One file of 100 bytes in chunks of 10 that arrives as the test says."""

    role = "relay"

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(range(100)))
        self.path = path
        self.arrival = Arrival(100, 10, 10)

    def versions(self) -> list[int]:
        return [0]

    def complete(self) -> list[int]:
        return []

    def find(self, path: str) -> Resource | None:
        return Resource(100, "e", True, path=self.path, arrival=self.arrival)


def test_a_chunk_is_served_the_moment_it_is_there(tmp_path: Path) -> None:
    content = Growing(tmp_path / "f")
    content.arrival.mark(3)
    with Server(content, Serving(limits=Limits(wait_seconds=20))) as server:
        assert ask(server, FILE, Range="bytes=30-39")[2] == bytes(range(30, 40))
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(ask(server, FILE)[2]))
        thread.start()
        for index in range(10):
            until(lambda: bool(content.arrival._waiting) or bool(got), "a waiting request")
            content.arrival.mark(index)
        thread.join()
        assert got == [bytes(range(100))]


def test_a_chunk_that_does_not_come_in_time_is_503(tmp_path: Path) -> None:
    content = Growing(tmp_path / "f")
    with Server(content, Serving(limits=Limits(wait_seconds=0.05))) as server:
        status, headers, _ = ask(server, FILE, Range="bytes=0-9")
        assert (status, headers["Retry-After"]) == (503, "1")


def test_a_transfer_that_cannot_go_on_is_cut_not_padded(tmp_path: Path) -> None:
    content = Growing(tmp_path / "f")
    content.arrival.mark(0)
    with (
        Server(content, Serving(limits=Limits(wait_seconds=0.05))) as server,
        pytest.raises((http.client.IncompleteRead, ConnectionResetError)),
    ):
        ask(server, FILE)


def test_a_defect_cuts_a_transfer_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def defect(*_: object) -> int:
        raise ZeroDivisionError

    content = Growing(tmp_path / "f")
    content.arrival.mark(0)
    monkeypatch.setattr(content.arrival, "wait", defect)
    with (
        Server(content) as server,
        pytest.raises((http.client.IncompleteRead, ConnectionResetError)),
    ):
        ask(server, FILE)


def test_a_shortage_of_descriptors_is_one_sentence_a_minute(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish()
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    left, moments, accept = [0], [0.0], socket.socket.accept

    def accept_after(listening: socket.socket) -> object:
        if left[0] == 0:
            return accept(listening)
        left[0] -= 1
        raise full

    def refuse(_: Peer) -> int:
        raise full

    monkeypatch.setattr(socket.socket, "accept", accept_after)
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0)
    with Server(DirectoryContent(run.root), clock=lambda: moments[0]) as server:
        for moments[0] in (0.0, 59.0, 61.0):
            left[0] = 50
            assert ask(server, FILE)[0] == 200
            assert left[0] == 0
        with monkeypatch.context() as patched:
            patched.setattr(Peer, "descriptor", refuse)
            with pytest.raises(http.client.IncompleteRead):
                ask(server, FILE)
        assert ask(server, FILE)[0] == 200
    logged = [one for one in caplog.records if one.name.startswith(("asyncio", "prime"))]
    assert [one.exc_info for one in logged] == [None, None]
    assert all("Too many open files" in one.getMessage() for one in logged)
