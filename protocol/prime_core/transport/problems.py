"""Conversion between RFC 9457 problem documents and the error tree."""

from __future__ import annotations

import json
from typing import Any

from prime_core.errors import (
    ConflictError,
    FatalError,
    MalformedError,
    PolicyError,
    PrimeError,
    ProtocolError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.errors import NotFoundError as NotFoundError

CONTENT_TYPE = "application/problem+json"
_URN = "urn:prime:problem:"

_KINDS: dict[str, tuple[type[PrimeError], int]] = {
    "malformed": (MalformedError, 400),
    "untrusted": (UntrustedError, 401),
    "refused": (PolicyError, 403),
    "not-found": (NotFoundError, 404),
    "conflict": (ConflictError, 409),
    "unavailable": (UnavailableError, 503),
    "protocol": (ProtocolError, 400),
    "user": (UserError, 400),
    "fatal": (FatalError, 500),
}


def to_problem(error: PrimeError) -> tuple[int, dict[str, Any]]:
    """HTTP status and problem document for an expected error."""
    for kind, (error_type, status) in _KINDS.items():
        if isinstance(error, error_type):
            document: dict[str, Any] = {
                "type": f"{_URN}{kind}",
                "title": kind,
                "status": status,
                "detail": error.public or str(error),
            }
            if hint := getattr(error, "hint", ""):
                document["hint"] = hint
            if isinstance(error, ProtocolError) and error.spoken is not None:
                document["spoken"] = list(error.spoken)
            return status, document
    return 500, {
        "type": f"{_URN}fatal",
        "title": "fatal",
        "status": 500,
        "detail": error.public or str(error),
    }


def from_problem(status: int, body: bytes) -> PrimeError:
    """The error described by a peer's problem document, with its kind in `problem`. Without a kind
    (a proxy's answer, another program's), the status decides and `problem` stays empty."""
    kind, detail, hint, spoken = "", "", "", None
    try:
        document = json.loads(body[:65_536])
        named = str(document.get("type", ""))
        detail = _text(document.get("detail", ""), 2048)
        kind = named.removeprefix(_URN) if named.startswith(_URN) else ""
        hint = _text(document.get("hint", ""), 512)
        spoken = document.get("spoken")
    except (ValueError, AttributeError, RecursionError):
        pass
    if kind in _KINDS:
        # A defect of the peer is none of ours: to its clients it is an outage.
        error_type = UnavailableError if kind == "fatal" else _KINDS[kind][0]
        error = error_type(detail)
        if isinstance(error, UserError):
            error.hint = hint
        if isinstance(error, ProtocolError):
            error.spoken = _versions(spoken)
        error.problem = kind
        return error
    detail = detail or f"the server answered {status}"
    if status == 404:
        return NotFoundError(detail)
    if status >= 500 or status == 429:
        return UnavailableError(detail)
    return MalformedError(detail)


def _text(value: object, most: int) -> str:
    """`value` as text that can be encoded: JSON may hold half of a surrogate pair."""
    return str(value)[:most].encode("utf-8", "replace").decode()


def _versions(value: object) -> tuple[int, int] | None:
    """Oldest and newest version in a refusal; None if it has no readable ones."""
    match value:
        case [int(oldest), int(newest)]:
            return oldest, newest
    return None
