"""Small servers next to a test, each on a free port of the loopback address, and waiting for what
they do. They end with the test."""

from __future__ import annotations

import functools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import (
    BaseHTTPRequestHandler,
    SimpleHTTPRequestHandler,
    ThreadingHTTPServer,
)
from pathlib import Path
from typing import Any

import uvicorn


def until(
    condition: Callable[[], Any], what: str = "what the test waits for", seconds: float = 240.0
) -> Any:
    """Polls until the condition holds, and returns its value. Fails by name after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)
    return found


@contextmanager
def served(
    handler: Callable[..., BaseHTTPRequestHandler],
    port: int = 0,
    context: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Serves one request handler, by HTTPS with a `context`; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def served_folder(folder: Path, port: int = 0) -> Iterator[str]:
    """Serves the files of a folder; yields its URL."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with served(handler, port) as url:
        yield url


def listen(port: int = 0) -> tuple[socket.socket, str]:
    """A listening socket, for an application that needs its own URL before it is made; the URL."""
    # TCP is named as the protocol so that asyncio sets TCP_NODELAY
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def serving(app: Any, listener: socket.socket) -> Iterator[None]:
    """Serves an ASGI application from a thread, as `running` does."""
    with running(uvicorn.Server(uvicorn.Config(app, log_level="error")), listener):
        yield


@contextmanager
def running(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    """Runs a server in a thread, and closes the socket afterwards. Fails if a request outlives the
    server by a minute."""
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the server's start")
        assert server.started
        yield
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive(), "a request does not end"
