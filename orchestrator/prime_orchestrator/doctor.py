"""`orchestrator doctor`: checks a configured or running orchestrator; each failure comes with what
to type next.

Checks continue after a failure; those that need the result of a failed one are skipped. Each has
at most SECONDS. Nothing is changed but a probe object, which is deleted again.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from prime_chain.amounts import ether
from prime_chain.client import Block, ChainClient
from prime_chain.contracts import Contracts
from prime_chain.keystore import named_address, open_keystore
from prime_chain.networks import LOCAL
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.doctor import DoctorCheck, Outcome, failed
from prime_core.errors import PrimeError
from prime_core.ids import Address
from prime_core.run import RunDefinition
from prime_core.run_file import read_run
from prime_core.signing import CONTRACT_NAMES
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.config import Settings
from prime_orchestrator.serve import BUSY, KEPT_FILES, check_facts, facts_of, place_of
from prime_orchestrator.store import Store, intents, leaders, meta, nodes, open_store, sqlite_file
from prime_orchestrator.store.engine import shown
from prime_orchestrator.store.migrate import current, head

SECONDS = 20.0
"""A check that takes longer has failed."""
ANSWER_SECONDS = 5.0
"""Time-out of one request to an RPC endpoint or to the server."""
OLD_BLOCK_SECONDS = 60
MAX_SKEW_SECONDS = 5
"""How far this machine's clock may be behind the newest block, or off the S3 server's."""
GIB = 1 << 30
LEAST_DISK, LITTLE_DISK = GIB, 10 * GIB
DAY_SECONDS = 86_400
FEW_DAYS = 7
SAMPLED = 20
"""Receipts from which a day's fees are estimated."""
NODE_CONNECTIONS = 2
"""Open connections counted for each node in the database."""
CLOCK_FIX = "sudo timedatectl set-ntp true"
T = TypeVar("T")


@dataclass(frozen=True)
class _Pool:
    """What the settings name: the pool's files and their contents."""

    deployment: Deployment
    number: int
    run: RunDefinition
    wallet: Path


def examine(load: Callable[[], Settings]) -> Iterator[DoctorCheck]:
    """Yields the finding of every check that is possible with the settings that `load` returns."""
    try:
        settings = load()
    except PrimeError as error:
        yield failed("settings", error)
        return
    yield DoctorCheck("settings", "ok", f"they are read; the data folder is {settings.data}")
    with ExitStack() as opened:
        yield from _examine(settings, opened)


def _examine(settings: Settings, opened: ExitStack) -> Iterator[DoctorCheck]:
    pool, account = _Kept[_Pool](), _Kept[Address]()
    store, client = _Kept[Store](), _Kept[ChainClient]()
    yield from _bounded("pool files", lambda: _files(settings, pool))
    yield from _bounded("key files", lambda: _keys(settings, account))
    yield from _bounded("database", lambda: _database(settings, pool.value, store))
    if store.value is not None:
        opened.callback(store.value.close)
    if pool.value is not None or not settings.s3_bucket:
        yield from _bounded("objects", lambda: _objects(settings, pool.value))
    yield from _bounded("disk", lambda: _disk(settings))
    yield from _bounded("open files", lambda: _open_files(settings, store.value))
    yield from _bounded("server", lambda: _server(settings))
    if store.value is not None:
        yield from _bounded("loops", lambda: _loops(store.need))
    if pool.value is None:
        return
    chain_id = pool.value.deployment.chain_id
    yield from _bounded("rpc", lambda: _rpc(settings, chain_id, client))
    if client.value is None:
        return
    opened.callback(client.value.close)
    yield from _bounded("clock", lambda: _clock(client.need))
    yield from _bounded("contracts", lambda: _contracts(client.need, pool.need.deployment))
    if account.value is not None:
        yield from _bounded("pool", lambda: _pool(client.need, pool.need, account.need))
        yield from _bounded("balance", lambda: _balance(client.need, account.need, store.value))


class _Kept(Generic[T]):
    """A result of one check that later checks need; None if the check failed."""

    def __init__(self) -> None:
        self.value: T | None = None

    @property
    def need(self) -> T:
        assert self.value is not None
        return self.value


def _bounded(name: str, ask: Callable[[], Iterable[DoctorCheck]]) -> list[DoctorCheck]:
    """Returns what `ask` finds, or a failure if it raises PrimeError or OSError, or takes longer
    than SECONDS."""
    answer: Future[list[DoctorCheck]] = Future()

    def run() -> None:
        try:
            answer.set_result(list(ask()))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    try:
        return answer.result(SECONDS)
    except TimeoutError:
        return [DoctorCheck(name, "failed", f"no answer within {SECONDS:.0f} s", "try again")]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return [DoctorCheck(name, "failed", f"{where}{error.strerror}", "check its permissions")]
    except PrimeError as error:
        return [failed(name, error)]
    except Exception as error:
        said = f"it ended with {type(error).__name__}, which is a fault of this program"
        return [DoctorCheck(name, "failed", said, "report it, with the settings but no secret")]


