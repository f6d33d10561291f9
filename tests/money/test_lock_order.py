"""All writers of a file's end lock its rows in one order: none waits in a circle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from money_kit import ManagerSide, key, open_manager

from prime_core.verdict import Reason
from prime_orchestrator.manager.settlement import void
from prime_orchestrator.store import jobs, submissions

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
        assert submissions.judge(connection, row.digest, "accepted", reason=0, judged_at=1.0)
    ending.join(30)
    assert not failures
    assert mgr.row(row.digest).status == "accepted"
