"""Caches for one value that is expensive to compute and often read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi.concurrency import run_in_threadpool

K = TypeVar("K")
T = TypeVar("T")
EVERY_SECONDS = 1.0


class Kept(Generic[T]):
    """Caches the result of `make` for one second, or for as long as `make` took if that is longer.
    Concurrent readers share one call. `make` runs in a thread; `get` belongs to the event loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._good_until = float("-inf")
        self._latest: tuple[T] | None = None

    async def get(self) -> T:
        """Returns the cached value, or a new one if it has expired. Raises what `make` raises."""
        async with self._lock:
            clock = asyncio.get_running_loop().time
            begun = clock()
            if self._latest is None or begun >= self._good_until:
                self._latest = (await run_in_threadpool(self._make),)
                done = clock()
                self._good_until = done + EVERY_SECONDS * max(1.0, done - begun)
            return self._latest[0]


class KeptFor(Generic[K, T]):
    """Caches the value of the newest key. Readers do not wait for one another, so some may make
    the same value twice."""

    def __init__(self) -> None:
        self._kept: tuple[K, T] | None = None

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Returns the value of `key`, by `make` if it is not cached. Raises what `make` raises."""
        kept = self._kept
        if kept is None or kept[0] != key:
            kept = self._kept = key, make()
        return kept[1]