# -- files ---------------------------------------------------------------------------------------


def _files(settings: Settings, kept: _Kept[_Pool]) -> Iterator[DoctorCheck]:
    settings.need_rpc()
    deployment = Deployment.load(settings.need("deployment"))
    run = read_run(settings.need("run"), exact=True)
    deployment.check_run(run)
    number = settings.need("pool")
    kept.value = _Pool(deployment, number, run, settings.need("wallet"))
    said = f"pool {number} on chain {deployment.chain_id}, run {run.name!r}"
    yield DoctorCheck("pool files", "ok", said)


def _keys(settings: Settings, kept: _Kept[Address]) -> Iterator[DoctorCheck]:
    """The manager's keystore, its password, and the secrets. Says whose key it is, no more."""
    wallet = settings.need("wallet")
    if settings.password_file is None:
        kept.value = named_address(wallet)
        said = f"{wallet} names {kept.value}; no password file is named, so it was not opened"
        yield DoctorCheck("wallet", "warning", said, "add --password-file FILE")
    else:
        kept.value = open_keystore(wallet, settings.password_file).address
        yield DoctorCheck("wallet", "ok", f"{wallet} holds the key of {kept.value}")
    named = {
        "wallet's file": wallet, "password file": settings.password_file,
        "planted secret": settings.planted_secret,
    }  # fmt: skip
    if settings.secret_file.exists():
        named["secret of URLs"] = settings.secret_file
    for name, path in named.items():
        if path is not None:
            yield _private(name, path)


def _private(name: str, path: Path) -> DoctorCheck:
    mode = path.stat().st_mode
    fix = f"chmod 600 {path}"
    if mode & 0o007:
        return DoctorCheck(name, "failed", f"every user of this machine may open {path}", fix)
    if mode & 0o070:  # as secrets that Kubernetes mounts
        return DoctorCheck(name, "warning", f"its group may open {path}", fix)
    return DoctorCheck(name, "ok", f"only its owner may open {path}")


def _database(settings: Settings, pool: _Pool | None, kept: _Kept[Store]) -> Iterator[DoctorCheck]:
    file = sqlite_file(settings.database_url)
    if file is not None and not file.is_file():
        said = f"there is no {file} yet"
        yield DoctorCheck("database", "warning", said, "orchestrator serve makes it")
        return
    store = open_store(settings.database_url)
    where = shown(store.engine.url)
    try:
        with store.read() as connection:
            found = current(connection)
            serves = meta.get(connection, meta.SERVES) if found == head() else None
    except BaseException:
        store.close()
        raise
    if found == head():
        kept.value = store
    else:
        store.close()
    place = None if pool is None else place_of(pool.deployment, pool.number)
    if found is None:
        said = f"{where} answers and is empty"
        yield DoctorCheck("database", "warning", said, "orchestrator serve makes its tables")
    elif found != head():
        said = f"{where} answers; its schema is {found}, this program's is {head()}"
        fix = "orchestrator store migrate; if the schema is newer, install the newer program"
        yield DoctorCheck("database", "failed", said, fix)
    elif serves is not None and place is not None and serves != place:
        said = f"{where} belongs to pool {serves}, not {place}"
        yield DoctorCheck("database", "failed", said, "name another --data or --database")
    else:
        yield DoctorCheck("database", "ok", f"{where} answers; its schema {found} is the newest")


def _objects(settings: Settings, pool: _Pool | None) -> Iterator[DoctorCheck]:
    folder = settings.objects_folder
    if not settings.s3_bucket and not folder.exists():
        said = f"there is no {folder} yet"
        yield DoctorCheck("objects", "warning", said, "orchestrator serve makes it")
        return
    place = "" if pool is None else place_of(pool.deployment, pool.number)
    objects = settings.open_objects("", place)  # a bucket is tried out by this
    if isinstance(objects, DirectoryStore):
        key = f"probe-{secrets.token_hex(8)}"
        objects.put(key, b"probe")
        try:
            objects.get(key, 10)
        finally:
            objects.delete(key)
        yield DoctorCheck("objects", "ok", f"{folder} takes objects and gives them back")
        return
    yield DoctorCheck("objects", "ok", f"{objects} takes objects, checks them, gives them back")
    fix = "docs/storage.md#lifecycle-rules says how; not needed where the server does it by itself"
    ends = objects.ends_uploads()  # type: ignore[attr-defined]  # S3Store, whose package is an extra
    if ends:
        yield DoctorCheck("S3 lifecycle", "ok", "a rule ends uploads that a crash left unfinished")
    else:
        said = "no rule ends uploads that a crash left unfinished"
        if ends is None:
            said = "these credentials cannot read the bucket's rules (s3:GetLifecycleConfiguration)"
        yield DoctorCheck("S3 lifecycle", "warning", said, fix)
    skew = objects.clock_skew()  # type: ignore[attr-defined]
    if abs(skew) > MAX_SKEW_SECONDS:
        said = f"the S3 server's clock is {skew:+.0f} s off this machine's: signed URLs may fail"
        yield DoctorCheck("S3 clock", "failed", said, CLOCK_FIX)
    else:
        yield DoctorCheck("S3 clock", "ok", f"within {abs(skew):.0f} s of the S3 server's")


