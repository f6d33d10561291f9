"""What history costs: the same work on stores with 1,000, 100,000 and 1,000,000 judged files.

A store holds one file that went through the API from lease to verdict; its rows are copied in bulk
under other names, one file a second up to now, a batch for each hundred. `growth_…`: CPU time of
this process and PostgreSQL for one lease, batch tick, status, page of nodes, or page of metrics, on
the largest store over the smallest, each with 10,000 nodes, most of which have no file in the
smallest; the stores take turns. `restart_s`: from starting an API process on the largest store to
its first status, with the byte code that an installation has. `bytes_per_file`: of the tables that
grow with files, with indexes, on a store with 1,024 nodes (the newest files of each node are kept),
once all epochs are settled and their files archived, after VACUUM FULL: a pool at work reuses the
space of deleted rows. Of the chain's events, each root has one; policies, batches and their targets
grow with steps and are left out.
`bytes_per_file_in_tables`: before.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa
from prometheus_client import generate_latest
from sqlalchemy import Connection

from bench import seats, work
from bench.form import Row
from bench.servers import (
    Database,
    Place,
    compiled,
    connect,
    cpu_seconds,
    end,
    request_bytes,
    serving,
    start_api,
)
from prime_core.errors import FatalError
from prime_core.ids import ZERO_DIGEST, Address
from prime_core.messages import LeaseRequest
from prime_core.run import RunDefinition
from prime_core.settlement import settle
from prime_core.storage.base import put_object
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.api import leasing, status
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.metrics import PoolMetrics, RequestCounts
from prime_orchestrator.manager.archiving import KEPT_SECONDS, Archiver
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME
from prime_orchestrator.store import meta, open_store, rewards, schema
from prime_orchestrator.store.rewards import RewardRootRow

SIZES = (1_000, 100_000, 1_000_000)
QUICK_SIZES = (100, 1_000)
SEATS, QUICK_SEATS = 10_000, 100
"""Nodes of the stores whose costs are compared."""
ARCHIVE_SEATS = 1_024
"""Nodes of the store that is archived."""
A_BATCH = 100
"""Files in a batch."""
SECONDS, ROUNDS = 4.0, 8
"""How long each kind of work is repeated on a store, and in how many turns."""
KEPT = (
    *("leases", "submissions", "opinions", "credits", "groups", "jobs", "assignments"),
    *("archived", "archive_pages", "archive_totals"),
    *("roots", "chain_events", "intents"),
)
"""Tables that keep rows of a file until it is archived, after, and of its root
(docs/retention.md)."""


def definition() -> RunDefinition:
    """A hundred files of two groups a batch."""
    return work.definition().model_copy(update={"groups_per_batch": 2 * A_BATCH})


def rows(quick: bool, database: Database) -> list[Row]:
    """All rows."""
    sizes, nodes = (QUICK_SIZES, QUICK_SEATS) if quick else (SIZES, SEATS)
    with ExitStack() as stack:
        stores = [stack.enter_context(_store(database, size, nodes)) for size in sizes]
        costs = {name: _costs([one.works[name] for one in stores], database)
                 for name in stores[0].works}  # fmt: skip
        found = _restart(quick, stores[-1])
    with _store(database, sizes[-1], ARCHIVE_SEATS) as last:
        found += _bytes(quick, last)
    for name, (first, *others) in costs.items():
        found.append(
            Row(f"growth_{name}", others[-1] / first,
                f"× the CPU time on {sizes[0]:,} files ({1000 * first:.3g} ms), on "
                f"{sizes[-1]:,} files, {nodes:,} nodes", bar=None if quick else 1.5)
        )  # fmt: skip
        found += [
            Row(f"growth_{name}_{size}_ms", 1000 * cost, f"ms of CPU on {size:,} files")
            for size, cost in zip(sizes[1:], others, strict=True)
        ]
    return found


@dataclass(frozen=True)
class _Filled:
    """A pool with `files` judged files in a database of its own."""

    files: int
    database: Database
    pool: seats.Pool
    works: Mapping[str, Callable[[], object]]


@contextmanager
def _store(server: Database, files: int, nodes: int) -> Iterator[_Filled]:
    """A new database of the server, filled."""
    name = f"growth_{files}_{nodes}"
    with closing(open_store(server.url)) as store, store.engine.connect() as plain:
        plain.execution_options(isolation_level="AUTOCOMMIT").execute(
            sa.text(f"CREATE DATABASE {name}")
        )
    database = replace(server, url=server.url.replace("/postgres?", f"/{name}?"))
    with serving(database, definition(), validators=work.signers(1, 2)) as servers:
        seated = work.one_judged_file(servers, work.signers(1, 2), nodes)
        backend = servers.pool.backend
        with backend.store.begin() as connection:
            fill(connection, files, time.time())
        with backend.store.engine.connect() as plain:
            vacuum = plain.execution_options(isolation_level="AUTOCOMMIT")
            vacuum.execute(sa.text("VACUUM ANALYZE"))
            vacuum.execute(sa.text("CHECKPOINT"))
        yield _Filled(files, database, servers.pool, _works(backend, seated))


def _works(backend: Backend, nodes: work.Nodes) -> Mapping[str, Callable[[], object]]:
    metrics = PoolMetrics(backend, RequestCounts())
    asking: Iterator[Address] = iter(())

    def lease() -> None:
        nonlocal asking
        node = next(asking, None)
        if node is None:
            with backend.store.begin() as connection:
                connection.execute(sa.delete(schema.leases).where(schema.leases.c.status == "open"))
            asking = iter([one.address for one in nodes.accounts[:50]])
            node = next(asking)
        answer = leasing.lease(backend, node, LeaseRequest(policy_version=1 << 40))
        if answer.lease is None:
            raise FatalError(f"no lease was given: {answer.reason}")

    def tick() -> None:
        if seal_ready_batches(
            backend.store, backend.objects, backend.manager, backend.context, backend.now
        ):
            raise FatalError("a batch was sealed, so the next tick would find another store")

    return {
        "lease": lease,
        "tick": tick,
        "status": lambda: status.status(backend),
        "nodes": lambda: status.NodeList(backend),
        "metrics": lambda: generate_latest(metrics),
    }


def _costs(works: Sequence[Callable[[], object]], database: Database) -> list[float]:
    """CPU seconds of one call of each work, in this process and PostgreSQL. The works take turns,
    so that a change of the machine's load meets all of them."""
    spent, counts = [0.0] * len(works), [0] * len(works)
    for one in works:
        one()
    for _ in range(ROUNDS):
        for at, one in enumerate(works):
            process, server = time.process_time(), database.cpu_seconds()
            until = time.monotonic() + SECONDS / ROUNDS
            while time.monotonic() < until:
                one()
                counts[at] += 1
            spent[at] += time.process_time() - process + database.cpu_seconds() - server
    return [total / count for total, count in zip(spent, counts, strict=True)]


