"""A shadow file is judged, and nothing follows: no root, no pay, no batch, no slash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from money_kit import RUN, ManagerSide, key, open_manager

from prime_core.encoding import sha256
from prime_core.verdict import Reason
from prime_orchestrator.manager import reviews
from prime_orchestrator.manager.endings import void_unjudged
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME
from prime_orchestrator.store import groups, jobs, meta, row_marks, schema, submissions

SHADOW, PAID = key(60), key(61)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ManagerSide]:
    mgr = open_manager(tmp_path)
    mgr.publish(0)
    mgr.admit(SHADOW, "shadow")
    mgr.admit(PAID)
    yield mgr
    mgr.store.close()


def test_an_accepted_shadow_file_earns_nothing_and_trains_nothing(pool: ManagerSide) -> None:
    pool.judge(pool.submit(SHADOW, shadow=True))
    row = pool.row(pool.submit(SHADOW, shadow=True).digest)
    pool.judge(row)
    assert pool.row(row.digest).status == "accepted"
    assert pool.row(row.digest).verdict is not None, "its verdict is real and published"
    for table in (schema.credits, schema.groups, schema.drift, schema.intents):
        assert pool.count(table) == 0, table.name
    with pool.store.read() as connection:
        assert groups.free(connection, step=0, max_staleness=2) == []
        assert submissions.accepted_of(connection, SHADOW.address) == 0
        assert submissions.counts(connection, shadow=True) == {"accepted": 2}


@pytest.mark.slow
def test_a_rejected_shadow_file_slashes_nothing_and_ejects_no_node(pool: ManagerSide) -> None:
    row = pool.submit(SHADOW, shadow=True)
    pool.judge(row, Reason.WRONG_SAMPLING)
    assert pool.row(row.digest).status == "rejected"
    assert pool.row(row.digest).evidence is not None, "so that its node can replay it"
    assert pool.node_status(SHADOW.address) == "shadow"
    for table in (schema.slashes, schema.credits, schema.intents):
        assert pool.count(table) == 0, table.name


def test_no_root_ever_holds_a_shadow_file(pool: ManagerSide) -> None:
    hidden = [pool.submit(SHADOW, shadow=True) for _ in range(RUN.root_submissions)]
    pool.now.time += RUN.root_seconds
    assert post_roots(pool.store, pool.objects, pool.context, pool.now) == []
    paid = pool.submit(PAID)
    pool.now.time += RUN.root_seconds
    assert len(post_roots(pool.store, pool.objects, pool.context, pool.now)) == 1
    assert pool.row(paid.digest).root_id is not None
    assert all(pool.row(row.digest).root_id is None for row in hidden)


def test_what_a_shadow_file_calls_improbable_has_one_other_file_replayed_whole_and_no_more(
    pool: ManagerSide,
) -> None:
    """A lie that costs its node nothing must not cost the validators a week."""
    row = pool.submit(SHADOW, shadow=True)
    pool.judge(row)
    with pool.store.begin() as connection:
        row_marks.remember(connection, row.digest, {"aa": True, "bb": True}, now=pool.now())
    honest, later = {"aa": False}, sha256(b"later")
    with pool.store.begin() as connection:
        assert row_marks.seen(connection, honest, but=later) == {"aa"}
        assert reviews.send_back(connection, pool.context, sha256(b"whole"), honest) == []
        assert row_marks.seen(connection, honest, but=later) == frozenset()
        job = jobs.get(connection, row.digest)
    assert job is not None
    assert job.status == "done", "a shadow file is judged once"


def test_a_shadow_file_without_opinions_ends_void_in_time(pool: ManagerSide) -> None:
    row = pool.submit(SHADOW, shadow=True)
    with pool.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(pool.now())))
    assert void_unjudged(pool.store, pool.context, pool.now) == 0
    pool.now.time += RUN.validity_seconds + 1
    assert void_unjudged(pool.store, pool.context, pool.now) == 1
    assert pool.row(row.digest).status == "void"


def test_a_verdict_of_the_shadow_says_nothing_of_the_same_nodes_paid_files(
    pool: ManagerSide,
) -> None:
    """The node came out of the shadow with a file still waiting: only that file's lease decides."""
    waiting = pool.submit(SHADOW, shadow=True)
    pool.admit(SHADOW)
    pool.judge(waiting, Reason.WRONG_SAMPLING)
    assert pool.node_status(SHADOW.address) == "active"
    paid = pool.submit(SHADOW)
    pool.judge(paid)
    assert pool.count(schema.credits) == 1
    with pool.store.read() as connection:
        (credit,) = connection.execute(sa.select(schema.credits)).mappings()
    assert (credit["submission_digest"], json.loads(credit["amount"])) == (
        paid.digest,
        20 * RUN.price_per_unit,
    )
