"""A TCP proxy that can lose, delay and cut: the network between two parties, in user space.

With several targets it also balances: each connection goes to the next target that accepts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from devnet.ports import free_port

PIECE = 1 << 16
CONNECT_SECONDS = 2.0
RETRANSMISSION_SECONDS = 0.2
"""What a lost packet costs: the least retransmission timeout of Linux's TCP."""


@dataclass(frozen=True)
class Weather:
    """Conditions on a proxy. `delay` in seconds, one way; `loss`: the share of pieces that arrive
    only after a retransmission, which doubles its timeout each time it is lost again. `cut`: open
    connections are reset, and none is accepted."""

    delay: float = 0.0
    loss: float = 0.0
    cut: bool = False


CLEAR = Weather()


class Wires:
    """Proxies on 127.0.0.1, all served by one thread until `close`."""

    def __init__(self, *, seed: int = 0) -> None:
        self._loop = uvloop.new_event_loop()
        self._dice = random.Random(seed)
        self._weather: dict[int, Weather] = {}
        self._open: dict[int, set[asyncio.WriteTransport]] = {}
        self._records: dict[int, bytearray] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()

    def add(self, targets: Sequence[int]) -> int:
        """Starts a proxy to ports of 127.0.0.1 and returns its own port."""
        port = free_port()
        self._weather[port], self._open[port] = CLEAR, set()
        turn = iter(range(1 << 62))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            start = next(turn)
            order = [targets[(start + at) % len(targets)] for at in range(len(targets))]
            with contextlib.suppress(asyncio.CancelledError):  # by `close`
                await self._connected(port, order, reader, writer)

        async def listen() -> None:
            await asyncio.start_server(serve, "127.0.0.1", port, backlog=4096)

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)
        return port

    def set(self, port: int, weather: Weather) -> None:
        """Changes the weather of one proxy."""

        def change() -> None:
            self._weather[port] = weather
            if weather.cut:
                for one in tuple(self._open[port]):
                    one.abort()

        self._loop.call_soon_threadsafe(change)

    def record(self, port: int) -> bytearray:
        """Returns what passes one proxy from now on, in both directions; it grows."""
        return self._records.setdefault(port, bytearray())

    def close(self) -> None:
        """Ends all proxies and their connections."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _connected(
        self,
        port: int,
        targets: Sequence[int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self._weather[port].cut:
            writer.transport.abort()
            return
        for target in targets:
            with contextlib.suppress(OSError, TimeoutError):
                far_reader, far_writer = await asyncio.wait_for(
                    asyncio.open_connection("127.0.0.1", target), CONNECT_SECONDS
                )
                break
        else:
            writer.transport.abort()
            return
        ends = {writer.transport, far_writer.transport}
        self._open[port] |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(port, reader, far_writer))
                group.create_task(self._carry(port, far_reader, writer))
        except* OSError:
            pass  # one end is gone; so is the other, below
        finally:
            self._open[port] -= ends
            for one in ends:
                one.close()

    async def _carry(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(PIECE):
            if port in self._records:
                self._records[port] += piece
            weather = self._weather[port]
            wait, again = weather.delay, RETRANSMISSION_SECONDS
            while self._dice.random() < weather.loss:
                wait, again = wait + again, 2 * again
            if wait:
                await asyncio.sleep(wait)
            if writer.transport.is_closing():
                return
            writer.write(piece)
            await writer.drain()
        if not writer.transport.is_closing():  # the weather may have cut it meanwhile
            writer.write_eof()
