"""One HTTP connection to one source: requests ranges and reads them directly into a buffer.

Small objects are read by http.client; files directly from its socket, in as few calls as the
kernel allows. Redirects are not followed, an answer of another shape than requested is refused, and
every read has a deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import urlsplit

from prime_broadcast.http1 import plain
from prime_core.errors import MalformedError, UnavailableError
from prime_core.transport.addresses import connect_public
from prime_core.version import HEADER, SPOKEN

if TYPE_CHECKING:
    from typing_extensions import Buffer


PATIENCE = 0.25
"""Seconds after which `fill` returns what it has, so that its caller can check other events."""


class TimedSocket:
    """The part of a socket that `http.client` uses, with deadlines. `silence`: the longest time of
    one recv, in seconds."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        self._sock = sock
        self._silence = silence
        self._deadline: float | None = None
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._waits = False
        # In force only while the socket blocks, which it does in `fill`.
        limit = struct.pack("ll", int(PATIENCE), int(PATIENCE % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.settimeout(silence)

    def within(self, seconds: float | None) -> None:
        """Limits all following reads to `seconds` together; None: only silence ends them."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._sock.settimeout(self._silence)
        self._waits = False

    def receive(self, buffer: Buffer) -> int:
        """One recv. Raises TimeoutError at the deadline, or after too long a silence."""
        self._mind_deadline()
        return self._sock.recv_into(buffer)

    def receive_into(self, raw: io.RawIOBase, buffer: Buffer) -> int | None:
        """Like `receive`, through `raw`, the file that http.client reads from."""
        self._mind_deadline()
        return raw.readinto(buffer)

    def fill(self, buffer: memoryview) -> int | None:
        """Reads until `buffer` is full, PATIENCE is over or the stream ends: returns the number of
        bytes; 0 at the end of the stream, None if nothing came in time. Ignores the deadline."""
        try:
            if self._encrypted:
                return self._sock.recv_into(buffer)
            if not self._waits:
                self._sock.settimeout(None)
                self._waits = True
            return self._sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
        except (BlockingIOError, TimeoutError):
            return None

    def _mind_deadline(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline of an answer has passed")
            self._sock.settimeout(min(self._silence, left))

    def sendall(self, data: Buffer) -> None:
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """For reading ("rb"), as HTTPResponse asks for it."""
        assert mode == "rb"
        return io.BufferedReader(_Raw(self, self._sock.makefile("rb", buffering=0)))

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


class _Raw(io.RawIOBase):
    """The unbuffered half; keeps the socket open as long as it is, as `socket.makefile` does."""

    def __init__(self, timed: TimedSocket, raw: io.RawIOBase) -> None:
        self._timed = timed
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        return self._timed.receive_into(self._raw, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


MAX_HEAD = 64 << 10
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?\Z")
_LENGTH = re.compile(rb"[0-9]{1,19}\Z")


@dataclass(frozen=True)
class Head:
    """Status and fields (names in lower case) of an answer. `length` of its body, None if it does
    not say; `closes`: no other answer will come on its connection."""

    status: int
    reason: str
    fields: dict[str, str]
    length: int | None
    closes: bool


def parse_answer(raw: bytes) -> Head:
    """One head, up to and including its blank line. Raises MalformedError."""
    lines = raw[:-4].split(b"\r\n")
    match = _STATUS.match(lines[0])
    if match is None:
        raise MalformedError("it does not answer in HTTP/1.1")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise MalformedError("its answer's head cannot be read")
        key, text = name.decode("latin-1").lower(), value.strip(b" \t").decode("latin-1")
        if key == "content-length" and fields.get(key, text) != text:
            raise MalformedError("its answer states two lengths")
        fields[key] = text
    length = fields.get("content-length")
    if length is not None and not _LENGTH.match(length.encode("latin-1")):
        raise MalformedError("its answer states no length that could be")
    coded = "transfer-encoding" in fields
    connection = fields.get("connection", "").lower()
    return Head(
        int(match[2]),
        (match[3] or b"").decode("latin-1"),
        fields,
        None if length is None or coded else int(length),
        connection == "close" or (match[1] == b"0" and connection != "keep-alive"),
    )


def read_answer(receive: Callable[[memoryview], int]) -> tuple[Head, bytes]:
    """Returns the head of the next final answer, and the part of its body that came with it. Skips
    interim answers (1xx). `receive` fills some of a buffer and returns how much. Raises
    ConnectionError if the stream ends before, MalformedError, and what `receive` raises."""
    buffer = memoryview(bytearray(4096))
    held = b""
    while True:
        while (end := held.find(b"\r\n\r\n")) < 0:
            if len(held) > MAX_HEAD:
                raise MalformedError("its answer's head is too long")
            count = receive(buffer)
            if not count:
                raise ConnectionResetError("it closed the connection without an answer")
            held += buffer[:count]
        head = parse_answer(held[: end + 4])
        held = held[end + 4 :]
        if head.status >= 200:
            return head, held


CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 6.0
"""Silence that ends a request; longer than a relay waits for a chunk that is still arriving."""
HEAD_TIMEOUT = 10.0
"""From asking to the end of the answer's head, interim answers included."""
SMALL_TIMEOUT = 30.0
"""For the whole of a small object, once its head is there."""
FIRST_PIECE = 256 << 10
LARGEST_PIECE = 4 << 20
PIECE_SECONDS = 0.1
"""Pieces of a body are sized to arrive in about this time at the measured rate."""
SLOWEST = 32 << 10
"""Bytes per second below which a chunk is fetched elsewhere, after GRACE seconds."""
GRACE = 20.0
MAX_HEALTH = 1 << 20


class TransferError(UnavailableError):
    """The source did not deliver. `pause`: seconds before it is asked again; `waiting`: it asked
    for patience itself (503 or 429 with Retry-After), which is not a fault; `gone`: it will never
    have the object again (410); `missing`: it does not have it now (404; 403 from a bucket)."""

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
    """The answer is no longer needed (another source was faster)."""


class WholeOnlyError(TransferError):
    """The source answers every range with the whole file."""

    def __init__(self) -> None:
        super().__init__("it knows no ranges")


T = TypeVar("T")
_VERSION = f"{HEADER}: {SPOKEN[-1]}"
Answer = http.client.HTTPResponse
Fill = Callable[[memoryview, Callable[[], bool]], None]
"""Fills a buffer with the next bytes; the second argument says when they are no longer needed."""


class Sink(Protocol):
    """Where a body goes. `room` gives the place for the next bytes, never empty while some are
    still to come; `arrived` gets the number of bytes that were put there."""

    def room(self) -> memoryview: ...

    def arrived(self, count: int) -> None: ...


class BufferSink:
    """Writes received bytes into `buffer`."""

    def __init__(self, buffer: memoryview) -> None:
        self._left = buffer

    def room(self) -> memoryview:
        return self._left

    def arrived(self, count: int) -> None:
        self._left = self._left[count:]


class Link:
    """A kept-alive connection. Not thread-safe: one thread uses it at a time. `authorization` gives
    the Authorization field of each request, or None; with `public_only`, private addresses are not
    connected to."""

    def __init__(
        self,
        url: str,
        authorization: Callable[[], str | None] = lambda: None,
        *,
        public_only: bool = False,
    ) -> None:
        self._authorization = authorization
        self._public_only = public_only
        parts = urlsplit(url)
        self._prefix = parts.path.rstrip("/")
        self._host = parts.hostname or ""
        self._port = parts.port
        self._secure = parts.scheme == "https"
        self._authority = parts.netloc
        self._connection: http.client.HTTPConnection | None = None
        self._wire: TimedSocket | None = None
        self._aborted = False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abort(self) -> None:
        """Ends a read in another thread; this connection sends no further request."""
        self._aborted = True
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
    ) -> None:
        """Fills `buffer` with the bytes of `path` (whose full size is `size`) from `offset`. Raises
        as `read_span` does."""
        self.read_span(path, (offset, offset + len(buffer)), size, BufferSink(buffer), cancelled)

    def read_span(
        self,
        path: str,
        span: tuple[int, int],
        size: int,
        sink: Sink,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Gives `sink` the bytes `span` (begin, end) of `path`, whose full size is `size`.

        Raises TransferError if the source is away, refuses, answers with another shape, stops
        early or crawls; SupersededError once `cancelled()` is true.
        """
        offset, end = span
        length = end - offset
        whole = offset == 0 and end == size
        try:
            with _as_transfer_error():
                head, early = self._ask(path, None if whole else (offset, end))
                if head.status == 200 and not whole and head.length == size:
                    raise WholeOnlyError
                if head.status != (200 if whole else 206):
                    raise refusal(head.status, head.reason, head.fields.get)
                reported = head.fields.get("content-range")
                if not whole and reported != f"bytes {offset}-{end - 1}/{size}":
                    raise TransferError("it answered with another range")
                if head.length != length:
                    raise TransferError(f"it offered {head.length} bytes instead of {length}")
                self._fill(early, length, sink, cancelled)
        except TransferError:
            self.close()
            raise
        if head.closes or len(early) > length:
            self.close()

    @contextmanager
    def reading(self, path: str, size: int) -> Iterator[Fill]:
        """The whole of a file of `size` bytes, piece by piece. Raises TransferError as
        `read_range` does; the connection is closed if the reading stops early."""
        reusable = False
        early = b""
        read = 0

        def fill(buffer: memoryview, cancelled: Callable[[], bool]) -> None:
            nonlocal read, early
            with _as_transfer_error():
                self._fill(early, len(buffer), BufferSink(buffer), cancelled)
            early = early[len(buffer) :]
            read += len(buffer)

        try:
            with _as_transfer_error():
                head, early = self._ask(path, None)
                if head.status != 200:
                    raise refusal(head.status, head.reason, head.fields.get)
                if head.length != size:
                    raise TransferError(f"it offered {head.length} bytes instead of {size}")
            yield fill
            reusable = read == size and not head.closes and not early
        finally:
            if not reusable:
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
                raise refusal(answer.status, answer.reason, answer.getheader)
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
        """The role that the source states ("relay", "origin"); "mirror" for any other HTTP server.
        Raises TransferError without an answer."""
        role = self.health().get("role")
        return role if role == "relay" or role == "origin" else "mirror"

    def health(self) -> dict[str, object]:
        """Returns what the source states about itself; empty for any other HTTP server. Raises
        TransferError if it does not answer."""
        try:
            health = json.loads(self.read_small("/healthz", MAX_HEALTH))
        except TransferError as error:
            if isinstance(error.__cause__, OSError):
                raise
            return {}
        except (ValueError, RecursionError, MalformedError):
            return {}
        return health if isinstance(health, dict) else {}

    def _request(self, method: str, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """An answer by http.client, its body still to be read."""

        def attempt(wire: TimedSocket, connection: http.client.HTTPConnection) -> Answer:
            field = self._authorization()
            signed = {"Authorization": field} if field else {}
            fields = {**headers, HEADER: str(SPOKEN[-1]), **signed}
            connection.request(method, self._prefix + path, headers=fields)
            answer = connection.getresponse()
            if answer.status < 300:
                _check_version(answer.getheader(HEADER))
            return answer

        return self._attempt(attempt)

    def _ask(self, path: str, span: tuple[int, int] | None) -> tuple[Head, bytes]:
        """Requests a file, or its bytes `span` (begin, end). Returns the answer's head and the part
        of the body that came with it; `_fill` reads the rest."""

        def attempt(
            wire: TimedSocket, connection: http.client.HTTPConnection
        ) -> tuple[Head, bytes]:
            lines = [f"GET {self._prefix}{path} HTTP/1.1", f"Host: {self._authority}", _VERSION]
            if span is not None:
                lines.append(f"Range: bytes={span[0]}-{span[1] - 1}")
            if field := self._authorization():
                lines.append(f"Authorization: {field}")
            text = "\r\n".join([*lines, "Accept-Encoding: identity", "", ""])
            wire.sendall(text.encode("ascii"))
            head, early = read_answer(wire.receive)
            if head.status < 300:
                _check_version(head.fields.get(HEADER.lower()))
            return head, early

        return self._attempt(attempt)

    def _attempt(self, attempt: Callable[[TimedSocket, http.client.HTTPConnection], T]) -> T:
        """Sends a request and returns its answer's head, within HEAD_TIMEOUT. Tries again on a new
        connection if a kept-alive one fails, because the server may have closed it."""
        while True:
            fresh = self._connection is None or self._connection.sock is None
            if self._connection is None or self._connection.sock is None:
                # http.client closes the socket after an answer that ends the connection.
                self._stop_if_aborted()
                self._connection = self._connect()
            self._stop_if_aborted()  # `abort` may not have seen this connection
            assert self._wire is not None
            self._wire.within(HEAD_TIMEOUT)
            try:
                answer = attempt(self._wire, self._connection)
                self._wire.within(None)
                return answer
            except (ConnectionError, http.client.BadStatusLine):
                self.close()
                if fresh or self._aborted:
                    raise

    def _stop_if_aborted(self) -> None:
        if self._aborted:
            raise ConnectionAbortedError("the fetch is over")

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
        if self._public_only:
            connection._create_connection = connect_public  # type: ignore[attr-defined]
        connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = TimedSocket(connection.sock, READ_TIMEOUT)
        connection.sock = self._wire
        return connection

    def _fill(
        self,
        early: bytes,
        length: int,
        sink: Sink,
        cancelled: Callable[[], bool],
    ) -> None:
        """Writes `length` bytes to `sink`: first those of `early`, which came with the head, then
        more from the connection."""
        assert self._wire is not None
        filled = 0
        while part := early[filled:length]:
            room = sink.room()[: len(part)]
            room[:] = part[: len(room)]
            sink.arrived(len(room))
            filled += len(room)
        begun = received = time.monotonic()
        piece = FIRST_PIECE
        while filled < length:
            count = self._wire.fill(sink.room()[: min(piece, length - filled)])
            now = time.monotonic()
            if count == 0:
                raise TransferError(f"it ended after {filled} of {length} bytes")
            if count is None and now - received > READ_TIMEOUT:
                raise TimeoutError
            if count is not None:
                filled, received = filled + count, now
                sink.arrived(count)
            if cancelled():
                raise SupersededError("fetched elsewhere meanwhile")
            spent = now - begun
            if spent > GRACE and filled < (spent - GRACE) * SLOWEST:
                raise TransferError(f"it crawls: {filled} bytes in {spent:.0f} s")
            likely = int(filled / max(spent, 1e-6) * PIECE_SECONDS)
            piece = max(FIRST_PIECE, min(LARGEST_PIECE, likely))


def _check_version(named: str | None) -> None:
    """Raises TransferError if an answer names a version that this program does not speak. An answer
    without a version is accepted: a mirror is any HTTP server, and its bytes are checked by digest.
    """
    if named is not None and named != str(SPOKEN[-1]):
        raise TransferError(f"it speaks protocol {plain(named[:9])}, this program {SPOKEN[-1]}")


def refusal(status: int, reason: str, field: Callable[[str], str | None]) -> TransferError:
    """Returns the error for an answer that is not the file."""
    pause: float | None = None
    after = field("retry-after") or ""
    if after.isascii() and after.isdigit():
        pause = min(30.0, max(0.1, float(after)))
    reported = plain(field("prime-reason") or reason)
    return TransferError(
        f"it answered {status} {reported}"[:160],
        pause,
        waiting=pause is not None,
        gone=status == 410,
        missing=status in (403, 404),
    )


@contextmanager
def _as_transfer_error() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(_say(error)) from error
    except MalformedError as error:
        raise TransferError(str(error)) from error


def _say(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return plain(f"{type(error).__name__}: {error}"[:200])
