"""Who has taken all of a policy, by what a server sent: for an origin that serves until then.

A reader (an address) has a policy once every byte of its files was sent there; or those of a delta,
if it then asks for none of the files: it had the delta's base, since a relay that lacks it goes on
to the files at once. What was sent twice counts once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from protocol.broadcast import layout
from protocol.broadcast.layout import delta_items, file_items
from protocol.broadcast.manifest import MANIFEST_NAME
from protocol.core.checkpoint import Manifest

QUIET_SECONDS = 10.0
"""Whoever has a whole delta and asks for nothing more for so long has made the policy from it."""
MOST_READERS = 256
MOST_SPANS = 1024
"""Of one file to one reader, apart from one another; what is beyond either bound is not counted."""


class Spans:
    """Bytes of a file, as spans that do not touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        apart = [(s, e) for s, e in self._spans if e < start or end < s]
        touched = [(s, e) for s, e in self._spans if not (e < start or end < s)]
        if not touched and len(apart) >= MOST_SPANS:
            return
        first = min((s for s, _ in touched), default=start)
        last = max((e for _, e in touched), default=end)
        self._spans = [*apart, (min(start, first), max(end, last))]

    def covers(self, size: int) -> bool:
        """Whether these are all of a file of so many bytes."""
        return size == 0 or self._spans == [(0, size)]


class Taken:
    """What was sent of one policy, whose manifest need not be known yet. `sent` comes from the
    server's thread."""

    def __init__(self, version: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._version = version
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: dict[str, dict[str, Spans]] = {}
        self._last: dict[str, float] = {}

    def sent(self, reader: str, address: str, start: int, end: int) -> None:
        """`reader` was sent the bytes from `start` to `end` of what lies at `address`."""
        named = layout.parse_address(address)
        if named is None or named.version != self._version or named.name == MANIFEST_NAME:
            return
        with self._lock:
            if reader not in self._sent and len(self._sent) >= MOST_READERS:
                return
            self._sent.setdefault(reader, {}).setdefault(named.name, Spans()).add(start, end)
            self._last[reader] = self._clock()

    def by(self, manifest: Manifest) -> str | None:
        """A reader that has all of it; None while there is none."""
        with self._lock:
            for reader, spans in self._sent.items():
                if _has_all(manifest, spans, self._clock() - self._last[reader]):
                    return reader
        return None


def _has_all(manifest: Manifest, spans: dict[str, Spans], quiet: float) -> bool:
    nothing = Spans()
    files = {item.name: item.size for item in file_items(manifest)}
    if all(spans.get(name, nothing).covers(size) for name, size in files.items()):
        return True
    if quiet < QUIET_SECONDS or not files.keys().isdisjoint(spans):
        return False
    return any(spans.get(d.name, nothing).covers(d.size) for d in delta_items(manifest))
