"""A socket for http.client whose reads also end at a deadline of the whole, not only of each recv.

Without it a server that says one byte every few seconds, or interim answers (`100 Continue`) for
ever, holds its reader for as long as it likes.
"""

from __future__ import annotations

import io
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TimedSocket:
    """What `http.client` uses of a socket. `silence`: seconds that one recv may take at most."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        self._sock = sock
        self._silence = silence
        self._deadline: float | None = None
        sock.settimeout(silence)

    def within(self, seconds: float | None) -> None:
        """All reads from now on end in `seconds` together; None: only silence ends them."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._sock.settimeout(self._silence)

    def receive_into(self, raw: io.RawIOBase, buffer: Buffer) -> int | None:
        """One recv. Raises TimeoutError at the deadline, or after too long a silence."""
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline of an answer has passed")
            self._sock.settimeout(min(self._silence, left))
        return raw.readinto(buffer)

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
