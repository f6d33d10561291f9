"""The gateway's tools: reads of web pages, of one OpenAPI operation, or of one MCP tool.

Each call is one or a few requests with bounds on bytes and total time. The address is checked when
the connection is made, so a name that resolves to a private address later is refused as well. What
a server says is an answer, errors included; if it says nothing, there is no answer. Nor is there
one if the operator's settings are wrong: a server that refuses the secret or has no public address.

MCP is spoken here as JSON-RPC over HTTP (initialize, tools/list, tools/call). The package `mcp`
brings a server and its own HTTP client, which could not be held to these bounds.
"""

from __future__ import annotations

import codecs
import html
import http.client
import ipaddress
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from email.message import Message
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import quote, urlencode, urljoin, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from prime_core.errors import UnavailableError, UserError
from prime_core.given import read_given
from prime_core.settings import UserPath
from prime_core.transport.addresses import (
    DEFAULT_PORTS,
    NoHostError,
    PrivateAddressError,
    addresses_of,
    authority,
    is_public,
)
from prime_envs.tools import TOOL_ERROR

log = logging.getLogger(__name__)

MAX_BODY = 1 << 20
"""Bytes of a response that are read; the rest is left out."""
SECONDS = 10.0
"""For all requests of one call, from the first connection to the last byte."""
MAX_REDIRECTS = 3
MAX_URL = 2048
AGENT = "prime-gateway"
MCP_VERSION = "2025-06-18"
CHARSETS = frozenset(
    codecs.lookup(name).name
    for name in (
        "utf-8", "us-ascii", "iso-8859-1", "iso-8859-15", "windows-1252", "windows-1251", "utf-16",
        "shift_jis", "euc-jp", "euc-kr", "gb2312", "gbk", "gb18030", "big5",
    )
)  # fmt: skip
"""Charsets that a page may name. Python has others that are slow (punycode) or no charsets."""
_CHARSET = re.compile(r"charset=[\"']?([A-Za-z0-9_-]{1,20})", re.IGNORECASE)


class ToolError(Exception):
    """An answer that reports an error, worded for the model."""


class SettingsError(UnavailableError):
    """There is no answer until the operator corrects the tool's settings."""


class HostError(Exception):
    """The host of a URL does not exist, or has a private address; worded for the model."""


