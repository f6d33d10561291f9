"""API processes on one database and one object store, and a client that signs its requests.

The first process of a network also runs the loops of `orchestrator serve`, all but those that ask
the chain or the store's public address. Transactions are queued and never sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from bench import seats
from bench.form import ROOT
from devnet.s3 import BUCKET
from prime_core.ids import Address
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.storage.base import ObjectStore
from prime_core.storage.directory import DirectoryStore
from prime_core.transport.signatures import SessionKey, sign_headers
from prime_core.version import HEADER, SPOKEN
from prime_orchestrator.store import open_store, schema
from prime_orchestrator.store.engine import Store

AUDIENCE = "http://127.0.0.1"
BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_TICKS = os.sysconf("SC_CLK_TCK")


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
        while True:
            listed = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
            try:
                return sum(map(cpu_seconds, (self.process, *map(int, listed))))
            except (FileNotFoundError, ProcessLookupError):
                continue  # one of them ended meanwhile: its time counts as the server's now


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


@dataclass(frozen=True)
class Place:
    """Where an API process finds its data. `endpoint`: of an S3 server; empty: the folder
    `objects` holds the objects. `run`: the bytes of the run definition as text."""

    folder: str
    database: str
    run: str
    objects: str = ""
    endpoint: str = ""
    loops: bool = False

    def open_objects(self) -> ObjectStore:
        if self.endpoint:
            from prime_core.storage.s3 import S3Store

            return S3Store(BUCKET, endpoint=self.endpoint)
        return DirectoryStore(Path(self.objects or self.folder), AUDIENCE, b"s" * 32)


@dataclass
class Servers:
    """Two API processes on one database. `ports` and `pool` are theirs; the pool's own backend
    uses the same database and objects in this process."""

    pool: seats.Pool
    ports: list[int]
    processes: list[subprocess.Popen[str]]
    database: Database

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of (the API processes, PostgreSQL)."""
        spent = sum(cpu_seconds(one.pid) for one in self.processes)
        return spent, self.database.cpu_seconds()


@contextmanager
def serving(
    database: Database,
    run: RunDefinition | None = None,
    *,
    validators: Sequence[LocalSigner] = (),
    endpoint: str = "",
) -> Iterator[Servers]:
    """Two API processes on the database, which is emptied first, until the end of the block."""
    _raise_files()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-api-"))
        empty(database)
        pool = seats.Pool.make(
            Path(folder) / "pool", database.url, run, validators=validators, start=time.time()
        )
        stack.callback(pool.backend.store.close)
        place = Place(
            folder=folder,
            database=database.url,
            run=pool.backend.context.run.raw().decode(),
            objects=f"{folder}/pool/objects",
            endpoint=endpoint,
        )
        pool.backend = replace(pool.backend, objects=place.open_objects(), now=time.time)
        servers = Servers(pool, [], [], database)
        stack.callback(end, servers.processes)
        for number in range(2):
            one = replace(place, folder=f"{folder}/{number}", loops=number == 0)
            servers.ports.append(start_api(servers.processes, one))
        yield servers


def _raise_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def empty(database: Database) -> None:
    """Drops everything in the database."""
    with closing(open_store(database.url)) as store, store.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))


def start_api(servers: list[subprocess.Popen[str]], place: Place) -> int:
    """Starts an API process and adds it to `servers`; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    descriptor = listener.fileno()
    servers.append(
        start("bench.servers", str(descriptor), json.dumps(asdict(place)), keep=descriptor)
    )
    port: int = listener.getsockname()[1]
    listener.close()
    if line(servers[-1]) != "ready":
        raise RuntimeError("an API process did not start")
    return port


@contextmanager
def compiled(folder: str) -> Iterator[None]:
    """Until the end of the block, processes that are started keep their byte code in the folder."""
    before = {name: os.environ.pop(name, None) for name in BYTECODE}
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    try:
        yield
    finally:
        del os.environ["PYTHONPYCACHEPREFIX"]
        os.environ |= {name: value for name, value in before.items() if value is not None}


def start(module: str, *words: str, keep: int | None = None) -> subprocess.Popen[str]:
    """Starts `python -m module words` with pipes; it inherits the descriptor `keep`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=() if keep is None else (keep,),
    )


