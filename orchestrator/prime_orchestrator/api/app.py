"""The API application: routes, problem documents and a rate limit per client. Never imports
torch."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_broadcast.peers import place_of
from prime_core import messages
from prime_core.checkpoint import SignedManifest
from prime_core.errors import PrimeError, ProtocolError, UnavailableError
from prime_core.rollout import SignedSubmission
from prime_core.signing import Strict
from prime_core.transport.problems import CONTENT_TYPE
from prime_core.version import HEADER, SPOKEN, agree
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import ForwardedFor, Proxies
from prime_orchestrator.api.held import HOLD_SECONDS
from prime_orchestrator.api.metrics import RequestCounts
from prime_orchestrator.api.routes import nodes, objects, pool, validators, watch
from prime_orchestrator.api.routes.http import install_problems, problem, refusal
from prime_orchestrator.api.routes.watch import StatusFeed

log = logging.getLogger(__name__)
BODIES: tuple[type[Strict], ...] = (
    messages.SessionRequest,
    messages.RevokeRequest,
    messages.AdmissionRequest,
    messages.CardsCommitment,
    messages.CardsEcho,
    messages.CardsRequest,
    messages.ClassRequest,
    messages.Heartbeat,
    messages.LeaseRequest,
    messages.UploadRequest,
    messages.RelayAnnouncement,
    messages.RevisionRequest,
    SignedManifest,
    SignedSubmission,
    *validators.BODIES,
)
"""Request bodies that routes parse by hand. The OpenAPI document includes them too."""
PROBLEM: dict[str, Any] = {
    "title": "Problem",
    "description": "A problem document (RFC 9457).",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "hint": {"type": "string"},
        "spoken": {"type": "array", "items": {"type": "integer"}},
    },
}
DIRECT = (
    "/v1/heartbeat",
    "/v1/leases",
    "/v1/leases/{digest}/upload",
    "/v1/submissions",
    "/v1/store/{key:path}",
    "/v1/validators/claims",
    "/v1/validators/together",
)
"""Paths of the routes that every file, node or validator uses all the time."""
_PROBLEM_REF = {"$ref": "#/components/schemas/Problem"}


def create_app(
    backend: Backend,
    *,
    requests_per_second: int = 0,
    proxies: Proxies | None = None,
    spoken: range = SPOKEN,
    hold_seconds: float = HOLD_SECONDS,
) -> FastAPI:
    """Returns the ASGI application for one pool. `requests_per_second` 0 disables the rate limit;
    `proxies` are trusted to name their clients; `spoken` are the accepted protocol versions.
    Validators' claims wait up to `hold_seconds` for work."""
    feed, requests = StatusFeed(backend), RequestCounts()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        feed.end()

    app = FastAPI(title="Prime orchestrator", version=_version(), lifespan=lifespan)
    app.state.feed = feed
    install_problems(app)
    often = (
        nodes.router(backend),
        objects.router(backend),
        validators.router(backend, hold_seconds),
    )
    for router in (
        *often,
        pool.router(backend),
        watch.router(backend, feed, requests),
    ):
        app.include_router(router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(Direct, routes=_routes(often, DIRECT))
    app.add_middleware(Versions, spoken=spoken)
    app.add_middleware(Gate, requests=requests, per_second=requests_per_second)
    app.add_middleware(ForwardedFor, proxies=proxies or Proxies())  # the last added runs first
    return app


def _version() -> str:
    try:
        return version("prime-open")
    except PackageNotFoundError:  # running from an uninstalled checkout
        return "0"


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Returns FastAPI's document plus the bodies that routes parse by hand, and the problem
    document of a refusal. FastAPI's own 422 is never answered."""
    document = FastAPI.openapi(app)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = PROBLEM
    refused = {"description": "Refused", "content": {CONTENT_TYPE: {"schema": _PROBLEM_REF}}}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = refused
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, extra = models_json_schema(
        [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
    )
    for name, schema in extra["$defs"].items():
        schemas.setdefault(name, schema)
    return document


def _routes(routers: Sequence[APIRouter], paths: Sequence[str]) -> list[APIRoute]:
    """Returns the routes of these paths that change something. Their functions take only the
    request."""
    return [
        route
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        and route.path in paths
        and not (route.methods or set()) & {"GET", "HEAD"}
    ]


class Direct:
    """Calls the most frequent routes without FastAPI's routing and dependencies, which cost several
    times what the routes do. The same functions are routes of the application."""

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self._app = app
        self._routes = [
            (method, route.path_regex, route.endpoint)
            for route in routes
            for method in route.methods or ()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for method, path, endpoint in self._routes:
                if method == scope["method"] and (found := path.match(scope["path"])):
                    scope["path_params"] = found.groupdict()
                    try:
                        answer = await endpoint(Request(scope, receive))
                    except PrimeError as error:
                        answer = refusal(error)
                    await answer(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class Versions:
    """Refuses requests in a protocol version that the server does not support, and names the
    version in every answer.

    A request that changes something must name its version. A read without one (a browser, curl) is
    answered in the newest. Signed URLs (/v1/store/) name none: any object store may serve them.
    """

    def __init__(self, app: ASGIApp, spoken: range) -> None:
        self._app = app
        self._spoken = spoken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        agreed = self._spoken[-1]

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = str(agreed)
            await send(message)

        asked = Headers(scope=scope).get(HEADER)
        versioned = scope["path"].startswith("/v1/") and not scope["path"].startswith("/v1/store/")
        if versioned and (asked is not None or scope["method"] not in ("GET", "HEAD")):
            try:
                agreed = agree(asked, self._spoken)
            except ProtocolError as error:
                await problem(error)(scope, receive, naming)
                return
        await self._app(scope, receive, naming)


class Gate:
    """Counts answers and limits each client address by a token bucket that holds two seconds of
    requests. Under IPv6 each /64 network counts as one address, since its holder has 2^64 of
    them."""

    MAX_CLIENTS = 10_000

    def __init__(self, app: ASGIApp, requests: RequestCounts, per_second: int) -> None:
        self._app = app
        self._requests = requests
        self._rate = per_second
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.count(scope["method"], message["status"])
            await send(message)

        client = place_of((scope.get("client") or ("?", 0))[0])
        if self._rate and not self._admit(client, time.monotonic()):
            refused = problem(UnavailableError("too many requests: slow down"), code=429)
            await refused(scope, receive, counting)
            return
        await self._app(scope, receive, counting)

    def _admit(self, client: str, now: float) -> bool:
        full = 2.0 * self._rate
        tokens, seen = self._buckets.pop(client, (full, now))
        tokens = min(full, tokens + (now - seen) * self._rate)
        self._buckets[client] = (max(0.0, tokens - 1), now)
        if len(self._buckets) > self.MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return tokens >= 1
