"""What the API's processes, their loops and PostgreSQL carry on one machine.

`connections`: held open at once by two API processes. Each one answers a request when it is opened
and another one after all are open. Clients are two processes with 200 loopback addresses. Each API
process has a SQLite store of its own: what is measured is the server. All other rows: see
heartbeats.py, refusals.py, work.py, growth.py, settling.py, takeover.py and watching.py. A rate is
2 ÷ CPU seconds per operation of the API processes and PostgreSQL; the generator, validators' replay
and the S3 server are not counted.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import growth, heartbeats, refusals, seats, settling, takeover, watching, work
from bench.form import Row
from bench.servers import Database, Place, end, line, postgres, start, start_api
from prime_core.errors import UserError

PROCESSES = 2
SOURCES = 200
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: bench\r\n\r\n"
PACKAGES = ("uvicorn", "httptools", "uvloop", "fastapi", "sqlalchemy", "psycopg", "boto3")
ROWS: dict[str, Callable[[bool, Database], list[Row]]] = {
    "heartbeats_s": heartbeats.rows,
    "lease_refused_us": refusals.rows,
    "rollout_path_s_dir": lambda quick, database: work.path_rows(quick, database, "dir"),
    "rollout_path_s_s3": lambda quick, database: work.path_rows(quick, database, "s3"),
    "verdicts_s_1": lambda quick, database: work.verdict_rows(quick, database, 1),
    "verdicts_s_4": lambda quick, database: work.verdict_rows(quick, database, 4),
    "verdicts_s_16": lambda quick, database: work.verdict_rows(quick, database, 16),
    "upload_to_verdict_s": work.delay_rows,
    "watchers": watching.watcher_rows,
    "node_death_s": watching.death_rows,
    "takeover_s": takeover.rows,
    "growth": growth.rows,
    "settle_files_s": settling.rows,
}
"""Rows that need PostgreSQL, by the first one's name; `growth` gives all of its kind."""


def run(quick: bool, only: str = "") -> list[Row]:
    """All rows, or the part named `only`. Raises UserError if there is none of that name."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "connections": lambda: _connections(quick),
        "rpc_calls_min_idle": lambda: watching.rpc_rows(quick),
    }
    if only and only not in {*parts, *ROWS}:
        raise UserError(
            f"there is no part {only!r}", hint=f"name one of {', '.join((*parts, *ROWS))}"
        )
    rows = [row for name, part in parts.items() if only in ("", name) for row in part()]
    wanted = [part for name, part in ROWS.items() if only in ("", name)]
    if wanted:
        with postgres() as database:
            rows += [row for part in wanted for row in part(quick, database)]
    return rows


def _connections(quick: bool) -> list[Row]:
    each = 1_000 if quick else 11_000
    with tempfile.TemporaryDirectory(prefix="bench-api-") as folder:
        servers: list[subprocess.Popen[str]] = []
        clients: list[subprocess.Popen[str]] = []
        try:
            for number in range(PROCESSES):
                place = Place(f"{folder}/{number}", "", seats.definition().raw().decode())
                port = start_api(servers, place)
                words = (str(port), str(each), str(number))
                clients.append(start("bench.orchestrator", *words))
            opened = [int(line(client)) for client in clients]
            memory = sum(_resident(server) for server in servers)
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("again\n")
                client.stdin.flush()
            answered = [int(line(client)) for client in clients]
        finally:
            end([*clients, *servers])
    held = min(sum(opened), sum(answered))
    return [
        Row("connections", held, "connections", bar=None if quick else 20_000, better="higher"),
        Row("connection_memory_kib", memory / 1024 / held, "KiB of the servers"),
    ]


def _resident(child: subprocess.Popen[str]) -> int:
    """Resident memory in bytes."""
    fields = Path(f"/proc/{child.pid}/statm").read_text().split()
    return int(fields[1]) * 4096


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
    asyncio.run(_hold(*map(int, sys.argv[1:])))
