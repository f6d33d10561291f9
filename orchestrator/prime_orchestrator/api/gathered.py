"""Batches concurrent calls, so that one transaction serves many requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from fastapi.concurrency import run_in_threadpool

from prime_core.errors import UnavailableError

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MOST = 256
"""Most items in one batch."""
AGAIN_SECONDS = 1.0
"""A caller is expected to ask again within this time."""


@dataclass
class _Queue(Generic[Item, Answer]):
    """Items waiting in one event loop. `worker` is referenced here so that it is not
    garbage-collected. `came` is set when an item arrives. `asked`: callers that are expected to ask
    again, with when they asked last."""

    waiting: list[tuple[Item, asyncio.Future[Answer]]] = field(default_factory=list)
    worker: asyncio.Task[None] | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)
    asked: dict[Hashable, float] = field(default_factory=dict)


class Gathered(Generic[Item, Answer]):
    """Passes items to `serve` in batches of up to MOST, in order of arrival.

    An item that arrives while `serve` is idle is served immediately, alone. Items that arrive while
    a batch is served form the next one, so a busier server needs fewer transactions per item.
    `serve` runs in a thread and returns one answer per item, or an exception to raise for it. If
    `serve` itself raises, the items are served again one by one, so that one bad item fails alone;
    `serve` must have changed nothing then, or nothing that a repetition would change again. After
    UnavailableError every item of the batch fails: the others would only wait for the same.

    `caller` returns who asks for an item. If it is given, a batch waits until all callers of the
    last AGAIN_SECONDS are in it, at most `wait` seconds. Callers that ask at about the same pace
    then share batches. The only caller never waits.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[Item]], Sequence[Answer | Exception]],
        *,
        wait: float = 0.0,
        caller: Callable[[Item], Hashable] | None = None,
    ) -> None:
        self._serve = serve
        self._wait = wait
        self._caller = caller
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue[Item, Answer]] = (
            WeakKeyDictionary()
        )

    async def ask(self, item: Item) -> Answer:
        """Returns the answer to one item. Raises what `serve` returned or raised for it."""
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = _Queue()
        future: asyncio.Future[Answer] = loop.create_future()
        queue.waiting.append((item, future))
        queue.came.set()
        if queue.worker is None or queue.worker.done():
            queue.worker = loop.create_task(self._work(queue))
        return await future

    async def _work(self, queue: _Queue[Item, Answer]) -> None:
        while queue.waiting:
            if self._caller is not None:
                await self._await_callers(queue, self._caller)
            batch, queue.waiting = queue.waiting[:MOST], queue.waiting[MOST:]
            answers = await run_in_threadpool(self._served, [item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # the client disconnected
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _await_callers(
        self, queue: _Queue[Item, Answer], caller: Callable[[Item], Hashable]
    ) -> None:
        """Waits for the callers that are expected to ask again, and notes who asks now."""
        time = asyncio.get_running_loop().time
        until = time() + self._wait
        while True:
            now, waiting = time(), {caller(item) for item, _ in queue.waiting}
            recent = {one: at for one, at in queue.asked.items() if now - at < AGAIN_SECONDS}
            queue.asked = recent | dict.fromkeys(waiting, now)
            if recent.keys() <= waiting or now >= until:
                return
            queue.came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(queue.came.wait(), until - now)

    def _served(self, items: Sequence[Item]) -> Sequence[Answer | Exception]:
        try:
            return self._serve(items)
        except UnavailableError as error:
            return [error] * len(items)
        except Exception as error:
            if len(items) == 1:
                return [error]
            log.exception("a batch of %d requests failed; each is served alone", len(items))
            return [answer for item in items for answer in self._served([item])]
