"""Client of the orchestrator, used by node agent, trainer, relay, auditor and devnet.

Use each instance from one thread only. A session is opened on the first signed request and renewed
before it ends; the account's key only signs the grant.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

from pydantic import TypeAdapter, ValidationError

from prime_core import ids, version
from prime_core.clock import Clock
from prime_core.errors import (
    MalformedError,
    ProtocolError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import Address, Digest
from prime_core.messages import (
    NODES_PAGE,
    SUBMISSIONS_PAGE,
    NodeInfo,
    PoolInfo,
    SessionAnswer,
    SessionRequest,
    SubmissionInfo,
    UploadAnswer,
)
from prime_core.node import SessionGrant
from prime_core.signing import Answer, ContractName, Domain, Signer, Strict
from prime_core.storage.base import CHECKSUM_HEADER
from prime_core.transport.addresses import (
    authority,
    is_loopback,
)
from prime_core.transport.problems import from_problem
from prime_core.transport.signatures import MAX_SKEW_SECONDS, SessionKey, sign_headers
from prime_core.version import SPOKEN

# httpx imports its own command line (click, rich, pygments: 0.2 s of CPU) wherever it finds them.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
import httpx  # noqa: E402

from prime_core.transport.paced import at_public_address, paced_client  # noqa: E402

Model = TypeVar("Model", bound=Strict)
_NODES = TypeAdapter(list[NodeInfo])
_SUBMISSIONS = TypeAdapter(list[SubmissionInfo])
_ARCHIVED = re.compile(r'[?&]archived=([0-9]{1,18})>; rel="next"')
UPLOAD_TYPE = "application/octet-stream"
MAX_ANSWER_BYTES = 8 << 20
SESSION_SECONDS = 12 * 3600
POLITE_TRIES = 8
LONGEST_PAUSE = 5.0
SLOWEST = 32 << 10
"""Bytes per second. An answer, head included, that takes longer than `timeout` and what this rate
allows is given up: a server that sends a byte now and then must not hold its reader."""


class _Reply(NamedTuple):
    status_code: int
    headers: httpx.Headers
    content: bytes


class OrchestratorClient:
    """Signed and unsigned requests to one orchestrator.

    `signer` may be None for readers. `timeout`: seconds for each step of an exchange; a whole
    answer takes at most that and what SLOWEST allows. Raises UserError if `base_url` is not an
    http(s) URL. Every method raises UnavailableError if the orchestrator does not answer,
    ProtocolError if there is no common version, and the error named in the problem document if the
    request is refused.
    """

    named: ClassVar[bool] = False
    """Whether another party named `base_url`, so that it must not lead to a private address."""

    def __init__(
        self,
        base_url: str,
        signer: Signer | None = None,
        scope: str = "node",
        *,
        timeout: float = 30.0,
        allow_private: bool = False,
        clock: Clock = Clock(),
    ) -> None:
        self.base_url = _checked_url(base_url)
        self.signer = signer
        self.scope = scope
        self._clock = clock
        self.allows_private = allow_private or (not self.named and is_loopback(self.base_url))
        self._trusted = "" if self.named else authority(self.base_url)
        self._http = paced_client(timeout, seconds=timeout, rate=SLOWEST)
        self._session: tuple[SessionKey, int] | None = None
        self._pool: PoolInfo | None = None
        self._protocol = SPOKEN[-1]

    def __enter__(self) -> OrchestratorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- requests common to all clients --------------------------------------------------------

    def pool(self, *, refresh: bool = False) -> PoolInfo:
        """The pool's public facts, cached after the first call. Raises UntrustedError if the
        orchestrator's stated URL differs from the one given to this client."""
        if self._pool is None or refresh:
            pool = self.get("/v1/pool", PoolInfo)
            if _identity(pool.orchestrator) != _identity(self.base_url):
                raise UntrustedError(
                    f"the server at {self.base_url} says that it is {pool.orchestrator}: something "
                    "stands between, or the orchestrator has another name; use --orchestrator "
                    f"{pool.orchestrator} if that is the one you mean"
                )
            self._pool = pool
        return self._pool

    def domain(self, contract: ContractName) -> Domain:
        """EIP-712 domain of one of the pool's contracts."""
        pool = self.pool()
        return Domain(chain_id=pool.chain_id, contract=getattr(pool.contracts, contract))

    def submissions(self, node: Address) -> Iterator[SubmissionInfo]:
        """Yields every submission of `node`, newest first; archived ones follow, by page of the
        archive. One that is archived meanwhile may come twice."""
        before, known = "", set[Digest]()
        while True:
            page, newest = self._submissions(node, {"before": before})
            yield from page
            if len(page) < SUBMISSIONS_PAGE:
                break
            before = page[-1].submission_digest
            if before in known:
                raise MalformedError("the list of submissions does not advance")
            known.add(before)
        while newest is not None:
            page, following = self._submissions(node, {"archived": str(newest)})
            yield from page
            if following is not None and following >= newest:
                raise MalformedError("the list of archived submissions does not advance")
            newest = following

    def _submissions(
        self, node: Address, place: dict[str, str]
    ) -> tuple[list[SubmissionInfo], int | None]:
        """A page of a node's submissions, and the page of the archive that the answer names as
        next, if it does."""
        path = f"/v1/submissions?{urlencode({'node': node, **place})}"
        reply = self._exchange("GET", path, b"", {}, signed=False)
        named = _ARCHIVED.search(reply.headers.get("link", ""))
        following = None if named is None else int(named[1])
        return _listed(path, reply.content, _SUBMISSIONS), following

    def _page(self, path: str, kind: TypeAdapter[list[Model]]) -> list[Model]:
        return _listed(path, self.request("GET", path, b"", signed=False), kind)

    def nodes(self, provider: Address | None = None) -> Iterator[NodeInfo]:
        """Yields every node of the pool (or of one provider), by address."""
        after = ""
        while True:
            query = urlencode({"after": after, "provider": provider or ""})
            page = self._page(f"/v1/nodes?{query}", _NODES)
            yield from page
            if len(page) < NODES_PAGE:
                return
            if page[-1].node <= after:
                raise MalformedError("the list of nodes does not advance")
            after = page[-1].node

    def get(self, path: str, answer: type[Model], *, signed: bool = False) -> Model:
        """GETs `path` and parses the response as `answer`."""
        return _parse(answer, self.request("GET", path, b"", signed=signed))

    def get_changed(
        self, path: str, answer: type[Model], tag: str | None
    ) -> tuple[Model, str | None] | None:
        """GETs `path` and returns the parsed response with its entity tag; None if it still matches
        `tag` (RFC 9110 §13.1.2), in which case no body is sent."""
        asked = {"If-None-Match": tag} if tag else {}
        reply = self._exchange("GET", path, b"", asked, signed=False)
        if reply.status_code == httpx.codes.NOT_MODIFIED:
            return None
        given = reply.headers.get("etag", "")
        return _parse(answer, reply.content), given if given.isascii() and given else None

    def post(
        self, path: str, body: Strict | bytes, answer: type[Model], *, signed: bool = True
    ) -> Model:
        """POSTs a model (as JSON) or raw bytes, signed by the session, and parses the response as
        `answer`."""
        return _parse(answer, self.send("POST", path, body, signed=signed))

    def send(
        self, method: str, path: str, body: Strict | bytes = b"", *, signed: bool = True
    ) -> bytes:
        """Like `post` with any method; returns the raw response."""
        raw = body if isinstance(body, bytes) else body.model_dump_json().encode()
        return self.request(method, path, raw, signed=signed)

    def request(self, method: str, path: str, body: bytes, *, signed: bool) -> bytes:
        """Sends one request and returns the response body. Retries once with a new session if the
        server no longer knows the session, or once with an older common protocol version."""
        return self._exchange(method, path, body, {}, signed=signed).content

    # -- objects and signed URLs --------------------------------------------------------------

    def get_object(self, digest: Digest, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """Fetches an object named by its SHA-256 through the orchestrator's redirect and checks the
        digest."""
        response = self._exchange("GET", f"/v1/objects/{digest}", b"", {}, signed=False)
        if response.status_code != httpx.codes.TEMPORARY_REDIRECT:
            raise MalformedError(f"the answer about an object has status {response.status_code}")
        location = response.headers.get("location", "")
        return self.download(location, limit=limit, sha256=digest)

    def download(self, url: str, *, limit: int, sha256: Digest | None = None) -> bytes:
        """GETs a signed URL, at most `limit` bytes. Raises UntrustedError on a wrong digest."""
        data = bytearray()
        for block in self._stream(self._absolute(url)):
            data += block
            if len(data) > limit:
                raise MalformedError(f"the object is larger than {limit} bytes")
        if sha256 is not None and ids.digest(hashlib.sha256(data).digest()) != sha256:
            raise UntrustedError(f"the downloaded object is not {sha256}")
        return bytes(data)

    def upload(self, target: UploadAnswer, body: bytes | Path) -> None:
        """PUTs a file to a signed URL. We set the headers, not the party that provides the URL."""
        content = body.read_bytes() if isinstance(body, Path) else body
        headers = {
            "Content-Type": UPLOAD_TYPE,
            "Content-Length": str(len(content)),
            CHECKSUM_HEADER: base64.b64encode(hashlib.sha256(content).digest()).decode(),
        }
        response = self._send("PUT", self._absolute(target.url), content, headers)
        if response.status_code not in (200, 201, 204):
            raise from_problem(response.status_code, response.content)

    def post_to(self, url: str, body: Strict, answer: type[Model]) -> Model:
        """POSTs a model to another server of the pool, whose URL the run names, and parses the
        response. Thread-safe, as it is not signed by a session."""
        headers = {version.HEADER: str(self._protocol), "Content-Type": "application/json"}
        raw = body.model_dump_json().encode()
        response = self._send("POST", self._absolute(url), raw, headers)
        if response.status_code != httpx.codes.OK:
            raise from_problem(response.status_code, response.content)
        return _parse(answer, response.content)

    # -- below ---------------------------------------------------------------------------------

    def _absolute(self, url: str) -> str:
        """A URL that the orchestrator named. Raises MalformedError if it is none."""
        whole = self.base_url + url if url.startswith("/") else url
        if not _is_url(whole):
            raise MalformedError(
                f"the orchestrator at {self.base_url} named {url[:200]!r} as a URL"
            )
        return whole

    def _exchange(
        self, method: str, path: str, body: bytes, fields: dict[str, str], *, signed: bool
    ) -> _Reply:
        try:
            return self._once(method, path, body, fields, signed)
        except ProtocolError as error:
            both = version.common(error.spoken, SPOKEN)
            if both is None or both == self._protocol:
                raise
            self._protocol = both
        except UntrustedError:
            if not signed or self._session is None:
                raise
            self._session = None
        return self._once(method, path, body, fields, signed)

    def _once(
        self, method: str, path: str, body: bytes, fields: dict[str, str], signed: bool
    ) -> _Reply:
        """One exchange; a redirect and "not modified" count as responses."""
        url = self.base_url + path
        headers = {version.HEADER: str(self._protocol), **fields}
        if body:
            headers["Content-Type"] = "application/json"
        if signed:
            key = self._open_session()
            headers |= sign_headers(
                key, method, url, body, now=self._clock.now(), nonce=secrets.token_urlsafe(18)
            )
        reply = self._send(method, url, body, headers)
        if reply.status_code >= 400:
            error = from_problem(reply.status_code, reply.content)
            if isinstance(error, UntrustedError):
                self._check_clocks(reply, error)
            raise error
        version.check_answer(
            reply.headers.get(version.HEADER),
            self._protocol,
            f"the orchestrator at {self.base_url}",
        )
        return reply

    def _check_clocks(self, reply: _Reply, refusal: UntrustedError) -> None:
        """Raises UnavailableError if a wrong clock, of this machine or of the server, explains why
        a signature was refused: the request may be repeated once the clock is right."""
        try:
            theirs = parsedate_to_datetime(reply.headers.get("date", "")).timestamp()
        except (ValueError, OverflowError):
            return
        if (ahead := round(self._clock.now() - theirs)) and abs(ahead) > MAX_SKEW_SECONDS:
            raise UnavailableError(
                f"this machine's clock is {abs(ahead)} s {'ahead of' if ahead > 0 else 'behind'} "
                f"that of {self.base_url}: one of them is wrong ({refusal})"
            ) from refusal

    def _open_session(self) -> SessionKey:
        if self._session is not None and self._session[1] > self._clock.now() + 300:
            return self._session[0]
        if self.signer is None:
            raise UntrustedError("this client has no key to sign with")
        pool, key, now = self.pool(), SessionKey.generate(), int(self._clock.now())
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
        answer = _parse(SessionAnswer, self.request("POST", "/v1/sessions", raw, signed=False))
        self._session = (key, answer.expiry)
        return key

    def _send(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> _Reply:
        """One exchange; retries on 429 after the delay that the server asks for.

        The server refuses before it checks the signature, so its nonce is still unused.
        """
        try:
            for _ in range(POLITE_TRIES):
                asked = {"Accept-Encoding": "identity", **headers}
                with self._open(method, url, asked, body) as response:
                    reply = _Reply(response.status_code, response.headers, self._content(response))
                if reply.status_code != httpx.codes.TOO_MANY_REQUESTS:
                    break
                self._clock.sleep(_pause(response))
            return reply
        except httpx.InvalidURL as error:  # of a name that the server gave
            raise MalformedError(f"{url[:200]!r} is not a URL") from error
        except httpx.TransportError as error:
            raise UnavailableError(f"{urlsplit(url).netloc} does not answer: {error}") from error

    @contextmanager
    def _open(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None = None
    ) -> Iterator[httpx.Response]:
        """Sends one request. Hosts other than the orchestrator's own are contacted only at public
        addresses, unless private ones are allowed. Raises UntrustedError for a private one."""
        target, extensions = httpx.URL(url), {}
        if not self.allows_private and authority(url) != self._trusted:
            target = at_public_address(target)
            headers = {**headers, "Host": authority(url)}
            extensions = {"sni_hostname": httpx.URL(url).host}
        with self._http.stream(
            method, str(target), content=body, headers=headers, extensions=extensions
        ) as response:
            yield response

    def _stream(self, url: str) -> Iterator[bytes]:
        try:
            for tries_left in reversed(range(POLITE_TRIES)):
                with self._open("GET", url, {"Accept-Encoding": "identity"}) as response:
                    if response.status_code == 200:
                        yield from response.iter_raw()
                        return
                    if response.status_code != httpx.codes.TOO_MANY_REQUESTS or not tries_left:
                        raise from_problem(response.status_code, self._content(response))
                self._clock.sleep(_pause(response))
        except httpx.TransportError as error:
            raise UnavailableError(f"{urlsplit(url).netloc} does not answer: {error}") from error

    def _content(self, response: httpx.Response) -> bytes:
        """Reads the body, up to MAX_ANSWER_BYTES. Raises MalformedError beyond.

        A compressed body is rejected: none was requested, and a few bytes may expand to gigabytes.
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


def run_bytes(client: OrchestratorClient, digest: Digest) -> bytes:
    """Fetches the bytes of one definition of the pool's run. Raises UntrustedError if they do not
    match the digest, NotFoundError if the orchestrator has none."""
    raw = client.request("GET", f"/v1/runs/{digest}", b"", signed=False)
    if ids.digest(hashlib.sha256(raw).digest()) != digest:
        raise UntrustedError(f"the orchestrator's run definition is not {digest}")
    return raw


def _identity(url: str) -> str:
    try:
        return f"{urlsplit(url).scheme}://{authority(url)}{urlsplit(url).path.rstrip('/')}"
    except ValueError:
        return url


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        httpx.URL(url).host.encode("idna")  # as the socket does; httpx fails on such as xn--
        http = parts.scheme in ("http", "https") and parts.port != 0
        return http and bool(host) and host.isascii()
    except (ValueError, httpx.InvalidURL):
        return False


def _checked_url(url: str) -> str:
    if not _is_url(url):
        raise UserError(
            f"the orchestrator's address {url[:200]!r} is not a URL",
            hint="write it like http://HOST:PORT",
        )
    return url.rstrip("/")


def _parse(answer: type[Model], raw: bytes) -> Model:
    try:
        return answer.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError(f"the answer is not a {answer.__name__}: {error}") from error


def _listed(path: str, raw: bytes, kind: TypeAdapter[list[Model]]) -> list[Model]:
    try:
        return kind.validate_json(raw)
    except ValidationError as error:
        raise MalformedError(f"{path} was answered by something else: {error}") from error


def _pause(response: httpx.Response) -> float:
    """Seconds that a 429 asks us to wait (RFC 9110, numeric Retry-After), bounded."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked), LONGEST_PAUSE) if asked.isascii() and asked.isdigit() else 1.0


class Empty(Answer):
    """A response without content: {}."""
