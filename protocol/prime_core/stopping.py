"""Shutdown of long-running programs by SIGTERM (a supervisor) and SIGINT (Ctrl-C).

Python runs signal handlers in the main thread, between two bytecode instructions. Setting an event
there can deadlock: the main thread may be inside that event's `wait` and hold the lock that `set`
needs. A signal just before the wait starts also goes unnoticed until something else wakes the
thread. Therefore the C-level handler writes the signal number to a socket (`signal.set_wakeup_fd`),
and a separate thread reads it and sets the event.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from prime_core.waiting import StoppedError


def until_stopped(
    stop: threading.Event | None = None, *, second_ends: bool = False
) -> threading.Event:
    """Returns an event (`stop`, or a new one) that the first SIGTERM or SIGINT sets. With
    `second_ends`, a second signal ends the process at once. Call it once, in the main thread."""
    event = stop or threading.Event()
    ours, handlers = socket.socketpair()
    handlers.setblocking(False)
    signal.set_wakeup_fd(handlers.fileno(), warn_on_full_buffer=False)

    def handle(number: int, frame: FrameType | None) -> None:
        if second_ends:
            signal.signal(number, signal.SIG_DFL)

    def listen() -> None:
        while handlers.fileno() >= 0:  # never closed: the freed descriptor number could be reused
            if ours.recv(1)[0] in (signal.SIGTERM, signal.SIGINT):
                event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    return event


@contextmanager
def interruptible() -> Iterator[None]:
    """While active, the first SIGTERM or SIGINT raises StoppedError in the main thread, and a
    second one ends the process. Call it from the main thread, around work without persistent side
    effects."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise StoppedError

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)
