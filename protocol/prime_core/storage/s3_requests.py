"""Signed URLs and short requests of an S3 bucket, without boto3's client, which takes six times the
CPU time of signing and sending them.

`Signer` is AWS Signature Version 4 for one bucket. `ShortRequests` sends the three requests that
every accepted file needs. Each of them returns nothing (None or False) if the answer is not a plain
success: boto3's client then makes the request again, with its own retries and errors.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urlsplit

CONNECT_SECONDS = 5
READ_SECONDS = 30
MOST_BYTES = 64 << 10
"""Longest line or body of an answer."""
MOST_HEADERS = 100
_EMPTY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


class Credentials(Protocol):
    """An account's key, its secret and, if it is temporary, its token."""

    access_key: str
    secret_key: str
    token: str | None


class Signer:
    """Signs for the bucket at the URL `base`, which ends with a slash, in one region. `credentials`
    gives the current ones. Keys need no quoting (`check_key`)."""

    def __init__(self, base: str, region: str, credentials: Callable[[], Credentials]) -> None:
        parts = urlsplit(base)
        port = {"https": ":443", "http": ":80"}.get(parts.scheme, "")
        self.base, self.path = base, parts.path
        self.host = parts.netloc.lower().removesuffix(port)
        self._region = region
        self._credentials = credentials
        self._kept: tuple[str, str, bytes] | None = None

    def url(self, method: str, key: str, seconds: int, headers: Mapping[str, str]) -> str:
        """Returns a URL that is valid for so long, for requests with these `headers` (lower-case
        names)."""
        found, moment = self._credentials(), _moment()
        signed = {"host": self.host, **headers}
        names = ";".join(sorted(signed))
        fields = {
            "X-Amz-Algorithm": _ALGORITHM,
            "X-Amz-Credential": f"{found.access_key}/{self._scope(moment)}",
            "X-Amz-Date": moment,
            "X-Amz-Expires": str(seconds),
            **({"X-Amz-Security-Token": found.token} if found.token else {}),
            "X-Amz-SignedHeaders": names,
        }
        query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in fields.items())
        signature = self._sign(found, moment, method, key, query, signed, "UNSIGNED-PAYLOAD")
        return f"{self.base}{key}?{query}&X-Amz-Signature={signature}"

    def headers(self, method: str, key: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns all headers of a request without a body that has these (lower-case names)."""
        found, moment = self._credentials(), _moment()
        signed = {
            "host": self.host,
            "x-amz-content-sha256": _EMPTY,
            "x-amz-date": moment,
            **({"x-amz-security-token": found.token} if found.token else {}),
            **headers,
        }
        names = ";".join(sorted(signed))
        signature = self._sign(found, moment, method, key, "", signed, _EMPTY)
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={found.access_key}/{self._scope(moment)}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def _scope(self, moment: str) -> str:
        return f"{moment[:8]}/{self._region}/s3/aws4_request"

    def _sign(
        self,
        credentials: Credentials,
        moment: str,
        method: str,
        key: str,
        query: str,
        headers: Mapping[str, str],
        payload: str,
    ) -> str:
        names = sorted(headers)
        lines = "".join(f"{name}:{headers[name]}\n" for name in names)
        request = f"{method}\n{self.path}{key}\n{query}\n{lines}\n{';'.join(names)}\n{payload}"
        hashed = hashlib.sha256(request.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{moment}\n{self._scope(moment)}\n{hashed}"
        return _mac(self._key(credentials.secret_key, moment[:8]), text).hex()

    def _key(self, secret: str, day: str) -> bytes:
        kept = self._kept
        if kept is None or kept[:2] != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = _mac(key, part)
            self._kept = kept = secret, day, key
        return kept[2]


def _moment() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


@dataclass(frozen=True)
class _Answer:
    """The headers, by their lower-case names, and the body of an answer 200 or 204. `last`: the
    server closes the connection."""

    headers: Mapping[str, str]
    body: bytes
    last: bool


class ShortRequests:
    """See the top of this module. `certificates`: the file of those that HTTPS trusts. A refused or
    broken connection is such an answer, too. Thread-safe: each request has a connection of its own,
    which is kept for later ones."""

    def __init__(self, signer: Signer, bucket: str, certificates: str | None) -> None:
        self._signer, self._bucket = signer, bucket
        parts = urlsplit(signer.base)
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = ssl.create_default_context(cafile=certificates)
        self._place = parts.hostname or "", parts.port or (443 if self._context else 80)
        self._idle: deque[_Wire] = deque()

    def head(self, key: str) -> Mapping[str, str] | None:
        """Returns the headers of an object with at least its length and tag, by their lower-case
        names."""
        answer = self._ask("HEAD", key, {"x-amz-checksum-mode": "ENABLED"})
        if answer is None or not {"content-length", "etag"} <= answer.headers.keys():
            return None
        return answer.headers

    def copy(self, source: str, target: str, tag: str) -> bool:
        """Copies an object that has this tag."""
        origin = {
            "content-length": "0",
            "x-amz-copy-source": f"{self._bucket}/{source}",
            "x-amz-copy-source-if-match": tag,
        }
        answer = self._ask("PUT", target, origin)
        return answer is not None and b"<CopyObjectResult" in answer.body  # 200 may be an error

    def delete(self, key: str) -> bool:
        """Deletes an object."""
        return self._ask("DELETE", key, {}) is not None

    def _ask(self, method: str, key: str, headers: Mapping[str, str]) -> _Answer | None:
        signed = self._signer.headers(method, key, headers)
        lines = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        request = f"{method} {self._signer.path}{key} HTTP/1.1\r\n{lines}\r\n".encode()
        wire = None
        try:
            wire = self._wire()
            answer = wire.ask(method, request)
        except (OSError, ValueError):  # ValueError: not HTTP/1.1
            answer = None
        if wire is None or answer is None or answer.last:
            if wire is not None:
                wire.close()
        else:
            self._idle.append(wire)
        return answer

    def _wire(self) -> _Wire:
        while True:
            try:
                wire = self._idle.pop()
            except IndexError:
                return _Wire(self._place, self._context)
            if wire.is_silent():
                return wire
            wire.close()  # by the server


class _Wire:
    """One connection. Raises OSError if it breaks."""

    def __init__(self, place: tuple[str, int], context: ssl.SSLContext | None) -> None:
        wire = socket.create_connection(place, CONNECT_SECONDS)
        try:
            wire.settimeout(READ_SECONDS)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                wire = context.wrap_socket(wire, server_hostname=place[0])
        except OSError:
            wire.close()
            raise
        self._socket, self._file = wire, wire.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def is_silent(self) -> bool:
        """Whether the server has neither closed the connection nor sent anything."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        return not ready.poll(0)

    def ask(self, method: str, request: bytes) -> _Answer | None:
        """Returns the answer, None if its status is another. Raises ValueError if it is not an
        answer of HTTP/1.1 within the limits."""
        self._socket.sendall(request)
        first = self._file.readline(MOST_BYTES)
        if not first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 204")):
            return None
        headers: dict[str, str] = {}
        while (line := self._line()) != b"":
            name, _, value = line.partition(b":")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
            if len(headers) > MOST_HEADERS:
                raise ValueError("too many headers")
        body = b""
        if method != "HEAD" and first[9:12] != b"204":
            body = self._body(headers)
        return _Answer(headers, body, headers.get("connection", "").lower() == "close")

    def _line(self) -> bytes:
        line = self._file.readline(MOST_BYTES)
        if not line.endswith(b"\r\n"):
            raise ValueError("an incomplete or too long line")
        return line[:-2]

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return self._read(int(headers.get("content-length", "-1")))
        body = b""
        while size := int(self._line().partition(b";")[0], 16):
            body += self._read(size)
            if self._line() or len(body) > MOST_BYTES:
                raise ValueError("not a chunk, or too many")
        while self._line():  # trailers
            pass
        return body

    def _read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_BYTES:
            raise ValueError("a body without a length, or a too long one")
        data = self._file.read(size)
        if len(data) < size:
            raise ValueError("an incomplete body")
        return data
