"""Signed heartbeats of many nodes, answered by two API processes on one PostgreSQL.

`heartbeats_s`: 2 ÷ CPU seconds that one heartbeat costs the API processes and PostgreSQL, at the
highest load that the generator reaches. One of the processes also runs the loop that finds silent
nodes, as `orchestrator serve` does. `heartbeat_p99_ms`: at half of the raw rate. Requests are
signed before the clock starts, and ten nodes share a connection: one for each would be idle for
longer than the server allows where the cores are shared. The generator's CPU time
is a row of its own.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench import seats
from bench.form import Row
from bench.servers import Client, Database, Servers, connect, open_sessions, serving, signed_post
from prime_core.messages import Heartbeat
from prime_core.transport.signatures import SessionKey

CORES = 2
CONNECTIONS = 1_000
AT_ONCE = 512
"""Requests under way at the highest load."""
ROUNDS = 2
"""Heartbeats of each node at the highest load."""
LATENCY_SECONDS = 10


def rows(quick: bool, database: Database) -> list[Row]:
    """The rows of heartbeats; empties the database."""
    with serving(database) as servers:
        nodes = seat(servers.pool, 500 if quick else 10_000)
        return asyncio.run(_measure(servers, nodes, quick))


async def _measure(servers: Servers, nodes: Sequence[SessionKey], quick: bool) -> list[Row]:
    clients = await connect(servers.ports, min(CONNECTIONS, len(nodes)))
    await _at_most(clients, _signed(nodes[: len(clients)]), AT_ONCE)
    api = database = generator = seconds = 0.0
    for _ in range(ROUNDS):
        requests = _signed(nodes)
        before, own, since = servers.cpu_seconds(), time.process_time(), time.monotonic()
        await _at_most(clients, requests, AT_ONCE)
        after = servers.cpu_seconds()
        generator += (time.process_time() - own) / (ROUNDS * len(nodes))
        seconds += time.monotonic() - since
        api += (after[0] - before[0]) / (ROUNDS * len(nodes))
        database += (after[1] - before[1]) / (ROUNDS * len(nodes))
    raw = ROUNDS * len(nodes) / seconds
    half = _signed(nodes)[: int(raw / 2 * LATENCY_SECONDS)]
    with _no_garbage_collection():
        late = sorted(await _at_rate(clients, half, raw / 2))
    for client in clients:
        client.close()
    return [
        Row("heartbeats_s", CORES / (api + database), "heartbeats/s",
            bar=None if quick else 5000, better="higher"),
        Row("heartbeat_api_us", 1e6 * api, "µs of CPU in the API processes"),
        Row("heartbeat_postgres_us", 1e6 * database, "µs of CPU in PostgreSQL"),
        Row("heartbeat_generator_us", 1e6 * generator,
            "µs of CPU in the generator, which signed before"),
        Row("heartbeats_s_raw", raw, "heartbeats/s, with the generator on the same cores",
            better="higher"),
        Row("heartbeat_p99_ms", 1000 * late[int(0.99 * len(late))], "ms at half the raw rate",
            bar=None if quick else 50),
    ]  # fmt: skip


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps pauses of the generator's own garbage collector (250 ms) out of the servers' delay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seat(pool: seats.Pool, count: int) -> list[SessionKey]:
    """Active nodes with a session each; the keys of their sessions."""
    pool.clock[0] = now = int(time.time())
    pool.seat(count, honest=True)
    return open_sessions(pool.backend.store, pool.honest, "node", now)


def _signed(nodes: Sequence[SessionKey]) -> list[bytes]:
    """A heartbeat of every node, as it goes over the wire."""
    now = int(time.time())
    body = Heartbeat(policy_version=0, heard_at=now).model_dump_json().encode()
    return [signed_post(key, "/v1/heartbeat", body) for key in nodes]


async def _at_most(clients: Sequence[Client], requests: Sequence[bytes], at_once: int) -> None:
    """Sends all requests, `at_once` at a time. Request n goes over
    connection n modulo their number."""
    waiting = iter(enumerate(requests))

    async def one() -> None:
        for at, request in waiting:
            await clients[at % len(clients)].ask(request)

    await asyncio.gather(*(one() for _ in range(min(at_once, len(clients)))))


async def _at_rate(
    clients: Sequence[Client], requests: Sequence[bytes], rate: float
) -> list[float]:
    """Seconds from when each request was due, at `rate` a second, to its answer."""
    start, late, answers = time.monotonic(), [], []

    async def one(client: Client, request: bytes, due: float) -> None:
        await client.ask(request)
        late.append(time.monotonic() - due)

    for at, request in enumerate(requests):
        due = start + at / rate
        if (pause := due - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        answers.append(asyncio.create_task(one(clients[at % len(clients)], request, due)))
    await asyncio.gather(*answers)
    return late
