"""The sending half of the server: heads, small bodies, spans of files by sendfile.

The kernel is called directly, on a descriptor beside the event loop's own: a chunk that a reader
takes at once costs one turn of the loop, and one more each time that its socket was full.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from prime_broadcast.content import Content, Resource
from prime_broadcast.files import open_regular
from prime_broadcast.http1 import Bucket, Limits, RequestError, plain
from prime_broadcast.peers import Peer
from prime_core.errors import UnavailableError
from prime_core.version import HEADER, SPOKEN

SLICE = 1 << 20
"""The deadline for slow readers is per so many bytes."""
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


class Sender:
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
