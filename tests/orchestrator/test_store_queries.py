"""The store's behaviour suite: every rule below holds on SQLite and on PostgreSQL."""

from __future__ import annotations

import random
import secrets
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_world import signer

from prime_chain.client import Call, TxReceipt
from prime_core.encoding import sha256
from prime_core.ids import Address, Digest
from prime_core.node import Hardware
from prime_core.verdict import Reason
from prime_orchestrator.store import (
    Store,
    archive,
    batches,
    chain,
    challenges,
    groups,
    intents,
    jobs,
    leases,
    lock,
    meta,
    nodes,
    open_store,
    opinions,
    policies,
    schema,
    sessions,
    shadows,
    sqlite_url,
    submissions,
    totals,
)
from prime_orchestrator.store.batches import BatchRow
from prime_orchestrator.store.challenges import ChallengeRow
from prime_orchestrator.store.groups import GroupRow
from prime_orchestrator.store.intents import StoreQueue
from prime_orchestrator.store.jobs import Wish
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.rows import one_of
from prime_orchestrator.store.sessions import SessionRow
from prime_orchestrator.store.shadows import DeletableLease
from prime_orchestrator.store.submissions import Wanted

NODE = signer(1).address
OTHER = signer(2).address
HARDWARE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


def name(number: int) -> Digest:
    return sha256(b"%d" % number)


def session(number: int, issued_at: int = 100, account: Address = NODE) -> SessionRow:
    return SessionRow(name(number), account, "node", issued_at, issued_at + 1000, False)


# -- counts of judged files ------------------------------------------------------------------------


def test_texts_of_any_characters_are_found_in_a_list(either_store: Store) -> None:
    keys = ["plain", "a,b", '"', '\\"\\', "{}", "", "NULL", "é\n", " x "]
    with either_store.begin() as connection:
        for key in (*keys, "other"):
            meta.put(connection, key, "")
        for some in (keys, keys[:1], []):
            query = sa.select(schema.meta.c.key).where(one_of(connection, schema.meta.c.key, some))
            assert sorted(connection.execute(query).scalars()) == sorted(some)


def test_tallies_are_what_counting_gives_after_any_change(either_store: Store) -> None:
    table, dice = schema.submissions, random.Random(5)
    queued(either_store, *range(1, 30))
    for at in range(120):
        row = table.c.digest == name(dice.randrange(1, 30))
        status = dice.choice(("submitted", "accepted", "rejected", "void"))
        with either_store.begin() as connection:
            if at % 20 == 0:
                found = sa.select(table.c.digest, table.c.lease_digest).where(row)
                for digest, lease in connection.execute(found).all():
                    shadows.forget(connection, [DeletableLease(lease, digest, frozenset())])
            else:
                values = {"status": status, "units": dice.randrange(9)}
                if at % 3 == 0:  # as a planted file, once it is judged
                    values = {"shadow": dice.random() < 0.5}
                connection.execute(sa.update(table).where(row).values(**values))
    with either_store.read() as connection:
        for shadow in (False, True):
            query = sa.select(table.c.status, sa.func.count(), sa.func.sum(table.c.units)).where(
                table.c.shadow.is_(shadow)
            )
            rows = connection.execute(query.group_by(table.c.status))
            found = {status: (n, int(units)) for status, n, units in rows}
            counts = submissions.counts(connection, shadow=shadow)
            assert counts == {one: n for one, (n, _) in found.items()}
            by_node = submissions.counts_by_node(connection, [NODE], shadow=shadow)[NODE]
            assert by_node["units"] == found.get("accepted", (0, 0))[1]
            assert by_node.get("rejected", 0) == counts.get("rejected", 0)


def test_overruled_opinions_are_those_that_the_verdicts_contradict(either_store: Store) -> None:
    files, said, dice = schema.submissions, schema.opinions, random.Random(6)
    queued(either_store, *range(1, 20))
    for at in range(150):
        digest = name(dice.randrange(1, 20))
        with either_store.begin() as connection:
            if at % 3 == 0:
                author, reason = dice.choice((NODE, OTHER)), dice.choice((0, 1, 14, 50, 56))
                opinions.add(connection, OpinionRow(digest, author, reason, "", float(at)))
            elif at % 25 == 1:
                opinions.forget(connection, digest)
            else:
                status = dice.choice(("submitted", "accepted", "rejected", "void"))
                submissions.change(connection, digest, status=status)
    with either_store.read() as connection:
        of_file = files.c.digest == said.c.submission_digest
        joined = sa.select(said.c.validator, said.c.reason, files.c.status).join(files, of_file)
        rows = connection.execute(joined).all()
        found = {row.validator: row for row in opinions.track_records(connection)}
    assert len(rows) > 10
    outcomes = {"accepted": "rejected", "rejected": "accepted"}
    for author in (NODE, OTHER):
        own = [(Reason(reason).outcome.name.lower(), status) for who, reason, status in rows
               if who == author]  # fmt: skip
        overruled = sum(outcomes.get(outcome) == status for outcome, status in own)
        assert overruled > 0
        assert (found[author].opinions, found[author].overruled) == (len(own), overruled)


