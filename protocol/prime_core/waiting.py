"""How programs wait for what does not answer: patiently once it was there, briefly before.

A program that has worked before waits for its orchestrator and RPC as long as it takes: they come
back. At its very first start nothing tells that their addresses are right, so there it gives up
and says what to check.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from prime_core.errors import UnavailableError

Answer = TypeVar("Answer")
FIRST_ANSWER_SECONDS = 60.0
"""How long a program's very first start waits for an answer."""
FIRST_ANSWER_HELP = (
    "Seconds that the very first start waits for orchestrator and RPC to answer (60); later starts "
    "wait as long as it takes."
)


class StoppedError(Exception):
    """A program was told to stop while it waited. No error: it ends cleanly on it."""


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
    """What `ask` answers, asked again whenever it raises UnavailableError.

    `tell` hears each such error and the seconds until the next attempt, which grow from `pause` to
    `longest`. Raises StoppedError once `stop` is set, and after `give_up` seconds (None: never)
    UnavailableError with what to check. A single question is bounded by whoever asks it.
    """
    began = clock()
    while True:
        try:
            return ask()
        except UnavailableError as error:
            left = longest if give_up is None else began + give_up - clock()
            if left <= 0:
                raise UnavailableError(
                    f"{error}; nothing was heard for {give_up:g} s at this first start: check the "
                    "address (--orchestrator, --rpc) and that it is up, then type this again"
                ) from error
            wait = min(pause, left)
            tell(error, wait)
            if stop.wait(wait):
                raise StoppedError from error
            pause = min(longest, pause * 2)
