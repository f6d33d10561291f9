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
from types import FrameType


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
