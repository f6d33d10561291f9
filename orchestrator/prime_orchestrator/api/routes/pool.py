"""Routes of the pool: its facts, policies, relays, batches, nodes, rewards, status."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from prime_core import ids
from prime_core.batch import SignedBatch
from prime_core.checkpoint import SignedManifest
from prime_core.encoding import MAX_JSON_BYTES
from prime_core.errors import MalformedError, NotFoundError
from prime_core.ids import Digest
from prime_core.messages import (
    BatchAnswer,
    DrawInfo,
    LeaseInfo,
    NodeInfo,
    PolicyList,
    PoolInfo,
    RelayAnnouncement,
    RelayInfo,
    RevisionRequest,
    RewardInfo,
    RunList,
    RunRevision,
    SubmissionInfo,
)
from prime_core.run import MAX_RUN_BYTES
from prime_core.storage.base import digest_key
from prime_orchestrator.api import publishing, status
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.kept import Kept, KeptFor
from prime_orchestrator.api.liveness import RELAY_SECONDS
from prime_orchestrator.api.routes.http import (
    MAX_DIGITS,
    Signed,
    answer,
    nothing,
    parse,
    post,
    signed_by,
)
from prime_orchestrator.api.status import Part
from prime_orchestrator.manager import revisions
from prime_orchestrator.store import Connection, batches, draws, policies
from prime_orchestrator.store.batches import BatchRow

BATCH_URL_SECONDS = 3600
MAX_STEP = 1 << 62


def router(backend: Backend) -> APIRouter:
    """The routes, bound to one pool."""
    routes = APIRouter()
    listed = Kept(lambda: status.NodeList(backend))
    listing = KeptFor[str, str]()
    proofs = KeptFor[Digest, status.RewardProofs]()
    trainer = signed_by(backend, "trainer")

    @routes.get("/v1/pool", responses={200: {"model": PoolInfo}})
    def pool(host: Annotated[str, Header()] = "") -> Response:
        """Chain, contracts, keys, and the name that session grants must carry."""
        return answer(status.pool_info(backend, host))

    @routes.get("/v1/run")
    def run() -> Response:
        """The pool's first run definition: the bytes whose SHA-256 is the pool's run digest."""
        return Response(backend.context.run.raw(), media_type="application/json")

    @routes.get("/v1/runs", responses={200: {"model": RunList}})
    def run_list() -> Response:
        """The pool's first definition and its revisions."""
        with backend.store.read() as connection:
            return answer(revisions.listing(connection, backend.context))

    @routes.get("/v1/runs/{digest}")
    def one_run(digest: str) -> Response:
        """One definition's exact bytes."""
        wanted = ids.digest(digest)
        with backend.store.read() as connection:
            raw = revisions.raw_of(connection, backend.context, wanted)
        return Response(raw, media_type="application/json")

    @post(routes, "/v1/revisions", RevisionRequest, RunRevision)
    def revise(request: Signed = signed_by(backend, "manager", 2 * MAX_RUN_BYTES)) -> Response:
        """Revise the run from a step that is not leased yet."""
        asked = parse(RevisionRequest, request.body)
        return answer(revisions.announce(backend.store, backend.context, asked, backend.now()))

    @routes.get(
        "/v1/policies",
        responses={200: {"model": PolicyList}, 304: {"description": "Still the same"}},
    )
    def list_policies(if_none_match: Annotated[str, Header()] = "") -> Response:
        """The newest policies' signed manifests, newest first; 304 for who has them already."""
        tag, body = publishing.listing(backend.store, listing)
        if tag in (known.strip() for known in if_none_match.split(",")):
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, media_type="application/json", headers={"ETag": tag})

    @routes.get("/v1/policies/{version}", responses={200: {"model": SignedManifest}})
    def one_policy(version: int) -> Response:
        """One policy's signed manifest, however old: what auditors of old work need."""
        if not 0 <= version <= MAX_STEP:
            raise MalformedError("a policy's version is a number from 0")
        return Response(publishing.manifest(backend, version), media_type="application/json")

    @post(routes, "/v1/policies", SignedManifest)
    def publish(request: Signed = signed_by(backend, "trainer", MAX_JSON_BYTES)) -> Response:
        """Publish the next policy (its bytes lie with the origin already)."""
        publishing.publish(backend, parse(SignedManifest, request.body))
        return nothing()

    @routes.get("/v1/relays", responses={200: {"model": list[RelayInfo]}})
    def relay_list() -> Response:
        """Relays announced recently."""
        own = backend.own_accounts
        with backend.store.read() as connection:
            since = backend.now() - RELAY_SECONDS
            rows = policies.relays(connection, since=since, own=own)
        return answer(
            [RelayInfo(url=r.url, versions=r.versions, own=r.account in own) for r in rows]
        )

    @post(routes, "/v1/relays", RelayAnnouncement)
    def announce(request: Signed = signed_by(backend, "relay")) -> Response:
        """Name a relay to the pool's nodes."""
        relay = parse(RelayAnnouncement, request.body)
        publishing.announce_relay(backend, request.caller.account, relay)
        return nothing()

    @routes.get("/v1/batches/{step}", responses={200: {"model": BatchAnswer}})
    def batch(step: str, request: Signed = trainer) -> Response:
        """The first sealed batch from number `step` on, with a signed URL for each of its
        objects; 409 if its files were removed."""
        signed = _sealed(backend, step, batches.first_from).signed()
        status.require_files(backend, signed.manifest)
        expires = int(backend.now()) + BATCH_URL_SECONDS
        names = {name for file in signed.manifest.files for name in (file.sha256, file.table)}
        urls: dict[str, str] = {
            name: backend.objects.signed_get(digest_key(name), expires) for name in sorted(names)
        }
        return answer(BatchAnswer(batch=signed, urls=urls))

    @routes.get("/v1/batches/{step}/manifest", responses={200: {"model": SignedBatch}})
    def manifest(step: str) -> Response:
        """A sealed batch's signed manifest."""
        return answer(_sealed(backend, step, batches.get).signed())

    @routes.get("/v1/draws", responses={200: {"model": list[DrawInfo]}})
    def draw_list() -> Response:
        """Validators' commitments to their draws: an epoch's are signed before its leases."""
        with backend.store.browse() as connection:
            return answer(draws.listing(connection))

    @routes.get("/v1/nodes", responses={200: {"model": list[NodeInfo]}})
    async def node_list(after: str = "", provider: str = "") -> Response:
        """Nodes by address, a page at a time; `provider` names one owner's. Made at most once a
        second."""
        owner = ids.address(provider) if provider else None
        page = (await listed.get()).page(ids.address(after) if after else "", owner)
        return Response(page, media_type="application/json")

    @routes.get("/v1/nodes/{node}", responses={200: {"model": NodeInfo}})
    def node_info(node: str) -> Response:
        """One node."""
        return answer(status.node_info(backend, ids.address(node)))

    @routes.get("/v1/nodes/{node}/leases", responses={200: {"model": list[LeaseInfo]}})
    def lease_list(node: str, before: str = "", archived: str = "") -> Response:
        """A node's leases, a page at a time, the newest last on it and on the first page; archived
        ones follow. The header `Link` names the next page; a page of the archive may be empty."""
        owner = ids.address(node)
        newest = partial(status.lease_list, backend, owner)
        older = partial(status.archived_leases, backend, owner)
        return _part(newest, older, before, archived, f"/v1/nodes/{owner}/leases?")

    @routes.get("/v1/rewards/{node}", responses={200: {"model": RewardInfo}})
    def rewards(node: str) -> Response:
        """A node's entry in the newest reward root, with its Merkle proof."""
        return answer(status.reward_info(backend, proofs, ids.address(node)))

    @routes.get("/v1/submissions", responses={200: {"model": list[SubmissionInfo]}})
    def submission_list(node: str, before: str = "", archived: str = "") -> Response:
        """A node's submissions, newest first, a page at a time, then archived ones. The header
        `Link` names the next page; a page of the archive may be empty."""
        owner = ids.address(node)
        newest = partial(status.submission_list, backend, owner)
        older = partial(status.archived_list, backend, owner)
        return _part(newest, older, before, archived, f"/v1/submissions?node={owner}&")

    @routes.get("/v1/submissions/{digest}", responses={200: {"model": SubmissionInfo}})
    def submission(digest: str) -> Response:
        """What became of a submission."""
        return answer(status.submission_info(backend, ids.digest(digest)))

    return routes


def _part(
    newest: Callable[[Digest | None], Part[Any]],
    older: Callable[[int], Part[Any]],
    before: str,
    archived: str,
    path: str,
) -> Response:
    """Answers with a part of a list: of `older` if `archived` is given, else of `newest`. `path`
    with the next part's query is what the header `Link` names."""
    if archived:
        part = older(_number(archived, "archived"))
    else:
        part = newest(ids.digest(before) if before else None)
    found = answer(part.items)
    if part.following:
        found.headers["Link"] = f'<{path}{part.following}>; rel="next"'
    return found


def _sealed(
    backend: Backend, step: str, find: Callable[[Connection, int], BatchRow | None]
) -> BatchRow:
    number = _number(step, "step")
    with backend.store.read() as connection:
        row = find(connection, number)
    if row is None:
        raise NotFoundError(f"batch {number} is not sealed yet")
    return row


def _number(text: str, name: str) -> int:
    """Returns a number of a path or query. Raises MalformedError."""
    number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    if not number or int(text) > MAX_STEP:
        raise MalformedError(f"{name} is a whole number")
    return int(text)
