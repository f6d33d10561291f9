"""A small HTTP/1.1 server for files: ranges, sendfile, and bounds on everything.

One event loop serves all connections; the kernel moves the bytes. Only GET and HEAD without a body
are understood. A connection that is silent, slow to ask or slow to read costs a few kilobytes and
is closed at its deadline; when all places are taken, an idle, slow or greedy one goes (peers.py).

    GET /healthz                → {"role": …, "versions": […], "complete": […]}
    GET /readyz                 → the same; 503 before the first policy is complete
    GET /metrics                → Prometheus text
    GET /policies/…             → the layout (prime_broadcast/layout.py)

A range of a file that is still arriving is answered as soon as its first chunk is verified; if
that takes longer than `wait_seconds`, with 503 and Retry-After. With `rules`, the layout is only
for requests that carry a pass (prime_broadcast/access.py); others get 401.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from prime_broadcast import metrics
from prime_broadcast.access import Gate, Rules, token_of
from prime_broadcast.content import Content, DirectoryContent, Resource
from prime_broadcast.files import open_regular
from prime_broadcast.http1 import (
    MAX_HEAD,
    Bucket,
    Limits,
    Request,
    RequestError,
    asked_range,
    byte_range,
    not_modified,
    parse_head,
    plain,
    resource_headers,
)
from prime_broadcast.peers import Peer, peer_to_drop, place_of
from prime_core.errors import (
    MalformedError,
    PrimeError,
    ProtocolError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.version import HEADER, SPOKEN, agree

log = logging.getLogger(__name__)

SLICE = 1 << 20
"""Bytes per deadline of a slow reader."""
TURN = 4 << 20
"""Bytes that one reader may take before the others have their turn."""
BURST = 1 / 16
"""Seconds of `bytes_per_second` that may pass at once."""


@dataclass
class Counters:
    """What a server has done since it started."""

    connections: int = 0
    refused: int = 0
    evicted: int = 0
    requests: int = 0
    bytes_sent: int = 0
    by_status: dict[int, int] = field(default_factory=dict)


class PacedSender:
    """Sends at the pace of readers and limits. A reader that stalls is cut off."""

    def __init__(
        self,
        content: Content,
        limits: Limits,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._content = content
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._date = (0, "")
        speed = limits.bytes_per_second
        self._bandwidth = Bucket(speed, clock, BURST) if speed else None

    async def send_file(
        self,
        peer: Peer,
        address: str,
        resource: Resource,
        span: tuple[HTTPStatus, int, int],
        headers: dict[str, str],
        close: bool,
    ) -> None:
        """The answer for one span of a file, as far as it is there, the rest as it arrives."""
        status, start, end = span
        ready = await self._ready(resource, start)
        if ready <= start < end:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
        with self._open(address, resource) as fd:
            await self.send_head(peer, status, end - start, headers, close=close)
            while start < end:
                if ready <= start:
                    ready = await self._ready(resource, start)
                    if ready <= start:
                        peer.abort()  # the head promised more: only a cut says so
                        raise ConnectionAbortedError
                count = min(end, ready) - start
                if self._bandwidth is not None:
                    count = min(count, SLICE)
                    await self._throttle(count)
                await self._push(peer, fd, start, count)
                start += count

    async def _push(self, peer: Peer, fd: int, start: int, count: int) -> None:
        """`count` bytes of the open file `fd` from `start`. Raises ConnectionError if the peer went
        away or the file is shorter than it was, TimeoutError if a slice is not taken in time."""
        loop = asyncio.get_running_loop()
        sock, end, turn = peer.descriptor(), start + count, 0
        peer.waiting_since, mark = self._clock(), start
        try:
            while start < end:
                try:
                    sent = os.sendfile(sock, fd, start, min(end - start, TURN))
                except BlockingIOError:
                    spent = self._clock() - peer.waiting_since
                    await _writable(loop, sock, self._limits.slice_timeout - spent)
                    continue
                if sent == 0:  # the file is shorter than it was
                    raise ConnectionAbortedError
                self._counters.bytes_sent += sent
                start += sent
                turn += sent
                if start - mark >= SLICE:
                    peer.waiting_since, mark = self._clock(), start
                if turn >= TURN and start < end:
                    turn = 0
                    await asyncio.sleep(0)
        except (ConnectionError, TimeoutError):
            peer.abort()
            raise
        finally:
            peer.waiting_since = None

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
        ready = resource.arrival.ready_until(start)
        if ready > start:
            return ready
        return await resource.arrival.wait(start, self._limits.wait_seconds)

    async def _throttle(self, count: int) -> None:
        if self._bandwidth is not None:
            wait = self._bandwidth.take(count)
            if wait > 0:
                await asyncio.sleep(wait)

    async def send_bytes(self, peer: Peer, data: bytes) -> None:
        """A small body."""
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            await self._throttle(len(piece))
            peer.writer.write(piece)
            await self._drain(peer)
            self._counters.bytes_sent += len(piece)

    async def send_head(
        self,
        peer: Peer,
        status: HTTPStatus,
        length: int,
        headers: dict[str, str],
        *,
        close: bool,
    ) -> None:
        """Status line and fields; once it returns, nothing is left in the event loop's buffer."""
        peer.head_sent = True
        self._counters.by_status[status] = self._counters.by_status.get(status, 0) + 1
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Date: {self._now()}",
            f"Server: prime-broadcast/{self._content.role}",
            f"{HEADER}: {SPOKEN[-1]}",
            f"Content-Length: {length}",
            f"Connection: {'close' if close else 'keep-alive'}",
            *(f"{name}: {plain(value)}" for name, value in headers.items()),
        ]
        peer.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await self._drain(peer)

    def _now(self) -> str:
        """The date as HTTP writes it, made once a second."""
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, email.utils.formatdate(second, usegmt=True))
        return self._date[1]

    async def _drain(self, peer: Peer) -> None:
        """Waits until the kernel has all that was written. Raises ConnectionError, TimeoutError."""
        if not peer.writer.transport.get_write_buffer_size():
            if peer.writer.transport.is_closing():
                raise ConnectionResetError
            return
        peer.waiting_since = self._clock()
        try:
            async with asyncio.timeout(self._limits.slice_timeout):
                await peer.writer.drain()
        finally:
            peer.waiting_since = None


