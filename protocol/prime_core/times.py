"""Times as people read them: always UTC, and saying so."""

from __future__ import annotations

from datetime import UTC, datetime

from prime_core.errors import UserError


def utc(seconds: float) -> str:
    """Unix seconds as `2026-11-20 19:05:00Z` (RFC 3339 with a blank for the T), cut to seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def parse_utc(text: str) -> float:
    """Unix seconds of an ISO 8601 time, UTC if it names no zone. Raises UserError if it is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        hint = "like 2026-11-20 or 2026-11-20T19:05:00Z"
        raise UserError(f"{text!r} is no time", hint=hint) from error
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
