"""One epoch of many files: settled, rebuilt by an auditor, and claimed.

One file goes through the API from lease to verdict. It is made again under other names for 1,024
nodes: submissions, receipts and opinions are signed, verdicts, tables and the lists of leaves are
objects of their own, the roots are on chain by the store. Then, each in a process of its own:

    settle   what `orchestrator serve` does: reads every leaf and verdict of the store in
             PostgreSQL, writes the settlement's pages, queues the reward root
    rebuild  what `orchestrator rewards rebuild` does with the chain's events and a folder of
             objects: checks three signatures a file and settles again
    claim    finds a node's proof in the rebuilt settlement and checks it against the posted root
             as the contract does (`merkle_verify`); no chain runs

`…_mib` is the most resident memory of the process, PostgreSQL's not counted. `settle_N_files_s` of
each size, and `settle_files_s` of `bench orchestrator`: 2 ÷ CPU seconds that settling a file costs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench import seats, work
from bench.form import Row
from bench.servers import Database, Place, Servers, end, line, postgres, serving, start
from prime_chain.event import Event
from prime_chain.event_kinds import PoolCreated, RewardRootPosted, RootPosted, ValidatorSet
from prime_chain.rewards import Rebuilder
from prime_core import encoding
from prime_core.errors import FatalError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.revisions import RunHistory
from prime_core.rollout import Receipt, SignedSubmission, encode_leaves
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.storage.base import ObjectStore, digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.verdict import Verdict
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import read_object
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME, settle_epochs
from prime_orchestrator.serve import collect_garbage_rarely
from prime_orchestrator.store import meta, open_store, schema, submissions
from prime_orchestrator.store.submissions import SubmissionRow

PACKAGES = ("sqlalchemy", "psycopg", "pydantic", "coincurve")
SIZES, QUICK_SIZES = (20_000, 100_000, 1_000_000), (2_000,)
FILES, QUICK_FILES = 100_000, 5_000
A_ROOT = 1_000
"""Files in a work root."""
VALIDATORS, NODES = 1, 1024
BLOCK = 2
"""The chain's newest block, as of which the epoch is settled."""


def run(quick: bool, files: int = 0) -> list[Row]:
    """Rows of each size, or of `files` alone."""
    sizes = (files,) if files else QUICK_SIZES if quick else SIZES
    with postgres() as database:
        return [row for size in sizes for row in _rows_of(database, size)]


def rows(quick: bool, database: Database) -> list[Row]:
    """The rows of `bench orchestrator`; empties the database."""
    files = QUICK_FILES if quick else FILES
    with _filled(database, files) as epoch:
        return _settled(database, epoch, "settle_files", None if quick else 20_000)[1]


@dataclass(frozen=True)
class _Epoch:
    """An epoch of `files`, ready to be settled. `roots`: number, root, object and count of each.
    `now`: when they were posted (Unix seconds); `over`: when the epoch can be settled."""

    place: Place
    files: int
    roots: Sequence[tuple[int, Digest, Digest, int]]
    now: int
    over: int

    def backend(self) -> Backend:
        store, run = open_store(self.place.database), RunDefinition.parse(self.place.run.encode())
        return seats.backend_on(store, self.place.open_objects(), run)


def _rows_of(database: Database, files: int) -> Iterator[Row]:
    with _filled(database, files) as epoch:
        settled, rates = _settled(database, epoch, f"settle_{files}_files")
        rebuilt = _in_a_process("rebuild", epoch, settled)
    if rebuilt["root"] != settled["root"]:
        raise FatalError(f"rebuilt root {rebuilt['root']}, posted {settled['root']}")
    yield from rates
    for name, one in (("settle", settled), ("rebuild", rebuilt)):
        yield Row(f"{name}_{files}_s", one["seconds"], f"s for an epoch of {files:,} files")
        yield Row(f"{name}_{files}_mib", one["peak"] / 2**20, "MiB resident at most")
    yield Row(f"objects_{files}_mib", settled["bytes"] / 2**20,
              f"MiB of the settlement's head and {settled['pages']:,} pages")  # fmt: skip
    yield Row(f"claim_{files}_ms", 1e3 * rebuilt["claim"], "ms to prove and check a claim")


def _settled(
    database: Database, epoch: _Epoch, name: str, bar: float | None = None
) -> tuple[dict[str, Any], list[Row]]:
    """What the process that settled the epoch found, and rows of the CPU time that a file took."""
    before, found = database.cpu_seconds(), _in_a_process("settle", epoch)
    server, files = database.cpu_seconds() - before, epoch.files
    return found, [
        Row(f"{name}_s", work.CORES * files / (found["cpu"] + server),
            f"files/s of an epoch of {files:,}", bar=bar, better="higher"),
        Row(f"{name}_us", 1e6 * found["cpu"] / files, "µs of CPU in the process"),
        Row(f"{name}_postgres_us", 1e6 * server / files, "µs of CPU in PostgreSQL"),
    ]  # fmt: skip


