"""Connections as the server sees them, and which one is dropped when all places are taken.

In this order: the one idle longest; the one that has kept the same bytes waiting longest, if that
is long enough to be slow; one of the address with the most places, if the newcomer's address has
fewer. So neither idle nor slow readers, nor many from one address, keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import termios
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

SLOW_READER_SECONDS = 8.0
"""When all places are taken, a reader that takes no bytes for this long is dropped for a newcomer
(128 KiB/s, since bytes are handed over in pieces of 1 MiB)."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER, on and 0 seconds: the kernel forgets what the peer has not taken."""


@dataclass(eq=False)
class Peer:
    """One connection. `idle_since`: when its last answer ended; None while one is under way.
    `waiting_since`: when it was handed bytes that it has not taken yet. `pending`: what it sent
    beyond its last request. `head_sent`: whether the answer to its last request has begun. Times by
    the server's clock."""

    writer: asyncio.StreamWriter
    address: str
    idle_since: float | None
    waiting_since: float | None = None
    pending: bytes = b""
    head_sent: bool = False
    _descriptor: int = field(default=-1, repr=False)

    def descriptor(self) -> int:
        """The socket under a number of its own: the event loop keeps the first for itself."""
        if self._descriptor < 0:
            self._descriptor = os.dup(self.writer.get_extra_info("socket").fileno())
        return self._descriptor

    def busy(self) -> bool:
        """Whether an answer is under way, or not all its bytes are confirmed by the other side."""
        if self.idle_since is None:
            return True
        try:
            sock = self.writer.get_extra_info("socket").fileno()
            (unconfirmed,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # it is gone
            return False
        return bool(unconfirmed)

    def close(self) -> None:
        """Ends it once; what was handed over is still sent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.writer.transport.is_closing():
            self.writer.transport.abort()
        else:
            self.writer.close()

    def abort(self) -> None:
        """Drops the connection at once, even during a transfer; its task finds it closed."""
        sock = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it may be gone already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.shutdown(socket.SHUT_RDWR)
        self.writer.transport.abort()


def place_of(address: str) -> str:
    """Whom an address's places count against: itself, or its /64 network (RFC 6177: the least that
    one site gets) under IPv6."""
    return _network_of(address, 64)


def site_of(address: str) -> str:
    """Like `place_of`, by /48 network (RFC 6177: the most that one site gets) under IPv6."""
    return _network_of(address, 48)


def _network_of(address: str, bits: int) -> str:
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, bits), strict=False))
    return str(parsed)


def peer_to_drop(peers: Collection[Peer], newcomer: str, now: float) -> Peer | None:
    """The peer that gives way to a connection from the place `newcomer`; None if none has to."""
    idle = [peer for peer in peers if peer.idle_since is not None]
    if idle:
        return min(idle, key=lambda peer: peer.idle_since or 0.0)
    slow = [
        peer
        for peer in peers
        if peer.waiting_since is not None and now - peer.waiting_since > SLOW_READER_SECONDS
    ]
    if slow:
        return min(slow, key=lambda peer: peer.waiting_since or 0.0)
    held = Counter(peer.address for peer in peers)
    greediest, most = max(held.items(), key=lambda entry: entry[1], default=("", 0))
    if most <= held[newcomer] + 1:
        return None
    theirs = [peer for peer in peers if peer.address == greediest]
    return min(theirs, key=lambda peer: peer.waiting_since or now)
