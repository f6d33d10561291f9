"""`orchestrator store prune` and `export`: what goes, what stays, and the page that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from orchestrator_world import MakeWorld, World
from typer.testing import CliRunner

from prime_broadcast.files import FullError
from prime_core.errors import UserError
from prime_orchestrator.cli.main import app
from prime_orchestrator.store import Store, leases, meta, retention, schema

DAY = 86_400.0
PAGE = (Path(__file__).parents[2] / "docs" / "retention.md").read_text()


@pytest.fixture
def store(either_store: Store) -> Store:
    """The pool's database, of each kind."""
    return either_store


@pytest.fixture
def pool(make_world: MakeWorld, store: Store) -> World:
    made = make_world(groups_per_batch=10_000)
    made.publish(0)
    return made


def count(store: Store, table: sa.Table) -> int:
    with store.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_only_what_is_old_and_done_goes(pool: World, store: Store, tmp_path: Path) -> None:
    session = pool.member(1)
    judged, waiting = pool.hand_in(session, b"judged"), pool.hand_in(session, b"waiting")
    ended = [pool.lease_digest(pool.lease(pool.member(number))) for number in (2, 3)]
    now = pool.backend.now()
    group = {"policy_version": 0, "rows": 1, "reward_micro_sum": 0, "accepted_at": now}
    with store.begin() as connection:
        for digest in ended:
            leases.set_status(connection, digest, "expired")
        connection.execute(
            sa.update(schema.submissions)
            .where(schema.submissions.c.digest == judged)
            .values(status="accepted", judged_at=now)
        )
        connection.execute(
            sa.update(schema.jobs)
            .where(schema.jobs.c.submission_digest == judged)
            .values(status="done")
        )
        connection.execute(
            sa.insert(schema.groups),
            [
                group | {"submission_digest": judged, "group_no": 0, "informative": True,
                         "batch_step": 1},
                group | {"submission_digest": judged, "group_no": 1, "informative": True,
                         "batch_step": None},
                group | {"submission_digest": judged, "group_no": 2, "informative": False,
                         "batch_step": None},
            ],
        )  # fmt: skip
        meta.put(connection, meta.SERVES, "31337/0xPools/1")
        next_index = leases.next_index(connection, 1)
    before = {table.name: count(store, table) for table in schema.metadata.sorted_tables}

    assert not any(retention.prune(store, now - DAY, None, dry_run=False).values()), "too young"
    later = now + 30 * DAY
    would = retention.prune(store, later, None, dry_run=True)
    assert {table.name: count(store, table) for table in schema.metadata.sorted_tables} == before
    gone = retention.prune(store, later, tmp_path / "archive", dry_run=False)
    assert gone == would
    assert gone["groups"] == 2
    assert gone["leases"] == 1, "the highest index of its step stays"
    assert gone["jobs"] == 1
    with store.read() as connection:
        assert leases.next_index(connection, 1) == next_index
        jobs = connection.execute(sa.select(schema.jobs.c.submission_digest)).scalars().all()
    assert jobs == [waiting]
    for table in schema.metadata.sorted_tables:
        left = before[table.name] - gone.get(table.name, 0)
        assert count(store, table) == left, table.name
        if table.name in gone:
            files = sorted((tmp_path / "archive" / table.name).glob("*.parquet"))
            kept = [pq.read_table(file) for file in files]
            assert sum(part.num_rows for part in kept) == gone[table.name]
            assert all(part.column_names == table.columns.keys() for part in kept)

    made = retention.export(store, tmp_path / "export")
    assert made.keys() == before.keys() - retention.SECRET
    files = pq.read_table(tmp_path / "export" / "submissions.parquet").to_pylist()
    assert {one["digest"] for one in files} == {judged, waiting}
    with pytest.raises(UserError, match="exists already"):
        retention.export(store, tmp_path / "export")


def test_rows_go_only_once_their_file_of_the_archive_is_whole(
    pool: World, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune that ends at the third file has deleted what the first two hold; the next one goes
    on in the same folder."""
    ended = [pool.lease_digest(pool.lease(pool.member(number))) for number in range(1, 6)]
    with store.begin() as connection:
        for digest in ended:
            leases.set_status(connection, digest, "expired")
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 1)
    write, left = retention.write_whole, [2]

    def full(path: Path, data: bytes) -> None:
        if not left[0]:
            raise FullError("the disk is full")
        left[0] -= 1
        write(path, data)

    def archived() -> set[str]:
        files = (tmp_path / "archive" / "leases").glob("*.parquet")
        return {row["digest"] for file in files for row in pq.read_table(file).to_pylist()}

    later, rows = pool.backend.now() + 30 * DAY, count(store, schema.leases)
    with monkeypatch.context() as patched:
        patched.setattr(retention, "write_whole", full)
        with pytest.raises(FullError):
            retention.prune(store, later, tmp_path / "archive", dry_run=False)
    assert count(store, schema.leases) == rows - 2
    assert len(archived()) == 2
    assert retention.prune(store, later, tmp_path / "archive", dry_run=False)["leases"] == 2
    with store.read() as connection:
        kept = connection.execute(sa.select(schema.leases.c.digest)).scalars().all()
    assert archived().isdisjoint(kept)
    assert archived() | set(kept) == set(ended)


def test_the_commands(tmp_path: Path) -> None:
    from prime_orchestrator.store import open_store, sqlite_url

    store = open_store(sqlite_url(tmp_path / "orchestrator.sqlite"))
    store.migrate()
    with store.begin() as connection:
        meta.put(connection, meta.SERVES, "31337/0xPools/1")
    store.close()
    for words in (["prune"], ["export", str(tmp_path / "export")]):
        done = CliRunner().invoke(app, ["store", *words, "--data", str(tmp_path), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["leases"] == 0


def test_the_page_names_every_table() -> None:
    for table in schema.metadata.sorted_tables:
        assert f"`{table.name}`" in PAGE, table.name
