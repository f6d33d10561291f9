"""Routes of validators: draws, claims, opinions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from prime_core import ids
from prime_core.draws import DrawReveal
from prime_core.encoding import MAX_JSON_BYTES
from prime_core.messages import UploadAnswer
from prime_core.validator_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClassList,
    CommitRequest,
    KeepRequest,
    ObjectRequest,
    OpinionList,
    ReleaseRequest,
    RowsAnswer,
    RowsRequest,
    SealAnswer,
    SealRequest,
)
from prime_core.verdict import SignedOpinion
from prime_orchestrator.api import classes, validators
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.routes.http import Signed, answer, nothing, parse, signed_by, takes

BODIES = (
    CommitRequest,
    DrawReveal,
    ClaimRequest,
    ClassList,
    KeepRequest,
    ReleaseRequest,
    RowsRequest,
    SealRequest,
    ObjectRequest,
    SignedOpinion,
)


def router(backend: Backend) -> APIRouter:
    """The routes, bound to one pool."""
    routes = APIRouter()
    validator = signed_by(backend, "validator")

    @routes.post("/v1/validators/commitments", openapi_extra=takes(CommitRequest))
    def commit(request: Signed = validator) -> Response:
        """Commit to the draws of this epoch and of those to come."""
        validators.commit(backend, request.caller.account, parse(CommitRequest, request.body))
        return nothing()

    @routes.post("/v1/validators/reveals", openapi_extra=takes(DrawReveal))
    def reveal(request: Signed = validator) -> Response:
        """Show the secret of an epoch that no lease needs any more."""
        validators.reveal_draw(backend, request.caller.account, parse(DrawReveal, request.body))
        return nothing()

    @routes.post(
        "/v1/validators/claims",
        responses={200: {"model": ClaimAnswer}},
        openapi_extra=takes(ClaimRequest),
    )
    def claim(request: Signed = validator) -> Response:
        """Get the files that were assigned to the caller, and what it is to hand in now."""
        wish = parse(ClaimRequest, request.body)
        return answer(validators.claim(backend, request.caller.account, wish))

    @routes.post("/v1/validators/classes", openapi_extra=takes(ClassList))
    def announce_classes(request: Signed = validator) -> Response:
        """Announce the exact classes in which the caller repeats proof passes of a policy."""
        classes.announce_all(backend, request.caller.account, parse(ClassList, request.body))
        return nothing()

    @routes.post("/v1/validators/keep", openapi_extra=takes(KeepRequest))
    def keep(request: Signed = validator) -> Response:
        """Keep claims while their files are being judged."""
        validators.keep(backend, request.caller.account, parse(KeepRequest, request.body))
        return nothing()

    @routes.post("/v1/validators/release", openapi_extra=takes(ReleaseRequest))
    def release(request: Signed = validator) -> Response:
        """End a claim without an opinion."""
        validators.release(backend, request.caller.account, parse(ReleaseRequest, request.body))
        return nothing()

    @routes.post(
        "/v1/validators/rows",
        responses={200: {"model": RowsAnswer}},
        openapi_extra=takes(RowsRequest),
    )
    def rows(request: Signed = signed_by(backend, "validator", MAX_JSON_BYTES)) -> Response:
        """Ask which rows of a file other files have as well."""
        wish = parse(RowsRequest, request.body)
        return answer(validators.rows_seen(backend, request.caller.account, wish))

    @routes.post(
        "/v1/validators/seals",
        responses={200: {"model": SealAnswer}},
        openapi_extra=takes(SealRequest),
    )
    def seal(request: Signed = validator) -> Response:
        """Seal an opinion by its hash."""
        wish = parse(SealRequest, request.body)
        return answer(validators.seal(backend, request.caller.account, wish))

    @routes.post(
        "/v1/validators/objects",
        responses={200: {"model": UploadAnswer}},
        openapi_extra=takes(ObjectRequest),
    )
    def room(request: Signed = validator) -> Response:
        """Get a signed URL for a table or for evidence."""
        wish = parse(ObjectRequest, request.body)
        return answer(validators.room_for(backend, request.caller.account, wish))

    @routes.post("/v1/validators/opinions", openapi_extra=takes(SignedOpinion))
    def opinion(request: Signed = validator) -> Response:
        """Hand in a sealed opinion that is due."""
        signed = parse(SignedOpinion, request.body)
        validators.give_opinion(backend, request.caller.account, signed)
        return nothing()

    @routes.get("/v1/submissions/{digest}/opinions", responses={200: {"model": OpinionList}})
    def opinions(digest: str) -> Response:
        """Every opinion on a submission, once it has a verdict."""
        return answer(validators.opinions_on(backend, ids.digest(digest)))

    return routes
