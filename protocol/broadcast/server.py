"""A small HTTP/1.1 server for files: ranges, sendfile, and bounds on everything.

One event loop serves all connections; the kernel moves the bytes. Only GET and HEAD without a body
are understood. A connection that is silent, slow to ask or slow to read costs a few kilobytes and
is closed at its deadline; when all places are taken, the one that has been idle longest goes.

    GET /healthz                → {"role": …, "versions": […]}
    GET /policies/…             → the layout (protocol/broadcast/layout.py)

A range of a file that is still arriving is answered as soon as its first chunk is verified; if
that takes longer than `wait_seconds`, with 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from protocol.broadcast.content import Content, DirectoryContent, Resource
from protocol.broadcast.files import open_regular
from protocol.core.errors import PrimeError, UnavailableError, UserError

MAX_HEAD = 8 << 10
SLICE = 1 << 20
"""Bytes handed to the kernel at once; the deadline for slow readers is per slice."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; times in seconds."""

    connections: int = 1024
    request_timeout: float = 10.0
    """From a connection's opening (or its last answer's end) to the end of a request's head once
    its first byte came; slowloris ends here."""
    idle_timeout: float = 60.0
    """How long a connection may keep its place between requests."""
    slice_timeout: float = 30.0
    """A reader must take 1 MiB in this time."""
    wait_seconds: float = 4.0
    """How long a request waits for a chunk that is still arriving."""
    requests_per_second: float = 0.0
    """Of one address, on average, over all its connections; 0 means unlimited."""
    bytes_per_second: float = 0.0
    """Of the whole server; 0 means unlimited."""


@dataclass
class Counters:
    """What a server has done since it started."""

    connections: int = 0
    refused: int = 0
    requests: int = 0
    bytes_sent: int = 0
    by_status: dict[int, int] = field(default_factory=dict)


