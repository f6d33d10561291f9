"""Routes of sessions and nodes: grants, admission, heartbeats, leases, uploads, submissions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from prime_broadcast.peers import place_of
from prime_core import ids
from prime_core.ids import Address
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    CardsAnswer,
    CardsCommitment,
    CardsDraw,
    CardsEcho,
    CardsRequest,
    ChallengeAnswer,
    ClassAnswer,
    ClassInfo,
    ClassRequest,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    MemoryAnswer,
    MemoryCommitment,
    MemoryDraw,
    MemoryProved,
    ReceiptAnswer,
    RevokeRequest,
    SessionAnswer,
    SessionRequest,
    SignedMemory,
    SignedPassport,
    UploadAnswer,
    UploadRequest,
)
from prime_core.rollout import SignedSubmission
from prime_core.signing import Answer, Strict
from prime_core.task import SignedLease
from prime_core.transport.signatures import check_body
from prime_orchestrator.api import (
    admission,
    auth,
    cards,
    classes,
    intake,
    leasing,
    liveness,
    memory,
)
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.gathered import Gathered
from prime_orchestrator.api.routes.http import (
    SMALL_BODY,
    Signed,
    answer,
    body_of,
    connection_of,
    head_of,
    host_of,
    in_path,
    nothing,
    parse,
    post,
    read_body,
    signed_by,
    signed_reader,
    takes,
)


def router(backend: Backend) -> APIRouter:
    """The routes, bound to one pool."""
    routes = APIRouter()
    node = signed_by(backend, "node")
    signed_node = signed_reader(backend, "node")
    beats = Gathered[liveness.SignedBeat, HeartbeatAnswer](
        partial(liveness.signed_heartbeats, backend)
    )

    asking = Gathered[leasing.Ask, LeaseAnswer](partial(leasing.lease_all, backend))
    uploading = Gathered[leasing.UploadAsk, leasing.Announced | UploadAnswer](
        partial(leasing.upload_all, backend)
    )

    strangers = auth.Strangers()
    looking_up = Gathered[SignedSubmission, intake.Known](partial(intake.look_up, backend))
    accepting = Gathered[intake.Checked, ReceiptAnswer](partial(intake.accept, backend))

    def awaited(account: Address, path: Mapping[str, str]) -> int:
        return admission.awaited(backend, account, path["challenge_id"])

    def opening_awaited(account: Address, path: Mapping[str, str]) -> int:
        return cards.awaited(backend, account, path["challenge_id"])

    def blocks_awaited(account: Address, path: Mapping[str, str]) -> int:
        return memory.awaited(backend, account, path["challenge_id"])

    def proof_step(
        take: Callable[..., Answer],
        body: Strict,
        challenge_id: str,
        signed: Signed,
        request: Request,
    ) -> Response:
        """Gives a step of a proof of cards to `take`, with when and how it arrived."""
        return answer(
            take(
                backend, signed.caller.account, challenge_id, body,
                arrived_at=signed.arrived_at, connection=connection_of(request),
            )
        )  # fmt: skip

    def opened(take: Callable[..., Answer], challenge_id: str, signed: Signed) -> Response:
        """Gives the bytes that a challenge waits for to `take`, with when they arrived."""
        account, arrived = signed.caller.account, signed.arrived_at
        return answer(take(backend, account, challenge_id, signed.body, arrived_at=arrived))

    @post(routes, "/v1/sessions", SessionRequest, SessionAnswer)
    def open_session(body: bytes = body_of(), *, request: Request) -> Response:
        """Let a session key sign requests for an account."""
        wish = parse(SessionRequest, body)
        return answer(auth.open_session(backend, wish, strangers, host_of(request)))

    @post(routes, "/v1/sessions/revoke", RevokeRequest)
    def revoke(body: bytes = body_of()) -> Response:
        """End an account's sessions issued before a time."""
        auth.revoke(backend, parse(RevokeRequest, body))
        return nothing()

    @post(routes, "/v1/admission/challenge", AdmissionRequest, ChallengeAnswer)
    def challenge(signed: Signed = node, *, request: Request) -> Response:
        """Ask for the hardware challenge."""
        wish = parse(AdmissionRequest, signed.body)
        address = place_of(host_of(request))
        return answer(admission.challenge(backend, signed.caller.account, wish, address))

    @post(routes, "/v1/admission/solution/{challenge_id}", bytes, AdmissionAnswer)
    def solution(
        challenge_id: str,
        request: Signed = signed_by(
            backend, "node", admission.solution_limit(backend), expects=awaited
        ),
    ) -> Response:
        """Answer it: int64 little-endian products, row by row."""
        return opened(admission.solution, challenge_id, request)

    @post(routes, "/v1/admission/cards", CardsRequest, CardsAnswer)
    def prove_cards(signed: Signed = node, *, request: Request) -> Response:
        """Ask for a proof of the node's cards."""
        wish = parse(CardsRequest, signed.body)
        place, connection = place_of(host_of(request)), connection_of(request)
        return answer(cards.begin(backend, signed.caller.account, wish, place, connection))

    @post(routes, "/v1/admission/cards/{challenge_id}/filled", CardsEcho, MemoryAnswer)
    def filled(challenge_id: str, signed: Signed = node, *, request: Request) -> Response:
        """Announce that the cards are filled by sending the token back, then send back each further
        token. The last answer holds the seed of the vectors and starts the clock."""
        return proof_step(
            memory.filled, parse(CardsEcho, signed.body), challenge_id, signed, request
        )

    @post(routes, "/v1/admission/cards/{challenge_id}/memory", MemoryCommitment, MemoryDraw)
    def commit_memory(challenge_id: str, signed: Signed = node, *, request: Request) -> Response:
        """Commit to the marks of all blocks. The answer names the blocks to open."""
        return proof_step(
            memory.commitment, parse(MemoryCommitment, signed.body), challenge_id, signed, request
        )

    @post(routes, "/v1/admission/cards/{challenge_id}/blocks", bytes, MemoryProved)
    def open_blocks(
        challenge_id: str,
        request: Signed = signed_by(backend, "node", memory.MAX_BLOCKS, expects=blocks_awaited),
    ) -> Response:
        """Open the drawn blocks."""
        return opened(memory.opening, challenge_id, request)

    @post(routes, "/v1/admission/cards/{challenge_id}/echo", CardsEcho, CardsAnswer)
    def echo(challenge_id: str, signed: Signed = node, *, request: Request) -> Response:
        """Send a token back. The last answer holds the order and starts the clock."""
        return proof_step(cards.echo, parse(CardsEcho, signed.body), challenge_id, signed, request)

    @post(routes, "/v1/admission/cards/{challenge_id}/commitment", CardsCommitment, CardsDraw)
    def commit_cards(challenge_id: str, signed: Signed = node, *, request: Request) -> Response:
        """Commit to all products. The answer names the rows to open."""
        return proof_step(
            cards.commitment, parse(CardsCommitment, signed.body), challenge_id, signed, request
        )

    @post(routes, "/v1/admission/cards/{challenge_id}/opening", bytes, AdmissionAnswer)
    def open_cards(
        challenge_id: str,
        request: Signed = signed_by(backend, "node", cards.MAX_OPENING, expects=opening_awaited),
    ) -> Response:
        """Open the drawn rows."""
        return opened(cards.opening, challenge_id, request)

    @routes.get("/v1/nodes/{node}/passport", responses={200: {"model": SignedPassport}})
    def passport(node: str) -> Response:
        """A node's hardware passport: the newest proof of its cards."""
        return answer(cards.passport_of(backend, ids.address(node)))

    @routes.get("/v1/nodes/{node}/memory", responses={200: {"model": SignedMemory}})
    def proved_memory(node: str) -> Response:
        """What a node's newest proof found of its cards' memory."""
        return answer(cards.memory_of(backend, ids.address(node)))

    @post(routes, "/v1/heartbeat", Heartbeat, HeartbeatAnswer)
    async def heartbeat(request: Request) -> Response:
        """Report the node's state; the answer says what the node should do next."""
        # Its session is looked up together with its answer, after its body has been read.
        proven = auth.prove(backend, head_of(request), backend.now())
        body = await read_body(request, SMALL_BODY)
        check_body(proven, body)
        beat = parse(Heartbeat, body)
        return answer(await beats.ask(liveness.SignedBeat(proven, beat)))

    @post(routes, "/v1/classes", ClassRequest, ClassAnswer)
    def announce_class(signed: Signed = node) -> Response:
        """Ask whether an exact class is wanted, or announce it."""
        wish = parse(ClassRequest, signed.body)
        return answer(classes.announce(backend, signed.caller.account, wish))

    @routes.get("/v1/classes/{digest}", responses={200: {"model": ClassInfo}})
    def exact_class(digest: str) -> Response:
        """What it takes to repeat the proof passes of an exact class."""
        return answer(classes.info(backend, ids.digest(digest)))

    @post(routes, "/v1/leases", LeaseRequest, LeaseAnswer)
    async def lease(request: Request) -> Response:
        """Get the open lease, a new one, or how long to wait."""
        signed = await signed_node(request)
        wish = parse(LeaseRequest, signed.body)
        return answer(await asking.ask(leasing.Ask(signed.caller.account, wish, host_of(request))))

    @post(routes, "/v1/leases/evaluation", LeaseRequest, LeaseAnswer)
    async def evaluation_lease(request: Request) -> Response:
        """Like POST /v1/leases, for nodes that know evaluation leases: it may be one."""
        signed = await signed_node(request)
        wish = parse(LeaseRequest, signed.body)
        account, address = signed.caller.account, host_of(request)
        return answer(await asking.ask(leasing.Ask(account, wish, address, evaluates=True)))

    @routes.get("/v1/leases/{digest}", responses={200: {"model": SignedLease}})
    def signed_lease(digest: str) -> Response:
        """A lease whose file was handed in, as the manager signed it: what an audit starts from."""
        return answer(leasing.handed_in(backend, ids.digest(digest)))

    @routes.post("/v1/leases/{digest}/abandon")
    def abandon(digest: str, request: Signed = node) -> Response:
        """Stop working on a lease; it will come back."""
        leasing.abandon(backend, request.caller.account, ids.digest(digest))
        return nothing()

    @routes.post(
        "/v1/leases/{digest}/upload",
        responses={200: {"model": UploadAnswer}},
        openapi_extra=takes(UploadRequest) | in_path("digest"),
    )
    async def upload(request: Request) -> Response:
        """Get a signed URL for the lease's file."""
        signed = await signed_node(request)
        digest = ids.digest(request.path_params["digest"])
        wish = parse(UploadRequest, signed.body)
        found = await uploading.ask(leasing.UploadAsk(signed.caller.account, digest, wish))
        if isinstance(found, UploadAnswer):
            return answer(found)
        return answer(await run_in_threadpool(leasing.place, backend, wish, found))

    @post(routes, "/v1/submissions", SignedSubmission, ReceiptAnswer)
    async def submit(request: Request) -> Response:
        """Hand in an uploaded file; anyone may carry the node's signed submission."""
        signed = parse(SignedSubmission, await read_body(request, SMALL_BODY))
        known = await looking_up.ask(signed)
        checked = await run_in_threadpool(intake.check, backend, signed, known)
        if isinstance(checked, ReceiptAnswer):
            return answer(checked)
        receipt = await accepting.ask(checked)
        await run_in_threadpool(intake.keep, backend, checked, known)
        return answer(receipt)

    return routes
