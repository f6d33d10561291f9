"""Work that no one put on chain in time: not rooted late, void, and its node is notified."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import Any

import pytest
import sqlalchemy as sa
from money_kit import NODE, RUN, ManagerSide
from money_kit import OTHER as PLANTED

from prime_core.ids import Address, Digest
from prime_core.verdict import Reason
from prime_orchestrator.manager.roots import post_roots, void_unrooted
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME
from prime_orchestrator.manager.slashing import drop_expired
from prime_orchestrator.store import groups, meta, rewards, schema, slashes, submissions
from prime_orchestrator.store.submissions import SubmissionRow


@pytest.fixture
def mgr(mgr: ManagerSide) -> ManagerSide:
    mgr.admit(PLANTED)
    return mgr


def last_moment(mgr: ManagerSide, row: SubmissionRow) -> int:
    """The last second in which it can be rooted and answered for."""
    return row.signed().submission.valid_until + mgr.context.deployment.periods.accountable


def chain_at(mgr: ManagerSide, time: float) -> None:
    with mgr.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(time)))


def rooted(mgr: ManagerSide) -> list[Digest]:
    return post_roots(mgr.store, mgr.objects, mgr.context, mgr.now)


def given_up(mgr: ManagerSide, without: Collection[Address] = ()) -> list[Digest]:
    return drop_expired(mgr.store, mgr.context, mgr.now, without)


def ended(mgr: ManagerSide) -> int:
    return void_unrooted(mgr.store, mgr.context, mgr.now, {PLANTED.address})


def test_work_is_rooted_to_the_last_moment_and_not_after_it(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    moment = last_moment(mgr, row)
    mgr.now.time = float(moment + 1)
    assert rooted(mgr) == []
    assert mgr.row(row.digest).root_id is None
    mgr.now.time = float(moment)
    assert len(rooted(mgr)) == 1
    assert mgr.row(row.digest).root_id is not None


def test_work_that_came_too_late_keeps_no_other_work_from_its_root(mgr: ManagerSide) -> None:
    late = [mgr.submit(NODE) for _ in range(RUN.root_submissions + 1)]
    mgr.now.time = last_moment(mgr, late[-1]) + 1.0
    good = mgr.submit(NODE)
    mgr.now.time += RUN.root_seconds
    assert len(rooted(mgr)) == 1
    assert mgr.row(good.digest).root_id is not None
    assert all(mgr.row(row.digest).root_id is None for row in late)


def test_however_much_work_came_too_late_the_rest_is_rooted_and_it_ends(mgr: ManagerSide) -> None:
    """A statement takes so many values and no more, and roots come before all that ends."""
    late = [mgr.submit(NODE) for _ in range(20)]
    mgr.now.time = last_moment(mgr, late[-1]) + 1.0
    good = mgr.submit(NODE)
    mgr.now.time += RUN.root_seconds
    chain_at(mgr, mgr.now() + RUN.epoch_seconds)

    @sa.event.listens_for(mgr.store.engine, "checkout")
    def _few(connection: sqlite3.Connection, *_: object) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 12)

    assert len(rooted(mgr)) == 1
    assert mgr.row(good.digest).root_id is not None
    assert ended(mgr) == 20
    assert given_up(mgr) == []


def test_what_waits_for_a_root_is_found_without_a_look_at_shadow_files(mgr: ManagerSide) -> None:
    """These have no root, ever: there are more of them every hour, and roots are asked for every
    second."""
    plans: list[str] = []

    @sa.event.listens_for(mgr.store.engine, "before_cursor_execute")
    def _plan(_c: object, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if "root_id IS NULL" in statement:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans.append(cursor.fetchall()[0][3])

    assert rooted(mgr) == []
    assert len(plans) == 2
    assert all("submissions_unrooted (shadow=?" in plan for plan in plans), plans


def test_unrooted_work_ends_void_and_its_node_learns_why(mgr: ManagerSide) -> None:
    judged, waiting, bad = mgr.submit(NODE), mgr.submit(NODE), mgr.submit(PLANTED)
    mgr.judge(judged)
    with mgr.store.read() as connection:
        assert rewards.pending_units(connection, NODE.address, -1) == 20
    moment = max(last_moment(mgr, row) for row in (judged, waiting, bad))
    mgr.now.time = float(moment + 10 * RUN.epoch_seconds)
    assert ended(mgr) == 0, "our own clock decides nothing for good"
    chain_at(mgr, moment + RUN.epoch_seconds)
    assert ended(mgr) == 0, "its node may just have rooted it"
    chain_at(mgr, moment + RUN.epoch_seconds + 1)
    assert ended(mgr) == 2
    assert ended(mgr) == 0
    for row in (judged, waiting):
        after = mgr.row(row.digest)
        assert (after.status, after.reason) == ("void", Reason.UNROOTED)
    with mgr.store.read() as connection:
        assert rewards.pending_units(connection, NODE.address, -1) == 0, (
            "it no longer shows as earned"
        )
        reported = submissions.ended_badly(connection, NODE.address, since=0, limit=9)
    assert {row.digest for row in reported} == {judged.digest, waiting.digest}
    assert mgr.row(bad.digest).status == "submitted", "no party puts a planted file into a root"


def test_groups_of_unrooted_work_count_for_no_batch(mgr: ManagerSide) -> None:
    """No batch takes them: counted as waiting, they would keep every node from its next lease."""
    row = mgr.submit(NODE)
    mgr.judge(row)
    with mgr.store.begin() as connection:
        assert groups.take(connection, [(row.digest, 0)], 0) == 1
        assert groups.free_counts(connection, oldest_version=0) == [(0, 1)]
    chain_at(mgr, last_moment(mgr, row) + RUN.epoch_seconds + 1)
    assert ended(mgr) == 1
    with mgr.store.read() as connection:
        assert groups.free_counts(connection, oldest_version=0) == []
        assert groups.informative_share(connection, 9) == (1, 1), "what was trained on is kept"


def test_an_unrooted_lie_stays_a_lie(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    mgr.judge(row, Reason.WRONG_SAMPLING)
    chain_at(mgr, last_moment(mgr, row) + 2 * RUN.epoch_seconds)
    assert ended(mgr) == 0
    assert mgr.row(row.digest).status == "rejected"


def test_the_slash_of_an_unrooted_lie_is_given_up_and_its_node_ejected(
    mgr: ManagerSide,
) -> None:
    """It can never be proposed: left open, it would hold what the node earned, and keep its
    provider's other nodes out, forever."""
    good, bad = mgr.submit(NODE), mgr.submit(NODE)
    mgr.judge(good)
    assert rooted(mgr) == []
    mgr.judge(bad, Reason.WRONG_SAMPLING)
    moment = last_moment(mgr, bad) + RUN.epoch_seconds
    chain_at(mgr, moment)
    assert given_up(mgr) == []
    chain_at(mgr, moment + 1)
    with mgr.store.read() as connection:
        assert slashes.has_open(connection, NODE.address)
    assert given_up(mgr, {NODE.address}) == [], "a planted one's ends otherwise"
    assert given_up(mgr) == [bad.digest]
    assert given_up(mgr) == []
    with mgr.store.read() as connection:
        assert not slashes.has_open(connection, NODE.address)
        ejected = connection.execute(
            sa.select(schema.intents.c.id).where(schema.intents.c.kind == "eject")
        ).scalars()
        assert list(ejected) == [f"eject:{NODE.address}:{bad.digest}"]
        credits = connection.execute(sa.select(schema.credits.c.status)).scalars()
        assert list(credits) == ["earned"], "nothing was proven on chain"
