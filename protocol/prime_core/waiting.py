"""Waiting for peers, and stop requests: without limit for a program that has worked before, briefly
at its first start.

A program that has worked before waits for its orchestrator and RPC as long as necessary. At its
very first start the addresses may be wrong, so there it gives up and says what to check.

SIGTERM (a supervisor) and SIGINT (Ctrl-C) end waits. Python runs signal handlers in the main
thread, between two bytecode instructions. Setting an event there can deadlock: the main thread may
be inside that event's `wait` and hold the lock that `set` needs. A signal just before the wait
starts also goes unnoticed until something else wakes the thread. Therefore the C-level handler
writes the signal number to a socket (`signal.set_wakeup_fd`), and a separate thread reads it and
sets the event.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from prime_core.errors import UnavailableError

Answer = TypeVar("Answer")
FIRST_ANSWER_SECONDS = 60.0
"""How long a program waits for an answer at its very first start."""
FIRST_ANSWER_HELP = (
    "Seconds that the very first start waits for orchestrator and RPC to answer (60); later starts "
    "wait as long as it takes."
)


class StoppedError(Exception):
    """A program received a stop request while it waited. Not a failure: the program exits
    cleanly."""


def until_answered(
    ask: Callable[[], Answer],
    stop: threading.Event,
    tell: Callable[[UnavailableError, float], None],
    *,
    give_up: float | None = None,
    pause: float = 1.0,
    longest: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Calls `ask` until it does not raise UnavailableError, and returns its result.

    Before each pause, calls `tell` with the error and the seconds until the next attempt; these
    double from `pause` up to `longest`. Raises StoppedError once `stop` is set, and
    UnavailableError with what to check after `give_up` seconds (None: never). `ask` must have its
    own timeout.
    """
    began = clock()
    while True:
        try:
            return ask()
        except UnavailableError as error:
            left = longest if give_up is None else began + give_up - clock()
            if left <= 0:
                raise UnavailableError(
                    f"{error}; no answer for {give_up:g} s at this first start: check the "
                    "address (--orchestrator, --rpc) and that it is up, then type this again"
                ) from error
            wait = min(pause, left)
            tell(error, wait)
            if stop.wait(wait):
                raise StoppedError from error
            pause = min(longest, pause * 2)


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
