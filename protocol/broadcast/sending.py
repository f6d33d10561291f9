"""The sending half of the server: heads, small bodies, spans of files by sendfile."""

from __future__ import annotations

import asyncio
import email.utils
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from protocol.broadcast.content import Content, Resource
from protocol.broadcast.files import open_regular
from protocol.broadcast.http1 import Bucket, Limits, RequestError, plain
from protocol.core.errors import UnavailableError

SLICE = 1 << 20
"""Bytes handed to the kernel at once; the deadline for slow readers is per slice."""
BURST = 1 / 16
"""Seconds of `bytes_per_second` that may pass at once."""


@dataclass
class Counters:
    """What a server has done since it started."""

    connections: int = 0
    refused: int = 0
    requests: int = 0
    bytes_sent: int = 0
    by_status: dict[int, int] = field(default_factory=dict)


class Sender:
    """Sends at the pace of readers and limits. A reader that stalls is cut off."""

    def __init__(
        self, content: Content, limits: Limits, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._content = content
        self._limits = limits
        self._counters = counters
        speed = limits.bytes_per_second
        self._bandwidth = Bucket(speed, clock, BURST) if speed else None

    async def send_file(
        self,
        writer: asyncio.StreamWriter,
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
        with ExitStack() as stack:
            fd = stack.enter_context(self._open(address, resource))
            file = stack.enter_context(os.fdopen(fd, "rb", buffering=0, closefd=False))
            await self.send_head(writer, status, end - start, headers, close=close)
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
                self._counters.bytes_sent += sent
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

    async def send_bytes(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """A small body."""
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            await self._throttle(len(piece))
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), self._limits.slice_timeout)
            self._counters.bytes_sent += len(piece)

    async def send_head(
        self,
        writer: asyncio.StreamWriter,
        status: HTTPStatus,
        length: int,
        headers: dict[str, str],
        *,
        close: bool,
    ) -> None:
        """Status line and fields."""
        self._counters.by_status[status] = self._counters.by_status.get(status, 0) + 1
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Date: {email.utils.formatdate(usegmt=True)}",
            f"Server: prime-broadcast/{self._content.role}",
            f"Content-Length: {length}",
            f"Connection: {'close' if close else 'keep-alive'}",
            *(f"{name}: {plain(value)}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await asyncio.wait_for(writer.drain(), self._limits.slice_timeout)