class _Tool(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _WithSecret(_Tool):
    header: str = Field(default="Authorization", pattern=r"^[A-Za-z0-9-]{1,64}$")
    secret_file: UserPath | None = None
    """File with the value of that header."""

    def headers(self) -> dict[str, str]:
        """The header with the secret, if there is one. Raises UserError for an unreadable file or
        one whose content is not a header's value; the error does not contain it."""
        if self.secret_file is None:
            return {}
        hint = f"write the value of the header {self.header} into it, nothing else"
        raw = read_given(self.secret_file, "secret file", hint, limit=64 << 10)
        secret = raw.decode("ascii", "replace").strip()
        if not (secret and secret.isascii() and secret.isprintable()):
            raise UserError(f"{self.secret_file} is not one line of printable ASCII", hint=hint)
        return {self.header: secret}


_NAME = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*"
_HOST = re.compile(rf"\*\.{_NAME}|(?:{_NAME}|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{{0,4}}))?")


def _host(text: str) -> str:
    """An allowed host in lower case. Raises ValueError for what no URL's host can equal."""
    host = text.strip().lower()
    found = _HOST.fullmatch(host)
    if found is None or int(found["port"] or 1) > 65_535:
        raise ValueError(
            f"{text[:100]!r} is not a host; write en.wikipedia.org, *.example.org or "
            "example.org:8443, in ASCII, without http:// and path"
        )
    if found["port"] and int(found["port"]) in DEFAULT_PORTS.values():
        raise ValueError(f"{text[:100]!r} names a default port; leave out :{found['port']}")
    return host


class FetchTool(_Tool):
    """Reads a page whose URL the model names (argument `url` or `input`)."""

    kind: Literal["fetch"]
    hosts: tuple[Annotated[str, AfterValidator(_host)], ...] = Field(min_length=1, max_length=1024)
    """Allowed hosts: "en.wikipedia.org", "*.example.org", or "example.org:8443" with a port other
    than 80 and 443."""


class OpenApiTool(_WithSecret):
    """Calls one GET operation of an OpenAPI 3 document in JSON."""

    kind: Literal["openapi"]
    document: UserPath
    operation: str = Field(min_length=1, max_length=256)
    """Its operationId."""
    server: str = Field(default="", max_length=512)
    """URL of the server; by default the document's first one."""


class McpTool(_WithSecret):
    """Calls one tool of an MCP server that states that the tool only reads (`readOnlyHint`)."""

    kind: Literal["mcp"]
    url: str = Field(pattern=r"^https?://", max_length=512)
    tool: str = Field(min_length=1, max_length=256)


ToolSettings = Annotated[FetchTool | OpenApiTool | McpTool, Field(discriminator="kind")]


class Upstream(Protocol):
    """A tool of the gateway."""

    def answer(self, arguments: Mapping[str, str]) -> str:
        """The answer's text. Raises ToolError for an answer that reports an error,
        UnavailableError if there is no answer."""
        ...


@dataclass(frozen=True)
class Page:
    """A response; `body` is cut at MAX_BODY bytes."""

    status: int
    headers: Message
    body: bytes

    def text(self) -> str:
        """The body as text; of HTML, the visible text. Raises ToolError if it is not text."""
        kind = self.headers.get_content_type()
        if not (kind.startswith("text/") or kind.endswith(("json", "xml"))):
            raise ToolError(f"the page is not text but {kind[:64]!a}")
        text = self.body.decode(_charset(self.headers.get("Content-Type", "")), "replace")
        return visible(text) if kind == "text/html" else text


def _charset(content_type: str) -> str:
    """The charset that a Content-Type names if it is one of CHARSETS, else UTF-8.

    Message.get_content_charset is not used: it decodes with any codec that the header names.
    """
    named = _CHARSET.search(content_type)
    try:
        found = codecs.lookup(named[1]).name if named else "utf-8"
    except LookupError:
        found = "utf-8"
    return found if found in CHARSETS else "utf-8"


@dataclass(frozen=True)
class Web:
    """Makes the requests. `loopback`: this machine's own addresses are allowed (a local chain).
    `seconds`: for each request, or together for those until `end` (time.monotonic; None: none)."""

    loopback: bool = False
    seconds: float = SECONDS
    end: float | None = None

    def for_one_call(self) -> Web:
        """The same for the requests of one call, which have `seconds` together."""
        return replace(self, end=time.monotonic() + self.seconds)

    def send(
        self,
        method: Literal["GET", "POST"],
        url: str,
        headers: Mapping[str, str] = {},
        body: bytes | None = None,
    ) -> Page:
        """Sends one request. Raises ToolError for a URL that is not allowed, HostError for a host
        without a public address, UnavailableError if no response comes in time."""
        target = _parts(url)
        secure = target.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        port = target.port or kind.default_port  # http.client cuts an IPv6 address without one
        connection = kind(target.hostname or "", port, timeout=self.seconds)
        guard = _Guard(self)
        connection._create_connection = guard.connect  # type: ignore[attr-defined]
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        sent = {"User-Agent": AGENT, "Accept-Encoding": "identity", **headers}
        try:
            with guard:
                connection.request(method, path, body, sent)
                response = connection.getresponse()
                found = response.read(MAX_BODY)
        except PrivateAddressError as error:
            raise HostError("the host is not allowed") from error
        except NoHostError as error:
            raise HostError("there is no such host") from error
        except (OSError, ssl.CertificateError, http.client.HTTPException) as error:
            raise UnavailableError(f"{target.hostname} does not answer: {error!r}") from error
        finally:
            connection.close()
        if guard.expired:
            raise UnavailableError(f"{target.hostname} did not answer in {self.seconds:g} s")
        if response.length and len(found) < MAX_BODY:  # bytes that it announced and did not send
            raise UnavailableError(f"{target.hostname} ended in the middle of its response")
        if response.status >= 500 or response.status == 429:
            raise UnavailableError(f"{target.hostname} answered {response.status}")
        return Page(response.status, response.headers, found)

    def ask_own(
        self,
        method: Literal["GET", "POST"],
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> Page:
        """Sends one request to a server that the settings name. Raises SettingsError if that server
        has no public address or refuses the secret, and the same errors as `send`."""
        host = _parts(url).hostname
        try:
            page = self.send(method, url, headers, body)
        except HostError as error:
            raise SettingsError(f"{host} cannot be asked: {error}") from error
        if page.status in (401, 403, 407):
            raise SettingsError(f"{host} refuses the request's secret ({page.status})")
        return page


class _Guard:
    """Connects to allowed addresses only, and ends the connection when the time is over."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._end = time.monotonic() + web.seconds if web.end is None else web.end
        self._timer = threading.Timer(max(0.0, self._left()), self._expire)
        self._socket: socket.socket | None = None
        self.expired = False

    def __enter__(self) -> _Guard:
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._socket is not None:
            self._socket.close()

    def connect(
        self, address: tuple[str, int], timeout: float | None, source: tuple[str, int] | None
    ) -> socket.socket:
        """`socket.create_connection` to the addresses that were checked, one after another, IPv4
        first: this machine may have no route for IPv6. Each gets an equal part of the time left.
        Raises the last one's OSError."""
        looking = ThreadPoolExecutor(1)
        try:
            found = looking.submit(addresses_of, address[0]).result(self._left())
        finally:
            looking.shutdown(wait=False)
        for one in found:
            local = self._web.loopback and ipaddress.ip_address(one.split("%")[0]).is_loopback
            if not (local or is_public(one)):
                raise PrivateAddressError(f"{address[0]} is the private address {one}")
        last: OSError = TimeoutError("no time is left to connect")
        for place, one in enumerate(sorted(found, key=lambda one: ":" in one)):
            part = self._left() / (len(found) - place)
            if part <= 0:
                break
            try:
                connection = socket.create_connection((one, address[1]), part, source)
            except OSError as error:
                last = error
                continue
            connection.settimeout(timeout)
            self._socket = connection.dup()  # shutdown through it also ends a TLS connection
            if self.expired:  # before the timer could see the socket
                connection.close()
                break
            return connection
        raise last

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _expire(self) -> None:
        self.expired = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has ended by itself


def _parts(url: str) -> Any:
    """Raises ToolError for what is not a URL that may be read."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port != 0
        host = parts.hostname or ""
    except ValueError as error:
        raise ToolError("this is not a URL") from error
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL
    if not (plain and port_is_valid and host and parts.scheme in ("http", "https")):
        raise ToolError("this is not an http:// or https:// URL in ASCII")
    if "@" in parts.netloc:
        raise ToolError("a URL with a user name is not allowed")
    return parts


_HIDDEN = re.compile(r"(script|style|noscript|template|title)(?![a-z0-9])", re.IGNORECASE)


def visible(page: str) -> str:
    """The text of an HTML page, one line for each piece between tags, without scripts and styles.

    Takes time linear in the page's length. html.parser does not: 256 KiB of "<a " take minutes.
    """
    pieces, at = [], 0
    while (start := page.find("<", at)) >= 0:
        pieces.append(page[at:start])
        if page.startswith("<!--", start):
            end = page.find("-->", start + 4)
            at = end + 3
        else:
            end = page.find(">", start)
            at = end + 1
            if end >= 0 and (hidden := _HIDDEN.match(page, start + 1)):
                closing = re.compile(f"</{hidden[1]}", re.IGNORECASE).search(page, at)
                end = at = -1 if closing is None else closing.start()
        if end < 0:
            break
    else:
        pieces.append(page[at:])
    lines = (" ".join(html.unescape(piece).split()) for piece in pieces)
    return "\n".join(line for line in lines if line)


def make(settings: FetchTool | OpenApiTool | McpTool, web: Web) -> Upstream:
    """The tool of these settings. Raises UserError for a document or file that cannot be used."""
    match settings:
        case FetchTool():
            return Fetch(settings.hosts, web)
        case OpenApiTool():
            return OpenApi(settings, web)
        case McpTool():
            return Mcp(settings, web)


@dataclass(frozen=True)
class Fetch:
    """See FetchTool."""

    hosts: tuple[str, ...]
    web: Web

    def answer(self, arguments: Mapping[str, str]) -> str:
        """See Upstream. Redirects are followed to allowed hosts."""
        url, web = arguments.get("url", arguments.get("input", "")).strip(), self.web.for_one_call()
        for _ in range(MAX_REDIRECTS + 1):
            parts = _parts(url)
            if not self._allows(authority(url), parts.hostname):
                raise ToolError(f"the host {parts.hostname[:200]!a} is not allowed")
            try:
                page = web.send("GET", url)
            except HostError as error:
                raise ToolError(str(error)) from error
            if page.status not in (301, 302, 303, 307, 308):
                break
            try:
                url = urljoin(url, page.headers.get("Location", ""))
            except ValueError as error:
                raise ToolError("the page redirects to what is not a URL") from error
        else:
            raise ToolError("the page redirects too often")
        if page.status != 200:
            raise ToolError(f"the site answered {page.status}")
        return page.text()

    def _allows(self, place: str, host: str) -> bool:
        return any(
            place == one or (one.startswith("*.") and place.endswith(one[1:]) and place == host)
            for one in self.hosts
        )


class OpenApi:
    """See OpenApiTool."""

    def __init__(self, settings: OpenApiTool, web: Web) -> None:
        hint = "give a document in JSON; name its server by `server`"
        raw = read_given(settings.document, "OpenAPI document", hint)
        try:
            document = json.loads(raw)
            self._path, self._parameters = _operation(document, settings.operation)
            self._server = settings.server or str(document["servers"][0]["url"])
            if _parts(self._server).query:
                raise ToolError("a server's URL has no query")
        except (ValueError, LookupError, TypeError, AttributeError, ToolError) as error:
            raise UserError(
                f"{settings.document} is not an OpenAPI document with the operation "
                f"{settings.operation!r} and a server: {error!r}",
                hint=hint,
            ) from error
        self._headers, self._web = settings.headers(), web

    def answer(self, arguments: Mapping[str, str]) -> str:
        """See Upstream."""
        given = _named(arguments, self._parameters)
        path, query = self._path, {}
        for name, value in given.items():
            if self._parameters[name].get("in") == "path":
                if value in ("", ".", ".."):
                    raise ToolError(f"{name!a} has no valid value")
                path = path.replace(f"{{{name}}}", quote(value, safe=""))
            else:
                query[name] = value
        url = self._server.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        page = self._web.ask_own("GET", url, self._headers)
        if page.status != 200:
            raise ToolError(f"the server answered {page.status}")
        return page.text()


def _operation(document: Any, wanted: str) -> tuple[str, dict[str, Any]]:
    """Path and parameters (path and query) of the operation. Raises LookupError if it is absent
    or no GET operation."""
    for path, item in document["paths"].items():
        operation = item.get("get", {})
        if operation.get("operationId") == wanted:
            every = [*item.get("parameters", []), *operation.get("parameters", [])]
            found = {one["name"]: one for one in every if one.get("in") in ("path", "query")}
            return str(path), found
    raise LookupError(f"no GET operation {wanted!r}")


def _named(arguments: Mapping[str, str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The arguments by parameter. A lone `input` is the first required parameter, or the first.
    Raises ToolError for a missing or unknown one."""
    needed = [name for name, one in known.items() if one.get("required")]
    given = dict(arguments)
    if set(given) == {"input"} and "input" not in known and known:
        given = {(needed or list(known))[0]: given["input"]}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ToolError(f"there is no argument {unknown[0][:64]!a}")
    missing = [name for name in needed if name not in given]
    if missing:
        raise ToolError(f"the argument {missing[0][:64]!a} is missing")
    return given


@dataclass(frozen=True)
class _Session:
    """One call to an MCP server, and the headers that its server wants from then on."""

    web: Web
    headers: dict[str, str] = field(default_factory=dict)


class Mcp:
    """See McpTool. One session a call: initialize, tools/list, tools/call."""

    def __init__(self, settings: McpTool, web: Web) -> None:
        self._settings, self._web = settings, web
        self._headers = settings.headers()
        try:
            self._host = _parts(settings.url).hostname  # the URL may hold a secret
        except ToolError as error:
            raise UserError(f"the URL of the MCP server: {error}") from error

    def answer(self, arguments: Mapping[str, str]) -> str:
        """See Upstream. Raises UnavailableError also if the server does not speak MCP, and
        SettingsError if it has no such tool or does not state that it only reads."""
        session = _Session(self._web.for_one_call())
        hello = {
            "protocolVersion": MCP_VERSION, "capabilities": {},
            "clientInfo": {"name": AGENT, "version": "1"},
        }  # fmt: skip
        try:
            agreed = self._ask(1, "initialize", hello, session)
            session.headers["MCP-Protocol-Version"] = str(agreed["protocolVersion"])
            self._post({"method": "notifications/initialized"}, session)
            schema = self._schema(session)
            given = _named(arguments, schema)
            typed = {name: _typed(name, value, schema[name]) for name, value in given.items()}
            call = {"name": self._settings.tool, "arguments": typed}
            found = self._ask(99, "tools/call", call, session)
            texts = [str(one["text"]) for one in found["content"] if one.get("type") == "text"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            kind = type(error).__name__  # its text may hold a secret
            raise UnavailableError(f"{self._host} does not speak MCP: {kind}") from error
        text = "\n".join(texts).encode("utf-8", "replace").decode()
        if found.get("isError"):
            raise ToolError(text)
        return text

    def _schema(self, session: _Session) -> dict[str, dict[str, Any]]:
        cursor: dict[str, Any] = {}
        for page in range(2, 12):
            listed = self._ask(page, "tools/list", cursor, session)
            for tool in listed["tools"]:
                if tool["name"] != self._settings.tool:
                    continue
                if (tool.get("annotations") or {}).get("readOnlyHint") is not True:
                    raise SettingsError(
                        f"{self._host} does not state that {self._settings.tool} only reads"
                    )
                schema = tool["inputSchema"]
                needed = schema.get("required", [])
                return {
                    name: {**one, "required": name in needed}
                    for name, one in schema.get("properties", {}).items()
                }
            if not listed.get("nextCursor"):
                break
            cursor = {"cursor": listed["nextCursor"]}
        raise SettingsError(f"{self._host} has no tool {self._settings.tool}")

    def _ask(self, number: int, method: str, params: Any, session: _Session) -> Any:
        page = self._post({"id": number, "method": method, "params": params}, session)
        answer = _message(page, number)
        if "error" in answer:
            raise ToolError(str(answer["error"].get("message", "the server refused"))[:512])
        return answer["result"]

    def _post(self, message: Mapping[str, Any], session: _Session) -> Page:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            **self._headers,
            **session.headers,
        }
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        page = session.web.ask_own("POST", self._settings.url, headers, body)
        if page.status not in (200, 202):
            raise UnavailableError(f"{self._host} answered {page.status}")
        if name := page.headers.get("Mcp-Session-Id"):
            session.headers["Mcp-Session-Id"] = name
        return page


def _message(page: Page, number: int) -> Any:
    """The JSON-RPC response in a page: JSON, or one event of a stream. Raises ValueError."""
    text = page.body.decode("utf-8", "replace")
    if page.headers.get_content_type() != "text/event-stream":
        return json.loads(text)
    for event in text.replace("\r\n", "\n").split("\n\n"):
        lines = [one[5:].strip() for one in event.split("\n") if one.startswith("data:")]
        if lines and (found := json.loads("\n".join(lines))).get("id") == number:
            return found
    raise ValueError("the stream has no response")


def _typed(name: str, value: str, schema: Mapping[str, Any]) -> Any:
    """A model's argument, which is text, as its schema's type. Raises ToolError."""
    kinds: dict[str, Any] = {"integer": int, "number": float, "boolean": json.loads}
    kind = schema.get("type")
    if isinstance(kind, list):  # such as ["string", "null"]
        kind = next((one for one in kind if one != "null"), None)
    try:
        return kinds[kind](value) if kind in kinds else value
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{name[:64]!a} is not of type {kind}") from error


def bounded(text: str, most: int) -> str:
    """At most `most` UTF-8 bytes of the text, which is made Unicode where it is none."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")


def answer_of(upstream: Upstream, arguments: Mapping[str, str], most: int) -> str:
    """The final text of a call, errors included. Raises UnavailableError if there is none.

    A page is the site's choice: one on which Python's parsers fail is an answer, the same again.
    """
    try:
        return bounded(upstream.answer(arguments), most)
    except ToolError as error:
        return bounded(f"{TOOL_ERROR}{error}", most)
    except (ValueError, LookupError, RecursionError) as error:
        log.warning("a page cannot be read: %s", type(error).__name__)
        return bounded(f"{TOOL_ERROR}the page cannot be read", most)
