"""Routes for watchers: health, metrics, the event stream, the dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
from prometheus_client import generate_latest

from prime_core import ids
from prime_core.errors import NotFoundError
from prime_core.messages import Status, TransactionInfo, ValidatorInfo
from prime_orchestrator.api import kept, metrics, status
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import Places
from prime_orchestrator.api.kept import Kept
from prime_orchestrator.api.metrics import RequestCounts
from prime_orchestrator.api.routes.http import answer, host_of
from prime_orchestrator.store import meta

WEB = Path(__file__).parents[2] / "web"
KEEP_ALIVE_SECONDS = 15.0
MAX_WATCHERS = 1024
WATCHERS_EACH = 16
"""Of one foreign address, behind which several people may sit."""


class StatusFeed:
    """The newest status (`Kept`), and a stream of it. Ends with the process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept = Kept(self._make)
        self.watchers = Places(MAX_WATCHERS, WATCHERS_EACH, "too many are watching")
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Ends every stream."""
        self._ended.set()

    async def latest(self) -> tuple[Status, str]:
        """The newest status, and the same as JSON."""
        return await self._kept.get()

    def _make(self) -> tuple[Status, str]:
        made = status.status(self._backend)
        return made, made.model_dump_json()

    async def events(self, host: str) -> AsyncIterator[str]:
        """Server-sent events (WHATWG HTML 9.2) for `host`: a status whenever it changed, and "end"
        with the time (Unix seconds) when this process stops.

        Raises UnavailableError if too many watch already.
        """
        with self.watchers.one(host):
            sent, quiet = "", 0.0
            while not self._ended.is_set():
                _, latest = await self.latest()
                if latest != sent:
                    sent, quiet = latest, 0.0
                    yield f"data: {latest}\n\n"
                elif quiet >= KEEP_ALIVE_SECONDS:
                    quiet = 0.0
                    yield ": still here\n\n"
                quiet += kept.EVERY_SECONDS
                try:
                    await asyncio.wait_for(self._ended.wait(), kept.EVERY_SECONDS)
                except TimeoutError:
                    continue
            yield f"event: end\ndata: {int(self._backend.now())}\n\n"


def router(backend: Backend, feed: StatusFeed, requests: RequestCounts) -> APIRouter:
    """The routes, bound to one pool."""
    routes = APIRouter()
    collector = metrics.PoolMetrics(backend, requests)

    @routes.get("/readyz")
    @routes.get("/healthz")
    def health() -> Response:
        """200 while the database answers."""
        with backend.store.read() as connection:
            meta.get(connection, meta.CHAIN_SEEN_AT)
        return Response('{"status":"ok"}', media_type="application/json")

    @routes.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(collector), media_type=metrics.CONTENT_TYPE)

    @routes.get("/v1/status", responses={200: {"model": Status}})
    async def now() -> Response:
        """One picture of the pool, made at most once a second."""
        return Response((await feed.latest())[1], media_type="application/json")

    @routes.get("/v1/validators/{validator}", responses={200: {"model": ValidatorInfo}})
    async def validator(validator: str) -> Response:
        """A validator's record."""
        return answer(status.validator_info(ids.address(validator), (await feed.latest())[0]))

    @routes.get("/v1/transactions/{tx_hash}", responses={200: {"model": TransactionInfo}})
    async def transaction(tx_hash: str) -> Response:
        """The pool's events that a transaction caused, and its state if the pool sent it."""
        latest, _ = await feed.latest()
        found = await run_in_threadpool(
            status.transaction_info, backend, ids.digest(tx_hash), latest
        )
        return answer(found)

    @routes.get("/v1/events", response_class=StreamingResponse)
    async def events(request: Request) -> Response:
        """Server-sent events, each a Status."""
        stream = feed.events(host_of(request))
        first = await anext(stream)  # refuses before the answer has begun

        async def whole() -> AsyncIterator[str]:
            yield first
            async for event in stream:
                yield event

        return StreamingResponse(
            whole(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    @routes.get("/", include_in_schema=False)
    def page() -> Response:
        return _file("index.html")

    @routes.get("/dashboard/{name}", include_in_schema=False)
    def asset(name: str) -> Response:
        return _file(name)

    return routes


def _file(name: str) -> Response:
    """A file of the pages' folder, by plain name."""
    known = {path.name: path for path in WEB.iterdir()} if WEB.is_dir() else {}
    path = known.get(name)
    if path is None or path.suffix not in (".html", ".js", ".css", ".svg"):
        raise NotFoundError(f"there is no page {name[:80]!r}")
    return FileResponse(path, headers={"Cache-Control": "no-cache"})
