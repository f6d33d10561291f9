"""`settle_files_s`: what `orchestrator serve` needs to settle an epoch.

One file goes through the API from lease to verdict. Its row and its verdict object are copied under
other names, each with a receipt and an opinion of its own, for many nodes, in roots on chain. Then
one call settles the epoch: it reads every leaf and every verdict, writes the settlement's pages and
queues the reward root. Signatures of the copies do not hold; settling checks none.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from sqlalchemy import Connection

from bench import work
from bench.form import Row
from bench.servers import Database, serving
from prime_core import encoding
from prime_core.errors import FatalError
from prime_core.ids import Digest
from prime_core.storage.base import digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.verdict import Verdict
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import read_object
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME, settle_epochs
from prime_orchestrator.serve import collect_garbage_rarely
from prime_orchestrator.store import meta, schema, submissions

FILES, QUICK_FILES = 100_000, 5_000
A_ROOT = 1_000
"""Files in a work root."""


def rows(quick: bool, database: Database) -> list[Row]:
    """All rows; empties the database."""
    files, keys = QUICK_FILES if quick else FILES, work.signers(1, 2)
    with serving(database, work.definition(), validators=keys) as servers:
        nodes = work.one_judged_file(servers, keys)
        backend = servers.pool.backend
        with backend.store.begin() as connection:
            _fill(connection, backend, nodes, files)
        collect_garbage_rarely()  # as the process that settles does
        process, server = time.process_time(), database.cpu_seconds()
        settled = settle_epochs(backend.store, backend.objects, backend.context, backend.now)
        process, server = time.process_time() - process, database.cpu_seconds() - server
    paid = 0 if settled is None else sum(one.state == "paid" for one in settled.files)
    if paid != files:
        raise FatalError(f"{paid} of {files} files were settled as paid")
    return [
        Row("settle_files_s", work.CORES * files / (process + server),
            f"files/s of an epoch of {files:,}", bar=None if quick else 20_000, better="higher"),
        Row("settle_files_us", 1e6 * process / files, "µs of CPU in the process"),
        Row("settle_files_postgres_us", 1e6 * server / files, "µs of CPU in PostgreSQL"),
    ]  # fmt: skip


def _fill(connection: Connection, backend: Backend, nodes: work.Nodes, files: int) -> None:
    """Puts `files` copies of the store's only file into its place, in roots of this epoch, which
    the chain has left behind. Triggers are off meanwhile, and no object is flushed to the disk."""
    assert isinstance(backend.objects, DirectoryStore)
    connection.execute(sa.text("SET LOCAL session_replication_role = replica"))
    (first,) = connection.execute(sa.select(schema.submissions.c.digest)).scalars().all()
    row = submissions.get(connection, Digest(first))
    assert row is not None
    assert row.verdict is not None
    connection.execute(sa.delete(schema.submissions))
    verdict = Verdict.model_validate_json(read_object(backend.objects, row.verdict))
    body, receipt, said = row.body, row.receipt, verdict.canonical().decode()
    run, now = backend.context.run, int(backend.now())
    for start in range(0, files, A_ROOT):
        copies = []
        for number in range(start, min(files, start + A_ROOT)):
            digest, lease = (
                encoding.sha256(f"{kind} {number}".encode()) for kind in ("file", "lease")
            )
            node = nodes.accounts[number % len(nodes.accounts)].address
            raw = said.replace(row.digest, digest).replace(row.lease_digest, lease).encode()
            name = encoding.sha256(raw)
            (backend.objects.root / digest_key(name)).write_bytes(raw)
            copies.append(
                vars(row) | {
                    "digest": digest, "lease_digest": lease, "node": node, "verdict": name,
                    "body": body.replace(row.lease_digest, lease).replace(row.node, node),
                    "receipt": receipt.replace(row.digest, digest),
                    "root_id": start // A_ROOT + 1, "leaf_index": number - start,
                }
            )  # fmt: skip
        connection.execute(sa.insert(schema.submissions), copies)
        connection.execute(
            sa.insert(schema.roots).values(
                root=encoding.sha256(f"root {start}".encode()), leaves_object=row.sha256,
                count=len(copies), created_at=now, chain_seq=start // A_ROOT,
                epoch=now // run.epoch_seconds, posted_at=now, block=1,
            )
        )  # fmt: skip
    over = (now // run.epoch_seconds + 1) * run.epoch_seconds + run.validity_seconds
    meta.put(connection, CHAIN_BLOCK, "2")
    meta.put(connection, CHAIN_TIME, str(over))
