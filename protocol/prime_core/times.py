"""Times as people read them: always UTC, and saying so."""

from __future__ import annotations

from datetime import UTC, datetime


def utc(seconds: float) -> str:
    """Unix seconds as `2026-11-20 19:05:00Z` (RFC 3339 with a blank for the T), cut to seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%SZ")