class _Bucket:
    """Token bucket with one second of burst. `take` returns the seconds to wait."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._level = rate
        self._last = clock()

    def take(self, amount: float) -> float:
        now = self._clock()
        self._level = min(self._rate, self._level + (now - self._last) * self._rate) - amount
        self._last = now
        return max(0.0, -self._level / self._rate)

    def full(self) -> bool:
        return self._level + (self._clock() - self._last) * self._rate >= self._rate


@dataclass(eq=False)
class _Connection:
    writer: asyncio.StreamWriter
    address: str
    idle_since: float | None


class _RequestError(Exception):
    def __init__(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        super().__init__(status.phrase)
        self.status = status
        self.headers = headers or {}


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool


class Server:
    """Serves `content` on `host`:`port` (0: any free one) from a thread of its own."""

    def __init__(
        self,
        content: Content,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        public_url: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._content = content
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._public_url = public_url
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: OSError | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._buckets: dict[str, _Bucket] = {}
        self._bandwidth = (
            _Bucket(self._limits.bytes_per_second, clock) if self._limits.bytes_per_second else None
        )
        self.counters = Counters()

    @property
    def url(self) -> str:
        """Where clients find it, without a trailing slash."""
        if self._public_url:
            return self._public_url.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    def start(self) -> None:
        """Binds and begins to serve. Raises UserError if the address cannot be had."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(ready)), name="broadcast-server", daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise UserError(
                f"cannot listen on {self._host}:{self._port}: {self._failure.strerror}",
                hint="choose another --port, or 0 for any free one",
            )

    def stop(self) -> None:
        """Closes every connection and the port. May be called twice."""
        loop, stopping, thread = self._loop, self._stopping, self._thread
        if loop is None or stopping is None or thread is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(stopping.set)
        thread.join()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _run(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=MAX_HEAD, backlog=256
            )
        except OSError as error:
            self._failure = error
            ready.set()
            return
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await self._stopping.wait()
            server.close()
            for connection in list(self._connections):
                connection.writer.transport.abort()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer = writer.get_extra_info("peername")
        connection = _Connection(writer, str(peer[0]) if peer else "", self._clock())
        self.counters.connections += 1
        if len(self._connections) >= self._limits.connections and not self._make_room():
            self.counters.refused += 1
            writer.transport.abort()
            return
        self._connections.add(connection)
        self._tasks.add(task)
        try:
            await self._converse(reader, connection)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, PrimeError):
            pass  # the peer went away, stalled, or the file vanished under it: only it is affected
        except asyncio.CancelledError:
            # Only stop() cancels; asyncio's streams would log a cancelled handler as an error.
            if self._stopping is None or not self._stopping.is_set():
                raise
        finally:
            self._connections.discard(connection)
            self._tasks.discard(task)
            writer.transport.abort() if writer.transport.is_closing() else writer.close()

    def _make_room(self) -> bool:
        idle = [c for c in self._connections if c.idle_since is not None]
        if not idle:
            return False
        oldest = min(idle, key=lambda c: c.idle_since or 0.0)
        self._connections.discard(oldest)
        oldest.writer.transport.abort()
        return True

    async def _converse(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        writer = connection.writer
        while True:
            connection.idle_since = self._clock()
            try:
                request = await self._read_request(reader)
                if request is None:
                    return
                connection.idle_since = None
                self.counters.requests += 1
                self._admit(connection.address)
                await self._answer(request, writer)
                if not request.keep_alive:
                    return
            except _RequestError as refused:
                await self._send_head(writer, refused.status, 0, refused.headers, close=True)
                return

    async def _read_request(self, reader: asyncio.StreamReader) -> _Request | None:
        try:
            first = await asyncio.wait_for(reader.read(1), self._limits.idle_timeout)
        except TimeoutError:
            return None
        if not first:
            return None
        try:
            rest = await asyncio.wait_for(
                reader.readuntil(b"\r\n\r\n"), self._limits.request_timeout
            )
        except TimeoutError:
            raise _RequestError(HTTPStatus.REQUEST_TIMEOUT) from None
        except asyncio.LimitOverrunError:
            raise _RequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
        return _parse_head(first + rest)

    def _admit(self, address: str) -> None:
        rate = self._limits.requests_per_second
        if not rate:
            return
        bucket = self._buckets.get(address)
        if bucket is None:
            if len(self._buckets) > 4 * self._limits.connections:
                self._buckets = {a: b for a, b in self._buckets.items() if not b.full()}
            bucket = self._buckets[address] = _Bucket(rate, self._clock)
        wait = bucket.take(1)
        if wait > 0:
            after = {"Retry-After": str(max(1, round(wait)))}
            raise _RequestError(HTTPStatus.TOO_MANY_REQUESTS, after)

    async def _answer(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        close = not request.keep_alive
        if request.path == "/healthz":
            health = {"role": self._content.role, "versions": self._content.versions()}
            body = json.dumps(health).encode()
            headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
            await self._send_head(writer, HTTPStatus.OK, len(body), headers, close=close)
            if request.method == "GET":
                await self._send_bytes(writer, body)
            return
        resource = self._content.find(request.path)
        if resource is None:
            await self._send_head(writer, HTTPStatus.NOT_FOUND, 0, {}, close=close)
            return
        headers = _resource_headers(resource)
        if resource.etag and request.headers.get("if-none-match") == f'"{resource.etag}"':
            await self._send_head(writer, HTTPStatus.NOT_MODIFIED, 0, headers, close=close)
            return
        status, start, end = _range(request.headers.get("range"), resource.size)
        if status is HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            headers = {"Content-Range": f"bytes */{resource.size}"}
            await self._send_head(writer, status, 0, headers, close=close)
            return
        if status is HTTPStatus.PARTIAL_CONTENT:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{resource.size}"
        if request.method == "HEAD":
            await self._send_head(writer, status, end - start, headers, close=close)
        elif resource.data is not None:
            await self._send_head(writer, status, end - start, headers, close=close)
            await self._send_bytes(writer, resource.data[start:end])
        else:
            span = (status, start, end)
            await self._send_file(writer, request.path, resource, span, headers, close)

    async def _send_file(
        self,
        writer: asyncio.StreamWriter,
        address: str,
        resource: Resource,
        span: tuple[HTTPStatus, int, int],
        headers: dict[str, str],
        close: bool,
    ) -> None:
        status, start, end = span
        ready = await self._ready(resource, start)
        if ready <= start < end:
            raise _RequestError(HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
        with ExitStack() as stack:
            fd = stack.enter_context(self._open(address, resource))
            file = stack.enter_context(os.fdopen(fd, "rb", buffering=0, closefd=False))
            await self._send_head(writer, status, end - start, headers, close=close)
            while start < end:
                if ready <= start:
                    ready = await self._ready(resource, start)
                    if ready <= start:
                        writer.transport.abort()  # the head promised more: only a cut says so
                        raise ConnectionAbortedError
                count = min(SLICE, end - start, ready - start)
                await self._throttle(count)
                sent = await self._within_slice(
                    writer,
                    asyncio.get_running_loop().sendfile(writer.transport, file, start, count),
                )
                if sent != count:
                    writer.transport.abort()  # the file is shorter than it was
                    raise ConnectionAbortedError
                self.counters.bytes_sent += sent
                start += sent

    @contextmanager
    def _open(self, address: str, resource: Resource) -> Iterator[int]:
        assert resource.path is not None
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(open_regular(resource.path))
            except UnavailableError:
                # A version that has just become complete moved to its final folder: look again.
                again = self._content.find(address)
                if again is None or again.path is None:
                    raise
                fd = stack.enter_context(open_regular(again.path))
            yield fd

    async def _ready(self, resource: Resource, start: int) -> int:
        if resource.arrival is None:
            return resource.size
        return await resource.arrival.wait(start, self._limits.wait_seconds)

    async def _throttle(self, count: int) -> None:
        if self._bandwidth is not None:
            wait = self._bandwidth.take(count)
            if wait > 0:
                await asyncio.sleep(wait)

    async def _within_slice(
        self, writer: asyncio.StreamWriter, sending: Coroutine[Any, Any, int]
    ) -> int:
        try:
            return await asyncio.wait_for(sending, self._limits.slice_timeout)
        except TimeoutError:
            writer.transport.abort()
            raise

    async def _send_bytes(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            await self._throttle(len(piece))
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), self._limits.slice_timeout)
            self.counters.bytes_sent += len(piece)

    async def _send_head(
        self,
        writer: asyncio.StreamWriter,
        status: HTTPStatus,
        length: int,
        headers: dict[str, str],
        *,
        close: bool,
    ) -> None:
        self.counters.by_status[status] = self.counters.by_status.get(status, 0) + 1
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Date: {email.utils.formatdate(usegmt=True)}",
            f"Server: prime-broadcast/{self._content.role}",
            f"Content-Length: {length}",
            f"Connection: {'close' if close else 'keep-alive'}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await asyncio.wait_for(writer.drain(), self._limits.slice_timeout)


class Origin(Server):
    """Serves a finished layout (`publish`, `finalize`) from a thread: the trainer's process."""

    def __init__(
        self,
        root: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        public_url: str | None = None,
    ) -> None:
        super().__init__(DirectoryContent(root), host, port, limits=limits, public_url=public_url)


def _resource_headers(resource: Resource) -> dict[str, str]:
    headers = {
        "Content-Type": resource.content_type,
        "Accept-Ranges": "bytes",
        "Cache-Control": (
            "public, max-age=31536000, immutable" if resource.immutable else "no-cache"
        ),
    }
    if resource.etag:
        headers["ETag"] = f'"{resource.etag}"'
    return headers


_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})\Z")


