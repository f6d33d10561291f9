"""Fetches and checks the next sealed batch while the current one trains.

    rank 0's thread:   wait for batch s ─► fetch by signed URLs ─► check every row ─► one slot
    the loop:          take batch s (waits only if it is not ready) ─► the slot is free

Exactly one batch is held ahead, so memory is bounded by two batches: 4 bytes per prompt token, 8
per generated one (`Rollout`), plus one file while it is read. Download errors are raised in the
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from prime_trainer.data import BadBatch, TrainingBatch
from prime_trainer.metrics import Stopwatch

Produce = Callable[[int, Stopwatch], TrainingBatch | BadBatch]
"""(step, watch) → the verified batch, or which one to skip; raises why it is unusable, or
StoppedError when stopped."""


@dataclass(frozen=True)
class Fetched:
    """A batch, and the time its thread spent on it by name."""

    batch: TrainingBatch | BadBatch
    watch: Stopwatch


class Prefetcher:
    """Fetches one batch ahead, in a thread. Not thread-safe; `close` ends the thread.

    `limit`: batches from this step on are never requested.
    """

    def __init__(self, produce: Produce, limit: int | None) -> None:
        self._produce, self._limit = produce, limit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._slots: dict[int, Future[Fetched]] = {}

    def take(self, step: int) -> Fetched:
        """Returns the first batch from number `step` on; the thread then starts on the next. Raises
        what `produce` raised; taking the same step again retries."""
        future = self._slots.pop(step, None) or self._begin(step)
        fetched = future.result()
        self.ahead(fetched.batch.step + 1)
        return fetched

    def ahead(self, step: int) -> None:
        """Starts fetching the first batch from number `step` on, unless it is in progress or beyond
        the limit."""
        if step not in self._slots and (self._limit is None or step < self._limit):
            self._slots[step] = self._begin(step)

    def close(self) -> None:
        """Ends the thread. To close before the limit is reached, first set the event that stops
        `produce`."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, step: int) -> Future[Fetched]:
        return self._pool.submit(self._fetch, step)

    def _fetch(self, step: int) -> Fetched:
        watch = Stopwatch()
        return Fetched(self._produce(step, watch), watch)