def test_groups_of_batches_are_counted_by_target_length(either_store: Store) -> None:
    dice, taken = random.Random(7), Counter[tuple[int, int]]()
    with either_store.begin() as connection:
        for at in range(60):
            target = dice.choice((2, 6, 8))
            place = {"node": NODE, "step": 0, "policy_version": 0, "body": ""}
            lease = {"digest": name(at), "lease_index": at, "deadline": 10, "created_at": 9.0}
            lease |= {"shadow": False, "target": target, "status": "submitted"}
            file = {"digest": name(at), "lease_digest": name(at), "sha256": name(at), "size": 1}
            file |= {"receipt": "", "received_at": 9.5, "status": "accepted"}
            connection.execute(sa.insert(schema.leases).values(**place, **lease))
            connection.execute(sa.insert(schema.submissions).values(**place, **file))
            groups.add(connection, [group(at, number, 0) for number in range(2)])
            taken[at % 5, target] += 2
        for step in range(5):
            of_step = [(name(at), number) for at in range(step, 60, 5) for number in range(2)]
            assert groups.take(connection, of_step, step) == len(of_step)
            assert groups.take(connection, of_step, step + 1) == 0, "none is counted twice"
        for first in range(6):
            counted = Counter[int]()
            for (step, target), count in taken.items():
                counted[target] += count if first <= step < 4 else 0
            assert groups.by_target(connection, first, 4) == dict(+counted)


def test_rewards_of_the_newest_groups_are_summed_by_length_and_first_lease(
    either_store: Store,
) -> None:
    dice, made = random.Random(8), list[tuple[int, bool, GroupRow]]()
    with either_store.begin() as connection:
        for at in range(40):
            target, tries = dice.choice((2, 6)), dice.choice((0, 0, 1, 2))
            place = {"node": NODE, "step": 0, "policy_version": 0, "body": ""}
            lease = {"digest": name(at), "lease_index": at, "deadline": 10, "created_at": 9.0}
            lease |= {"shadow": False, "target": target, "status": "submitted", "tries": tries}
            file = {"digest": name(at), "lease_digest": name(at), "sha256": name(at), "size": 1}
            file |= {"receipt": "", "received_at": 9.5, "status": "accepted"}
            connection.execute(sa.insert(schema.leases).values(**place, **lease))
            connection.execute(sa.insert(schema.submissions).values(**place, **file))
            ungraded, step = dice.choice((0, 1, 4)), dice.choice((None, 3, groups.HELD_OUT))
            reward = (4 - ungraded) * dice.randrange(1_000_000)
            row = GroupRow(name(at), 0, 0, 4, True, reward, float(at), step, ungraded)
            groups.add(connection, [row])
            if ungraded < 4 and step != groups.HELD_OUT:
                made.append((target, tries > 0, row))
    for newest in (5, 1000):
        with either_store.read() as connection:
            found = groups.reward_sums(connection, newest)
        kept = made[-newest:]
        assert {key: sums.groups for key, sums in found.items()} == Counter(
            (target, again) for target, again, _ in kept
        )
        for key, sums in found.items():
            means = [row.reward_micro_sum / 1e6 / (row.rows - row.ungraded)
                     for target, again, row in kept if (target, again) == key]  # fmt: skip
            assert sums.total == pytest.approx(sum(means))
            assert sums.squares == pytest.approx(sum(mean * mean for mean in means))


