"""The next sealed batch, fetched and checked while this one trains.

    rank 0's thread:   wait for batch s ─► fetch by signed URLs ─► check to the last row ─► one slot
    the loop:          take batch s (waits only for what is not there yet) ─► the slot is free

Exactly one batch is held ahead, so memory is bounded by two: 4 bytes a prompt token, 8 a generated
one (`Rollout`), and one file while it is read. A download that fails raises in the
loop, never nowhere (an ancestor's prefetcher swallowed errors and marked the file fetched).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from prime_trainer.data import TrainingBatch
from prime_trainer.metrics import Stopwatch

Produce = Callable[[int, Stopwatch], TrainingBatch]
"""(step, watch) → the verified batch; raises what makes it unusable, StoppedError when stopped."""


@dataclass(frozen=True)
class Fetched:
    """A batch and how long its thread worked at it, by name."""

    batch: TrainingBatch
    watch: Stopwatch


class Prefetcher:
    """One batch ahead, in a thread. Belongs to one caller; `close` ends the thread.

    `limit`: steps from here on are never asked for.
    """

    def __init__(self, produce: Produce, limit: int | None) -> None:
        self._produce, self._limit = produce, limit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._slots: dict[int, Future[Fetched]] = {}

    def take(self, step: int) -> Fetched:
        """Batch `step`; the thread then goes after the next. Raises what `produce` raised: taking
        the same step again tries again."""
        future = self._slots.pop(step, None) or self._begin(step)
        fetched = future.result()
        self.ahead(step + 1)
        return fetched

    def ahead(self, step: int) -> None:
        """Begins with batch `step`, unless it is under way or beyond the limit."""
        if step not in self._slots and (self._limit is None or step < self._limit):
            self._slots[step] = self._begin(step)

    def close(self) -> None:
        """Ends the thread. Whoever closes before the limit is reached first sets the event that
        `produce` stops by."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, step: int) -> Future[Fetched]:
        return self._pool.submit(self._fetch, step)

    def _fetch(self, step: int) -> Fetched:
        watch = Stopwatch()
        return Fetched(self._produce(step, watch), watch)
