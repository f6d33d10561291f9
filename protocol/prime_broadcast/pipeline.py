"""Work on blocks side by side in a few threads, its results in order, its memory bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class Buffers:
    """Buffers of `size` bytes that threads use in turn: fresh memory costs more than the copy into
    it. A deque's ends are safe to use from several threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[bytearray] = deque()

    def take(self, length: int) -> bytearray:
        """One of at least `length` bytes."""
        try:
            buffer = self._free.pop()
        except IndexError:
            return bytearray(max(length, self._size))
        return buffer if len(buffer) >= length else bytearray(length)

    def give_back(self, buffer: bytearray) -> None:
        """Whoever took it is done with it."""
        self._free.append(buffer)


def job(function: Callable[..., T], *arguments: object) -> Callable[[], T]:
    """A call to be made later."""
    return lambda: function(*arguments)


def in_order(
    pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], T]], window: int
) -> Generator[T, None, None]:
    """Results in the jobs' order with at most `window` jobs begun and not yet taken. Once it ends,
    however it ends, no job is running: the caller may close the files that they work on."""
    running: deque[Future[T]] = deque()
    try:
        for call in jobs:
            running.append(pool.submit(call))
            if len(running) >= window:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
        wait(running)
