"""Signed heartbeats of many nodes, answered by two API processes on one PostgreSQL.

`heartbeats_s`: 2 ÷ CPU seconds that one heartbeat costs the API processes and PostgreSQL, at the
highest load that the generator reaches. One of the processes also runs the loop that finds silent
nodes, as `orchestrator serve` does. `heartbeat_p99_ms`: at half of the raw rate. Requests are
signed before the clock starts, and ten nodes share a connection: one for each would be idle for
longer than the server allows where the cores are shared. The generator's CPU time
is not counted.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from bench import seats
from bench.form import ROOT, Row
from prime_core.messages import Heartbeat
from prime_core.transport.signatures import SessionKey, sign_headers
from prime_core.version import HEADER, SPOKEN
from prime_orchestrator.store import schema

CORES = 2
CONNECTIONS = 1_000
AT_ONCE = 512
"""Requests under way at the highest load."""
ROUNDS = 2
"""Heartbeats of each node at the highest load."""
LATENCY_SECONDS = 10
_TICKS = os.sysconf("SC_CLK_TCK")


def rows(
    quick: bool, database: Database, start: Callable[[str, str], tuple[int, int]]
) -> list[Row]:
    """The rows of heartbeats on an empty database. `start(url, folder)` starts an API process on a
    database; it returns its port and its process id."""
    count = 500 if quick else 10_000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="bench-beats-") as folder:
        pool = seats.Pool.make(Path(folder), database.url)
        nodes = _seat(pool, count)
        pool.backend.store.close()
        servers = [start(database.url, f"{folder}/{number}") for number in (1, 2)]
        processes = [process for _, process in servers]

        def spent() -> tuple[float, float]:
            return sum(map(cpu_seconds, processes)), database.cpu_seconds()

        return asyncio.run(_measure([port for port, _ in servers], nodes, spent, quick))


async def _measure(
    ports: Sequence[int],
    nodes: Sequence[SessionKey],
    spent: Callable[[], tuple[float, float]],
    quick: bool,
) -> list[Row]:
    loop = asyncio.get_running_loop()
    clients: list[_Client] = []
    for at in range(min(CONNECTIONS, len(nodes))):
        _, client = await loop.create_connection(_Client, "127.0.0.1", ports[at % len(ports)])
        clients.append(client)
    await _at_most(clients, _signed(nodes[: len(clients)]), AT_ONCE)
    api = database = seconds = 0.0
    for _ in range(ROUNDS):
        requests = _signed(nodes)
        before, since = spent(), time.monotonic()
        await _at_most(clients, requests, AT_ONCE)
        after = spent()
        seconds += time.monotonic() - since
        api += (after[0] - before[0]) / (ROUNDS * len(nodes))
        database += (after[1] - before[1]) / (ROUNDS * len(nodes))
    raw = ROUNDS * len(nodes) / seconds
    half = _signed(nodes)[: int(raw / 2 * LATENCY_SECONDS)]
    late = sorted(await _at_rate(clients, half, raw / 2))
    for client in clients:
        client.close()
    return [
        Row("heartbeats_s", CORES / (api + database), "heartbeats/s",
            bar=None if quick else 5000, better="higher"),
        Row("heartbeat_api_us", 1e6 * api, "µs of CPU in the API processes"),
        Row("heartbeat_postgres_us", 1e6 * database, "µs of CPU in PostgreSQL"),
        Row("heartbeats_s_raw", raw, "heartbeats/s, with the generator on the same cores",
            better="higher"),
        Row("heartbeat_p99_ms", 1000 * late[int(0.99 * len(late))], "ms at half the raw rate",
            bar=None if quick else 50),
    ]  # fmt: skip


def _seat(pool: seats.Pool, count: int) -> list[SessionKey]:
    """Active nodes with a session each; the keys of their sessions."""
    pool.clock[0] = now = int(time.time())
    pool.seat(count, honest=True)
    keys = [SessionKey.generate() for _ in pool.honest]
    with pool.backend.store.begin() as connection:
        connection.execute(
            sa.insert(schema.sessions),
            [
                {"key_id": key.key_id, "account": account, "scope": "node", "issued_at": now,
                 "expiry": now + 3600, "revoked": False}
                for key, account in zip(keys, pool.honest, strict=True)
            ],
        )  # fmt: skip
    return keys


def _signed(nodes: Sequence[SessionKey]) -> list[bytes]:
    """A heartbeat of every node, as it goes over the wire."""
    now = int(time.time())
    body = Heartbeat(policy_version=0, heard_at=now).model_dump_json().encode()
    requests = []
    for key in nodes:
        headers = sign_headers(
            key, "POST", "http://127.0.0.1/v1/heartbeat", body, now=now, nonce=secrets.token_hex(8)
        ) | {"Host": "127.0.0.1", HEADER: str(SPOKEN[-1]), "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        requests.append(f"POST /v1/heartbeat HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return requests


class _Client(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self) -> None:
        self._answer = b""
        self._future: asyncio.Future[None] | None = None
        self._free = asyncio.Lock()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end or self._future is None:
            return
        size = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        if len(body) < size:
            return
        self._answer, future, self._future = b"", self._future, None
        if head.startswith(b"HTTP/1.1 200"):
            future.set_result(None)
        else:
            future.set_exception(ValueError((head + end + body).decode()))

    def connection_lost(self, _: Exception | None) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> None:
        """Returns when the request was answered with 200. Raises ValueError if it was answered
        otherwise, ConnectionError if it was not."""
        async with self._free:
            self._future = asyncio.get_running_loop().create_future()
            self._transport.write(request)
            await self._future

    def close(self) -> None:
        self._transport.close()


async def _at_most(clients: Sequence[_Client], requests: Sequence[bytes], at_once: int) -> None:
    """Sends all requests, `at_once` at a time. Request n goes over
    connection n modulo their number."""
    waiting = iter(enumerate(requests))

    async def one() -> None:
        for at, request in waiting:
            await clients[at % len(clients)].ask(request)

    await asyncio.gather(*(one() for _ in range(min(at_once, len(clients)))))


async def _at_rate(
    clients: Sequence[_Client], requests: Sequence[bytes], rate: float
) -> list[float]:
    """Seconds from when each request was due, at `rate` a second, to its answer."""
    start, late, answers = time.monotonic(), [], []

    async def one(client: _Client, request: bytes, due: float) -> None:
        await client.ask(request)
        late.append(time.monotonic() - due)

    for at, request in enumerate(requests):
        due = start + at / rate
        if (pause := due - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        answers.append(asyncio.create_task(one(clients[at % len(clients)], request, due)))
    await asyncio.gather(*answers)
    return late


def cpu_seconds(process: int) -> float:
    """CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


@dataclass(frozen=True)
class Database:
    """A PostgreSQL server: its URL and the id of its first process."""

    url: str
    process: int

    def cpu_seconds(self) -> float:
        """CPU time of the server and all of its processes."""
        listed = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        return sum(map(cpu_seconds, (self.process, *map(int, listed))))


@contextmanager
def postgres() -> Iterator[Database]:
    """A PostgreSQL server of our own."""
    folder = Path(tempfile.gettempdir()) / f"bench-postgres-{os.getpid()}"
    environment = {**os.environ, "PRIME_POSTGRES_STATE": str(folder)}
    script = str(ROOT / "scripts" / "ci_postgres.sh")
    subprocess.run([script, "start"], env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        process = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        yield Database(f"postgresql://postgres@/postgres?host={folder}", process)
    finally:
        subprocess.run([script, "stop"], env=environment, check=True)
