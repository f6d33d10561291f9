"""The API application: its routes behind their entry, and the OpenAPI document. Never imports
torch."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

from prime_broadcast.http1 import RateLimit
from prime_core import messages
from prime_core.checkpoint import SignedManifest
from prime_core.rollout import SignedSubmission
from prime_core.signing import Strict
from prime_core.transport.problems import CONTENT_TYPE
from prime_core.version import SPOKEN
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import Proxies
from prime_orchestrator.api.entry import Entry
from prime_orchestrator.api.held import HOLD_SECONDS
from prime_orchestrator.api.metrics import RequestCounts
from prime_orchestrator.api.routes import nodes, objects, pool, validators, watch
from prime_orchestrator.api.routes.http import install_problems
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
    messages.MemoryCommitment,
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


class Application(FastAPI):
    """FastAPI behind an `Entry`."""

    entry: Entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.entry(scope, receive, send)


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

    app = Application(title="Prime orchestrator", version=_version(), lifespan=lifespan)
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
    app.entry = Entry(
        partial(FastAPI.__call__, app),
        _routes(often, DIRECT),
        requests=requests,
        rate=RateLimit(requests_per_second),
        proxies=proxies or Proxies(),
        spoken=spoken,
    )
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
