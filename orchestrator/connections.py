"""Connections of strangers: each says what it wants in time, and no address holds them all.

uvicorn bounds how many connections there are, and refuses every request beyond; but it lets one
that says nothing, or half a request, stay for ever. A few hundred of those would shut a pool.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.broadcast.peers import place_of


class PatientH11(H11Protocol):
    """HTTP/1.1 (h11) of uvicorn with two bounds more. This machine's own addresses, a reverse
    proxy's among them, may have as many connections as they like."""

    HEADER_SECONDS: ClassVar[float] = 20.0
    """From a connection's first moment, or a later request's first byte, to its whole header."""
    MOST_EACH: ClassVar[int] = 100
    """Connections of one address (of one /64 network under IPv6)."""
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

    @staticmethod
    def is_bounded(host: str) -> bool:
        """Whether the connections of this address are counted."""
        try:
            return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
        except ValueError:  # no address of the internet: a Unix socket
            return False

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
