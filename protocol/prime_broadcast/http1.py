"""HTTP/1.1 as a file server needs it: a request's head, one range, a server's bounds. Pure."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from prime_broadcast.content import Resource

MAX_HEAD = 8 << 10


def plain(text: str) -> str:
    """`text` for a header or a terminal: anything but printable ASCII becomes "?", so that what a
    stranger chose cannot begin a line of its own."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)


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
    """Of one reader (its account if it signs, else its address), on average, over all its
    connections; 0 means unlimited."""
    connections_per_address: int = 0
    """At once; 0 means unlimited."""
    bytes_per_second: float = 0.0
    """Of the whole server; 0 means unlimited."""


class Bucket:
    """Token bucket that holds `burst` seconds of its `rate`, but `least` in any case. `take`
    returns the seconds to wait."""

    def __init__(
        self, rate: float, clock: Callable[[], float], burst: float = 1.0, least: float = 0.0
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._most = max(rate * burst, least)
        self._level = self._most
        self._last = clock()

    def take(self, amount: float) -> float:
        """Takes `amount` at once; the level may sink below zero, which others wait for."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._last) * self._rate) - amount
        self._last = now
        return max(0.0, -self._level / self._rate)

    def try_take(self, amount: float) -> bool:
        """Takes `amount` if the bucket holds that much, or else nothing. Returns whether it did."""
        self.take(0)
        if self._level < amount:
            return False
        self._level -= amount
        return True

    def full(self) -> bool:
        """True if it has not been used for a while."""
        return self._level + (self._clock() - self._last) * self._rate >= self._most


class RateLimit:
    """Limits requests by key: a bucket that holds two seconds of requests, at least one, for each
    of the `keys` latest keys."""

    def __init__(
        self, per_second: float, clock: Callable[[], float] = time.monotonic, keys: int = 10_000
    ) -> None:
        """`per_second` 0: no limit."""
        self._rate = per_second
        self._clock = clock
        self._keys = keys
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def admits(self, key: str) -> bool:
        """Whether a request with this key may go on."""
        if not self._rate:
            return True
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = Bucket(self._rate, self._clock, burst=2.0, least=1.0)
        self._buckets[key] = bucket
        if len(self._buckets) > self._keys:
            self._buckets.popitem(last=False)
        return bucket.try_take(1)


class RequestError(Exception):
    """An answer without a body that ends the connection."""

    def __init__(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        super().__init__(status.phrase)
        self.status = status
        self.headers = headers or {}


@dataclass(frozen=True)
class Request:
    """A parsed head. Header names in lower case; `token` is the query's `pass`."""

    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool
    token: str | None = None


def resource_headers(resource: Resource) -> dict[str, str]:
    """The fields that describe it, for its 200, 206, 304 and HEAD."""
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
_PASS = re.compile(rb"(?:^|&)pass=([A-Za-z0-9_-]{1,2048})(?:&|\Z)")
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})\Z")


def parse_head(head: bytes) -> Request:
    """RFC 9112, the part that a file server needs; everything else is 400, 405 or 505."""
    lines = head[:-4].split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    method, target, protocol = parts
    if protocol not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise RequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if method not in (b"GET", b"HEAD"):
        raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.match(name):
            raise RequestError(HTTPStatus.BAD_REQUEST)
        headers[name.decode("ascii").lower()] = value.strip(b" \t").decode("latin-1")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        raise RequestError(HTTPStatus.BAD_REQUEST)
    connection = headers.get("connection", "").lower()
    keep_alive = connection != "close" if protocol == b"HTTP/1.1" else connection == "keep-alive"
    # Nothing under the layout needs escapes; an escaped name is decoded once and then refused by
    # the layout's pattern if it tries anything.
    token = _PASS.search(query)
    return Request(
        method.decode(),
        unquote_to_bytes(path).decode("latin-1"),
        headers,
        keep_alive,
        token.group(1).decode() if token else None,
    )


def not_modified(field: str | None, etag: str) -> bool:
    """Whether If-None-Match (RFC 9110 §13.1.2) names this entity tag."""
    if field is None or not etag:
        return False
    tags = {tag.strip().removeprefix("W/") for tag in field.split(",")}
    return "*" in tags or f'"{etag}"' in tags


def asked_range(headers: Mapping[str, str], etag: str) -> str | None:
    """The Range field, unless an If-Range (RFC 9110 §13.1.5) says that it was of another file."""
    condition = headers.get("if-range")
    if condition is not None and condition != f'"{etag}"':
        return None
    return headers.get("range")


def byte_range(text: str | None, size: int) -> tuple[HTTPStatus, int, int]:
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
