"""What a relay tells: events for its log, and why a fetch was begun anew."""

from __future__ import annotations

from dataclasses import dataclass

from prime_core.errors import UnavailableError


@dataclass(frozen=True)
class RelayEvent:
    """Something worth a log line. `kind`: "learned", "refused", "complete", "failed", "fault",
    "dropped", "rot"."""

    kind: str
    version: int
    detail: str = ""


class SourcesChangedError(UnavailableError):
    """Try again at once, with the sources that are known now."""


class GivesWayError(UnavailableError):
    """A newer version goes first; this one is resumed after it."""
