"""`orchestrator serve`: one process that answers HTTP and runs the manager's loops.

    open       deployment, run definition, keystore, database, chain → refuse mismatches
    bind       the port, before anything publishes our address
    serve      HTTP in the main thread; each loop in its own thread, while this process holds the
               loop lease: several orchestrators may serve one store, and one of them runs the loops
    end        SIGTERM or SIGINT: HTTP first, then the loops; exit 0

A loop that meets a temporary error retries with growing pauses. One that meets a defect logs it in
full and ends the process with a non-zero code, so that the supervisor (systemd) restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import ipaddress
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import uvicorn
import uvloop
from starlette.types import ASGIApp

from prime_broadcast.files import write_whole
from prime_chain.contracts import Contracts
from prime_chain.errors import BadAnswerError
from prime_chain.heads import NewHeads
from prime_chain.keystore import open_keystore
from prime_chain.sender import Sender
from prime_chain.watcher import Watcher
from prime_core import ids, tracing
from prime_core.deployment import Deployment
from prime_core.errors import ConflictError, UnavailableError, UserError
from prime_core.folders import make_folder
from prime_core.ids import Address
from prime_core.logs import log_to_stderr, set_process_fields
from prime_core.loops import Loops
from prime_core.memory import collect_rarely
from prime_core.run import RunDefinition
from prime_core.run_file import read_run
from prime_core.transport.addresses import is_loopback
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import Proxies, behind
from prime_orchestrator.api.liveness import LifeTicks, get_probe
from prime_orchestrator.config import Settings
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.archiving import ARCHIVE_SECONDS
from prime_orchestrator.manager.loops import ManagerLoops, Pace
from prime_orchestrator.manager.uploads import SWEEP_SECONDS
from prime_orchestrator.store import Store, meta, open_store
from prime_orchestrator.store.chain import STATE_EVENTS
from prime_orchestrator.store.intents import StoreQueue
from prime_orchestrator.store.leaders import BEAT_SECONDS, LoopLease

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.5
JUDGE_SECONDS = 0.2
MONEY_SECONDS = 1.0
DRAW_SECONDS = 2.0
LIFE_SECONDS = 1.0
PROBE_SECONDS = 5.0
KEPT_FILES = 1024
"""Open files reserved for the database, the chain and the object store."""
MOST_CONNECTIONS = 100_000
BUSY = 500
"""Connections reserved for those with a request in progress."""
GARBAGE = 50_000
"""New objects, less freed ones, after which the garbage collector looks at them."""
SWITCH_SECONDS = 0.0005
"""Thread switch interval of the interpreter (sys.setswitchinterval). With Python's default of 5 ms,
a batch of heartbeats may wait that long for the interpreter after each SQL statement."""
GRACE_SECONDS = 5
"""Time that running requests get to finish on shutdown."""


def run(settings: Settings) -> None:
    """Serves until stopped by a signal. Exits non-zero if a loop met a defect."""
    log_to_stderr(settings.log_level)
    tracing.start("orchestrator")
    with ExitStack() as stack:
        deployment = Deployment.load(settings.need("deployment"))
        definition = read_run(settings.need("run"), exact=True)
        deployment.check_run(definition)
        signer = open_keystore(
            settings.need("wallet"), settings.password_file, settings.password_fd
        )
        make_folder(settings.data)
        stack.enter_context(only_one(settings.data / "serve.lock"))
        serve_file = settings.data / "serve.json"
        serve_file.unlink(missing_ok=True)  # left by a process that was killed
        store = open_store(settings.database_url, settings.replica)
        stack.callback(store.close)
        store.migrate()
        client = settings.open_chain(deployment.chain_id)
        stack.callback(client.close)
        contracts = Contracts(client, deployment)
        trainer = check_pool(
            store, contracts, deployment, settings.need("pool"), definition, signer.address
        )
        listener = bind(settings.host, settings.port)
        stack.callback(listener.close)
        url = settings.public_url or address_of(listener)
        others = frozenset(one.rstrip("/") for one in settings.also_known_as)
        context = PoolContext(
            deployment=deployment,
            pool=settings.need("pool"),
            manager=signer.address,
            run=definition,
        )
        backend = Backend(
            context=context,
            store=store,
            objects=settings.open_objects(url, place_of(deployment, settings.need("pool")), store),
            manager=signer,
            trainer=trainer,
            audience=url,
            also_known_as=others,
            on_one_machine=on_one_machine(listener, {url, *others}),
            relay_accounts=frozenset(ids.address(one) for one in settings.allow_relay),
            planted=settings.planted_nodes(),
            lease_slots=settings.lease_slots,
            remeasure_seconds=settings.remeasure_seconds,
        )
        idle = settings.chain_idle_seconds
        lease = LoopLease(store, holder_of(settings.data), now=time.monotonic)
        queue = StoreQueue(store, signer.address, deployment.chain_id, lease.held)
        sender = Sender(client, signer, queue)
        stack.callback(sender.close)
        manager = ManagerLoops(
            store=store,
            objects=backend.objects,
            context=context,
            contracts=contracts,
            watcher=Watcher(client, deployment, pool=settings.need("pool"), of_all=STATE_EVENTS),
            sender=sender,
            signer=signer,
            now=backend.now,
            board=backend.draws,
            planted=backend.planted,
            pace=Pace(client.network.idle_seconds if idle is None else idle),
        )
        uvloop.run(_serve(settings, backend, manager, lease, listener, serve_file, url))


async def _serve(
    settings: Settings,
    backend: Backend,
    manager: ManagerLoops,
    lease: LoopLease,
    listener: socket.socket,
    serve_file: Path,
    url: str,
) -> None:
    proxies = Proxies(settings.trusted_proxies)
    app = create_app(backend, requests_per_second=settings.requests_per_second, proxies=proxies)
    server = make_server(app, proxies)
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.should_exit = True
        app.state.feed.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loops = Loops(on_crash=lambda: loop.call_soon_threadsafe(end))
    client = httpx.Client()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    try:
        if server.started:
            announce(serve_file, url, listener.getsockname()[1])
            set_process_fields(pool=backend.context.pool)
            log.info("serving pool %d at %s", backend.context.pool, url)
            loops.start("lease", lease.tick, BEAT_SECONDS)
            lives = LifeTicks(backend, partial(get_probe, client))
            ticks: tuple[tuple[str, Callable[[], object], float], ...] = (
                ("chain", manager.chain_tick, settings.chain_poll_seconds),
                ("verdicts", manager.judge_tick, JUDGE_SECONDS),
                ("draws", manager.draw_tick, DRAW_SECONDS),
                ("batches", manager.batch_tick, BATCH_SECONDS),
                ("money", manager.money_tick, MONEY_SECONDS),
                ("lives", lives.tick, LIFE_SECONDS),
                ("objects", lives.probe, PROBE_SECONDS),
                ("uploads", manager.upload_tick, SWEEP_SECONDS),
                ("archive", manager.archive_tick, ARCHIVE_SECONDS),
            )
            for name, tick, every in ticks:
                heads = NewHeads(settings.rpc_ws) if name == "chain" and settings.rpc_ws else None
                loops.start(name, while_held(lease, tick), every, heads)
        await serving
    finally:
        await asyncio.to_thread(loops.stop)
        client.close()
        with contextlib.suppress(UnavailableError):
            await asyncio.to_thread(lease.release)
        serve_file.unlink(missing_ok=True)
    loops.raise_crash()
    log.info("ended")


def while_held(lease: LoopLease, tick: Callable[[], object]) -> Callable[[], object]:
    """Wraps `tick` so that it is skipped while another orchestrator on this store runs the
    loops."""
    return lambda: tick() if lease.held() else None


def collect_garbage_rarely() -> None:
    """Exempts what start-up has made from garbage collection, and lets it run less often: a search
    through all connections stops every request."""
    gc.collect()
    gc.freeze()
    collect_rarely(GARBAGE)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signal again at exit."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts uvicorn, then sets the garbage collector and the thread switch interval."""
        await super().startup(sockets)
        collect_garbage_rarely()
        sys.setswitchinterval(SWITCH_SECONDS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def most_connections() -> int:
    """Raises the soft limit on open files to the hard limit.

    Returns the number of connections that the limit allows, minus KEPT_FILES.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else hard
    return min(MOST_CONNECTIONS, max(KEPT_FILES, files - KEPT_FILES))


def make_server(app: ASGIApp, proxies: Proxies) -> Server:
    """Returns a uvicorn server with limits for a public address: as many connections as the limit
    on open files allows. The longest idle ones are closed when fewer than BUSY are left for
    requests."""
    most = most_connections()
    return Server(
        uvicorn.Config(
            app,
            http=behind(proxies, most - min(BUSY, most // 2)),
            proxy_headers=False,  # uvicorn's own trusts localhost and $FORWARDED_ALLOW_IPS
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=30,
            limit_concurrency=most,
            backlog=4096,
            ws="none",
            server_header=False,
        )
    )


# -- checks at startup ---------------------------------------------------------------------------


def check_pool(
    store: Store,
    contracts: Contracts,
    deployment: Deployment,
    pool: int,
    definition: RunDefinition,
    manager: Address,
) -> Address:
    """Checks that key, run definition, database and pool belong together; returns the pool's
    trainer.

    The chain is queried once. The result is stored, so that a restart needs no RPC. Raises
    UserError if something belongs to another pool, UnavailableError if the chain was never queried
    and does not answer.
    """
    place = place_of(deployment, pool)
    with store.read() as connection:
        known, facts, run = (
            meta.get(connection, key) for key in (meta.SERVES, "pool_facts", meta.RUN)
        )
    if known is not None and known != place:
        raise UserError(
            f"the database belongs to pool {known}, not {place}",
            hint="name another --data or --database",
        )
    if facts is None:
        facts = facts_of(contracts, deployment, pool)
    trainer = check_facts(facts, pool, definition, manager)
    if known is None or run is None:
        with store.begin() as connection:
            meta.put(connection, meta.SERVES, place)
            meta.put(connection, meta.RUN, definition.raw().decode())
            meta.put(connection, "pool_facts", facts)
    return trainer


def facts_of(contracts: Contracts, deployment: Deployment, pool: int) -> str:
    """Returns the pool's manager, trainer and run digest on chain, as JSON. Raises UserError if
    there is no such pool or contract, UnavailableError if the chain does not answer."""
    try:
        found = contracts.pools.pool_of(pool)
    except BadAnswerError as error:  # no code at the address, or a different contract
        raise UserError(
            f"the contracts that the deployment names are not on this chain: {error}",
            hint="check --rpc and --deployment; a local chain that was started again has none",
        ) from error
    except ConflictError as error:
        raise UserError(
            f"pool {pool} is not on chain {deployment.chain_id}: {error}",
            hint="make one with: orchestrator pool create",
        ) from error
    return json.dumps([found.manager, found.trainer, found.run_digest])


def check_facts(facts: str, pool: int, definition: RunDefinition, manager: Address) -> Address:
    """Checks that key and run definition are those of the pool; returns its trainer. `facts` is
    what `facts_of` returned. Raises UserError if they are another pool's."""
    its_manager, trainer, run_digest = json.loads(facts)
    if its_manager != manager:
        raise UserError(
            f"the wallet holds {manager}, but pool {pool} is managed by {its_manager}",
            hint="give that account's keystore by --wallet",
        )
    if run_digest != definition.digest():
        raise UserError(
            f"the run definition's digest is {definition.digest()}, the pool's is {run_digest}",
            hint="give the file that the pool was made with by --run",
        )
    return ids.address(trainer)


def place_of(deployment: Deployment, pool: int) -> str:
    """Returns the pool's unique name, used in the database and as its prefix in a bucket."""
    return f"{deployment.chain_id}/{deployment.contracts.pools}/{pool}"


def holder_of(data: Path) -> str:
    """Returns this data folder's unique name among the orchestrators on one store; created on first
    use.

    It includes the host name, so that a copied folder gets another name.
    """
    path = data / "holder"
    if not path.exists():  # serve.lock is held; an empty file would give two folders one name
        write_whole(path, secrets.token_hex(16).encode())
    return f"{path.read_text().strip()}@{socket.gethostname()}"


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Holds a lock until the process ends. Raises UserError if another process holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another orchestrator is serving from {path.parent}",
                hint="end it first; a second one for the pool needs a --data of its own, and the "
                "same --database and objects",
            ) from error
        yield


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Raises UserError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named; without it, answers wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another --host or --port (0 takes a free port)",
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Returns the http:// URL at which a program on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def on_one_machine(listener: socket.socket, urls: Iterable[str]) -> bool:
    """Whether a server listens on a loopback address only, and has no URL but such ones."""
    host = listener.getsockname()[0]
    return ipaddress.ip_address(host).is_loopback and all(map(is_loopback, urls))


def announce(path: Path, url: str, port: int) -> None:
    """Publishes our address: one JSON line on stdout, and the file that other programs read."""
    text = json.dumps({"url": url, "port": port, "pid": os.getpid()})
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text + "\n")
    draft.replace(path)
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