# -- the machine ---------------------------------------------------------------------------------


def _disk(settings: Settings) -> Iterator[DoctorCheck]:
    places = {"disk of data": settings.data}
    if not settings.s3_bucket and settings.objects is not None:
        places["disk of objects"] = settings.objects
    file = sqlite_file(settings.database_url)
    if file is not None and settings.database:
        places["disk of the database"] = file.parent
    for name, folder in places.items():
        there = folder
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        said, fix = f"{free / GIB:.1f} GiB free at {folder}", "free some space; docs/retention.md"
        if free < LEAST_DISK:
            yield DoctorCheck(name, "failed", said, fix)
        elif free < LITTLE_DISK:
            yield DoctorCheck(name, "warning", said, fix)
        else:
            yield DoctorCheck(name, "ok", said)


def _open_files(settings: Settings, store: Store | None) -> Iterator[DoctorCheck]:
    """The limit of the running server, else this shell's, next to the nodes in the database."""
    running = _running(settings.data)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if running is not None:
        try:
            limit = resource.prlimit(running["pid"], resource.RLIMIT_NOFILE)[1]
        except (PermissionError, ProcessLookupError):  # another user's, or it has just ended
            running = None
    known = 0
    if store is not None:
        with store.read() as connection:
            known = sum(nodes.counts(connection).values())
    needed = KEPT_FILES + BUSY + NODE_CONNECTIONS * known
    whose = "this shell's" if running is None else "the server's"
    if limit == resource.RLIM_INFINITY:
        yield DoctorCheck("open files", "ok", f"{whose} limit is none")
        return
    said = f"{whose} limit is {limit}; {known} nodes need about {needed}"
    fix = "raise it: LimitNOFILE of the systemd unit, or ulimit -Hn, before serve is started"
    if limit < needed:
        yield DoctorCheck("open files", "failed", said, fix)
    else:
        yield DoctorCheck("open files", "ok", said)


# -- the process ---------------------------------------------------------------------------------


def _running(data: Path) -> dict[str, Any] | None:
    """Returns what `serve` wrote into the data folder, if its process lives on this machine."""
    try:
        said: dict[str, Any] = json.loads((data / "serve.json").read_text())
        with suppress(PermissionError):  # it lives, as another user's
            os.kill(said["pid"], 0)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return said


def _server(settings: Settings) -> Iterator[DoctorCheck]:
    said = _running(settings.data)
    if said is None:
        if (settings.data / "serve.json").exists():
            found = f"the orchestrator that served from {settings.data} was killed"
            yield DoctorCheck("server", "failed", found, "start it: orchestrator serve")
        else:
            found = f"no orchestrator serves from {settings.data}"
            yield DoctorCheck("server", "warning", found, "start it: orchestrator serve")
        return
    url, pid = said["url"], said["pid"]
    try:
        status = httpx.get(f"{url}/readyz", timeout=ANSWER_SECONDS).status_code
    except httpx.HTTPError as error:
        found = f"process {pid} does not answer at {url}: {type(error).__name__}"
        fix = "check DNS, proxy and certificate of --public-url, then the log of serve"
        yield DoctorCheck("server", "failed", found, fix)
        return
    if status != httpx.codes.OK:
        found = f"process {pid} answers {status} at {url}/readyz"
        yield DoctorCheck("server", "failed", found, "see the check of the database, and its log")
    else:
        yield DoctorCheck("server", "ok", f"process {pid} answers at {url}")


def _loops(store: Store) -> Iterator[DoctorCheck]:
    """Whether the holder of the lease renews it; watched for one lease at most."""
    start = "start it: orchestrator serve; it takes the loops over"
    end = time.monotonic() + leaders.LEASE_SECONDS
    with store.read() as connection:
        first = leaders.holder_and_beat(connection)
    if first is None:
        yield DoctorCheck("loops", "warning", "no orchestrator runs the manager's loops", start)
        return
    while time.monotonic() < end:
        time.sleep(leaders.BEAT_SECONDS / 4)
        with store.read() as connection:
            now = leaders.holder_and_beat(connection)
        if now is not None and now != first:
            where = now[0].rpartition("@")[2]
            yield DoctorCheck("loops", "ok", f"a live process on {where} runs them")
            return
    where = first[0].rpartition("@")[2]
    found = f"the process on {where} that has the lease does not renew it"
    yield DoctorCheck("loops", "failed", found, start)


