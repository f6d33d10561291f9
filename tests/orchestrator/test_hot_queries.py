"""What the pool does all the time reads what is under way, not the pool's history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from prometheus_client import generate_latest

from bench.seats import Pool
from prime_core.messages import LeaseRequest
from prime_orchestrator.api import leasing, status
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.api.metrics import PoolMetrics, RequestCounts
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.store import nodes

HISTORY = frozenset(
    {"assignments", "batches", "groups", "intents", "jobs", "leases", "opinions", "policies"}
    | {"roots", "submissions"}
)
"""Tables that grow with files."""
PARTIAL = "submissions_repeated"
"""An index of few rows, which may be read whole."""
COUNTED = "GROUP BY intents.status"
"""Counts one entry of an index for each transaction; a root of hundreds of files is one."""


def test_no_frequent_query_reads_all_rows_of_a_table_that_grows_with_files(tmp_path: Path) -> None:
    pool = Pool.make(tmp_path)
    pool.seat(2, honest=True)
    backend, plans = pool.backend, dict[str, list[str]]()

    @sa.event.listens_for(backend.store.engine, "before_cursor_execute")
    def _plan(_c: object, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if statement.startswith("SELECT"):
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans[statement] = [row[3] for row in cursor.fetchall()]

    for node in pool.honest:
        assert leasing.lease(backend, node, LeaseRequest(policy_version=0)).lease is not None
    status.status(backend)
    status.NodeList(backend)
    generate_latest(PoolMetrics(backend, RequestCounts()))
    seal_ready_batches(
        backend.store, backend.objects, backend.manager, backend.context, backend.now
    )
    backend.store.close()
    assert len(plans) > 40
    for statement, steps in plans.items():
        for step in steps if COUNTED not in statement else ():
            scanned = step.startswith("SCAN") and step.split()[1] in HISTORY
            bounded = ("LIMIT" in statement and "USING" in step) or step.endswith(PARTIAL)
            assert not scanned or bounded, f"{step}: {statement}"


def test_nodes_that_fall_silent_together_are_written_by_one_statement(tmp_path: Path) -> None:
    """As after a cut of the network: one for each would hold the lock of leases for seconds."""
    pool, written = Pool.make(tmp_path), list[str]()
    pool.seat(3, honest=True)
    life = LifeTicks(pool.backend)
    sa.event.listen(
        pool.backend.store.engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: written.append(statement),
    )
    for _ in range(8):
        pool.clock[0] += 9.0
        life.tick()
    with pool.backend.store.read() as connection:
        assert nodes.counts(connection) == {"silent": 3}
    pool.backend.store.close()
    assert len([one for one in written if one.startswith("UPDATE nodes")]) == 1
