"""A value that many ask for and that is costly to make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi.concurrency import run_in_threadpool

T = TypeVar("T")
EVERY_SECONDS = 1.0


class Kept(Generic[T]):
    """The newest value of `make`, however many ask: made again at the earliest a second after the
    last one was done, and later where making it takes longer than a second. `make` runs in a
    thread; use all else in the event loop's."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._good_until = float("-inf")
        self._latest: tuple[T] | None = None

    async def get(self) -> T:
        """Returns the newest value. Raises what `make` raises."""
        async with self._lock:
            clock = asyncio.get_running_loop().time
            begun = clock()
            if self._latest is None or begun >= self._good_until:
                self._latest = (await run_in_threadpool(self._make),)
                done = clock()
                self._good_until = done + EVERY_SECONDS * max(1.0, done - begun)
            return self._latest[0]
