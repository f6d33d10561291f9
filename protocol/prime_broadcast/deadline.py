"""A socket for http.client whose reads also end at a deadline of the whole, not only of each recv.

Without it a server that says one byte every few seconds, or interim answers (`100 Continue`) for
ever, holds its reader for as long as it likes. Large bodies are read by `fill`, past http.client:
the kernel waits for the whole of a piece, which costs one call where polling costs dozens.
"""

from __future__ import annotations

import io
import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

PATIENCE = 1.0
"""Seconds after which `fill` comes back with what it has, so that its caller may look around."""


class TimedSocket:
    """What `http.client` uses of a socket. `silence`: seconds that one recv may take at most."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        self._sock = sock
        self._silence = silence
        self._deadline: float | None = None
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._waits = False
        # In force only while the socket blocks, which it does in `fill`.
        limit = struct.pack("ll", int(PATIENCE), int(PATIENCE % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.settimeout(silence)

    def within(self, seconds: float | None) -> None:
        """All reads from now on end in `seconds` together; None: only silence ends them."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._sock.settimeout(self._silence)
        self._waits = False

    def receive(self, buffer: Buffer) -> int:
        """One recv. Raises TimeoutError at the deadline, or after too long a silence."""
        self._mind_deadline()
        return self._sock.recv_into(buffer)

    def receive_into(self, raw: io.RawIOBase, buffer: Buffer) -> int | None:
        """The same through `raw`, the file that http.client reads from."""
        self._mind_deadline()
        return raw.readinto(buffer)

    def fill(self, buffer: memoryview) -> int | None:
        """Reads until `buffer` is full, PATIENCE is over or the stream ends: how many bytes came;
        0 at the end of the stream, None if nothing came in time. No deadline holds here."""
        try:
            if self._encrypted:
                return self._sock.recv_into(buffer)
            if not self._waits:
                self._sock.settimeout(None)
                self._waits = True
            return self._sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
        except (BlockingIOError, TimeoutError):
            return None

    def _mind_deadline(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline of an answer has passed")
            self._sock.settimeout(min(self._silence, left))

    def sendall(self, data: Buffer) -> None:
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """For reading ("rb"), as HTTPResponse asks for it."""
        assert mode == "rb"
        return io.BufferedReader(_Raw(self, self._sock.makefile("rb", buffering=0)))

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


class _Raw(io.RawIOBase):
    """The unbuffered half; keeps the socket open as long as it is, as `socket.makefile` does."""

    def __init__(self, timed: TimedSocket, raw: io.RawIOBase) -> None:
        self._timed = timed
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        return self._timed.receive_into(self._raw, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
