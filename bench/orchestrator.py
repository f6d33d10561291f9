"""What the API's processes carry on one machine.

`connections`: held open at once by two API processes. Each one answers a request when it is opened
and another one after all are open. Clients are two processes with 200 loopback addresses. Each API
process has a SQLite store of its own: what is measured is the server.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench import heartbeats, seats
from bench.form import Row

PROCESSES = 2
SOURCES = 200
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: bench\r\n\r\n"
PACKAGES = ("uvicorn", "fastapi", "h11", "sqlalchemy", "psycopg")


def run(quick: bool) -> list[Row]:
    """All rows."""
    return [*_connections(quick), *_heartbeats(quick)]


def _heartbeats(quick: bool) -> list[Row]:
    servers: list[subprocess.Popen[str]] = []

    def start(url: str, folder: str) -> tuple[int, int]:
        port = _server(servers, folder, url, "" if servers else "lives")
        return port, servers[-1].pid

    with heartbeats.postgres() as database:
        try:
            return heartbeats.rows(quick, database, start)
        finally:
            _end(servers)


def _connections(quick: bool) -> list[Row]:
    each = 1_000 if quick else 11_000
    with tempfile.TemporaryDirectory(prefix="bench-api-") as folder:
        servers: list[subprocess.Popen[str]] = []
        clients: list[subprocess.Popen[str]] = []
        try:
            for number in range(PROCESSES):
                port = _server(servers, f"{folder}/{number}")
                clients.append(_start("hold", str(port), str(each), str(number)))
            opened = [int(_line(client)) for client in clients]
            memory = sum(_resident(server) for server in servers)
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("again\n")
                client.stdin.flush()
            answered = [int(_line(client)) for client in clients]
        finally:
            _end([*clients, *servers])
    held = min(sum(opened), sum(answered))
    return [
        Row("connections", held, "connections", bar=None if quick else 20_000, better="higher"),
        Row("connection_memory_kib", memory / 1024 / held, "KiB of the servers"),
    ]


def _server(servers: list[subprocess.Popen[str]], folder: str, *words: str) -> int:
    """Starts an API process and adds it to `servers`; its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    descriptor = listener.fileno()
    servers.append(_start("serve", folder, str(descriptor), *words, keep=descriptor))
    port: int = listener.getsockname()[1]
    listener.close()
    assert _line(servers[-1]) == "ready"
    return port


def _end(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        child.kill()
        child.communicate()


def _start(*words: str, keep: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.orchestrator", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=() if keep is None else (keep,),
    )


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _resident(child: subprocess.Popen[str]) -> int:
    """Resident memory in bytes."""
    fields = Path(f"/proc/{child.pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def _serve(folder: str, descriptor: str, url: str = "", lives: str = "") -> None:
    """An API process on the socket that it inherits, with the store at `url` if given, and with
    the loop that finds silent nodes if `lives` is."""
    from prime_orchestrator.api.app import create_app
    from prime_orchestrator.api.connections import Proxies
    from prime_orchestrator.api.presence import LifeTicks
    from prime_orchestrator.serve import LIFE_SECONDS, Loops, make_server
    from prime_orchestrator.store import open_store

    Path(folder).mkdir()
    backend = seats.Pool.make(Path(folder)).backend
    if url:
        backend = replace(backend, store=open_store(url), now=time.time)
    server = make_server(create_app(backend), Proxies())

    async def serve() -> None:
        task = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=int(descriptor))]))
        while not server.started:
            await asyncio.sleep(0.01)
        if lives:
            Loops(on_crash=task.cancel).start("lives", LifeTicks(backend).tick, LIFE_SECONDS)
        print("ready", flush=True)
        await task

    asyncio.run(serve())


async def _hold(port: int, count: int, number: int) -> None:
    """Opens `count` connections; prints how many were answered, and again after a line of input."""
    held = []
    at_once = asyncio.Semaphore(64)

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(REQUEST)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(15)
        except (OSError, EOFError):
            return False
        return head.startswith(b"HTTP/1.1 200")

    async def one(at: int) -> None:
        source = f"127.0.{number + 1}.{at % SOURCES // PROCESSES + 1}"
        async with at_once:
            try:
                pair = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
            except OSError:
                return
            if await ask(*pair):
                held.append(pair)

    await asyncio.gather(*(one(at) for at in range(count)))
    print(len(held), flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with at_once:
            return await ask(reader, writer)

    print(sum(await asyncio.gather(*(again(*pair) for pair in held))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(*sys.argv[2:])
    else:
        asyncio.run(_hold(*map(int, sys.argv[2:])))