# -- the chain -----------------------------------------------------------------------------------


def _rpc(settings: Settings, chain_id: int, kept: _Kept[ChainClient]) -> list[DoctorCheck]:
    """Each endpoint by itself. One that fails is a warning if enough others are left."""
    client = settings.open_chain(chain_id, timeout=ANSWER_SECONDS)
    found, answering = [], 0
    singles = client.singles()
    with ThreadPoolExecutor(len(singles), "doctor-rpc") as pool:  # a silent one delays no other
        answers = list(pool.map(_newest, singles))
    for one, answer in zip(singles, answers, strict=True):
        if isinstance(answer, PrimeError):
            fix = "check --rpc; a public endpoint may limit you: add another"
            found.append(failed("rpc", answer, fix))
            continue
        answering += 1
        found.append(_head(one, answer))
    good = sum(check.outcome != "failed" for check in found)
    if answering >= client.quorum:
        kept.value = client
    else:
        client.close()
    if good < client.quorum:
        said = f"{good} endpoints are fit for use, {client.quorum} must agree"
        return [*found, DoctorCheck("quorum", "failed", said, "add --rpc URL")]
    return [
        replace(check, outcome="warning") if check.outcome == "failed" else check for check in found
    ]


def _newest(client: ChainClient) -> Block | PrimeError:
    """The newest block of an endpoint, or why it is not fit for use."""
    try:
        client.check()
        return client.block("latest")
    except PrimeError as error:
        return error


def _head(client: ChainClient, block: Block) -> DoctorCheck:
    age, network = time.time() - block.time, client.network
    said = f"{client.name}: chain {client.chain_id} ({network.name}) at block {block.number}"
    if age <= OLD_BLOCK_SECONDS:
        return DoctorCheck("rpc", "ok", said)
    outcome: Outcome = "warning" if network is LOCAL else "failed"
    fix = f"wait for the endpoint, or name another --rpc; if this clock is ahead: {CLOCK_FIX}"
    return DoctorCheck("rpc", outcome, f"{said}, which is {age:.0f} s old", fix)


def _clock(client: ChainClient) -> Iterator[DoctorCheck]:
    """A block of the future shows that this machine's clock is behind; an old one, see `_head`."""
    ahead = client.block("latest").time - time.time()
    if ahead > MAX_SKEW_SECONDS:
        said = f"this machine's clock is {ahead:.0f} s behind the newest block"
        yield DoctorCheck("clock", "failed", said, CLOCK_FIX)
    else:
        yield DoctorCheck("clock", "ok", "not behind the newest block")


def _contracts(client: ChainClient, deployment: Deployment) -> Iterator[DoctorCheck]:
    lacking = [
        SOLIDITY_NAMES[name] for name in CONTRACT_NAMES if not client.code(deployment.address(name))
    ]
    if lacking:
        fix = "check --rpc and --deployment; a local chain that was started again has none"
        said = f"there is no code of {', '.join(lacking)} where the deployment says"
        yield DoctorCheck("contracts", "failed", said, fix)
    else:
        said = f"there is code at all {len(CONTRACT_NAMES)} addresses"
        yield DoctorCheck("contracts", "ok", said)


def _pool(client: ChainClient, pool: _Pool, account: Address) -> Iterator[DoctorCheck]:
    facts = facts_of(Contracts(client, pool.deployment), pool.deployment, pool.number)
    check_facts(facts, pool.number, pool.run, account)
    yield DoctorCheck("pool", "ok", "its manager and run on chain are those of wallet and run file")


def _balance(client: ChainClient, account: Address, store: Store | None) -> Iterator[DoctorCheck]:
    """Next to what the last day's transactions cost, estimated from some of their receipts."""
    held, day = client.balance(account), 0
    if store is not None:
        with store.read() as connection:
            mined = intents.mined_since(connection, time.time() - DAY_SECONDS, 5_000)
        some = mined[:: max(1, len(mined) // SAMPLED)][:SAMPLED]
        fees = [fee.total for _, tx in some if (fee := client.paid_fee(tx)) is not None]
        day = len(mined) * sum(fees) // len(fees) if fees else 0
    said = f"{account} has {ether(held)}"
    said += f"; the last day's transactions cost about {ether(day)}" if day else ""
    fix = f"send ether to {account}; orchestrator costs shows what for"
    if held == 0 or held < day:
        yield DoctorCheck("balance", "failed", said, fix)
    elif held < FEW_DAYS * day:
        yield DoctorCheck("balance", "warning", said, fix)
    else:
        yield DoctorCheck("balance", "ok", said)