def _in_a_process(kind: str, epoch: _Epoch, settled: dict[str, Any] | None = None) -> Any:
    """What the function `_kind` returns in a process of its own, and the most memory it took."""
    child = start("bench.settling", kind)
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps([asdict(epoch), settled]) + "\n")
        child.stdin.flush()
        said = line(child)
    finally:
        end([child])
    if not said:
        raise FatalError(f"the process that has to {kind} {epoch.files} files ended")
    return json.loads(said)


def _main(kind: str) -> None:
    facts, settled = json.loads(sys.stdin.readline())
    place = Place(**facts.pop("place"))
    roots = [(seq, root, name, count) for seq, root, name, count in facts.pop("roots")]
    epoch = _Epoch(place=place, roots=roots, **facts)
    found = _settle(epoch) if kind == "settle" else _rebuild(epoch, settled)
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    print(json.dumps(found | {"peak": peak}), flush=True)


def _settle(epoch: _Epoch) -> dict[str, Any]:
    backend = epoch.backend()
    collect_garbage_rarely()  # as the process that settles does
    cpu, since = time.process_time(), time.monotonic()
    settled = settle_epochs(backend.store, backend.objects, backend.context, backend.now)
    seconds, cpu = time.monotonic() - since, time.process_time() - cpu
    paid = 0 if settled is None else sum(one.state == "paid" for one in settled.files)
    if settled is None or paid != epoch.files:
        raise FatalError(f"{paid} of {epoch.files} files were settled as paid")
    sizes: list[int] = []

    def count(data: bytes) -> Digest:
        sizes.append(len(data))
        return encoding.sha256(data)

    name = settled.publish(count)
    return {
        "seconds": seconds, "cpu": cpu, "epoch": settled.epoch, "root": settled.root(),
        "object": name, "total": settled.cumulative_total, "bytes": sum(sizes),
        "pages": len(sizes) - 1,
    }  # fmt: skip


def _rebuild(epoch: _Epoch, settled: dict[str, Any]) -> dict[str, Any]:
    """Asks nothing of the database, as an auditor."""
    context = epoch.backend().context
    since = time.monotonic()
    rebuilder = Rebuilder(
        _events(epoch, settled),
        context.deployment,
        context.pool,
        RunHistory(context.run),
        _Copy(epoch.place.open_objects()),
    )
    found = rebuilder.rebuild(settled["epoch"])
    seconds = time.monotonic() - since
    if not found.match:
        raise FatalError(f"the auditor does not agree: {found.problems}")
    since = time.monotonic()
    node = work.signers(1, 1)[0].address
    cumulative, proof = found.settlement.proof(node)
    if not encoding.merkle_verify(settled["root"], encoding.reward_leaf(node, cumulative), proof):
        raise FatalError(f"the proof of {node} does not lead to the posted root")
    return {
        "seconds": seconds, "claim": time.monotonic() - since, "root": found.settlement.root(),
    }  # fmt: skip


@dataclass(frozen=True)
class _Copy:
    """An auditor's copy of the published objects."""

    objects: ObjectStore

    def get_object(self, digest: Digest, limit: int) -> bytes:
        return read_object(self.objects, digest, limit)


def _events(epoch: _Epoch, settled: dict[str, Any]) -> list[Event]:
    """What the chain lists for the pool."""
    context, now = epoch.backend().context, epoch.now
    head: dict[str, Any] = {
        "block": 1, "block_hash": ZERO_DIGEST, "block_time": now, "log_index": 0,
        "tx_hash": ZERO_DIGEST,
    }  # fmt: skip
    pool, number = context.pool, now // context.run.epoch_seconds
    judges = work.signers(VALIDATORS, 2)
    return [
        PoolCreated(**head, pool=pool, manager=context.manager, trainer=context.manager,
                    run_digest=context.run.digest()),
        *(ValidatorSet(**head, pool=pool, validator=one.address, on=True) for one in judges),
        *(RootPosted(**head, pool=pool, seq=seq, root=root, count=count, leaves_object=name,
                     epoch=number) for seq, root, name, count in epoch.roots),
        RewardRootPosted(**head | {"block": BLOCK, "block_time": epoch.over}, pool=pool,
                         epoch=settled["epoch"], root=settled["root"],
                         cumulative_total=int(settled["total"]), object=settled["object"],
                         claimable_at=epoch.over),
    ]  # fmt: skip


# ── filling ──


@contextmanager
def _filled(database: Database, files: int) -> Iterator[_Epoch]:
    """An epoch of `files` files in the database, which is emptied first, until the block ends."""
    keys = work.signers(VALIDATORS, 2)
    with serving(database, work.definition(), validators=keys) as servers:
        work.one_judged_file(servers, keys, NODES)
        yield _fill(servers, files)


