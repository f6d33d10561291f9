"""One HTTP connection to one source: asks for ranges, reads them straight into a buffer.

Uses http.client because its `readinto` moves bytes from the socket into our buffer without a copy.
Redirects are not followed, answers of any other shape than the one asked for are refused, and
every read has a deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from protocol.broadcast.deadline import TimedSocket
from protocol.broadcast.http1 import plain
from protocol.core.errors import MalformedError, UnavailableError

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 6.0
"""Silence that ends a request; longer than a relay waits for a chunk that is still arriving."""
HEAD_TIMEOUT = 10.0
"""From asking to the end of the answer's head, interim answers included."""
SMALL_TIMEOUT = 30.0
"""For the whole of a small object, once its head is there."""
READ_SLICE = 4 << 20
SLOWEST = 32 << 10
"""Bytes per second below which a chunk is fetched elsewhere, after GRACE seconds."""
GRACE = 20.0
MAX_HEALTH = 1 << 20


class TransferError(UnavailableError):
    """The source did not deliver. `pause`: seconds to leave it alone; `waiting`: it asked for
    patience itself (503 or 429 with Retry-After), which is no fault; `gone`: it will never have
    the object again (410); `missing`: it does not have it now (404; 403 from a bucket)."""

    def __init__(
        self,
        reason: str,
        pause: float | None = None,
        *,
        waiting: bool = False,
        gone: bool = False,
        missing: bool = False,
    ) -> None:
        super().__init__(reason)
        self.pause = pause
        self.waiting = waiting
        self.gone = gone
        self.missing = missing


class SupersededError(TransferError):
    """Nobody needs the answer any more (another source was faster)."""


class WholeOnlyError(TransferError):
    """The source answers every range with the whole file."""

    def __init__(self) -> None:
        super().__init__("it knows no ranges")


Fill = Callable[[memoryview, Callable[[], bool]], None]
"""Fills a buffer with what comes next; the second argument says when nobody needs it any more."""


