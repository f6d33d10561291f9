"""Deletes rows whose time has passed, and exports tables as Parquet files (docs/retention.md).

Kept forever is what money, stake or an audit may depend on: files' receipts, opinions, verdicts,
credits, roots, slashes, chain events, batches, policies, leases that brought a file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa
from sqlalchemy import Connection

from prime_broadcast.files import disk_errors, sync_path, write_whole
from prime_core.errors import UserError
from prime_core.folders import make_folder
from prime_orchestrator.store import schema
from prime_orchestrator.store.engine import Store

ROWS_AT_ONCE = 1000
SECRET = frozenset(
    {"challenges", "loop_leases", "meta", "nonces", "second_secrets", "sessions"}
    | {table.name for table in (schema.sender_meta, schema.sender_attempts)}
)
"""Tables that no export contains: they hold secrets, or only matter to the running processes."""

_L, _S, _G, _I = schema.leases, schema.submissions.c, schema.groups.c, schema.intents.c
_Old = Mapping[sa.Table, sa.ColumnElement[bool]]


def old_rows(before: float) -> _Old:
    """Returns which rows may go, by table; `before` in Unix seconds.

    - leases that ended without a file, but for the highest index of a step: `leases.next_index`
      must not give an index twice, since it seeds the rows
    - jobs and assignments of files that have their verdict; a quarantined job stays
    - groups that a batch holds, and those that none can use because their rewards are equal
    - joins that are mined or failed: their invites have ended, and anyone may ask for one; and
      the transactions signed for them
    """
    later = _L.alias("later")
    file = sa.select(_S.digest).where(_S.lease_digest == _L.c.digest)
    above = sa.select(later.c.digest).where(
        later.c.step == _L.c.step, later.c.lease_index > _L.c.lease_index
    )
    judged = sa.select(_S.digest).where(_S.status != "submitted", _S.judged_at < before)
    done = sa.select(schema.jobs.c.submission_digest).where(schema.jobs.c.status == "done")
    return {
        _L: sa.and_(
            _L.c.status == "expired", _L.c.deadline < before, ~file.exists(), above.exists()
        ),
        schema.assignments: sa.and_(
            schema.assignments.c.submission_digest.in_(judged),
            schema.assignments.c.submission_digest.in_(done),
        ),
        schema.jobs: sa.and_(
            schema.jobs.c.submission_digest.in_(judged), schema.jobs.c.status == "done"
        ),
        schema.groups: sa.and_(
            _G.accepted_at < before,
            sa.or_(_G.batch_step >= 0, sa.and_(_G.batch_step.is_(None), _G.informative.is_(False))),
        ),
        schema.intents: sa.and_(
            _I.kind == "join", _I.status.in_(("confirmed", "failed")), _I.updated_at < before
        ),
        schema.sender_attempts: sa.and_(
            schema.sender_attempts.c.signed_at < before,
            ~sa.exists().where(_I.id == schema.sender_attempts.c.intent_id),
        ),
    }


def prune(store: Store, before: float, archive: Path | None, *, dry_run: bool) -> dict[str, int]:
    """Deletes the rows of `old_rows`, a thousand in a transaction, while the pool goes on working.

    `archive`: folder that receives them first, in a folder of Parquet files for each table; files
    of earlier calls stay. Returns the number of rows by table. Raises DiskError if the archive
    cannot be written; the rows of that transaction are not deleted.
    """
    found: dict[str, int] = {}
    for table, condition in old_rows(before).items():
        if dry_run:
            with store.read() as connection:
                query = sa.select(sa.func.count()).select_from(table).where(condition)
                found[table.name] = int(connection.execute(query).scalar_one())
            continue
        found[table.name] = sum(_delete_some(store, table, condition, archive))
    return found


def export(store: Store, folder: Path) -> dict[str, int]:
    """Writes every table but those of SECRET, of one moment, to `folder`/TABLE.parquet.

    Returns the number of rows by table. Raises UserError if the folder holds an earlier export,
    DiskError if it cannot be written.
    """
    found: dict[str, int] = {}
    with disk_errors(), store.read() as connection:
        for table in schema.metadata.sorted_tables:
            if table.name in SECRET:
                continue
            with _writer(folder, table) as writer:
                found[table.name] = _write(connection, table.select(), writer)
    return found


def _delete_some(
    store: Store,
    table: sa.Table,
    condition: sa.ColumnElement[bool],
    archive: Path | None,
) -> Iterator[int]:
    """Yields how many rows each transaction deleted. They are on disk in a file of the archive
    before it commits, so a crash may leave a row in both."""
    keys = list(table.primary_key.columns)
    while True:
        with store.begin() as connection:
            rows = connection.execute(table.select().where(condition).limit(ROWS_AT_ONCE))
            gone = [dict(row) for row in rows.mappings()]
            if not gone:
                return
            if archive is not None:
                _keep(archive, table, gone)
            match = sa.and_(*(key == sa.bindparam(f"old_{key.name}") for key in keys))
            values = [{f"old_{key.name}": row[key.name] for key in keys} for row in gone]
            connection.execute(sa.delete(table).where(match), values)
        yield len(gone)


def _write(
    connection: Connection, query: sa.Select[tuple[object, ...]], to: pq.ParquetWriter
) -> int:
    written = 0
    rows = connection.execute(query.execution_options(yield_per=ROWS_AT_ONCE))
    for part in rows.mappings().partitions():
        to.write_table(pa.Table.from_pylist([dict(row) for row in part], schema=to.schema))
        written += len(part)
    return written


def _keep(archive: Path, table: sa.Table, rows: list[dict[str, object]]) -> None:
    """Writes rows to the next file of the table's folder, and waits until it is on disk."""
    make_folder(archive).chmod(0o700)
    folder = make_folder(archive / table.name)
    number = 1 + max((int(file.stem) for file in folder.glob("*.parquet")), default=0)
    made = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(table)), made, compression="zstd")
    write_whole(folder / f"{number:06}.parquet", made.getvalue())
    sync_path(folder)


def _writer(folder: Path, table: sa.Table) -> pq.ParquetWriter:
    make_folder(folder).chmod(0o700)
    file = folder / f"{table.name}.parquet"
    if file.exists():
        raise UserError(f"{file} exists already", hint="name a new folder")
    return pq.ParquetWriter(file, _schema(table), compression="zstd")


def _schema(table: sa.Table) -> pa.Schema:
    return pa.schema(
        [pa.field(column.name, _type(column), column.nullable) for column in table.columns]
    )


def _type(column: sa.Column[object]) -> pa.DataType:
    kinds = {bool: pa.bool_(), bytes: pa.binary(), float: pa.float64(), int: pa.int64()}
    return kinds.get(column.type.python_type, pa.string())
