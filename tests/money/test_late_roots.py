"""Work that nobody put on chain in time: not rooted late, void, and its node is told."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from money_kit import RUN, Shop, key, open_shop

from prime_core.ids import Address, Digest
from prime_core.verdict import Reason
from prime_orchestrator.manager.members import has_open_slash
from prime_orchestrator.manager.roots import post_roots, void_unrooted
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME, pending_units
from prime_orchestrator.manager.slashing import drop_expired
from prime_orchestrator.store import groups, leases, meta, schema, submissions
from prime_orchestrator.store.submissions import SubmissionRow

NODE, PLANTED = key(60), key(61)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = open_shop(tmp_path)
    made.publish(0)
    made.admit(NODE)
    made.admit(PLANTED)
    yield made
    made.store.close()


def last_moment(shop: Shop, row: SubmissionRow) -> int:
    """The last second in which it can be rooted and answered for."""
    return row.signed().submission.valid_until + shop.context.deployment.periods.accountable


def chain_at(shop: Shop, time: float) -> None:
    with shop.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(time)))


def rooted(shop: Shop) -> list[Digest]:
    return post_roots(shop.store, shop.objects, shop.context, shop.now)


def given_up(shop: Shop, without: Collection[Address] = ()) -> list[Digest]:
    return drop_expired(shop.store, shop.context, shop.now, without)


def ended(shop: Shop) -> int:
    return void_unrooted(shop.store, shop.context, shop.now, {PLANTED.address})


def test_work_is_rooted_to_the_last_moment_and_not_after_it(shop: Shop) -> None:
    row = shop.submit(NODE)
    moment = last_moment(shop, row)
    shop.now.time = float(moment + 1)
    assert rooted(shop) == []
    assert shop.row(row.digest).root_id is None
    shop.now.time = float(moment)
    assert len(rooted(shop)) == 1
    assert shop.row(row.digest).root_id is not None


def test_work_that_came_too_late_keeps_no_other_work_from_its_root(shop: Shop) -> None:
    late = [shop.submit(NODE) for _ in range(RUN.root_submissions + 1)]
    shop.now.time = last_moment(shop, late[-1]) + 1.0
    good = shop.submit(NODE)
    shop.now.time += RUN.root_seconds
    assert len(rooted(shop)) == 1
    assert shop.row(good.digest).root_id is not None
    assert all(shop.row(row.digest).root_id is None for row in late)


def test_however_much_work_came_too_late_the_rest_is_rooted_and_it_ends(shop: Shop) -> None:
    """A statement takes so many values and no more, and roots come before all that ends."""
    late = [shop.submit(NODE) for _ in range(20)]
    shop.now.time = last_moment(shop, late[-1]) + 1.0
    good = shop.submit(NODE)
    shop.now.time += RUN.root_seconds
    chain_at(shop, shop.now() + RUN.epoch_seconds)

    @sa.event.listens_for(shop.store.engine, "checkout")
    def _few(connection: sqlite3.Connection, *_: object) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 12)

    assert len(rooted(shop)) == 1
    assert shop.row(good.digest).root_id is not None
    assert ended(shop) == 20
    assert given_up(shop) == []


def test_what_waits_for_a_root_is_found_without_a_look_at_shadow_files(shop: Shop) -> None:
    """These have no root, ever: there are more of them every hour, and roots are asked for every
    second."""
    plans: list[str] = []

    @sa.event.listens_for(shop.store.engine, "before_cursor_execute")
    def _plan(_c: object, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if "root_id IS NULL" in statement:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans.append(cursor.fetchall()[0][3])

    assert rooted(shop) == []
    assert len(plans) == 2
    assert all("submissions_unrooted (root_id=? AND shadow=?" in plan for plan in plans), plans


def test_work_that_nobody_rooted_ends_void_and_its_node_is_told_why(shop: Shop) -> None:
    judged, waiting, bad = shop.submit(NODE), shop.submit(NODE), shop.submit(PLANTED)
    shop.judge(judged)
    with shop.store.read() as connection:
        assert pending_units(connection, NODE.address, -1) == 20
    moment = max(last_moment(shop, row) for row in (judged, waiting, bad))
    shop.now.time = float(moment + 10 * RUN.epoch_seconds)
    assert ended(shop) == 0, "our own clock decides nothing for good"
    chain_at(shop, moment + RUN.epoch_seconds)
    assert ended(shop) == 0, "its node may just have rooted it"
    chain_at(shop, moment + RUN.epoch_seconds + 1)
    assert ended(shop) == 2
    assert ended(shop) == 0
    for row in (judged, waiting):
        after = shop.row(row.digest)
        assert (after.status, after.reason) == ("void", Reason.UNROOTED)
    with shop.store.read() as connection:
        assert pending_units(connection, NODE.address, -1) == 0, "it no longer shows as earned"
        told = submissions.ended_badly(connection, NODE.address, since=0, limit=9)
        lease = leases.get(connection, judged.lease_digest)
    assert {row.digest for row in told} == {judged.digest, waiting.digest}
    assert lease is not None
    assert lease.status == "void"
    assert shop.row(bad.digest).status == "submitted", "a planted file is rooted by nobody"


def test_groups_of_work_that_nobody_rooted_count_for_no_batch(shop: Shop) -> None:
    """No batch takes them: counted as waiting, they would keep every node from its next lease."""
    row = shop.submit(NODE)
    shop.judge(row)
    with shop.store.begin() as connection:
        assert groups.take(connection, [(row.digest, 0)], 0) == 1
        assert groups.free_counts(connection, oldest_version=0) == [(0, 1)]
    chain_at(shop, last_moment(shop, row) + RUN.epoch_seconds + 1)
    assert ended(shop) == 1
    with shop.store.read() as connection:
        assert groups.free_counts(connection, oldest_version=0) == []
        assert groups.informative_share(connection, 9) == (1, 1), "what was trained on is kept"


def test_a_lie_that_nobody_rooted_stays_a_lie(shop: Shop) -> None:
    row = shop.submit(NODE)
    shop.judge(row, Reason.WRONG_SAMPLING)
    chain_at(shop, last_moment(shop, row) + 2 * RUN.epoch_seconds)
    assert ended(shop) == 0
    assert shop.row(row.digest).status == "rejected"


def test_the_slash_of_a_lie_that_nobody_rooted_is_given_up_and_its_node_ejected(
    shop: Shop,
) -> None:
    """It can never be proposed: left open, it would hold what the node earned, and keep its
    provider's other nodes out, for ever."""
    good, bad = shop.submit(NODE), shop.submit(NODE)
    shop.judge(good)
    assert rooted(shop) == []
    shop.judge(bad, Reason.WRONG_SAMPLING)
    moment = last_moment(shop, bad) + RUN.epoch_seconds
    chain_at(shop, moment)
    assert given_up(shop) == []
    chain_at(shop, moment + 1)
    with shop.store.read() as connection:
        assert has_open_slash(connection, NODE.address)
    assert given_up(shop, {NODE.address}) == [], "a planted one's ends otherwise"
    assert given_up(shop) == [bad.digest]
    assert given_up(shop) == []
    with shop.store.read() as connection:
        assert not has_open_slash(connection, NODE.address)
        ejected = connection.execute(
            sa.select(schema.intents.c.id).where(schema.intents.c.kind == "eject")
        ).scalars()
        assert list(ejected) == [f"eject:{NODE.address}:{bad.digest}"]
        credits = connection.execute(sa.select(schema.credits.c.status)).scalars()
        assert list(credits) == ["earned"], "nothing was proven on chain"