def _fill(servers: Servers, files: int) -> _Epoch:
    """Puts `files` files like the store's only one into its place, in roots of this epoch, which
    the chain has left behind. Triggers are off meanwhile, and no object is flushed to the disk."""
    backend = servers.pool.backend
    assert isinstance(backend.objects, DirectoryStore)
    run, now = backend.context.run, int(backend.now())
    over = (now // run.epoch_seconds + 1) * run.epoch_seconds + run.validity_seconds
    place = Place("", servers.database.url, run.raw().decode(), str(backend.objects.root))
    with backend.store.begin() as connection:
        connection.execute(sa.text("SET LOCAL session_replication_role = replica"))
        (first,) = connection.execute(sa.select(schema.submissions.c.digest)).scalars().all()
        row = submissions.get(connection, Digest(first))
        assert row is not None
        connection.execute(sa.delete(schema.submissions))
        meta.put(connection, CHAIN_BLOCK, str(BLOCK))
        meta.put(connection, CHAIN_TIME, str(over))
    starts = range(0, files, A_ROOT)
    with ProcessPoolExecutor(work.CORES, get_context("spawn")) as processes:
        make = partial(_make_root, _Epoch(place, files, (), now, over), row)
        roots = list(processes.map(make, starts))
    with backend.store.engine.connect() as plain:
        plain.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text("VACUUM ANALYZE"))
    return _Epoch(place, files, roots, now, over)


def _make_root(epoch: _Epoch, row: SubmissionRow, start: int) -> tuple[int, Digest, Digest, int]:
    """Makes the files of the root that begins with file `start`; returns its number, root, object
    and count."""
    backend, sequence = _opened(epoch), start // A_ROOT
    objects, context = backend.objects, backend.context
    (judge,), nodes = _signers(VALIDATORS, 2), _signers(NODES, 1)
    assert isinstance(objects, DirectoryStore)
    assert row.verdict is not None
    verdict = Verdict.model_validate_json(read_object(objects, row.verdict))
    said, signed, issued = verdict.deciding, row.signed(), row.receipt_answer()
    table = read_object(objects, Digest(said.opinion.table)).decode()
    domain = context.domain(said.opinion)  # of the contract Work, which all three name

    def put(data: bytes) -> Digest:
        name = encoding.sha256(data)
        (objects.root / digest_key(name)).write_bytes(data)
        return name

    leaves, copies = [], []
    for number in range(start, min(epoch.files, start + A_ROOT)):
        lease, node = encoding.sha256(f"lease {number}".encode()), nodes[number % len(nodes)]
        claim = signed.submission.model_copy(update={"lease_digest": lease, "node": node.address})
        digest = claim.digest(domain)
        leaf = SignedSubmission(
            submission=claim, node=node.address, signature=node.sign(claim, domain)
        )
        receipt = Receipt(submission_digest=digest, received_at=issued.receipt.received_at)
        answer = issued.model_copy(
            update={"receipt": receipt, "signature": backend.manager.sign(receipt, domain)}
        )
        named = put(table.replace(row.digest, digest).encode())
        law = said.law.model_copy(update={"lease": lease})
        opinion = said.opinion.model_copy(
            update={"submission": digest, "law": law.struct_hash(), "table": named}
        )
        given = said.model_copy(
            update={"opinion": opinion, "law": law, "signature": judge.sign(opinion, domain)}
        )
        leaves.append(leaf)
        copies.append(
            vars(row) | {
                "digest": digest, "lease_digest": lease, "node": node.address,
                "body": leaf.model_dump_json(), "receipt": answer.model_dump_json(),
                "verdict": put(verdict.model_copy(update={"opinions": (given,)}).canonical()),
                "verdict_table": named, "root_id": sequence + 1, "leaf_index": number - start,
            }
        )  # fmt: skip
    root = encoding.merkle_root([one["digest"] for one in copies])
    name = put(encode_leaves(leaves))
    with backend.store.begin() as connection:
        connection.execute(sa.text("SET LOCAL session_replication_role = replica"))
        connection.execute(sa.insert(schema.submissions), copies)
        connection.execute(
            sa.insert(schema.roots).values(
                id=sequence + 1, root=root, leaves_object=name, count=len(copies),
                created_at=epoch.now, chain_seq=sequence, posted_at=epoch.now, block=1,
                epoch=epoch.now // context.run.epoch_seconds,
            )
        )  # fmt: skip
    return sequence, root, name, len(copies)


@cache
def _opened(epoch: _Epoch) -> Backend:
    return epoch.backend()


@cache
def _signers(count: int, kind: int) -> list[LocalSigner]:
    return work.signers(count, kind)


if __name__ == "__main__":
    _main(*sys.argv[1:])