def line(child: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Ends the processes."""
    for child in children:
        child.kill()
        child.communicate()


def _serve(descriptor: int, place: Place) -> None:
    """An API process on the socket that it inherits."""
    import uvloop

    from prime_core.loops import Loops
    from prime_orchestrator.api.app import create_app
    from prime_orchestrator.api.connections import Proxies
    from prime_orchestrator.api.liveness import LifeTicks
    from prime_orchestrator.manager.archiving import ARCHIVE_SECONDS
    from prime_orchestrator.manager.loops import ManagerLoops
    from prime_orchestrator.manager.uploads import SWEEP_SECONDS
    from prime_orchestrator.serve import (
        BATCH_SECONDS,
        DRAW_SECONDS,
        JUDGE_SECONDS,
        LIFE_SECONDS,
        MONEY_SECONDS,
        make_server,
    )

    Path(place.folder).mkdir()
    run = RunDefinition.parse(place.run.encode())
    if place.database:
        store = open_store(place.database)
        store.migrate()
        backend = seats.backend_on(store, place.open_objects(), run)
    else:
        backend = seats.Pool.make(Path(place.folder), run=run).backend
    backend = replace(backend, now=time.time, random=secrets.token_bytes)
    chain: Any = None
    manager = ManagerLoops(
        store=backend.store,
        objects=backend.objects,
        context=backend.context,
        contracts=chain,
        watcher=chain,
        sender=chain,
        signer=backend.manager,
        now=backend.now,
        board=backend.draws,
        planted=backend.planted,
    )
    vars(manager)["quorum"] = 2  # which is read on the chain
    server = make_server(create_app(backend), Proxies())

    async def serve() -> None:
        task = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=descriptor)]))
        while not server.started:
            await asyncio.sleep(0.01)
        if place.loops:
            loops = Loops(on_crash=task.cancel)
            loops.start("lives", LifeTicks(backend).tick, LIFE_SECONDS)
            loops.start("verdicts", manager.judge_tick, JUDGE_SECONDS)
            loops.start("draws", manager.draw_tick, DRAW_SECONDS)
            loops.start("batches", manager.batch_tick, BATCH_SECONDS)
            loops.start("money", manager.money_tick, MONEY_SECONDS)
            loops.start("uploads", manager.upload_tick, SWEEP_SECONDS)
            loops.start("archive", manager.archive_tick, ARCHIVE_SECONDS)
        print("ready", flush=True)
        await task

    uvloop.run(serve())


# ── client ──


def open_sessions(
    store: Store, accounts: Sequence[Address], scope: str, now: int
) -> list[SessionKey]:
    """Writes a session for each account; returns their keys."""
    keys = [SessionKey.generate() for _ in accounts]
    with store.begin() as connection:
        connection.execute(
            sa.insert(schema.sessions),
            [
                {"key_id": key.key_id, "account": account, "scope": scope, "issued_at": now,
                 "expiry": now + 3600, "revoked": False}
                for key, account in zip(keys, accounts, strict=True)
            ],
        )  # fmt: skip
    return keys


def request_bytes(
    method: str, target: str, body: bytes, headers: Mapping[str, str], host: str = "127.0.0.1"
) -> bytes:
    """A request as it goes over the wire."""
    named = {"Host": host, **headers, "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body


def signed_post(key: SessionKey, path: str, body: bytes) -> bytes:
    """A POST that the session signs now."""
    headers = sign_headers(
        key, "POST", AUDIENCE + path, body, now=int(time.time()), nonce=secrets.token_hex(8)
    )
    return request_bytes("POST", path, body, headers | {HEADER: str(SPOKEN[-1])})


def put_bytes(url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A PUT to a signed URL."""
    parts = urlsplit(url)
    left = {name: value for name, value in headers.items() if name.lower() != "content-length"}
    return request_bytes("PUT", f"{parts.path}?{parts.query}", body, left, parts.netloc)


@dataclass
class Client(asyncio.Protocol):
    """One connection: one request at a time."""

    _answer: bytes = b""
    _future: asyncio.Future[bytes] | None = None
    _free: asyncio.Lock = field(default_factory=asyncio.Lock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end or self._future is None:
            return
        size = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0] or 0)
        if len(body) < size:
            return
        self._answer, future, self._future = b"", self._future, None
        if head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201", b"HTTP/1.1 204")):
            future.set_result(body)
        else:
            future.set_exception(ValueError((head + end + body).decode()))

    def connection_lost(self, _: Exception | None) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> bytes:
        """Returns the body of the answer 200. Raises ValueError for another answer,
        ConnectionError for none."""
        async with self._free:
            self._future = asyncio.get_running_loop().create_future()
            self._transport.write(request)
            return await self._future

    def close(self) -> None:
        self._transport.close()


async def connect(ports: Sequence[int], count: int) -> list[Client]:
    """`count` connections, spread over the ports."""
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for at in range(count):
        _, client = await loop.create_connection(Client, "127.0.0.1", ports[at % len(ports)])
        clients.append(client)
    return clients


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Place(**json.loads(sys.argv[2])))
