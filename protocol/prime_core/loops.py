"""Background work of a program: ticks that are repeated, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from prime_core.errors import UnavailableError

log = logging.getLogger(__name__)


class Waker(Protocol):
    """Ends a loop's pause early, for example when a block is announced."""

    def wait(self, seconds: float) -> object: ...

    def close(self) -> None: ...


class Loops:
    """Loops that stop together, also once `stop` is set (if one is given).

    `passing`: errors after which a tick is repeated, after pauses that double up to
    `longest_pause` seconds. Any other is a defect: the loop ends and `on_crash` is called."""

    def __init__(
        self,
        on_crash: Callable[[], object],
        *,
        stop: threading.Event | None = None,
        passing: tuple[type[Exception], ...] = (UnavailableError,),
        longest_pause: float = 10.0,
    ) -> None:
        self._on_crash = on_crash
        self._stop = stop or threading.Event()
        self._passing = passing
        self._longest_pause = longest_pause
        self._threads: list[threading.Thread] = []
        self._wakers: list[Waker] = []
        self._crashes: list[Exception] = []

    def start(
        self, name: str, tick: Callable[[], object], every: float, waker: Waker | None = None
    ) -> None:
        """Calls `tick` about every `every` seconds until `stop`, and when `waker` ends a pause."""
        if waker is not None:
            self._wakers.append(waker)
        thread = threading.Thread(
            target=self._run, args=(name, tick, every, waker), name=f"loop-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run(
        self, name: str, tick: Callable[[], object], every: float, waker: Waker | None
    ) -> None:
        pause = every
        while not self._stop.is_set():
            try:
                tick()
                pause = every
            except self._passing as error:
                pause = min(max(2 * pause, 1.0), self._longest_pause)
                log.warning("the %s loop tries again in %.0f s: %s", name, pause, error)
            except Exception as error:  # a defect: log it, then end the process
                log.critical("the %s loop met a defect; the process ends", name, exc_info=error)
                self._crashes.append(error)
                self._on_crash()
                return
            if waker is not None and pause == every:
                waker.wait(pause)
            else:
                self._stop.wait(pause)

    def stop(self, seconds: float | None = 20.0) -> None:
        """Stops all loops after their current tick; waits at most `seconds` for each (None: until
        it has ended)."""
        self._stop.set()
        for waker in self._wakers:
            waker.close()
        for thread in self._threads:
            thread.join(seconds)
            if thread.is_alive():
                log.error("%s did not end in %.0f s and is left behind", thread.name, seconds)

    def raise_crash(self) -> None:
        """Raises the first defect that a loop met, if any."""
        for error in self._crashes:
            raise error
