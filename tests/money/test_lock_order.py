"""All writers of a file's end lock its rows in one order: none waits in a circle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from money_kit import RUN, ManagerSide, key, open_manager

from prime_core.ids import ZERO_DIGEST
from prime_core.verdict import Reason
from prime_orchestrator.manager.indexer import derive
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME, void, void_unjudged
from prime_orchestrator.store import chain, jobs, lock, meta, nodes, submissions

NODE = key(10)


@pytest.fixture
def mgr(tmp_path: Path, empty_postgres: str) -> Iterator[ManagerSide]:
    """In PostgreSQL: SQLite lets one write at a time."""
    made = open_manager(tmp_path, url=empty_postgres)
    made.publish(0)
    made.admit(NODE)
    yield made
    made.store.close()


@pytest.mark.postgres
def test_a_file_whose_time_ends_while_its_verdict_is_written_keeps_the_verdict(
    mgr: ManagerSide,
) -> None:
    row = mgr.submit(NODE)
    failures: list[Exception] = []

    def end() -> None:
        try:
            with mgr.store.begin() as other:
                void(other, row.digest, Reason.UNAVAILABLE, mgr.now())
        except Exception as error:
            failures.append(error)

    ending = threading.Thread(target=end)
    with mgr.store.begin() as connection:
        assert jobs.lock_row(connection, row.digest) is not None
        ending.start()
        ending.join(0.3)  # it waits for the job, and must hold nothing that a verdict writes
        submissions.change(connection, row.digest, status="accepted", judged_at=1.0)
    ending.join(30)
    assert not failures
    assert mgr.row(row.digest).status == "accepted"


@pytest.mark.postgres
def test_files_that_end_together_wait_for_a_claim_of_several(mgr: ManagerSide) -> None:
    files = [mgr.submit(NODE, shadow=True).digest for _ in range(2)]
    failures: list[Exception] = []

    def end() -> None:
        try:
            void_unjudged(mgr.store, mgr.context, mgr.now)
        except Exception as error:
            failures.append(error)

    mgr.now.time += RUN.validity_seconds + 1
    with mgr.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(mgr.now())))
        first, second = submissions.unjudged(
            connection, rooted_before=0, shadow_before=mgr.now() - RUN.validity_seconds
        )
    assert {first, second} == {*files}
    ending = threading.Thread(target=end)
    with mgr.store.begin() as connection:
        lock(connection, "assignments")
        jobs.lock_row(connection, second)
        ending.start()
        blocked = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        while ending.is_alive() and not connection.execute(blocked).scalar_one():
            ending.join(0.01)
        jobs.lock_row(connection, first)
    ending.join(30)
    assert not failures
    assert {mgr.row(digest).status for digest in files} == {"void"}


@pytest.mark.postgres
@pytest.mark.parametrize("writer", ["the indexer", "planted files"])
def test_a_verdict_waits_for_no_writer_that_waits_for_its_file(
    mgr: ManagerSide, writer: str
) -> None:
    """A verdict writes the file, then its node's row."""
    row, node = mgr.submit(NODE), NODE.address
    failures: list[Exception] = []
    place: dict[str, Any] = {
        "block_hash": row.digest, "block": 1, "block_time": 1, "tx_hash": row.digest,
    }  # fmt: skip
    left: dict[str, Any] = {"pool": 1, "node": node}
    own: dict[str, Any] = {
        "pool": 1, "seq": 1, "root": row.digest, "count": 1, "leaves_object": ZERO_DIGEST,
        "epoch": 1,
    }  # fmt: skip
    events = [
        chain.event_row(log_index=0, name="NodeLeft", args=left, **place),
        chain.event_row(log_index=1, name="RootPosted", args=own, **place),
    ]
    with mgr.store.begin() as connection:
        chain.add_event(connection, log_index=0, name="NodeLeft", args=left, **place)
        chain.add_event(connection, log_index=1, name="RootPosted", args=own, **place)

    def write() -> None:
        try:
            if writer == "the indexer":
                with mgr.store.begin() as other:
                    derive(other, mgr.context, events, mgr.now())
            else:
                reveal(mgr.store, mgr.context, Planted(frozenset({node}), b"s"), mgr.now)
        except Exception as error:
            failures.append(error)

    mgr.now.time += RUN.validity_seconds + 1
    writing = threading.Thread(target=write)
    with mgr.store.begin() as connection:
        jobs.lock_row(connection, row.digest)
        submissions.change(connection, row.digest, status="accepted", judged_at=1.0)
        writing.start()
        blocked = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        while writing.is_alive() and not connection.execute(blocked).scalar_one():
            writing.join(0.01)
        assert nodes.lock_row(connection, node) is not None
    writing.join(30)
    assert not failures
