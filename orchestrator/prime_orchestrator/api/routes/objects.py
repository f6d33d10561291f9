"""Routes of bytes: signed uploads and downloads, and objects by digest.

`/v1/store/…` serves the directory store; with a store that presigns its own URLs no one is ever
sent there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractContextManager

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from prime_core import ids
from prime_core.errors import MalformedError, NotFoundError, UnavailableError
from prime_core.storage.base import CHUNK_BYTES, digest_key
from prime_core.storage.directory import DirectoryStore, Sink
from prime_core.transport import copies
from prime_orchestrator.api import leasing, status
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import Places
from prime_orchestrator.api.routes.http import BODY_SECONDS, host_of, in_path, takes_bytes
from prime_orchestrator.store import archive

GET_SECONDS = 600
"""How long the URL behind an object's redirect holds."""
UPLOADS_AT_ONCE = 2
"""Of one object: a client whose first connection died need not wait for it, and no signed URL
fills the disk with many copies of its one file."""
COPIES_AT_ONCE, COPIES_EACH = 8, 2
"""Requests of `/v1/copies` in progress, in all and of one foreign address. Each may hold a thread
for a second or longer."""


def router(backend: Backend) -> APIRouter:
    """The routes, bound to one object store."""
    routes = APIRouter()
    under_way: Counter[str] = Counter()  # uploads by key; used in the event loop's thread alone
    copying = Places(COPIES_AT_ONCE, COPIES_EACH, "too many are asking for copies")

    def directory() -> DirectoryStore:
        if not isinstance(backend.objects, DirectoryStore):
            raise NotFoundError("this orchestrator keeps its objects elsewhere")
        return backend.objects

    def absent(name: str) -> NotFoundError:
        """Says that there is no such object, and why a rollout file may be gone."""
        with backend.store.read() as connection:
            marked, days = archive.files_marked(connection)
        why = f"; {archive.why_gone(days)}" if marked else ""
        return NotFoundError(f"there is no object {name}{why}")

    @routes.put(
        "/v1/store/{key:path}", status_code=204, openapi_extra=takes_bytes() | in_path("key")
    )
    async def put(request: Request) -> Response:
        """Upload to a signed URL: exactly the announced bytes, or nothing is kept."""
        store, key = directory(), request.path_params["key"]
        grant = store.check_url("PUT", key, request.query_params.multi_items(), now=backend.now())
        assert grant.size is not None
        assert grant.sha256 is not None
        declared = request.headers.get("content-length")
        if declared is not None and declared != str(grant.size):
            raise MalformedError(f"the signed URL is for exactly {grant.size} bytes")
        if under_way[key] >= UPLOADS_AT_ONCE:
            raise UnavailableError("this file is being uploaded already; try again in a moment")
        under_way[key] += 1
        try:
            until = grant.expires_at - backend.now() + BODY_SECONDS
            await _receive(store, key, grant.size, grant.sha256, request, seconds=until)
        finally:
            under_way[key] -= 1
            if not under_way[key]:
                del under_way[key]
        return Response(status_code=204)

    @routes.get("/v1/store/{key:path}", response_class=StreamingResponse)
    def get(key: str, request: Request) -> Response:
        """Download from a signed URL."""
        store = directory()
        store.check_url("GET", key, request.query_params.multi_items(), now=backend.now())
        try:
            size = store.size(key)
        except NotFoundError as error:
            raise absent(key) from error
        return StreamingResponse(
            store.chunks(key),
            media_type="application/octet-stream",
            headers={"Content-Length": str(size), "X-Content-Type-Options": "nosniff"},
        )

    @routes.get("/v1/objects/{digest}", status_code=307, response_class=RedirectResponse)
    def by_digest(digest: str) -> Response:
        """Where to fetch an object (verdict, evidence, table, root's leaves, file) right now."""
        key = digest_key(ids.digest(digest))
        if not backend.objects.exists(key):
            raise absent(digest)
        url = backend.objects.signed_get(key, int(backend.now()) + GET_SECONDS)
        return RedirectResponse(url, status_code=307)

    def copy(kind: str, digest: ids.Digest, limit: int) -> bytes:
        if kind == "objects":
            return backend.objects.get(digest_key(digest), limit)
        if kind == "leases":
            return leasing.handed_in(backend, digest).model_dump_json().encode()
        return status.submission_info(backend, digest).model_dump_json().encode()

    @routes.get(
        "/v1/copies",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def several(names: str, request: Request) -> Response:
        """Several objects, submissions and leases at once: `names` are KIND/DIGEST, with commas
        between. The answer is a line of JSON with the name and length of each, then their bytes."""
        parsed = copies.parse_names(names)
        with copying.one(host_of(request)):
            body = await run_in_threadpool(copies.pack, parsed, copy)
        return Response(body, media_type="application/octet-stream")

    return routes


async def _receive(
    store: DirectoryStore,
    key: str,
    size: int,
    sha256: ids.Digest,
    request: Request,
    *,
    seconds: float,
) -> None:
    """Streams a body into the store, a bounded piece at a time, off the event loop; each piece
    within BODY_SECONDS and the whole within `seconds`. A body of one piece takes one thread."""
    end = asyncio.get_running_loop().time() + seconds
    block = store.receive(key, size=size, sha256=sha256)
    sink, pending = None, bytearray()
    try:
        stream = request.stream().__aiter__()
        while True:
            left = end - asyncio.get_running_loop().time()
            async with asyncio.timeout(min(BODY_SECONDS, left)):
                piece = await anext(stream, None)
            if piece is None:
                break
            pending += piece
            if len(pending) >= CHUNK_BYTES:
                if sink is None:
                    sink = await run_in_threadpool(block.__enter__)
                await run_in_threadpool(sink.write, bytes(pending))
                pending.clear()
        if sink is not None:
            await run_in_threadpool(sink.write, bytes(pending))
    except BaseException as error:
        if sink is not None:
            block.__exit__(type(error), error, error.__traceback__)  # removes the temporary file
        if isinstance(error, ClientDisconnect | TimeoutError):
            raise UnavailableError("the upload broke off") from error
        raise
    if sink is not None:
        await run_in_threadpool(block.__exit__, None, None, None)
    else:
        await run_in_threadpool(_store, block, bytes(pending))


def _store(block: AbstractContextManager[Sink], data: bytes) -> None:
    with block as sink:
        sink.write(data)
