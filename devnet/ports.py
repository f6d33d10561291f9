"""Free TCP ports for servers that tests, benches and the devnet start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import threading
from collections import deque
from pathlib import Path

from prime_core.errors import FatalError

FIRST, LAST = 20_000, 31_999
"""Below the range from which Linux takes the near ends of outgoing connections, so no connection
can take a port before its server does, or while the server restarts."""
BLOCK = 40
_HELD = 3


class _Ports:
    """Ports that no other process of this user draws at the same time.

    A server binds its port some seconds after it was drawn, and until then a probe of another
    process finds the port free. So each process draws from blocks of BLOCK ports, each with a lock
    file. It keeps the locks of its last _HELD blocks, until it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: deque[int] = deque()
        self._undrawn: list[int] = []

    def draw(self) -> int:
        """A free port. Raises FatalError if there is none."""
        with self._lock:
            for _ in range(LAST - FIRST):
                if not self._undrawn:
                    self._undrawn = self._take_block()
                port = self._undrawn.pop()
                with socket.socket() as probe, contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    return port
        raise FatalError(f"no free TCP port between {FIRST} and {LAST}: end what holds them")

    def forget(self) -> None:
        """Gives up all blocks. For a forked child, whose parent has them too."""
        self._lock = threading.Lock()
        while self._locks:
            os.close(self._locks.pop())
        self._undrawn = []

    def _take_block(self) -> list[int]:
        if len(self._locks) == _HELD:
            os.close(self._locks.popleft())
        folder = Path(tempfile.gettempdir()) / f"prime-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        starts = list(range(FIRST, LAST, BLOCK))
        random.SystemRandom().shuffle(starts)
        for start in starts:
            lock = os.open(folder / str(start), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._locks.append(lock)
            return list(range(start, start + BLOCK))
        raise FatalError(f"all ports from {FIRST} to {LAST} are in use: end what uses {folder}")


_PORTS = _Ports()
os.register_at_fork(after_in_child=_PORTS.forget)


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that is free. No other process of this user draws it before
    this one ends or has drawn the ports of two more blocks. Raises FatalError if none is free."""
    return _PORTS.draw()