def _parse_head(head: bytes) -> _Request:
    """RFC 9112, the part that a file server needs; everything else is 400, 405 or 505."""
    lines = head[:-4].split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3:
        raise _RequestError(HTTPStatus.BAD_REQUEST)
    method, target, protocol = parts
    if protocol not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise _RequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if method not in (b"GET", b"HEAD"):
        raise _RequestError(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.match(name):
            raise _RequestError(HTTPStatus.BAD_REQUEST)
        headers[name.decode("ascii").lower()] = value.strip(b" \t").decode("latin-1")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _RequestError(HTTPStatus.BAD_REQUEST)
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):
        raise _RequestError(HTTPStatus.BAD_REQUEST)
    connection = headers.get("connection", "").lower()
    keep_alive = connection != "close" if protocol == b"HTTP/1.1" else connection == "keep-alive"
    # Nothing under the layout needs escapes; an escaped name is decoded once and then refused by
    # the layout's pattern if it tries anything.
    return _Request(method.decode(), unquote_to_bytes(path).decode("latin-1"), headers, keep_alive)


def _range(text: str | None, size: int) -> tuple[HTTPStatus, int, int]:
    """(status, start, end) for a Range header (RFC 9110 §14): one range, or the whole."""
    match = _RANGE.match(text) if text else None
    if match is None or match.group() == "bytes=-":
        return HTTPStatus.OK, 0, size
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start = int(first)
        end = min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return HTTPStatus.OK, 0, size
    if start >= end:
        return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0
    return HTTPStatus.PARTIAL_CONTENT, start, end
