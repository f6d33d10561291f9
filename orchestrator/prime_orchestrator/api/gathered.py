"""Calls that arrive together are answered together: one transaction for many requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from fastapi.concurrency import run_in_threadpool

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MOST = 256
"""Items in one batch."""


@dataclass
class _Queue(Generic[Item, Answer]):
    """What waits in one event loop. `worker` is kept so that the task is not collected."""

    waiting: list[tuple[Item, asyncio.Future[Answer]]] = field(default_factory=list)
    worker: asyncio.Task[None] | None = None


class Gathered(Generic[Item, Answer]):
    """Hands items to `serve` in batches of up to MOST, in the order of their arrival.

    An item that comes while nothing is under way is served at once and alone. Those that come while
    a batch is served form the next one: the busier the server, the fewer transactions an item
    needs. `serve` runs in a thread and gives one answer an item, or an exception to raise there; if
    it raises, every item of the batch fails.
    """

    def __init__(self, serve: Callable[[Sequence[Item]], Sequence[Answer | Exception]]) -> None:
        self._serve = serve
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue[Item, Answer]] = (
            WeakKeyDictionary()
        )

    async def ask(self, item: Item) -> Answer:
        """The answer to one item. Raises what `serve` gave or raised."""
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(loop, _Queue())
        future: asyncio.Future[Answer] = loop.create_future()
        queue.waiting.append((item, future))
        if queue.worker is None or queue.worker.done():
            queue.worker = loop.create_task(self._work(queue))
        return await future

    async def _work(self, queue: _Queue[Item, Answer]) -> None:
        while queue.waiting:
            batch, queue.waiting = queue.waiting[:MOST], queue.waiting[MOST:]
            answers: Sequence[Answer | Exception]
            try:
                answers = await run_in_threadpool(self._serve, [item for item, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # the client went away
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
