"""Times in human-readable form, always in UTC and marked as such."""

from __future__ import annotations

from datetime import UTC, datetime

from prime_core.errors import UserError


def utc(seconds: float) -> str:
    """Formats Unix seconds as `2026-11-20 19:05:00Z` (RFC 3339 with a space for the T), truncated
    to seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def parse_utc(text: str) -> float:
    """Parses an ISO 8601 time into Unix seconds; UTC if it has no zone. Raises UserError if
    invalid."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        hint = "like 2026-11-20 or 2026-11-20T19:05:00Z"
        raise UserError(f"{text!r} is not a time", hint=hint) from error
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