def _restart(quick: bool, store: _Filled) -> list[Row]:
    """Seconds from starting an API process to its first answers."""
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as folder:
        place = Place(
            folder=f"{folder}/api",
            database=store.database.url,
            run=store.pool.backend.context.run.raw().decode(),
            objects=str(Path(folder) / "objects"),
            loops=True,
        )
        with compiled(f"{folder}/bytecode"):
            _start(replace(place, folder=f"{folder}/first"))  # as pip compiles what it installs
            seconds, spent = _start(place)
    return [
        Row("restart_s", seconds, "s from a process's start to its first status",
            bar=None if quick else 5),
        Row("restart_cpu_s", spent, "s of CPU of the process"),
    ]  # fmt: skip


def _start(place: Place) -> tuple[float, float]:
    """Seconds from starting an API process to its first status, and its CPU time; ends it."""
    servers: list[subprocess.Popen[str]] = []
    since = time.monotonic()
    try:
        port = start_api(servers, place)

        async def ask() -> None:
            (client,) = await connect([port], 1)
            await client.ask(request_bytes("GET", "/v1/status", b"", {}))
            client.close()

        asyncio.run(ask())
        return time.monotonic() - since, cpu_seconds(servers[0].pid)
    finally:
        end(servers)


def _bytes(quick: bool, store: _Filled) -> list[Row]:
    before = sum(_sizes(store).values())
    with tempfile.TemporaryDirectory(prefix="bench-archive-") as folder:
        objects = _AllThere(Path(folder))
        archived, pages, seconds, cpu = _archive(quick, store, objects)
    with store.pool.backend.store.engine.connect() as plain:
        vacuum = plain.execution_options(isolation_level="AUTOCOMMIT")
        for name in KEPT:
            vacuum.execute(sa.text(f"VACUUM FULL {name}"))
    sizes = _sizes(store)
    return [
        Row("bytes_per_file", sum(sizes.values()),
            f"bytes in {', '.join(KEPT)}, with indexes, {archived:,} of {store.files:,} files "
            "archived; policies, batches and batch_targets, which grow with steps, are left out",
            bar=None if quick else 600),
        *(Row(f"bytes_per_file_{name}", size, "bytes") for name, size in sizes.items()),
        Row("bytes_per_file_in_tables", before, "bytes in the same before any file is archived"),
        Row("archive_page_s", seconds / max(pages, 1), "s for one page"),
        Row("archive_file_us", 1e6 * cpu / max(archived, 1), "µs of CPU, PostgreSQL's too"),
    ]  # fmt: skip


