"""What every request passes first, before FastAPI.

One ASGI application does it all: each middleware more costs a request two coroutines, and copies of
its headers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_broadcast.http1 import RateLimit
from prime_broadcast.peers import place_of
from prime_core.errors import PrimeError, ProtocolError, UnavailableError
from prime_core.version import HEADER, agree
from prime_orchestrator.api.connections import Proxies
from prime_orchestrator.api.metrics import RequestCounts
from prime_orchestrator.api.routes.http import defect, problem, refusal

Endpoint = Callable[[Request], Awaitable[Response]]
_HEADER = HEADER.lower().encode()


class Entry:
    """Finds a request's client behind trusted proxies, limits its rate, agrees on the protocol
    version, names it in the answer, and counts the answer. Under IPv6 each /64 network counts as
    one client, since its holder has 2^64 addresses.

    A request that changes something must name its version. A read without one (a browser, curl) is
    answered in the newest. Signed URLs (/v1/store/) name none: any object store may serve them.

    `direct`: routes that are called without FastAPI's routing and dependencies, which cost several
    times what these routes do. The same functions are routes of the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: Sequence[APIRoute],
        *,
        requests: RequestCounts,
        rate: RateLimit,
        proxies: Proxies,
        spoken: range,
    ) -> None:
        self._app = app
        self._requests = requests
        self._rate = rate
        self._proxies = proxies
        self._spoken = spoken
        self._fixed: dict[tuple[str, str], Endpoint] = {}
        self._patterns = []
        for route in direct:
            for method in route.methods or ():
                if "{" in route.path:
                    self._patterns.append((method, route.path_regex, route.endpoint))
                else:
                    self._fixed[method, route.path] = route.endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked: str | None = None
        forwarded: list[str] = []
        for name, value in scope["headers"]:
            if name == _HEADER:
                asked = value.decode("latin-1") if asked is None else asked
            elif name == b"x-forwarded-for":
                forwarded.append(value.decode("latin-1"))
        host, port = scope.get("client") or ("?", 0)
        if forwarded and scope.get("client"):
            host = self._proxies.client(host, forwarded)
            scope["client"] = (host, port)
        method, path = scope["method"], scope["path"]
        agreed, refused = self._spoken[-1], None
        if not self._rate.admits(place_of(host)):
            refused = problem(UnavailableError("too many requests: slow down"), code=429)
        elif (
            path.startswith("/v1/")
            and not path.startswith("/v1/store/")
            and (asked is not None or method not in ("GET", "HEAD"))
        ):
            try:
                agreed = agree(asked, self._spoken)
            except ProtocolError as error:
                refused = problem(error)
        if refused is not None:
            await self._send(refused, scope, send, agreed)
        elif (endpoint := self._endpoint(method, path, scope)) is not None:
            await self._call(endpoint, scope, receive, send, agreed)
        else:
            await self._app(scope, receive, self._named(method, send, agreed))

    def _endpoint(self, method: str, path: str, scope: Scope) -> Endpoint | None:
        """Returns the direct route's function, after writing its path parameters to the scope."""
        endpoint = self._fixed.get((method, path))
        if endpoint is not None:
            scope["path_params"] = {}
            return endpoint
        for its_method, pattern, found in self._patterns:
            if its_method == method and (match := pattern.match(path)):
                scope["path_params"] = match.groupdict()
                return found
        return None

    async def _call(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, agreed: int
    ) -> None:
        try:
            answer = await endpoint(Request(scope, receive))
        except PrimeError as error:
            answer = refusal(error)
        except Exception:
            await self._send(defect(), scope, send, agreed)
            raise  # the server logs it
        await self._send(answer, scope, send, agreed)

    async def _send(self, answer: Response, scope: Scope, send: Send, agreed: int) -> None:
        self._requests.count(scope["method"], answer.status_code)
        headers = _with_version(answer.raw_headers, agreed)
        await send(
            {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        )
        await send({"type": "http.response.body", "body": answer.body})

    def _named(self, method: str, send: Send, agreed: int) -> Send:
        """Returns `send` for an answer of FastAPI."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.count(method, message["status"])
                message["headers"] = _with_version(message.get("headers", ()), agreed)
            await send(message)

        return named


def _with_version(headers: Sequence[tuple[bytes, bytes]], agreed: int) -> list[tuple[bytes, bytes]]:
    return [one for one in headers if one[0] != _HEADER] + [(_HEADER, b"%d" % agreed)]
