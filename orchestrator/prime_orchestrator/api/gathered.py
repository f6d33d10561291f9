"""Batches concurrent calls, so that one transaction serves many requests."""

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
"""Most items in one batch."""


@dataclass
class _Queue(Generic[Item, Answer]):
    """Items waiting in one event loop. `worker` is referenced here so that it is not
    garbage-collected."""

    waiting: list[tuple[Item, asyncio.Future[Answer]]] = field(default_factory=list)
    worker: asyncio.Task[None] | None = None


class Gathered(Generic[Item, Answer]):
    """Passes items to `serve` in batches of up to MOST, in order of arrival.

    An item that arrives while `serve` is idle is served immediately, alone. Items that arrive while
    a batch is served form the next one, so a busier server needs fewer transactions per item.
    `serve` runs in a thread and returns one answer per item, or an exception to raise for it. If
    `serve` itself raises, every item of the batch fails.
    """

    def __init__(self, serve: Callable[[Sequence[Item]], Sequence[Answer | Exception]]) -> None:
        self._serve = serve
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue[Item, Answer]] = (
            WeakKeyDictionary()
        )

    async def ask(self, item: Item) -> Answer:
        """Returns the answer to one item. Raises what `serve` returned or raised for it."""
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
                if future.done():  # the client disconnected
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
