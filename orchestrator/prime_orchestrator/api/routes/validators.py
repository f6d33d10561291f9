"""Routes of validators: draws, claims, opinions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable
from functools import partial
from operator import attrgetter, itemgetter

from fastapi import APIRouter, Request, Response

from prime_core import ids
from prime_core.draws import DrawReveal
from prime_core.encoding import MAX_JSON_BYTES
from prime_core.errors import PrimeError
from prime_core.ids import Address
from prime_core.messages import UploadAnswer
from prime_core.transport.problems import to_problem
from prime_core.validator_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClassList,
    CommitAnswer,
    CommitRequest,
    EntryAnswer,
    KeepRequest,
    ObjectRequest,
    OpinionList,
    ReleaseRequest,
    RowsAnswer,
    RowsRequest,
    SealAnswer,
    SealRequest,
    TogetherAnswer,
    TogetherRequest,
)
from prime_core.verdict import SignedOpinion
from prime_orchestrator.api import classes, validators
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.gathered import Gathered
from prime_orchestrator.api.held import SHARE_SECONDS, HeldClaims
from prime_orchestrator.api.routes.http import (
    Signed,
    answer,
    nothing,
    parse,
    post,
    signed_by,
    signed_reader,
)

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
    TogetherRequest,
)


def entry(found: RowsAnswer | SealAnswer | bool | BaseException) -> EntryAnswer:
    """Returns the answer to one entry of a TogetherRequest. Raises what is not a refusal."""
    match found:
        case PrimeError():
            status, document = to_problem(found)
            return EntryAnswer(status=status, problem=json.dumps(document))
        case BaseException():
            raise found
        case RowsAnswer():
            return EntryAnswer(marks=found.marks)
        case SealAnswer():
            return EntryAnswer(reveal=found.reveal)
    return EntryAnswer()


async def entries(
    asked: Iterable[Awaitable[RowsAnswer | SealAnswer | bool]],
) -> tuple[EntryAnswer, ...]:
    """Returns the answers to entries of one kind, which are served together."""
    return tuple(map(entry, await asyncio.gather(*asked, return_exceptions=True)))


def router(backend: Backend, hold_seconds: float) -> APIRouter:
    """The routes, bound to one pool. Claims wait up to `hold_seconds` for work."""
    routes = APIRouter()
    validator = signed_by(backend, "validator")
    signed_validator = signed_reader(backend, "validator")
    signed_large = signed_reader(backend, "validator", MAX_JSON_BYTES)
    looking = Gathered[tuple[Address, RowsRequest], RowsAnswer](
        partial(validators.rows_seen_all, backend), wait=SHARE_SECONDS, caller=itemgetter(0)
    )
    sealing = Gathered[tuple[Address, SealRequest], SealAnswer](
        partial(validators.seal_all, backend), wait=SHARE_SECONDS, caller=itemgetter(0)
    )
    giving = Gathered[validators.Given, bool](
        partial(validators.give_all, backend), wait=SHARE_SECONDS, caller=attrgetter("account")
    )
    claims = HeldClaims(backend, hold_seconds)

    @post(routes, "/v1/validators/commitments", CommitRequest, CommitAnswer)
    def commit(request: Signed = validator) -> Response:
        """Commit to the draws of this epoch and of those to come."""
        wish = parse(CommitRequest, request.body)
        return answer(validators.commit(backend, request.caller.account, wish))

    @post(routes, "/v1/validators/reveals", DrawReveal)
    def reveal(request: Signed = validator) -> Response:
        """Show the secret of an epoch that no lease needs any more."""
        validators.reveal_draw(backend, request.caller.account, parse(DrawReveal, request.body))
        return nothing()

    @post(routes, "/v1/validators/claims", ClaimRequest, ClaimAnswer)
    async def claim(request: Request) -> Response:
        """Get the files assigned to the caller, and what it must submit now. Waits two
        seconds for them."""
        signed = await signed_validator(request)
        wish = parse(ClaimRequest, signed.body)
        return answer(await claims.ask(signed.caller.account, wish, request.is_disconnected))

    @post(routes, "/v1/validators/classes", ClassList)
    def announce_classes(request: Signed = validator) -> Response:
        """Announce the exact classes in which the caller repeats proof passes of a policy."""
        classes.announce_all(backend, request.caller.account, parse(ClassList, request.body))
        return nothing()

    @post(routes, "/v1/validators/keep", KeepRequest)
    def keep(request: Signed = validator) -> Response:
        """Keep claims while their files are being judged."""
        validators.keep(backend, request.caller.account, parse(KeepRequest, request.body))
        return nothing()

    @post(routes, "/v1/validators/release", ReleaseRequest)
    def release(request: Signed = validator) -> Response:
        """End a claim without an opinion."""
        validators.release(backend, request.caller.account, parse(ReleaseRequest, request.body))
        return nothing()

    @post(routes, "/v1/validators/rows", RowsRequest, RowsAnswer)
    async def rows(request: Request) -> Response:
        """Ask which rows of a file other files have as well."""
        signed = await signed_large(request)
        wish = parse(RowsRequest, signed.body)
        return answer(await looking.ask((signed.caller.account, wish)))

    @post(routes, "/v1/validators/seals", SealRequest, SealAnswer)
    async def seal(request: Request) -> Response:
        """Seal an opinion by its hash."""
        signed = await signed_validator(request)
        wish = parse(SealRequest, signed.body)
        return answer(await sealing.ask((signed.caller.account, wish)))

    @post(routes, "/v1/validators/objects", ObjectRequest, UploadAnswer)
    def room(request: Signed = validator) -> Response:
        """Get a signed URL for a table or for evidence."""
        wish = parse(ObjectRequest, request.body)
        return answer(validators.room_for(backend, request.caller.account, wish))

    @post(routes, "/v1/validators/opinions", SignedOpinion)
    async def opinion(request: Request) -> Response:
        """Hand in a sealed opinion that is due."""
        signed = await signed_validator(request)
        said = parse(SignedOpinion, signed.body)
        await giving.ask(validators.Given(signed.caller.account, said))
        return nothing()

    @post(routes, "/v1/validators/together", TogetherRequest, TogetherAnswer)
    async def together(request: Request) -> Response:
        """Ask for the rows of several files, seal several opinions, hand in several."""
        signed = await signed_large(request)
        account, wish = signed.caller.account, parse(TogetherRequest, signed.body)
        # One kind after another: a file whose opinion is sealed has no claim to look at rows by.
        return answer(
            TogetherAnswer(
                rows=await entries(looking.ask((account, one)) for one in wish.rows),
                seals=await entries(sealing.ask((account, one)) for one in wish.seals),
                opinions=await entries(
                    giving.ask(validators.given(account, one)) for one in wish.opinions
                ),
            )
        )

    @routes.get("/v1/submissions/{digest}/opinions", responses={200: {"model": OpinionList}})
    def opinions(digest: str) -> Response:
        """Every opinion on a submission, once it has a verdict."""
        return answer(validators.opinions_on(backend, ids.digest(digest)))

    return routes