def _sizes(store: _Filled) -> dict[str, float]:
    """Bytes a file in each table of KEPT, with its indexes."""
    query = "SELECT pg_total_relation_size('{}')"
    with store.pool.backend.store.read() as connection:
        return {
            name: int(connection.execute(sa.text(query.format(name))).scalar_one()) / store.files
            for name in KEPT
        }


class _AllThere(DirectoryStore):
    """Objects of a pool whose rollout files are not there, and that says they are."""

    def exists(self, key: str) -> bool:
        return True


def _archive(quick: bool, store: _Filled, objects: _AllThere) -> tuple[int, int, float, float]:
    """Settles all epochs and archives all files that are over. Returns how many, in how many pages,
    and the seconds and CPU seconds that took."""
    backend = store.pool.backend
    run, now = backend.context.run, int(backend.now())
    settlement = settle(
        chain_id=1, pool=backend.context.pool, epoch=now, as_of_block=0, previous=None,
        previous_name=ZERO_DIGEST, leaves=(), slashes=(),
    )  # fmt: skip
    name = put_object(objects, settlement.canonical())
    with backend.store.begin() as connection:
        root = RewardRootRow(now, ZERO_DIGEST, "0", name, now, claimable_at=now - run.epoch_seconds)
        rewards.add_root(connection, root)
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(now))
    archiver = Archiver(
        backend.store, objects, backend.context, lambda: backend.now() + KEPT_SECONDS
    )
    if quick:
        archiver.page_files, archiver.kept, archiver.kept_of_node = 100, 50, 1
    archived = pages = 0
    since, before = time.monotonic(), time.process_time() + store.database.cpu_seconds()
    while files := archiver.tick():
        archived, pages = archived + files, pages + 1
    cpu = time.process_time() + store.database.cpu_seconds() - before
    return archived, pages, time.monotonic() - since, cpu


# ── filling ──


