"""What all routes share: bounded bodies, strict parsing, signed callers, problem documents."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from prime_core import version
from prime_core.errors import MalformedError, PrimeError, UnavailableError
from prime_core.ids import Address
from prime_core.signing import Strict
from prime_core.transport.problems import CONTENT_TYPE, to_problem
from prime_core.transport.signatures import check_body
from prime_orchestrator.api.auth import Caller, Head, authenticate
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import Places
from prime_orchestrator.api.gathered import Gathered

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=Strict)
Route = TypeVar("Route", bound=Callable[..., Any])

SMALL_BODY = 64 << 10
BODY_SECONDS = 60
"""A body must have arrived in full after so long."""


@dataclass(frozen=True)
class Signed:
    """An authenticated request. `arrived_at`: when its last byte was here (Unix seconds)."""

    caller: Caller
    body: bytes
    arrived_at: float


MAX_LARGE_BODIES = 8
"""Of those that are taken into memory whole: bounds what strangers can make us hold."""
LARGE_BODIES_EACH = 2
"""Of one foreign address: one slow machine keeps no newcomer out."""
_large = Places(MAX_LARGE_BODIES, LARGE_BODIES_EACH, "too many large requests at once")
_OF_HEAD = frozenset({b"host", b"signature-input", b"signature", b"content-digest"})
MAX_DIGITS = 19
"""Digits of the largest number that is ever asked for (2^62)."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises MalformedError before reading more than that."""
    declared = b"0"
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            declared = value
            break
    # length first: int() itself refuses thousands of digits
    if not declared.isdigit() or len(declared) > MAX_DIGITS or int(declared) > limit:
        raise MalformedError(f"a body of this request has at most {limit} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":  # no one receives the answer
                    raise UnavailableError("the request broke off in its body")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise MalformedError(f"a body of this request has at most {limit} bytes")
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise UnavailableError("the request's body did not arrive in time") from error
    return bytes(body)


def host_of(request: Request) -> str:
    """The address at the other end of the connection; empty if it has none."""
    return request.client.host if request.client else ""


def connection_of(request: Request) -> str:
    """The other end of the connection with its port, which a connection keeps while it lasts; empty
    if it has none. Behind a proxy, that is the proxy's own connection."""
    return f"{request.client.host} {request.client.port}" if request.client else ""


def body_of() -> Any:
    """Dependency: the raw body of an unsigned request."""

    async def dependency(request: Request) -> bytes:
        return await read_body(request, SMALL_BODY)

    return Depends(dependency)


def signed_by(
    backend: Backend,
    scope: str,
    limit: int = SMALL_BODY,
    expects: Callable[[Address, Mapping[str, str]], int] | None = None,
) -> Any:
    """Dependency: the authenticated caller with the raw body, see `signed_reader`."""
    return Depends(signed_reader(backend, scope, limit, expects))


def signed_reader(
    backend: Backend,
    scope: str,
    limit: int = SMALL_BODY,
    expects: Callable[[Address, Mapping[str, str]], int] | None = None,
) -> Callable[[Request], Awaitable[Signed]]:
    """Returns a function that authenticates a request's caller and reads its body.

    Who asks is known before a byte of the body is read. For large bodies, `expects(account, path
    parameters)` gives how many bytes the very one that is awaited has, or raises; and few of them
    are read at once.
    """

    callers = Gathered[Head, Caller](partial(authenticate, backend, scope))

    async def read(request: Request) -> Signed:
        caller = await callers.ask(head_of(request))
        if expects is None:
            body = await read_body(request, limit)
        else:
            size = await run_in_threadpool(expects, caller.account, request.path_params)
            with _large.one(host_of(request)):
                body = await read_body(request, min(limit, size))
        arrived_at = backend.now()
        check_body(caller.proven, body)
        return Signed(caller, body, arrived_at)

    return read


def head_of(request: Request) -> Head:
    """What a signature covers but the body, and the signature."""
    scope = request.scope
    query = scope["query_string"].decode("latin-1")
    target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _OF_HEAD:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return Head(scope["method"], headers.get("host", ""), target, headers)


def parse(model: type[Model], body: bytes) -> Model:
    """A strict model from raw JSON. Raises MalformedError that names the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedError(
            f"the body is not a {model.__name__}: {where + ': ' if where else ''}{first['msg']}"
        ) from error


def answer(value: BaseModel | list[Any]) -> Response:
    """A model (or a list of models) as JSON."""
    if isinstance(value, BaseModel):
        return Response(value.model_dump_json(), media_type="application/json")
    parts = ",".join(item.model_dump_json() for item in value)
    return Response(f"[{parts}]", media_type="application/json")


def nothing() -> Response:
    """{}"""
    return Response("{}", media_type="application/json")


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` that documents a body read by hand."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "x-body-model": model.__name__,
    }


def in_path(name: str) -> dict[str, Any]:
    """`openapi_extra` that documents a part of the path read by hand."""
    schema = {"type": "string", "title": name.title()}
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": schema}]}


def takes_bytes() -> dict[str, Any]:
    """`openapi_extra` that documents a body of raw bytes."""
    schema = {"type": "string", "format": "binary"}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": schema}},
        }
    }


def post(
    routes: APIRouter, path: str, body: type[BaseModel] | type[bytes], gives: Any = None
) -> Callable[[Route], Route]:
    """Adds a POST route that reads its body by hand. `gives`: the model of its answer, if any."""
    documented = takes_bytes() if issubclass(body, bytes) else takes(body)
    responses: dict[int | str, dict[str, Any]] = {200: {"model": gives}} if gives else {}
    return routes.post(path, responses=responses, openapi_extra=documented)


def problem(error: PrimeError, code: int | None = None) -> Response:
    """The RFC 9457 document of an expected error, under its own status or `code`."""
    usual, document = to_problem(error)
    document["status"] = code or usual
    headers = {"Retry-After": "2"} if code == 429 or usual == 503 else {}
    return _document(document["status"], document, headers)


def refusal(error: PrimeError) -> Response:
    """The document of an expected error that a route raised; logs that of an outage."""
    if isinstance(error, UnavailableError):
        log.warning("unavailable: %s", error)
    return problem(error)


def defect() -> Response:
    """The bare document of an unexpected error, which the log describes in full."""
    document = {
        "type": "urn:prime:problem:fatal",
        "title": "fatal",
        "status": 500,
        "detail": "a defect of this server; its log says more",
    }
    return _document(500, document, {})


def _document(code: int, document: dict[str, Any], headers: dict[str, str]) -> Response:
    versioned = {version.HEADER: str(version.SPOKEN[-1]), **headers}
    return Response(
        json.dumps(document), status_code=code, media_type=CONTENT_TYPE, headers=versioned
    )


def install_problems(app: FastAPI) -> None:
    """Every error leaves as a problem document; a defect as a bare 500, logged in full."""

    async def expected(_: Request, error: Exception) -> Response:
        assert isinstance(error, PrimeError)
        return refusal(error)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "not-found" if error.status_code == 404 else "malformed"
        document = {
            "type": f"urn:prime:problem:{kind}",
            "title": kind,
            "status": error.status_code,
            "detail": str(error.detail),
        }
        return _document(error.status_code, document, dict(error.headers or {}))

    async def parameters(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return problem(MalformedError(f"{where}: {first['msg']}"))

    async def defective(_: Request, __: Exception) -> Response:
        return defect()

    app.add_exception_handler(PrimeError, expected)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, parameters)
    app.add_exception_handler(Exception, defective)
