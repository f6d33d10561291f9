"""All writers of a file's end lock its rows in one order: none waits in a circle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from judges import judge_of
from money_kit import NODE, OTHER, RUN, ManagerSide

from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.verdict import Reason
from prime_orchestrator.manager import reviews
from prime_orchestrator.manager.endings import void, void_unjudged
from prime_orchestrator.manager.indexer import derive
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.roots import void_unrooted
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME
from prime_orchestrator.store import chain, jobs, lock, meta, nodes, submissions
from prime_orchestrator.store.submissions import SubmissionRow


@pytest.fixture
def store_url(empty_postgres: str) -> str:
    """In PostgreSQL: SQLite lets one write at a time."""
    return empty_postgres


class Writer:
    """A thread that writes, and what it raised."""

    def __init__(self, mgr: ManagerSide, write: Callable[[], object]) -> None:
        self._mgr, self._write = mgr, write
        self.failures: list[Exception] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.failures.append(error)

    def start(self) -> None:
        """Starts it, and waits until it waits for a lock or has ended."""
        self._thread.start()
        blocked = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        while self._thread.is_alive():
            with self._mgr.store.read() as connection:
                if connection.execute(blocked).scalar_one():
                    return
            self._thread.join(0.01)

    def require_end(self) -> None:
        """It ends without a failure."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.failures == []


@pytest.mark.postgres
def test_a_file_whose_time_ends_while_its_verdict_is_written_keeps_the_verdict(
    mgr: ManagerSide,
) -> None:
    row = mgr.submit(NODE)

    def end() -> None:
        with mgr.store.begin() as other:
            void(other, row.digest, Reason.UNAVAILABLE, mgr.now())

    ending = Writer(mgr, end)
    with mgr.store.begin() as connection:
        assert jobs.lock_row(connection, row.digest) is not None
        ending.start()  # it waits for the job, and must hold nothing that a verdict writes
        submissions.change(connection, row.digest, status="accepted", judged_at=1.0)
    ending.require_end()
    assert mgr.row(row.digest).status == "accepted"


@pytest.mark.postgres
def test_files_that_end_together_wait_for_a_claim_of_several(mgr: ManagerSide) -> None:
    files = [mgr.submit(NODE, shadow=True).digest for _ in range(2)]
    mgr.now.time += RUN.validity_seconds + 1
    with mgr.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(mgr.now())))
        first, second = submissions.unjudged(
            connection, rooted_before=0, shadow_before=mgr.now() - RUN.validity_seconds
        )
    assert {first, second} == {*files}
    ending = Writer(mgr, lambda: void_unjudged(mgr.store, mgr.context, mgr.now))
    with mgr.store.begin() as connection:
        lock(connection, "assignments")
        jobs.lock_row(connection, second)
        ending.start()
        jobs.lock_row(connection, first)
    ending.require_end()
    assert {mgr.row(digest).status for digest in files} == {"void"}


@pytest.mark.postgres
@pytest.mark.parametrize("writer", ["the indexer", "planted files"])
def test_a_verdict_waits_for_no_writer_that_waits_for_its_file(
    mgr: ManagerSide, writer: str
) -> None:
    """A verdict writes the file, then its node's row."""
    row, node = mgr.submit(NODE), NODE.address
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
        if writer == "the indexer":
            with mgr.store.begin() as other:
                derive(other, mgr.context, events, mgr.now())
        else:
            reveal(mgr.store, mgr.context, Planted(frozenset({node}), b"s"), mgr.now)

    mgr.now.time += RUN.validity_seconds + 1
    writing = Writer(mgr, write)
    with mgr.store.begin() as connection:
        jobs.lock_row(connection, row.digest)
        submissions.change(connection, row.digest, status="accepted", judged_at=1.0)
        writing.start()
        assert nodes.lock_row(connection, node) is not None
    writing.require_end()


@pytest.fixture
def unrooted(mgr: ManagerSide) -> Writer:
    """Voids what was never rooted."""
    return Writer(mgr, lambda: void_unrooted(mgr.store, mgr.context, mgr.now))


def never_rooted(mgr: ManagerSide, row: SubmissionRow) -> None:
    """All files up to this one will never be rooted."""
    last = row.signed().submission.valid_until + mgr.context.deployment.periods.accountable
    with mgr.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(last + RUN.epoch_seconds + 1))


@pytest.mark.postgres
def test_a_verdict_that_sends_another_file_back_waits_in_no_circle_with_the_end_of_both(
    mgr: ManagerSide,
    unrooted: Writer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = {"f" * 32: True}
    rows = [mgr.submit(NODE) for _ in range(2)]
    for row in rows:
        job = mgr.bench.claim()
        assert job is not None
        assert job.submission_digest == row.digest
        drawn = tuple(range(RUN.rows_per_lease if row is rows[1] else RUN.rows_per_lease - 1))
        mgr.bench.say(job, Reason.NONE, mgr.table_rows(), marks=shared, rows_drawn=drawn)
        if row is rows[0]:
            assert judge_of(mgr.backend).tick() == [row.digest]
    never_rooted(mgr, rows[1])
    real, sent = reviews.send_back, list[Digest]()

    def send_back(*args: Any) -> list[Digest]:
        unrooted.start()
        sent.extend(real(*args))
        return sent

    monkeypatch.setattr(reviews, "send_back", send_back)
    assert judge_of(mgr.backend).tick() == [rows[1].digest]
    unrooted.require_end()
    assert sent == [rows[0].digest]
    assert {mgr.row(row.digest).status for row in rows} == {"void"}


@pytest.mark.postgres
def test_verdicts_on_several_nodes_wait_in_no_circle_with_the_end_of_their_files(
    mgr: ManagerSide,
    unrooted: Writer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both write how many files of each node were accepted."""
    mgr.admit(OTHER)
    first, second = sorted((NODE, OTHER), key=lambda one: one.address)
    late = [mgr.judge(mgr.submit(node)) for node in (second, first)]
    mgr.now.time += 100
    files = [mgr.submit(node) for node in (first, second)]
    for _ in files:
        job = mgr.bench.claim()
        assert job is not None
        mgr.bench.say(job, Reason.NONE, mgr.table_rows())
    never_rooted(mgr, late[-1])
    real = submissions.set_verdicts

    def set_verdicts(connection: sa.Connection, rows: list[SubmissionRow]) -> None:
        assert [row.node for row in rows] == [first.address, second.address]
        real(connection, rows[:1])
        unrooted.start()
        real(connection, rows[1:])

    monkeypatch.setattr(submissions, "set_verdicts", set_verdicts)
    assert judge_of(mgr.backend).tick() == [row.digest for row in files]
    unrooted.require_end()
    assert [mgr.row(row.digest).status for row in late] == ["void", "void"]