def fill(connection: Connection, files: int, now: float) -> None:
    """Copies the rows of the store's only file `files` times, and adds their batches, policies,
    roots and the intents of these. Triggers are off meanwhile; what they count is added, too."""
    connection.execute(sa.text("SET LOCAL session_replication_role = replica"))
    connection.execute(
        sa.text(
            "CREATE TEMP TABLE bench_nodes AS "
            "SELECT row_number() OVER (ORDER BY address) - 1 AS n, address FROM nodes"
        )
    )
    count = int(connection.execute(sa.text("SELECT count(*) FROM bench_nodes")).scalar_one())
    at = f"({now - files} + i)"
    file = {
        "digest": "'0x' || md5('s' || i) || md5('t' || i)",
        "lease": "'0x' || md5('l' || i) || md5('m' || i)",
    }
    step, root = f"(i / {A_BATCH})", f"(i / {A_BATCH} + 1)"
    same = {"node": "b.address", "step": step, "policy_version": step}
    given = {"submission_digest": file["digest"]}
    copies: dict[str, dict[str, str]] = {
        "leases": same | {"digest": file["lease"], "created_at": at,
                          "lease_index": f"i % {A_BATCH} + 1",
                          "deadline": f"CAST({at} AS bigint) + 600"},
        "submissions": same | {"digest": file["digest"], "lease_digest": file["lease"],
                               "sha256": "'0x' || md5('f' || i) || md5('g' || i)",
                               "verdict": "'0x' || md5('v' || i) || md5('w' || i)",
                               "received_at": at, "judged_at": at, "root_id": root,
                               "leaf_index": f"i % {A_BATCH}"},
        "jobs": given | {"created_at": at},
        "assignments": given | {"at": at, "until": at},
        "opinions": given | {"at": at},
        "credits": given | {"node": "b.address", "earned_at": f"CAST({at} AS bigint)"},
        "groups": given | {"policy_version": step, "accepted_at": at,
                           "informative": "group_no = 0 OR i % 3 > 0",
                           "batch_step": f"CASE WHEN i >= {files - A_BATCH // 2} THEN NULL "
                                         f"WHEN group_no = 0 OR i % 3 > 0 THEN {step} END"},
    }  # fmt: skip
    many = sa.text(f"generate_series(0, {files - 1}) i JOIN bench_nodes b ON b.n = i % {count}")
    for name, values in copies.items():
        table = schema.metadata.tables[name]
        key = table.c.digest if "digest" in table.c else table.c.submission_digest
        first = connection.execute(sa.select(key)).scalars().all()
        chosen = (
            sa.literal_column(values[column.name]) if column.name in values else column
            for column in table.c
        )
        copied = sa.select(*chosen).select_from(table, many)
        connection.execute(sa.insert(table).from_select(list(table.c), copied))
        connection.execute(sa.delete(table).where(key.in_(first)))
    _steps(connection, files, now)
    for statement in (
        "DELETE FROM tallies",
        "INSERT INTO tallies (node, shadow, status, files, units) SELECT node, shadow, status, "
        "count(*), sum(units) FROM submissions GROUP BY node, shadow, status",
        "INSERT INTO batch_targets (step, target, groups) SELECT g.batch_step, l.target, count(*) "
        "FROM groups g JOIN submissions s ON s.digest = g.submission_digest JOIN leases l ON "
        "l.digest = s.lease_digest WHERE g.batch_step IS NOT NULL GROUP BY g.batch_step, l.target",
    ):
        connection.execute(sa.text(statement))


def _steps(connection: Connection, files: int, now: float) -> None:
    last = files // A_BATCH
    connection.execute(sa.delete(schema.policies))
    for statement in (
        "INSERT INTO policies (version, digest, step, body, published_at) SELECT i, "
        "'0x' || md5('p' || i) || md5('q' || i), i, repeat('x', 4096), :now - (:last - i) * :each "
        "FROM generate_series(0, :last) i",
        "INSERT INTO batches (step, digest, body, rows, mean_reward_micro, staleness_max, "
        "sealed_at) SELECT i, '0x' || md5('b' || i) || md5('c' || i), repeat('x', 4096), 1600, "
        "500000, 1, :now - (:last - i) * :each FROM generate_series(0, :last - 1) i",
        "INSERT INTO roots (id, root, leaves_object, count, created_at, chain_seq, epoch, "
        "posted_at, block) SELECT i + 1, '0x' || md5('r' || i) || md5('o' || i), '0x', :each, "
        ":now - (:last - i) * :each, i, i / 100, 0, i FROM generate_series(0, :last) i",
        "INSERT INTO chain_events (block_hash, log_index, block, block_time, tx_hash, name, args, "
        "subject, second) SELECT '0x' || md5('c' || i) || md5('h' || i), 0, i, "
        ":now - (:last - i) * :each, '0x' || md5('x' || i) || md5('y' || i), 'RootPosted', "
        "CAST(json_build_object('count', CAST(:each AS bigint), 'epoch', i / 100, 'leaves_object', "
        "'0x' || md5('a' || i) || md5('d' || i), 'pool', 1, 'root', "
        "'0x' || md5('r' || i) || md5('o' || i), 'seq', i) AS text), "
        "'0x' || md5('r' || i) || md5('o' || i), CAST(i AS text) "
        "FROM generate_series(0, :last) i",
        "INSERT INTO intents (id, kind, payload, value, description, note, status, tx_hash, block, "
        "created_at, updated_at) SELECT 'root:' || i, 'root', '{}', '0', '', '', 'confirmed', "
        "'0x' || md5('x' || i) || md5('y' || i), i, :now - (:last - i) * :each, "
        ":now - (:last - i) * :each FROM generate_series(0, :last) i",
    ):
        connection.execute(sa.text(statement), {"now": now, "last": last, "each": A_BATCH})
