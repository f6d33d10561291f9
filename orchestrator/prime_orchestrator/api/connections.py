"""Limits on client connections: header timeouts, and a maximum per address.

uvicorn limits the number of connections and refuses requests beyond it, but keeps idle or half-sent
ones open indefinitely. A few hundred of those would block a pool.

Behind a reverse proxy every connection comes from the proxy. If the operator names it
(`--trusted-proxy`), the client's address is taken from its X-Forwarded-For; from other peers the
header is ignored.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from prime_broadcast.peers import place_of
from prime_core.errors import UnavailableError


def is_bounded(host: str) -> bool:
    """Whether connections of this address are counted."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # not an IP address: a Unix socket
        return False


class Proxies:
    """Reverse proxies that are trusted to name their clients.

    Each appends the address of its client to X-Forwarded-For. The list is read from its end, and
    only as far as trusted proxies wrote it, so entries forged by the client are never reached. The
    proxies must set the header (nginx: `proxy_set_header X-Forwarded-For
    $proxy_add_x_forwarded_for`). A proxy that passes the client's header unchanged lets any client
    spoof any address.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        """Takes addresses, or networks in CIDR notation. Raises ValueError for anything else, and
        for a network that contains every address."""
        self._networks = [ipaddress.ip_network(one) for one in networks]
        if any(network.prefixlen == 0 for network in self._networks):
            raise ValueError("trusting every address would let any client forge its address")

    def __contains__(self, host: str) -> bool:
        address = _address(host)
        return address is not None and any(address in network for network in self._networks)

    def client(self, peer: str, forwarded: Iterable[str]) -> str:
        """Returns the client's address. `peer`: the other end of the connection; `forwarded`: the
        header's values."""
        entries = [entry.strip() for value in forwarded for entry in value.split(",")]
        found = peer
        while entries and found in self:
            address = _address(_without_port(entries.pop()))
            if address is None:  # "unknown" or invalid: use the proxy's own address
                break
            found = str(address)
        return found


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _without_port(entry: str) -> str:
    """Returns the address in `1.2.3.4:5`, `[2001:db8::1]:5` or an address without port."""
    if entry.startswith("["):
        return entry[1:].partition("]")[0]
    return entry.partition(":")[0] if entry.count(":") == 1 else entry


class Places:
    """A limited number of places, of which one remote address may hold only a few.

    Use it only in the event loop's thread.
    """

    def __init__(self, most: int, each: int, what: str) -> None:
        self._most = most
        self._each = each
        self._what = what
        self._taken = 0
        self._held: Counter[str] = Counter()

    @contextmanager
    def one(self, host: str) -> Iterator[None]:
        """Holds a place while the block runs. Raises UnavailableError if there is none."""
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


class PatientHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol (httptools) with five more limits. Loopback addresses and trusted
    proxies (`behind`) may open any number of connections. If more than MOST_WAITING wait for a
    request, the longest waiting ones are closed, so silent connections cannot use up uvicorn's
    total."""

    HEADER_SECONDS: ClassVar[float] = 20.0
    """Time from opening a connection, or from the first byte of a later request, to the complete
    header."""
    HEADER_BYTES: ClassVar[int] = 16 << 10
    """Size of an incomplete header, trailer or frame of a chunk."""
    MOST_AHEAD: ClassVar[int] = 8
    """Requests that a client may send before the answer to its first one."""
    MOST_EACH: ClassVar[int] = 100
    """Connections per address (per /64 network under IPv6)."""
    MOST_WAITING: ClassVar[int] = 500
    """Total connections without a request in progress."""
    is_bounded = staticmethod(is_bounded)
    _waiting: ClassVar[dict[PatientHttp, None]] = {}
    """Ordered by when they began to wait."""
    _held: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._address = ""
        self._running: RequestResponseCycle | None = None
        self._awaits_header = True
        self._incomplete = 0
        """Bytes received since the parser last completed a part of a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = str((transport.get_extra_info("peername") or ("",))[0])
        if self.is_bounded(host):
            self._address = place_of(host)
            self._held[self._address] += 1
            if self._held[self._address] > self.MOST_EACH:
                transport.close()
                return
        self._wait()
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address:
            self._held[self._address] -= 1
            if not self._held[self._address]:
                del self._held[self._address]
        self._forget_timer()
        self._waiting.pop(self, None)
        if self._running is not None and not self._running.response_complete:
            # uvicorn notifies the newest request only
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        self._incomplete += len(data)
        super().data_received(data)
        if self._incomplete > self.HEADER_BYTES and not self.transport.is_closing():
            if self._awaits_header:
                self.send_400_response("The header is too large.")
            self.transport.close()
        self._watch_header()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self.MOST_AHEAD:
            raise ValueError("too many requests before an answer")  # uvicorn answers 400
        self._incomplete = 0
        self._awaits_header = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._incomplete = 0
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._incomplete = 0

    def on_message_complete(self) -> None:
        self._incomplete = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._awaits_header = not self.pipeline
        super().on_response_complete()
        if self._awaits_header:
            self._wait()

    def _wait(self) -> None:
        """Marks this connection as waiting for a request; may close the one that has waited
        longest."""
        self._waiting.pop(self, None)
        self._waiting[self] = None
        if len(self._waiting) > self.MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.close()

    def _watch_header(self) -> None:
        """Runs the timer while a request's header is awaited; partial data does not reset it."""
        if not self._awaits_header:
            self._waiting.pop(self, None)
            self._forget_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.HEADER_SECONDS, self._too_late)

    def _too_late(self) -> None:
        self._header_timer = None
        if self._awaits_header and not self.transport.is_closing():
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def behind(proxies: Proxies, waiting: int = PatientHttp.MOST_WAITING) -> type[PatientHttp]:
    """Returns PatientHttp for a server behind `proxies`, whose connections are not counted by
    address. `waiting`: most connections without a request in progress."""

    class ProxiedHttp(PatientHttp):
        MOST_WAITING = waiting
        is_bounded = staticmethod(lambda host: is_bounded(host) and host not in proxies)

    return ProxiedHttp
