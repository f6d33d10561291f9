"""How long-running programs are told to end: SIGTERM (a supervisor) and SIGINT (Ctrl-C).

Python runs a signal's handler in the main thread, between two of its instructions. An event set
there can hang the program: if the main thread was just inside that event's `wait`, it holds the
lock that `set` needs; and a signal that comes just before it begins to wait is not noticed before
something else wakes it. So the signal's number travels through a socket, which the C handler writes
whatever the main thread does, to a thread that sets the event.
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
    """An event (`stop`, or a new one) that the first SIGTERM or SIGINT sets; with `second_ends`, a
    second one ends the process at once. Call it once, in the main thread."""
    event = stop or threading.Event()
    ours, handlers = socket.socketpair()
    handlers.setblocking(False)
    signal.set_wakeup_fd(handlers.fileno(), warn_on_full_buffer=False)

    def handle(number: int, frame: FrameType | None) -> None:
        if second_ends:
            signal.signal(number, signal.SIG_DFL)

    def listen() -> None:
        while handlers.fileno() >= 0:  # open for good: a number freed would be given to a file
            if ours.recv(1)[0] in (signal.SIGTERM, signal.SIGINT):
                event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    return event


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, the first SIGTERM or SIGINT raises StoppedError in the main thread, from where it
    is called; a second one ends the process. For work that changes nothing that is kept."""

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
