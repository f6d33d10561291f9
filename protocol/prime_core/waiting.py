"""Waiting for peers: without limit for a program that has worked before, briefly at its first
start.

A program that has worked before waits for its orchestrator and RPC as long as necessary. At its
very first start the addresses may be wrong, so there it gives up and says what to check.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