class Link:
    """A kept-alive connection. Not thread-safe: one thread has it at a time. `authorization` gives
    the Authorization field of each request, or None."""

    def __init__(self, url: str, authorization: Callable[[], str | None] = lambda: None) -> None:
        self._authorization = authorization
        parts = urlsplit(url)
        self._prefix = parts.path.rstrip("/")
        self._host = parts.hostname or ""
        self._port = parts.port
        self._secure = parts.scheme == "https"
        self._connection: http.client.HTTPConnection | None = None
        self._wire: TimedSocket | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abort(self) -> None:
        """Ends a read that another thread is in."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def read_range(
        self,
        path: str,
        offset: int,
        size: int,
        buffer: memoryview,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        arrived: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Fills `buffer` with the bytes of `path` (whose full size is `size`) from `offset`;
        `arrived` is told how far it is filled.

        Raises TransferError if the source is away, refuses, answers with another shape, stops
        early or crawls; SupersededError once `cancelled()` is true.
        """
        end = offset + len(buffer)
        whole = offset == 0 and end == size
        headers = {} if whole else {"Range": f"bytes={offset}-{end - 1}"}
        try:
            answer = self._request("GET", path, headers)
            if answer.status == 200 and not whole and answer.length == size:
                raise WholeOnlyError
            if answer.status != (200 if whole else 206):
                self._refuse(answer)
            if (
                not whole
                and answer.getheader("Content-Range") != f"bytes {offset}-{end - 1}/{size}"
            ):
                raise TransferError("it answered with another range")
            if answer.length != len(buffer):
                raise TransferError(f"it offered {answer.length} bytes instead of {len(buffer)}")
            self._fill(answer, buffer, cancelled, arrived)
            self._end(answer)
        except TransferError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise TransferError(_say(error)) from error

    @contextmanager
    def reading(self, path: str, size: int) -> Iterator[Fill]:
        """The whole of a file of `size` bytes, piece by piece. Raises TransferError as
        `read_range` does; the connection is closed if the reading stops early."""
        finished = False
        read = 0

        def fill(buffer: memoryview, cancelled: Callable[[], bool]) -> None:
            nonlocal read
            with _as_transfer_error():
                self._fill(answer, buffer, cancelled)
            read += len(buffer)

        try:
            with _as_transfer_error():
                answer = self._request("GET", path, {})
                if answer.status != 200:
                    self._refuse(answer)
                if answer.length != size:
                    raise TransferError(f"it offered {answer.length} bytes instead of {size}")
            yield fill
            finished = read == size
            if finished:
                self._end(answer)
        finally:
            if not finished:
                self.close()

    def read_small(self, path: str, limit: int) -> bytes:
        """The whole of a small object. Raises TransferError, or MalformedError beyond `limit`."""
        found = self.read_changed(path, limit, None)
        assert found is not None
        return found[0]

    def read_changed(
        self, path: str, limit: int, tag: str | None
    ) -> tuple[bytes, str | None] | None:
        """The whole of a small object and its entity tag; None if it is still what `tag` names.
        Raises as `read_small` does."""
        try:
            answer = self._request("GET", path, {"If-None-Match": tag} if tag else {})
            if tag and answer.status == 304:
                answer.read()
                return None
            if answer.status != 200:
                self._refuse(answer)
            assert self._wire is not None
            self._wire.within(SMALL_TIMEOUT)
            data = answer.read(limit + 1)
            if len(data) > limit:
                self.close()
                raise MalformedError(f"{path} exceeds {limit} bytes")
            if not answer.isclosed():
                answer.read()
            return data, answer.getheader("ETag")
        except TransferError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise TransferError(_say(error)) from error

    def role(self) -> str:
        """What the source says it is ("relay", "origin"); "mirror" for any other HTTP server.
        Raises TransferError if nobody answers."""
        try:
            health = json.loads(self.read_small("/healthz", MAX_HEALTH))
        except TransferError as error:
            if isinstance(error.__cause__, OSError):
                raise
            return "mirror"
        except (ValueError, RecursionError, MalformedError):
            return "mirror"
        role = health.get("role") if isinstance(health, dict) else None
        return role if role in ("relay", "origin") else "mirror"

    def _request(self, method: str, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        fresh = self._connection is None
        try:
            return self._try(method, path, headers)
        except (ConnectionError, http.client.BadStatusLine):
            # A kept-alive connection that the server closed meanwhile: once more on a new one.
            self.close()
            if fresh:
                raise
            return self._try(method, path, headers)

    def _try(self, method: str, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._connection is None or self._connection.sock is None:
            # http.client closes the socket after an answer that ends the connection.
            self._connection = self._connect()
        if field := self._authorization():
            headers = {**headers, "Authorization": field}
        assert self._wire is not None
        self._wire.within(HEAD_TIMEOUT)
        self._connection.request(method, self._prefix + path, headers=headers)
        answer = self._connection.getresponse()
        self._wire.within(None)
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._secure:
            connection = http.client.HTTPSConnection(
                self._host,
                self._port,
                timeout=CONNECT_TIMEOUT,
                context=ssl.create_default_context(),
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT)
        connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = TimedSocket(connection.sock, READ_TIMEOUT)
        connection.sock = self._wire
        return connection

    def _fill(
        self,
        answer: http.client.HTTPResponse,
        buffer: memoryview,
        cancelled: Callable[[], bool],
        arrived: Callable[[int], None] = lambda count: None,
    ) -> None:
        begun = time.monotonic()
        filled = 0
        while filled < len(buffer):
            # One recv at most: `answer.readinto` would loop, and a crawling source could hold us.
            count = answer.fp.readinto1(buffer[filled : filled + READ_SLICE])
            if count == 0:
                raise TransferError(f"it ended after {filled} of {len(buffer)} bytes")
            filled += count
            arrived(filled)
            if cancelled():
                raise SupersededError("fetched elsewhere meanwhile")
            spent = time.monotonic() - begun
            if spent > GRACE and filled < (spent - GRACE) * SLOWEST:
                raise TransferError(f"it crawls: {filled} bytes in {spent:.0f} s")

    def _end(self, answer: http.client.HTTPResponse) -> None:
        answer.length = 0
        answer.read()  # reads nothing; http.client then knows that the connection is free again

    def _refuse(self, answer: http.client.HTTPResponse) -> None:
        pause: float | None = None
        after = answer.getheader("Retry-After") or ""
        if after.isascii() and after.isdigit():
            pause = min(30.0, max(0.1, float(after)))
        told = plain(answer.getheader("Prime-Reason") or answer.reason)
        reason = f"it answered {answer.status} {told}"[:160]
        raise TransferError(
            reason,
            pause,
            waiting=pause is not None,
            gone=answer.status == 410,
            missing=answer.status in (403, 404),
        )


@contextmanager
def _as_transfer_error() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(_say(error)) from error


def _say(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return plain(f"{type(error).__name__}: {error}"[:200])
