"""Connections of strangers: each says what it wants in time, and no address holds them all.

uvicorn bounds how many connections there are, and refuses every request beyond; but it lets one
that says nothing, or half a request, stay for ever. A few hundred of those would shut a pool.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.broadcast.peers import place_of
from protocol.core.errors import UnavailableError


def is_bounded(host: str) -> bool:
    """Whether what this address holds is counted."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # no address of the internet: a Unix socket
        return False


class Places:
    """A bounded number of places, of which one foreign address holds a few at most.

    Used in the event loop's thread alone.
    """

    def __init__(self, most: int, each: int, what: str) -> None:
        self._most = most
        self._each = each
        self._what = what
        self._taken = 0
        self._held: Counter[str] = Counter()

    @contextmanager
    def one(self, host: str) -> Iterator[None]:
        """A place for as long as the block runs. Raises UnavailableError if there is none."""
        address = place_of(host) if is_bounded(host) else ""
        if self._taken >= self._most or (address and self._held[address] >= self._each):
            raise UnavailableError(f"{self._what}; try again in a moment")
        self._taken += 1
        self._held[address] += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]


class PatientH11(H11Protocol):
    """HTTP/1.1 (h11) of uvicorn with two bounds more. This machine's own addresses, a reverse
    proxy's among them, may have as many connections as they like."""

    HEADER_SECONDS: ClassVar[float] = 20.0
    """From a connection's first moment, or a later request's first byte, to its whole header."""
    MOST_EACH: ClassVar[int] = 100
    """Connections of one address (of one /64 network under IPv6)."""
    is_bounded = staticmethod(is_bounded)
    _held: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = str((transport.get_extra_info("peername") or ("",))[0])
        if self.is_bounded(host):
            self._address = place_of(host)
            self._held[self._address] += 1
            if self._held[self._address] > self.MOST_EACH:
                transport.close()
                return
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address:
            self._held[self._address] -= 1
            if not self._held[self._address]:
                del self._held[self._address]
        self._forget_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def _watch_header(self) -> None:
        """The timer runs while a request's header is awaited, and is not set back by its pieces."""
        if self.conn.their_state is not h11.IDLE:
            self._forget_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.HEADER_SECONDS, self._too_late)

    def _too_late(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