def test_pages_of_files_have_each_file_once_though_times_are_equal(either_store: Store) -> None:
    queued(either_store, *range(1, 30))
    with either_store.begin() as connection:
        for at in range(1, 30):
            submissions.change(connection, name(at), received_at=float(at // 8))
    with either_store.read() as connection:
        whole = submissions.newest(connection, Wanted(), 99)
        assert len(whole) == 29
        assert whole == sorted(whole, key=lambda row: (row.received_at, row.digest), reverse=True)
        found = submissions.newest(connection, Wanted(), 4)
        while page := submissions.newest(connection, Wanted(), 4, before=found[-1]):
            found += page
    assert found == whole


@pytest.mark.parametrize("seed", range(4))
def test_what_is_under_way_is_what_a_look_at_each_open_lease_says(
    either_store: Store, seed: int
) -> None:
    dice = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {
            "address": signer(at).address,
            "provider": dice.choice((None, NODE, OTHER, signer(3).address)),
            "status": dice.choice(("active", "left")),
            "kept": dice.choice((0.0, 0.0, 0.2 * seed)),
            "missed": dice.choice((0.0, 1.5)),
            "misses": dice.choice((0, 0, 1)),
            "speed_class": 1, "hardware": "", "runtime": "", "last_heartbeat": 0.0,
            "created_at": 0.0,
        }
        for at in range(1, 9)
    ]  # fmt: skip
    given = [
        {
            "digest": name(at), "node": dice.choice(rows)["address"], "step": 0, "body": "",
            "lease_index": at, "policy_version": dice.randrange(2), "target": 8,
            "status": dice.choice(("open", "open", "open", "expired")),
            "deadline": dice.choice((9, 10, 11)), "created_at": dice.choice((4.0, 5.0, 6.0)),
            "shadow": dice.random() < 0.1, "evaluation": dice.choice((None, None, None, 1)),
        }
        for at in range(60)
    ]  # fmt: skip
    with either_store.begin() as connection:
        connection.execute(sa.insert(schema.nodes), rows)
        connection.execute(sa.insert(schema.leases), given)
    node = {row["address"]: row for row in rows}
    owner = {row["address"]: row["provider"] or row["address"] for row in rows}
    kept, missed = Counter[str](), Counter[str]()
    for row in rows:
        kept[owner[row["address"]]] += row["kept"]
        missed[owner[row["address"]]] += row["missed"]
    groups, newcomers = Counter[int](), 0
    for lease in given:
        holder, of = node[lease["node"]], owner[lease["node"]]
        if lease["status"] != "open" or lease["deadline"] < 9.4 or lease["shadow"]:
            continue
        newcomers += kept[of] < 0.5
        if holder["status"] == "active" and lease["created_at"] >= 5 and not lease["evaluation"]:
            share = (kept[of] + 1) / (kept[of] + missed[of] + 1)
            groups[lease["policy_version"]] += 0 if holder["misses"] else share
    with either_store.read() as connection:
        found = leases.under_way(connection, now=9.4, younger_than=5, proven=0.5)
        any_proven = nodes.any_proven(connection, 0.5)
    assert dict(found.groups) == pytest.approx(dict(groups))
    assert len(found.groups) == len(groups)
    assert found.newcomers == newcomers
    active = {owner[row["address"]] for row in rows if row["status"] == "active"}
    assert any_proven == any(kept[one] >= 0.5 for one in active)


def test_what_became_of_a_lease_is_what_became_of_its_file(either_store: Store) -> None:
    files = ("submitted", "accepted", "rejected", "void")
    nodes = {one: signer(at).address for at, one in enumerate(("open", "expired", *files), 1)}
    with either_store.begin() as connection:
        for at, (one, node) in enumerate(nodes.items()):
            place = {"node": node, "step": 0, "policy_version": 0, "body": ""}
            lease = {"digest": name(at), "lease_index": at, "deadline": 10, "created_at": 9.0}
            lease |= {"shadow": False, "target": 8, "status": "submitted" if one in files else one}
            connection.execute(sa.insert(schema.leases).values(**place, **lease))
            if one in files:
                file = {"digest": name(at), "lease_digest": name(at), "sha256": name(at), "size": 1}
                file |= {"receipt": "", "received_at": 9.5, "status": one}
                connection.execute(sa.insert(schema.submissions).values(**place, **file))
    with either_store.read() as connection:
        for one, node in nodes.items():
            assert [outcome for _, outcome in leases.newest_of(connection, node, 9)] == [one]
        failed = leases.with_failures(connection, nodes.values())
        assert failed == {nodes[one] for one in ("expired", "rejected", "void")}
        assert leases.newest_of(connection, nodes["open"], 9, ended=True) == []
        shares = leases.latest_by_target(connection, 9, shadow=False, now=9.0, younger_than=8.0)
        assert shares == {8: (6, 2, 1, 1)}


def test_a_status_reads_neither_all_void_files_nor_all_intents(store: Store) -> None:
    plans: list[str] = []

    @sa.event.listens_for(store.engine, "before_cursor_execute")
    def _plan(_c: object, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if "FROM submissions" in statement or "FROM intents" in statement:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans.append(cursor.fetchall()[0][3])

    with store.read() as connection:
        submissions.expired_unjudged(connection)
        intents.latest_sent(connection, 5)
    files, sent = plans
    assert "submissions_unjudged (status=? AND reason=? AND shadow=?" in files
    assert "intents_newest" in sent


def test_a_page_of_the_archive_is_chosen_without_reading_all_files(store: Store) -> None:
    plans: list[str] = []

    @sa.event.listens_for(store.engine, "before_cursor_execute")
    def _plan(_c: object, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if statement.startswith("SELECT submissions"):
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans.append(cursor.fetchall()[0][3])

    bounds = archive.Bounds(1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    with store.read() as connection:
        archive.following(connection, (0.0, ""), bounds, 9)
        archive.over(connection, bounds, [name(number) for number in range(9)])
    following, over = plans
    assert "submissions_newest (received_at>? AND received_at<?)" in following
    assert "submissions USING INDEX sqlite_autoindex_submissions_1 (digest=?)" in over


# -- jobs --------------------------------------------------------------------------------------


def queued(store: Store, *numbers: int) -> None:
    """Files that wait for a validator each, all assigned to NODE; their policy is 0."""
    with store.begin() as connection:
        for number in numbers:
            connection.execute(
                schema.submissions.insert().values(
                    digest=name(number), lease_digest=name(100 + number), node=NODE, step=0,
                    policy_version=0, sha256=name(number), size=1, body="", receipt="",
                    received_at=0.0, status="submitted",
                )
            )  # fmt: skip
            jobs.add(connection, {name(number): False}, now=float(number))
            jobs.change(connection, name(number), needed=1)
            jobs.assign(connection, [(name(number), NODE)], now=float(number))


def take(store: Store, worker: str, now: float, most: int = 1) -> list[Digest]:
    with store.begin() as connection:
        (found,) = jobs.take(connection, [Wish(NODE, worker, most)], now=now, until=now + 10)
        return found


def test_files_are_claimed_oldest_first_and_by_their_validator_alone(either_store: Store) -> None:
    queued(either_store, 3, 1, 2)
    with either_store.begin() as connection:
        jobs.add(connection, {name(1): False}, now=9.0)  # it is queued already
        other = Address("0x" + "22" * 20)
        assert jobs.take(connection, [Wish(other, "b", 9)], now=10.0, until=20.0) == [[]]
    assert [take(either_store, "a", 10.0) for _ in range(4)] == [
        [name(1)], [name(2)], [name(3)], []
    ]  # fmt: skip


def test_a_claim_that_ran_out_is_taken_again_alone_and_counts(either_store: Store) -> None:
    queued(either_store, 1, 2)
    assert take(either_store, "dead", 10.0) == [name(1)]
    with either_store.begin() as connection:
        for worker, since, until in (
            ("dead", 9.0, 30.0),
            ("other", 9.0, 99.0),
            ("dead", 11.0, 99.0),
        ):
            jobs.keep(connection, NODE, worker, [name(1)], claimed_since=since, until=until)
    assert take(either_store, "b", 25.0, most=2) == [name(2)]
    assert take(either_store, "b", 31.0, most=2) == [name(1)]
    with either_store.read() as connection:
        part = jobs.assignment(connection, name(1), NODE)
    assert part is not None
    assert (part.worker, part.attempts) == ("b", 1)


def test_all_processes_share_the_limit_of_shadow_leases_per_address(either_store: Store) -> None:
    def take(place: str, now: float) -> bool:
        with either_store.begin() as connection:
            lock(connection, "leases")
            return shadows.take(connection, place, now, most=3, within=60)

    assert [take("203.0.113.7", float(second)) for second in range(4)] == [True] * 3 + [False]
    assert take("203.0.113.8", 4.0), "another address"
    assert [take("203.0.113.7", 60.5 + second) for second in (0, 0.1, 1)] == [True, False, True]
    assert take("2001:db8::/64", 200.0)
    with either_store.begin() as connection:
        shadows.forget_places(connection, before=140.0)
        assert [key for key, _ in meta.under(connection, "shadow_leases/")] == [
            "shadow_leases/2001:db8::/64"
        ], "old addresses are forgotten"


def test_only_a_done_job_opens_again_for_every_validator_and_whole(either_store: Store) -> None:
    queued(either_store, 1)
    with either_store.begin() as connection:
        assert not jobs.reopen(connection, name(1)), "it waits already"
        jobs.change(connection, name(1), status="done")
        assert jobs.reopen(connection, name(1))
        job = jobs.get(connection, name(1))
        assert job is not None
        assert (job.status, job.needed, job.assigned, job.whole) == ("open", 1, 0, True)
        assert jobs.assignments(connection, name(1)) == []


def test_an_opinion_is_due_once_all_that_are_needed_are_sealed(either_store: Store) -> None:
    queued(either_store, 1)
    other = Address("0x" + "22" * 20)
    with either_store.begin() as connection:
        jobs.change(connection, name(1), needed=2)
        jobs.add(connection, {name(2): False}, now=2.0)
        several = [(name(2), NODE), (name(1), other), (name(2), other)]
        jobs.assign(connection, several, now=1.0)
        jobs.set_assignment(connection, name(1), NODE, status="sealed")
        assert jobs.to_reveal(connection, [NODE, other], 9) == {}
        jobs.set_assignment(connection, name(1), other, status="sealed")
        both = {NODE: [name(1)], other: [name(1)]}
        assert jobs.to_reveal(connection, [NODE, other], 9) == both
        jobs.end_assignment(connection, name(1), other, "missed", now=2.0)
        assert [job.assigned for job in jobs.short(connection, 9)] == [1, 2]


def test_a_search_for_jobs_that_finds_enough_looks_at_random_ones_now_and_then(
    either_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with either_store.begin() as connection:
        jobs.add(connection, {name(number): False for number in range(30)}, now=1.0)
        assert len(jobs.short(connection, 99)) == 30
        numbers = iter([1, 0])
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(numbers))
        first = jobs.short(connection, 9)
        assert len(first) == 9
        second = jobs.short(connection, 9)
        assert second[:9] == first
        assert len(second) > 9


def test_counters_of_archived_rows_are_read_of_those_that_are_asked_for(
    either_store: Store,
) -> None:
    with either_store.begin() as connection:
        totals.add(connection, "planted", {"a": 1, "b": 2, "c": 3})
        totals.raise_to(connection, "planted", {"a": 5, "b": 1, "d": 4})
        assert totals.of(connection, "planted") == {"a": 5, "b": 2, "c": 3, "d": 4}
        assert totals.of(connection, "planted", ["a", "c", "x"]) == {"a": 5, "c": 3}
        assert totals.of(connection, "planted", []) == {}


def test_what_the_pool_owes_and_who_abstains_is_counted_alike(either_store: Store) -> None:
    queued(either_store, 1, 2, 3)
    files = schema.submissions
    with either_store.begin() as connection:
        for number in (1, 2, 3):
            connection.execute(
                sa.insert(schema.leases).values(
                    digest=name(100 + number), node=NODE, step=0, lease_index=number, target=64,
                    policy_version=0, status="submitted", deadline=1, created_at=0.0, body="",
                )
            )  # fmt: skip
        opinions.add(connection, OpinionRow(name(1), OTHER, 0, "{}", 5.0))
        opinions.plant(connection, name(1), opinions.HONEST, now=5.0)
        done = {"status": "accepted", "units": 7, "prompt_units": 2}
        connection.execute(sa.update(files).where(files.c.digest == name(1)).values(**done))
        connection.execute(
            sa.insert(schema.credits).values(
                submission_digest=name(1), node=NODE, units=7, amount="7", earned_at=0,
                status="forfeited",
            )
        )  # fmt: skip
        jobs.end_assignment(connection, name(1), NODE, "abstained", now=6.0)
        jobs.set_assignment(connection, name(2), NODE, status="given", at=6.0)
        found = {row.status: row for row in submissions.unsettled(connection, 0.0, [])}
        assert found == {
            "accepted": submissions.UnsettledFiles(0, "accepted", 64, 1, 7, 2, 1),
            "submitted": submissions.UnsettledFiles(0, "submitted", 64, 2, 0, 0, 0),
        }, "forfeited pay is owed, too: a reward root reserves it"
        assert submissions.unsettled(connection, 0.0, [NODE]) == []
        assert submissions.unsettled(connection, 1.0, []) == []
        (planted,) = opinions.on_planted(connection, 0.0, 1.0)
        assert (planted.kind, planted.step, planted.opinion.validator) == ("honest", 0, OTHER)
        assert opinions.on_planted(connection, 1.0, 9.0) == []
        assert (jobs.abstaining(connection, 1), jobs.abstaining(connection, 2)) == ({NODE}, set())
        assert jobs.latest_files(connection, NODE, 0.0, 9) == (1, 1), "no opinion on the other"
        assert jobs.latest_files(connection, NODE, 7.0, 9) == (0, 0)


# -- sessions ----------------------------------------------------------------------------------


def test_forgetting_sessions_and_challenges_reads_only_what_is_old(store: Store) -> None:
    """Strangers can leave many for hours, and it runs every second."""
    plans: dict[str, str] = {}

    @sa.event.listens_for(store.engine, "before_cursor_execute")
    def _plan(_c: object, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if " FROM " in statement:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans[statement.split(" FROM ")[1].split()[0]] = cursor.fetchall()[0][3]

    with store.begin() as connection:
        sessions.forget(connection, now=50)
        challenges.forget(connection, now=50)
    assert {*plans} == {"nonces", "sessions", "revocations", "challenges"}
    assert all(plan.startswith("SEARCH") for plan in plans.values()), plans


def test_a_nonce_is_used_once_by_its_key(either_store: Store) -> None:
    with either_store.begin() as connection:
        thrice = [(name(1), "n" * 16, 50), (name(1), "m" * 16, 50), (name(1), "n" * 16, 50)]
        assert sessions.use_nonces(connection, thrice) == [True, True, False]
        assert not sessions.use_nonces(connection, [(name(1), "n" * 16, 50)])[0]
        assert sessions.use_nonces(connection, [(name(2), "n" * 16, 50)])[0]
        sessions.forget(connection, now=50)
        assert not sessions.use_nonces(connection, [(name(1), "n" * 16, 50)])[0]
        sessions.forget(connection, now=51)
        assert sessions.use_nonces(connection, [(name(1), "n" * 16, 99)])[0]


def test_a_revocation_ends_older_sessions_of_that_account_only(either_store: Store) -> None:
    with either_store.begin() as connection:
        for row in (session(1, 100), session(2, 200), session(3, 100, OTHER)):
            assert sessions.add(connection, row)
        assert not sessions.add(connection, session(1, 100))
        sessions.revoke(connection, NODE, 200)
        sessions.revoke(connection, NODE, 150)  # an older one takes nothing back
        found = [sessions.get(connection, name(number)) for number in (1, 2, 3)]
        assert [row is not None and row.revoked for row in found] == [True, False, False]
        assert sessions.revocation(connection, NODE) == 200
        assert sessions.revocation(connection, OTHER) == 0
        assert sessions.count(connection, NODE, 300) == 1


def test_a_challenge_counts_once(either_store: Store) -> None:
    row = ChallengeRow("id", NODE, name(1), 16, 2, 1.0, 100, "{}", "process")
    with either_store.begin() as connection:
        challenges.add(connection, row)
        assert challenges.open_for(connection, NODE, 50) == 1
        assert challenges.open_for(connection, NODE, 101) == 0
        assert challenges.use(connection, "id")
        assert not challenges.use(connection, "id")
        assert challenges.open_for(connection, NODE, 50) == 0


# -- nodes, groups, batches, policies ----------------------------------------------------------


def admit(store: Store, address: Address, now: float = 1.0) -> None:
    with store.begin() as connection:
        nodes.admit(
            connection, address, speed_class=2, hardware=HARDWARE, runtime="process", now=now
        )


def test_a_node_that_comes_again_keeps_one_row(either_store: Store) -> None:
    admit(either_store, NODE)
    with either_store.begin() as connection:
        nodes.set_status(connection, NODE, "left", last_heartbeat=5.0)
    admit(either_store, NODE, now=9.0)
    with either_store.read() as connection:
        assert [(n.address, n.status) for n in nodes.every(connection)] == [(NODE, "admitted")]
        assert nodes.every(connection, ("active",)) == []


def group(submission: int, number: int, version: int, **changes: object) -> GroupRow:
    values: dict[str, object] = {
        "submission_digest": name(submission),
        "group_no": number,
        "policy_version": version,
        "rows": 2,
        "informative": True,
        "reward_micro_sum": 5,
        "accepted_at": float(submission),
    }
    return GroupRow(**(values | changes))  # type: ignore[arg-type]


def test_free_groups_are_informative_fresh_and_in_no_batch(either_store: Store) -> None:
    with either_store.begin() as connection:
        rows = [
            group(1, 0, 3),
            group(1, 1, 3, informative=False),
            group(2, 0, 1),
            group(3, 0, 2),
            group(4, 0, 2),
        ]
        groups.add(connection, rows)
        groups.add(connection, rows)
        assert groups.take(connection, [(name(4), 0)], step=0) == 1
        assert groups.free_counts(connection, oldest_version=2) == [(2, 1), (3, 1)]
        assert groups.informative_share(connection, 2) == (2, 2)
        assert groups.informative_share(connection, 100) == (4, 5)


def test_a_group_is_taken_into_one_batch(either_store: Store) -> None:
    with either_store.begin() as connection:
        groups.add(connection, [group(1, 0, 0), group(1, 1, 0)])
        assert groups.take(connection, [(name(1), 0)], step=0) == 1
        assert groups.take(connection, [(name(1), 0), (name(1), 1)], step=1) == 1


def test_a_step_has_one_batch(either_store: Store) -> None:
    row = BatchRow(0, name(1), "{}", 4, 500_000, 1, 1.0)
    with either_store.begin() as connection:
        assert batches.next_step(connection) == 0
        assert batches.add(connection, row)
        assert batches.next_step(connection) == 1
        assert not batches.add(connection, replace(row, digest=name(2)))
        assert batches.get(connection, 0) == row


def test_no_account_crowds_the_relays_of_others_out(either_store: Store) -> None:
    crowd, own = Address("0x" + "22" * 20), Address("0x" + "33" * 20)
    with either_store.begin() as connection:
        for number in range(8):
            policies.see_relay(connection, f"http://c{number}", crowd, (), now=float(number))
        policies.see_relay(connection, "http://new", NODE, (), now=50.0)
        policies.see_relay(connection, "http://origin", own, (), now=60.0)
        policies.see_relay(connection, "http://origin2", own, (), now=61.0)
        listed = policies.relays(connection, since=0.0, own={own}, limit=5)
    urls = ["http://origin", "http://origin2", "http://c0", "http://new", "http://c1"]
    assert [row.url for row in listed] == urls


def test_relays_are_listed_while_heard_of_those_known_longest_first(either_store: Store) -> None:
    with either_store.begin() as connection:
        policies.see_relay(connection, "http://a", NODE, (1, 2), now=1.0)
        policies.see_relay(connection, "http://b", NODE, (), now=50.0)
        policies.see_relay(connection, "http://a", NODE, (2, 3), now=60.0)
        policies.see_relay(connection, "http://0", NODE, (), now=60.0)
        listed = policies.relays(connection, since=40.0)
        assert [(r.url, r.versions) for r in listed] == [
            ("http://a", (2, 3)),
            ("http://b", ()),
            ("http://0", ()),
        ]
        policies.forget_relays(connection, 55.0)
        assert policies.relay_owner(connection, "http://b") is None
        assert policies.relay_count(connection, NODE) == 2


# -- chain copy, intents, locks ----------------------------------------------------------------


def event(connection: object, block: int, what: str, args: dict[str, object]) -> bool:
    return chain.add_event(
        connection,  # type: ignore[arg-type]
        block_hash=name(block),
        log_index=0,
        block=block,
        block_time=block * 2,
        tx_hash=name(1000 + block),
        name=what,
        args=args,
    )


def test_events_come_once_and_go_with_their_blocks(either_store: Store) -> None:
    with either_store.begin() as connection:
        assert event(connection, 1, "NodeLeft", {"pool": 1, "node": NODE})
        assert not event(connection, 1, "NodeLeft", {"pool": 1, "node": NODE})
        assert event(connection, 2, "NodeEjected", {"pool": 1, "node": NODE})
        assert len(chain.events(connection, "NodeLeft", subject=NODE)) == 1
        assert chain.events(connection, "NodeLeft", subject=OTHER) == []
        assert [e.block for e in chain.retract(connection, 2)] == [2]
        assert chain.events(connection, "NodeEjected") == []


_STAKE = ("Deposited", "UnbondStarted", "Rebonded", "SlashHeld", "SlashReleased", "Slashed")
Happened = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.one_of(
            st.tuples(st.sampled_from(_STAKE), st.sampled_from("ab"), st.integers(1, 9)),
            st.tuples(st.sampled_from(["NodeAdded", "NodeRemoved"]), st.sampled_from("xy"),
                      st.integers(1, 3)),
            st.tuples(st.just("RevokedBefore"), st.sampled_from("xy"), st.integers(1, 9)),
        ),
    ),
    max_size=30,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(happened=Happened, cut=st.integers(0, 13), size=st.integers(1, 7))
def test_what_is_undone_leaves_the_state_as_if_it_had_never_come(
    tmp_path_factory: pytest.TempPathFactory,
    happened: list[tuple[int, tuple[str, str, int]]],
    cut: int,
    size: int,
) -> None:
    def args(name: str, account: str, number: int) -> dict[str, object]:
        if name in _STAKE:
            return {"provider": account, "amount": number}
        if name == "RevokedBefore":
            return {"node": account, "at": number}
        return {"node": account, "provider": f"p{number}"}

    happened = sorted(happened, key=lambda one: one[0])
    rows = [(block, name, args(name, who, n)) for block, (name, who, n) in happened]
    keys = [("provider", "x"), ("provider", "y"), ("revoked", "x"), ("revoked", "y"),
            ("stake", "a"), ("stake", "b")]  # fmt: skip

    def states(kept: list[tuple[int, str, dict[str, object]]], back: int | None) -> list[object]:
        store = open_store(sqlite_url(tmp_path_factory.mktemp("s") / "s.sqlite"))
        store.migrate()
        with store.begin() as connection:
            for at in range(0, len(kept), size):
                chain.fold(connection, kept[at : at + size], 12)
            if back is not None:
                chain.retract(connection, back)
            found = [chain.state(connection, kind, Address(who)) for kind, who in keys]
        store.close()
        return found

    assert states(rows, cut) == states([row for row in rows if row[0] < cut], None)


def test_a_cursor_moves(either_store: Store) -> None:
    with either_store.begin() as connection:
        assert chain.cursor(connection, "indexer") is None
        chain.set_cursor(connection, "indexer", 5, name(5))
        chain.set_cursor(connection, "indexer", 6, name(6))
        assert chain.cursor(connection, "indexer") == (6, name(6))


def test_the_end_of_another_pool_is_not_ours(either_store: Store) -> None:
    with either_store.begin() as connection:
        event(connection, 1, "PoolEnded", {"pool": 2})
        assert not chain.pool_ended(connection, 1)
        assert chain.pool_ended(connection, 2)


def test_an_intent_is_queued_once(either_store: Store) -> None:
    with either_store.begin() as connection:
        for amount in (1, 2):
            intents.queue_intent(connection, kind="root", key="1", payload={"n": amount}, now=1.0)
        queued = intents.pending(connection)
        assert [(i.id, i.arguments()) for i in queued] == [("root:1", {"n": 1})]
        mined = {"status": "confirmed", "tx_hash": name(1), "block": 7}
        connection.execute(schema.intents.update().values(**mined))
        assert intents.pending(connection) == []
        latest = intents.latest_sent(connection, 5)
        assert [(i.status, i.tx_hash, i.block) for i in latest] == [("confirmed", name(1), 7)]


def test_proposals_that_wait_for_their_roots_hold_up_no_root(either_store: Store) -> None:
    with either_store.begin() as connection:
        for number in range(101):
            intents.queue_intent(
                connection, kind="propose", key=f"{number:03d}", payload={}, now=1.0
            )
        intents.queue_intent(connection, kind="root", key="r", payload={}, now=2.0)
        seen: set[str] = set()
        for now in range(3, 8):
            first, *others = intents.pending(connection)
            assert first.id == "root:r"
            assert len(others) == intents.MAX_PROPOSALS
            seen |= {row.id for row in others}
            intents.postpone(connection, [first.id, *(row.id for row in others)], now=float(now))
    assert len(seen) == 101, "each gets its turn"


def test_a_transaction_that_uses_up_a_nonce_is_expected_to_emit_nothing(
    either_store: Store,
) -> None:
    queue = StoreQueue(either_store, NODE, 31337)
    queue.submit("fill-gap/3", Call(NODE, b"", 0, "use up a nonce"), 1.0)
    receipt = TxReceipt(name(1), 7, name(2), True, 21_000, None, ())
    queue.record_mined("fill-gap/3", receipt, None, 2.0)
    with either_store.read() as connection:
        assert intents.mined_between(connection, 0, 9) == []


def test_a_named_lock_lets_one_transaction_decide_at_a_time(either_store: Store) -> None:
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait(30)
        with either_store.begin() as connection:
            lock(connection, "leases")
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with either_store.begin() as connection:
        lock(connection, "leases")
        inside.set()
        thread.join(0.3)  # it cannot get in while we hold the lock
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