async def _writable(loop: asyncio.AbstractEventLoop, sock: int, seconds: float) -> None:
    """Waits until the socket takes bytes again. Raises TimeoutError after `seconds`."""
    future: asyncio.Future[bool] = loop.create_future()

    def tell(writable: bool) -> None:
        if not future.done():
            future.set_result(writable)

    timer = loop.call_later(max(0.0, seconds), tell, False)
    loop.add_writer(sock, tell, True)
    try:
        if not await future:
            raise TimeoutError
    finally:
        loop.remove_writer(sock)
        timer.cancel()


__all__ = ["Counters", "Limits", "Origin", "Server", "Serving"]

FINISH_LOOK_SECONDS = 0.05
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What the system says when it has no room for another connection or file."""
SHORTAGE_SECONDS = 60.0
"""A shortage is logged once in this time."""


@dataclass(frozen=True)
class Serving:
    """Where a server listens (port 0: any free one), where clients find it (`public_url`, by
    default the address that it listens on), and whom it serves. Without `rules` anyone may read."""

    host: str = "127.0.0.1"
    port: int = 0
    public_url: str | None = None
    limits: Limits = field(default_factory=Limits)
    rules: Rules | None = None


class Server:
    """Serves `content` from a thread of its own."""

    def __init__(
        self,
        content: Content,
        serving: Serving = Serving(),
        *,
        more_metrics: Callable[[], Sequence[Metric]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._content = content
        self._rules = serving.rules
        self._more_metrics = more_metrics
        self._gate: Gate | None = None
        self._host = serving.host
        self._port = serving.port
        self._limits = serving.limits
        self._public_url = serving.public_url
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._grace = 0.0
        self._failure: OSError | None = None
        self._shortage_logged = -math.inf
        self._peers: set[Peer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._buckets: dict[str, Bucket] = {}
        self.counters = Counters()
        self._sender = PacedSender(content, self._limits, self.counters, clock)

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

    @property
    def connected(self) -> int:
        """Connections that are open now."""
        return len(self._peers)

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

    def stop(self, grace: float = 0.0) -> None:
        """Closes the port and every connection; for `grace` seconds at most, answers under way are
        finished first, until the readers' side has confirmed their bytes. May be called twice."""
        loop, stopping, thread = self._loop, self._stopping, self._thread
        if loop is None or stopping is None or thread is None or not thread.is_alive():
            return
        self._grace = grace
        loop.call_soon_threadsafe(stopping.set)
        thread.join()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _run(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._log_failure)
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
        if self._rules is not None:
            self._gate = Gate(self._rules, self.url)
        ready.set()
        async with server:
            await self._stopping.wait()
            server.close()
            until = self._loop.time() + self._grace
            while any(peer.busy() for peer in self._peers) and self._loop.time() < until:
                await asyncio.sleep(FINISH_LOOK_SECONDS)
            for peer in list(self._peers):
                if self._grace and not peer.busy():
                    peer.close()
                else:
                    peer.abort()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        name = writer.get_extra_info("peername")
        peer = Peer(writer, place_of(str(name[0])) if name else "", self._clock())
        writer.transport.set_write_buffer_limits(high=0)  # drained means: the kernel has it all
        self.counters.connections += 1
        if self._crowded(peer.address) or (
            len(self._peers) >= self._limits.connections and not self._make_room(peer.address)
        ):
            self.counters.refused += 1
            peer.abort()
            return
        self._peers.add(peer)
        self._tasks.add(task)
        try:
            await self._converse(reader, peer)
        except (ConnectionError, TimeoutError, PrimeError):
            pass  # the peer went away, stalled, or the file vanished under it: only it is affected
        except asyncio.CancelledError:
            # Only stop() cancels; asyncio's streams would log a cancelled handler as an error.
            if not self._ends():
                raise
        finally:
            self._peers.discard(peer)
            self._tasks.discard(task)
            peer.close()

    def _log_failure(self, loop: asyncio.AbstractEventLoop, failure: dict[str, Any]) -> None:
        """Logs what failed in the event loop: a shortage in one sentence, not once a connection."""
        error = failure.get("exception")
        if not isinstance(error, OSError) or error.errno not in SHORTAGES:
            loop.default_exception_handler(failure)
        elif self._clock() - self._shortage_logged >= SHORTAGE_SECONDS:
            self._shortage_logged = self._clock()
            log.warning(
                "%s with %d connections: new ones wait or are cut off; raise the limit of open "
                "files (ulimit -n, LimitNOFILE)",
                error.strerror,
                len(self._peers),
            )

    def _ends(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def _crowded(self, address: str) -> bool:
        """Whether one address has as many connections as it may."""
        most = self._limits.connections_per_address
        return bool(most) and sum(peer.address == address for peer in self._peers) >= most

    def _make_room(self, newcomer: str) -> bool:
        peer = peer_to_drop(self._peers, newcomer, self._clock())
        if peer is None:
            return False
        self._peers.discard(peer)
        self.counters.evicted += 1
        peer.abort()
        return True

    async def _converse(self, reader: asyncio.StreamReader, peer: Peer) -> None:
        while True:
            peer.idle_since, peer.head_sent = self._clock(), False
            try:
                request = await self._read_request(reader, peer)
                if request is None or self._ends():
                    return
                peer.idle_since = None
                self.counters.requests += 1
                self._admit(request, peer.address)
                await self._answer(request, peer)
                if not request.keep_alive:
                    return
            except RequestError as refused:
                await self._sender.send_head(peer, refused.status, 0, refused.headers, close=True)
                return
            except (PrimeError, OSError):
                raise
            except Exception:
                log.exception("a defect of this server")
                if peer.head_sent:
                    peer.abort()  # the head promised more: only a cut says so
                else:
                    status = HTTPStatus.INTERNAL_SERVER_ERROR
                    await self._sender.send_head(peer, status, 0, {}, close=True)
                return

    async def _read_request(self, reader: asyncio.StreamReader, peer: Peer) -> Request | None:
        """The next request; None if the peer is silent for too long, or gone."""
        head = peer.pending
        until = self._clock() + self._limits.request_timeout
        while (end := head.find(b"\r\n\r\n")) < 0 and len(head) < MAX_HEAD:
            left = until - self._clock() if head else self._limits.idle_timeout
            try:
                async with asyncio.timeout(left):
                    more = await reader.read(MAX_HEAD)
            except TimeoutError:
                if not head:
                    return None
                raise RequestError(HTTPStatus.REQUEST_TIMEOUT) from None
            if not more:
                return None
            if not head:
                until = self._clock() + self._limits.request_timeout
            head += more
        if not 0 <= end <= MAX_HEAD - 4:
            raise RequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        peer.pending = head[end + 4 :]
        return parse_head(head[: end + 4])

    def _admit(self, request: Request, address: str) -> None:
        """Raises RequestError for a reader of another version of the protocol (one that names none
        is answered: any HTTP client may read), without a pass that holds, or one that asks too
        often (counted by account among members; strangers make accounts at
        will, so they are counted by address)."""
        reader = address
        if (asked := request.headers.get(HEADER.lower())) is not None:
            try:
                agree(asked)
            except ProtocolError as error:
                raise RequestError(HTTPStatus.BAD_REQUEST, {"Prime-Reason": str(error)}) from error
        if self._gate is not None and request.path not in ("/healthz", "/readyz"):
            try:
                token = token_of(request.headers.get("authorization"), request.token)
                account = self._gate.admit(token)
                reader = account if self._gate.exclusive else address
            except (UntrustedError, MalformedError) as error:
                why = str(error).encode("ascii", "replace").decode()[:300]
                headers = {"WWW-Authenticate": "Pass", "Prime-Reason": why}
                raise RequestError(HTTPStatus.UNAUTHORIZED, headers) from error
        rate = self._limits.requests_per_second
        if not rate:
            return
        bucket = self._buckets.get(reader)
        if bucket is None:
            if len(self._buckets) > 4 * self._limits.connections:
                self._buckets = {r: b for r, b in self._buckets.items() if not b.full()}
            bucket = self._buckets[reader] = Bucket(rate, self._clock, least=1.0)
        wait = bucket.take(1)
        if wait > 0:
            after = {"Retry-After": str(max(1, round(wait)))}
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, after)

    async def _answer(self, request: Request, peer: Peer) -> None:
        close = not request.keep_alive
        if request.path in ("/healthz", "/readyz", "/metrics"):
            body, kind = self._about(request.path)
            headers = {"Content-Type": kind, "Cache-Control": "no-store"}
            waits = request.path == "/readyz" and not self._content.complete()
            status = HTTPStatus.SERVICE_UNAVAILABLE if waits else HTTPStatus.OK
            await self._sender.send_head(peer, status, len(body), headers, close=close)
            if request.method == "GET":
                await self._sender.send_bytes(peer, body)
            return
        resource = self._content.find(request.path)
        if resource is None:
            status = HTTPStatus.GONE if self._content.gone(request.path) else HTTPStatus.NOT_FOUND
            await self._sender.send_head(peer, status, 0, {}, close=close)
            return
        headers = resource_headers(resource)
        if not_modified(request.headers.get("if-none-match"), resource.etag):
            await self._sender.send_head(peer, HTTPStatus.NOT_MODIFIED, 0, headers, close=close)
            return
        status, start, end = byte_range(asked_range(request.headers, resource.etag), resource.size)
        if status is HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            headers = {"Content-Range": f"bytes */{resource.size}"}
            await self._sender.send_head(peer, status, 0, headers, close=close)
            return
        if status is HTTPStatus.PARTIAL_CONTENT:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{resource.size}"
        if request.method == "HEAD":
            await self._sender.send_head(peer, status, end - start, headers, close=close)
        elif resource.data is not None:
            await self._sender.send_head(peer, status, end - start, headers, close=close)
            await self._sender.send_bytes(peer, resource.data[start:end])
        else:
            span = (status, start, end)
            await self._sender.send_file(peer, request.path, resource, span, headers, close)

    def _about(self, path: str) -> tuple[bytes, str]:
        """Returns body and type of the answer about the server itself."""
        if path != "/metrics":
            content = self._content
            health = {
                "role": content.role,
                "versions": content.versions(),
                "complete": content.complete(),
            }
            return json.dumps(health).encode(), "application/json"
        found = [*metrics.of_server(self.counters, self.connected), *self._more_metrics()]
        return metrics.render(found), metrics.CONTENT_TYPE


class Origin(Server):
    """Serves a finished layout (`publish`, `finalize`) from a thread: the trainer's process."""

    def __init__(self, root: Path, serving: Serving = Serving()) -> None:
        super().__init__(DirectoryContent(root), serving)
