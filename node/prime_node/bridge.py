"""The worker's only connection to the outside: HTTP over a Unix socket, answered by LeaseBroker.

No input is trusted. Limits: body 16 KiB (a file: the maximum rollout file size, one at a time, see
spool.py; refused bodies below 1 GB are read and discarded), one request per connection, 40
connections, 10 s without data. Only the task's user and the agent's may connect (SO_PEERCRED). No
request can name a path, a key or another node's lease.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import TypeVar

from pydantic import ValidationError

from prime_core import ids
from prime_core.errors import MalformedError, NotFoundError, PrimeError, UserError
from prime_core.gateway import GatewayCall
from prime_core.messages import MOST_SLOTS, ClassRequest
from prime_core.signing import Strict
from prime_core.transport.problems import CONTENT_TYPE, to_problem
from prime_core.version import HEADER, SPOKEN, agree
from prime_node.bridge_messages import (
    CALLS,
    FILES,
    MAX_BODY_BYTES,
    Abandon,
    Done,
    HandIn,
    LeaseWish,
    Pauses,
)
from prime_node.lease_broker import LeaseBroker
from prime_node.spool import PIECE_BYTES
from prime_node.watched import WatchedThread

log = logging.getLogger("prime.node.bridge")
Body = TypeVar("Body", bound=Strict)
MAX_CONNECTIONS = 8 + 2 * MOST_SLOTS
LONGEST_SOCKET_PATH = 100
"""sun_path holds 108 bytes (unix(7))."""


class Bridge:
    """Serves one LeaseBroker on `folder`/agent.sock until closed."""

    def __init__(self, folder: Path, broker: LeaseBroker, *, task_uid: int) -> None:
        path = folder / "agent.sock"
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            raise UserError(
                f"the socket's path {path} is too long for a Unix socket",
                hint="choose a shorter --data folder",
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        self.path = path
        self._server = _Server(str(path), broker, {task_uid, os.getuid()})
        path.chmod(0o600)
        if task_uid != os.getuid():
            os.chown(folder, task_uid, -1)
            os.chown(path, task_uid, -1)
        self.thread = WatchedThread("bridge", lambda: self._server.serve_forever(0.5))

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """Stops serving and removes the socket."""
        self._server.shutdown()
        self._server.server_close()
        self.thread.join()
        self.path.unlink(missing_ok=True)


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, path: str, broker: LeaseBroker, allowed_uids: set[int]) -> None:
        self.broker = broker
        self._allowed_uids = allowed_uids
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(path, _Handler)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Accepts only the task's user and ours, and only a limited number at once."""
        assert isinstance(request, socket.socket)
        if peer_uid(request) not in self._allowed_uids:
            log.warning("refused a connection from user %s", peer_uid(request))
            return False
        return self._slots.acquire(blocking=False)

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError | TimeoutError):
            return  # the worker disconnected; it repeats its request
        log.exception("a request over the bridge failed")


def peer_uid(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end of a Unix socket (Linux's
    SO_PEERCRED)."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10
    protocol_version = "HTTP/1.0"
    _unread = 0
    """Bytes of the announced body that were not read yet."""

    def do_GET(self) -> None:
        self._answer({"/run": lambda body: self.server.broker.run_definition()})

    def do_POST(self) -> None:
        broker = self.server.broker

        def abandon(body: bytes) -> bytes:
            broker.abandon(_parse(Abandon, body))
            return _json(Done())

        def pauses(body: bytes) -> bytes:
            broker.pauses = _parse(Pauses, body)
            return _json(Done())

        def call(body: bytes) -> bytes:
            named = self.path.removeprefix(CALLS)
            lease_digest = ids.digest(named) if named != self.path else None
            return _json(broker.call(_parse(GatewayCall, body), lease_digest))

        self._answer(
            {
                "/class": lambda body: _json(broker.exact_class(_parse(ClassRequest, body))),
                "/lease": lambda body: _json(broker.lease(_parse(LeaseWish, body))),
                "/submit": lambda body: _json(broker.submit(_parse(HandIn, body))),
                "/abandon": abandon,
                "/pauses": pauses,
                "/call": call,
                CALLS + self.path.removeprefix(CALLS): call,
            }
        )

    def do_PUT(self) -> None:
        name = self.path.removeprefix(FILES)

        def receive(_: bytes) -> bytes:
            self.server.broker.receive(name, self._unread, self._read)
            return _json(Done())

        self._answer({FILES + name: receive})

    def _answer(self, routes: dict[str, Callable[[bytes], bytes]]) -> None:
        status, kind = 200, "application/json"
        try:
            if self.command != "GET":
                self._unread = self._length()
            agree(self.headers.get(HEADER))
            body = self._read_body() if self.command == "POST" else b""
            if self.path not in routes:
                raise NotFoundError(f"the bridge has no {self.command} {self.path[:80]}")
            content = routes[self.path](body)
        except PrimeError as error:
            status, document = to_problem(error)
            kind, content = CONTENT_TYPE, json.dumps(document).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header(HEADER, str(SPOKEN[-1]))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self._drain()

    def _drain(self) -> None:
        """Reads and discards the rest of a refused body; a worker blocked on sending would never
        read the reason."""
        if self._unread:
            self.connection.shutdown(socket.SHUT_WR)
        while self._unread and self._read(min(self._unread, PIECE_BYTES)):
            pass

    def _read(self, most: int) -> bytes:
        """Returns up to `most` further bytes of the body; fewer only if it ends."""
        piece = self.rfile.read(most)
        self._unread -= len(piece)
        return piece

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise MalformedError("a request needs a Content-Length")
        if len(length) > 9:
            raise MalformedError(f"a body of {length} bytes is larger than any request may be")
        return int(length)

    def _read_body(self) -> bytes:
        if self._unread > MAX_BODY_BYTES:
            raise MalformedError(f"a body of {self._unread} bytes exceeds {MAX_BODY_BYTES}")
        return self._read(self._unread)

    def address_string(self) -> str:
        return "worker"

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def _parse(model: type[Body], raw: bytes) -> Body:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedError(
            f"the body is not a valid {model.__name__}: {where} {first['msg']}"
        ) from error


def _json(model: Strict) -> bytes:
    return model.model_dump_json().encode()
