"""How a server ends when it may finish: a slow reader gets all of an answer that was begun."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broadcast_world import Run, until

from prime_broadcast.server import Origin, Server

FILE = "/policies/0/model.safetensors"
ASK = f"GET {FILE} HTTP/1.1\r\n\r\n".encode()


@contextmanager
def slow_reader(server: Server) -> Iterator[socket.socket]:
    """A link on which nearly all that was sent still lies on the server's side."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def length_and_body(sock: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    return int(answer.headers["Content-Length"]), answer.read()


def closed(server: Server) -> bool:
    """Whether it takes no new connection."""
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=20).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("size", [150_000, 10_000_000])
def test_a_slow_link_gets_its_last_bytes_after_the_end_was_decided(
    tmp_path: Path, size: int
) -> None:
    """The smaller file lies in the kernel whole, the larger one is still being handed over."""
    run = Run(tmp_path / "run", size=size)
    run.publish(chunk_size=1 << 20)
    with Origin(run.root) as server, slow_reader(server) as sock:
        sock.sendall(ASK)
        until(lambda: server.counters.bytes_sent >= min(2 * size, 300_000), "the first bytes")
        end = threading.Thread(target=server.stop, args=(60.0,))
        end.start()
        until(lambda: closed(server), "the end's beginning")
        promised, body = length_and_body(sock)
        assert promised == len(body)
        assert body == run.file(0)
        end.join()
        assert sock.recv(1) == b"", "closed, not reset"


def test_nothing_new_is_answered_once_the_end_was_decided(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", size=10_000_000)
    run.publish(chunk_size=1 << 20)
    with Origin(run.root) as server, slow_reader(server) as slow, slow_reader(server) as other:
        slow.sendall(ASK)
        until(lambda: server.counters.requests == 1, "the slow reader's request")
        end = threading.Thread(target=server.stop, args=(60.0,))
        end.start()
        until(lambda: closed(server), "the end's beginning")
        other.sendall(ASK)
        assert other.recv(1) == b""
        assert length_and_body(slow)[1] == run.file(0)
        end.join()
        assert server.counters.requests == 1


def test_who_never_reads_holds_up_the_end_no_longer_than_was_granted(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", size=10_000_000)
    run.publish(chunk_size=1 << 20)
    with Origin(run.root) as server, slow_reader(server) as sock:
        sock.sendall(ASK)
        until(lambda: server.counters.requests == 1, "the request")
        server.stop(0.2)  # returns
        assert closed(server)
