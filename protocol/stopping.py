"""How long-running programs are told to end: SIGTERM (a supervisor) and SIGINT (Ctrl-C)."""

from __future__ import annotations

import signal
import threading


def until_stopped() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets. Call it in the main thread."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
