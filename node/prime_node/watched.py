"""A background thread whose failure ends the agent instead of going unnoticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prime_core.errors import FatalError

log = logging.getLogger("prime.node")


class WatchedThread(threading.Thread):
    """A daemon thread. Exceptions raised by `work` are logged with their traceback and kept for
    `check`, which the main thread calls, because the other threads depend on this one."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.critical("the agent's thread %r died", self.name, exc_info=True)
            self._error = error

    def check(self) -> None:
        """Raises FatalError if the thread has died of an error."""
        if (error := self._error) is not None:
            raise FatalError(
                f"the agent's thread {self.name!r} died of {type(error).__name__}: {error}"
            ) from error
