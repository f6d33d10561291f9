"""The orchestrator as its clients see it: node agent, trainer, relay, auditor, devnet.

One instance belongs to one thread. A session is opened on the first signed request and renewed
before it ends; the account's key signs the grant and nothing else.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx

from protocol.core import ids
from protocol.core.errors import MalformedError, UnavailableError, UntrustedError, UserError
from protocol.core.ids import Address, Digest
from protocol.core.messages import PoolInfo, SessionAnswer, SessionRequest, UploadAnswer
from protocol.core.node import SessionGrant
from protocol.core.signing import ContractName, Domain, Signer, Strict
from protocol.transport.problems import from_problem
from protocol.transport.signatures import SessionKey, sign_headers

Answer = TypeVar("Answer", bound=Strict)
MAX_ANSWER_BYTES = 8 << 20
SESSION_SECONDS = 12 * 3600
POLITE_TRIES = 8
LONGEST_PAUSE = 5.0


class _Reply(NamedTuple):
    status_code: int
    headers: httpx.Headers
    content: bytes


class OrchestratorClient:
    """Signed and unsigned requests to one orchestrator.

    `signer` may be None for readers. Raises UserError if `base_url` is no http(s) URL. Every method
    raises UnavailableError when the orchestrator does not answer, and the error that its problem
    document names when it refuses.
    """

    def __init__(
        self,
        base_url: str,
        signer: Signer | None = None,
        scope: str = "node",
        *,
        timeout: float = 30.0,
        now: Callable[[], float] = time.time,
        new_nonce: Callable[[], str] = lambda: secrets.token_urlsafe(18),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = _checked_url(base_url)
        self.signer = signer
        self.scope = scope
        self._now = now
        self._new_nonce = new_nonce
        self._sleep = sleep
        self._http = httpx.Client(timeout=timeout, follow_redirects=False)
        self._session: tuple[SessionKey, int] | None = None
        self._pool: PoolInfo | None = None

    def __enter__(self) -> OrchestratorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- what every client asks ---------------------------------------------------------------

    def pool(self, *, refresh: bool = False) -> PoolInfo:
        """The pool's public facts, remembered after the first call."""
        if self._pool is None or refresh:
            self._pool = self.get("/v1/pool", PoolInfo)
        return self._pool

    def domain(self, contract: ContractName) -> Domain:
        """EIP-712 domain of one of the pool's contracts."""
        pool = self.pool()
        return Domain(chain_id=pool.chain_id, contract=getattr(pool.contracts, contract))

    def get(self, path: str, answer: type[Answer], *, signed: bool = False) -> Answer:
        """GET `path`, parsed strictly as `answer`."""
        return _parse(answer, self.request("GET", path, b"", signed=signed))

    def get_changed(
        self, path: str, answer: type[Answer], tag: str | None
    ) -> tuple[Answer, str | None] | None:
        """GET `path`, parsed, with its entity tag; None if it is still what `tag` names (RFC 9110
        §13.1.2), which costs neither side a body."""
        asked = {"If-None-Match": tag} if tag else {}
        reply = self._send("GET", self.base_url + path, b"", asked)
        if reply.status_code == httpx.codes.NOT_MODIFIED:
            return None
        if reply.status_code >= 300:
            raise from_problem(reply.status_code, reply.content)
        return _parse(answer, reply.content), reply.headers.get("etag")

    def post(
        self, path: str, body: Strict | bytes, answer: type[Answer], *, signed: bool = True
    ) -> Answer:
        """POST a model (as JSON) or raw bytes, signed by this session, parsed as `answer`."""
        return _parse(answer, self.send("POST", path, body, signed=signed))

    def send(
        self, method: str, path: str, body: Strict | bytes = b"", *, signed: bool = True
    ) -> bytes:
        """Like `post` with any method; returns the raw answer."""
        raw = body if isinstance(body, bytes) else body.model_dump_json().encode()
        return self.request(method, path, raw, signed=signed)

    def request(self, method: str, path: str, body: bytes, *, signed: bool) -> bytes:
        """One request; a session that the server no longer knows is opened anew, once."""
        try:
            return self._once(method, path, body, signed)
        except UntrustedError:
            if not signed or self._session is None:
                raise
            self._session = None
            return self._once(method, path, body, signed)

    # -- objects and signed URLs --------------------------------------------------------------

    def get_object(self, digest: Digest, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """An object named by its SHA-256, through the orchestrator's redirect; digest checked."""
        response = self._send("GET", f"{self.base_url}/v1/objects/{digest}", b"", {})
        if response.status_code not in (302, 307):
            raise from_problem(response.status_code, response.content)
        return self.download(response.headers["location"], limit=limit, sha256=digest)

    def download(self, url: str, *, limit: int, sha256: Digest | None = None) -> bytes:
        """GET a signed URL, at most `limit` bytes. Raises UntrustedError on a wrong digest."""
        data = bytearray()
        for block in self._stream(self._absolute(url)):
            data += block
            if len(data) > limit:
                raise MalformedError(f"the object is larger than {limit} bytes")
        if sha256 is not None and ids.digest(hashlib.sha256(data).digest()) != sha256:
            raise UntrustedError(f"the downloaded object is not {sha256}")
        return bytes(data)

    def upload(self, target: UploadAnswer, body: bytes | Path) -> None:
        """PUT a file to a signed URL with exactly the headers it names."""
        content = body.read_bytes() if isinstance(body, Path) else body
        response = self._send("PUT", self._absolute(target.url), content, target.headers)
        if response.status_code not in (200, 201, 204):
            raise from_problem(response.status_code, response.content)

    # -- below ---------------------------------------------------------------------------------

    def _absolute(self, url: str) -> str:
        return url if urlsplit(url).scheme else self.base_url + url

    def _once(self, method: str, path: str, body: bytes, signed: bool) -> bytes:
        url = self.base_url + path
        headers = {"Content-Type": "application/json"} if body else {}
        if signed:
            key = self._open_session()
            headers |= sign_headers(
                key, method, url, body, now=self._now(), nonce=self._new_nonce()
            )
        response = self._send(method, url, body, headers)
        if response.status_code >= 300:
            raise from_problem(response.status_code, response.content)
        return response.content

    def _open_session(self) -> SessionKey:
        if self._session is not None and self._session[1] > self._now() + 300:
            return self._session[0]
        if self.signer is None:
            raise UntrustedError("this client has no key to sign with")
        pool, key, now = self.pool(), SessionKey.generate(), int(self._now())
        grant = SessionGrant(
            account=Address(self.signer.address),
            session_key=key.key_id,
            orchestrator=pool.orchestrator,
            scope=self.scope,
            issued_at=now,
            expiry=now + SESSION_SECONDS,
        )
        body = SessionRequest(
            grant=grant, signature=self.signer.sign(grant, self.domain("registry"))
        )
        raw = body.model_dump_json().encode()
        answer = _parse(SessionAnswer, self._once("POST", "/v1/sessions", raw, signed=False))
        self._session = (key, answer.expiry)
        return key

    def _send(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> _Reply:
        """One exchange; a server that says "slow down" (429) is asked again when it says so.

        The refusal comes before the server looks at a signature, so its nonce is still unused.
        """
        try:
            for _ in range(POLITE_TRIES):
                asked = {"Accept-Encoding": "identity", **headers}
                with self._http.stream(method, url, content=body, headers=asked) as response:
                    reply = _Reply(response.status_code, response.headers, _content(response))
                if reply.status_code != httpx.codes.TOO_MANY_REQUESTS:
                    break
                self._sleep(_pause(response))
            return reply
        except httpx.TransportError as error:
            raise UnavailableError(f"{urlsplit(url).netloc} does not answer: {error}") from error

    def _stream(self, url: str) -> Iterator[bytes]:
        try:
            for tries_left in reversed(range(POLITE_TRIES)):
                with self._http.stream(
                    "GET", url, headers={"Accept-Encoding": "identity"}
                ) as response:
                    if response.status_code == 200:
                        yield from response.iter_raw(1 << 18)
                        return
                    if response.status_code != httpx.codes.TOO_MANY_REQUESTS or not tries_left:
                        raise from_problem(response.status_code, _content(response))
                self._sleep(_pause(response))
        except httpx.TransportError as error:
            raise UnavailableError(f"{urlsplit(url).netloc} does not answer: {error}") from error


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        fine = False
    if not fine:
        raise UserError(
            f"the orchestrator's address {url[:200]!r} is no URL",
            hint="write it like http://HOST:PORT",
        )
    return url.rstrip("/")


def _parse(answer: type[Answer], raw: bytes) -> Answer:
    try:
        return answer.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError(f"the answer is not a {answer.__name__}: {error}") from error


def _content(response: httpx.Response) -> bytes:
    """The body, read no further than MAX_ANSWER_BYTES. Raises MalformedError beyond.

    A compressed body is not looked at: we asked for none, and a few bytes may unfold to gigabytes.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        if response.status_code >= 300:
            return b""  # the status says enough
        raise MalformedError("the answer is compressed, which was not asked for")
    content = bytearray()
    for block in response.iter_bytes():
        content += block
        if len(content) > MAX_ANSWER_BYTES:
            raise MalformedError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _pause(response: httpx.Response) -> float:
    """Seconds that a 429 asks us to wait (RFC 9110, Retry-After as a number), bounded."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked), LONGEST_PAUSE) if asked.isdigit() else 1.0


class Empty(Strict):
    """An answer without content: {}."""
