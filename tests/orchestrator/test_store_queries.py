"""The store's behaviour suite: every rule below holds on SQLite and on PostgreSQL."""

from __future__ import annotations

import threading

import pytest
from orchestrator_world import signer
from sqlalchemy.exc import IntegrityError

from orchestrator.store import (
    Store,
    batches,
    chain,
    challenges,
    groups,
    intents,
    jobs,
    lock,
    nodes,
    policies,
    sessions,
)
from orchestrator.store.batches import BatchRow
from orchestrator.store.challenges import ChallengeRow
from orchestrator.store.groups import GroupRow
from orchestrator.store.sessions import SessionRow
from protocol.core.encoding import sha256
from protocol.core.ids import Address, Digest
from protocol.core.node import Hardware

NODE = signer(1).address
OTHER = signer(2).address
HARDWARE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


def name(number: int) -> Digest:
    return sha256(b"%d" % number)


def session(number: int, issued_at: int = 100, account: Address = NODE) -> SessionRow:
    return SessionRow(name(number), account, "node", issued_at, issued_at + 1000, False)


# -- jobs --------------------------------------------------------------------------------------


def test_jobs_are_claimed_oldest_first_and_one_by_one(either_store: Store) -> None:
    with either_store.begin() as connection:
        for number in (3, 1, 2):
            assert jobs.add(connection, name(number), now=float(number))
        assert not jobs.add(connection, name(1), now=9.0)
    claimed = []
    for _ in range(4):
        with either_store.begin() as connection:
            claimed.append(jobs.claim(connection, "a", now=10.0, seconds=60))
    assert [job and job.submission_digest for job in claimed] == [name(1), name(2), name(3), None]


def test_only_a_done_job_opens_again_as_if_nobody_had_tried_it(either_store: Store) -> None:
    with either_store.begin() as connection:
        jobs.add(connection, name(1), now=1.0)
        assert not jobs.reopen(connection, name(1)), "it waits already"
        assert jobs.claim(connection, "a", now=2.0, seconds=60) is not None
        assert jobs.holds(connection, name(1), "a")
        assert not jobs.holds(connection, name(1), "b")
        assert not jobs.reopen(connection, name(1)), "it is being judged"
        assert jobs.finish(connection, name(1), "a")
        assert not jobs.holds(connection, name(1), "a")
        assert jobs.reopen(connection, name(1))
        again = jobs.claim(connection, "a", now=3.0, seconds=60)
        assert again is not None
        assert (again.attempts, again.abstentions) == (1, 0)


def test_no_job_is_claimed_twice_by_validators_at_once(either_store: Store) -> None:
    with either_store.begin() as connection:
        for number in range(12):
            jobs.add(connection, name(number), now=0.0)
    taken: list[Digest] = []

    def work(worker: str) -> None:
        while True:
            with either_store.begin() as connection:
                job = jobs.claim(connection, worker, now=1.0, seconds=60)
            if job is None:
                return
            taken.append(job.submission_digest)

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == sorted(name(number) for number in range(12))


@pytest.mark.parametrize(
    "empty_database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)
def test_postgresql_claims_past_a_row_that_another_holds(either_store: Store) -> None:
    with either_store.begin() as connection:
        jobs.add(connection, name(1), now=0.0)
        jobs.add(connection, name(2), now=1.0)
    with either_store.begin() as first, either_store.begin() as second:
        one = jobs.claim(first, "a", now=2.0, seconds=60)
        two = jobs.claim(second, "b", now=2.0, seconds=60)
    assert one is not None
    assert two is not None
    assert (one.submission_digest, two.submission_digest) == (name(1), name(2))


def test_a_claim_that_ran_out_is_taken_over_and_its_holder_loses_it(either_store: Store) -> None:
    with either_store.begin() as connection:
        jobs.add(connection, name(1), now=0.0)
        assert jobs.claim(connection, "dead", now=1.0, seconds=10) is not None
        assert jobs.claim(connection, "b", now=10.0, seconds=10) is None
        assert jobs.extend(connection, name(1), "dead", now=10.0, seconds=10)
        assert jobs.claim(connection, "b", now=15.0, seconds=10) is None
        taken = jobs.claim(connection, "b", now=21.0, seconds=10)
        assert taken is not None
        assert not jobs.finish(connection, name(1), "dead")
        assert not jobs.extend(connection, name(1), "dead", now=21.0, seconds=10)
        assert jobs.finish(connection, name(1), "b")
        assert jobs.claim(connection, "c", now=99.0, seconds=10) is None


# -- sessions ----------------------------------------------------------------------------------


def test_a_nonce_is_used_once_by_its_key(either_store: Store) -> None:
    with either_store.begin() as connection:
        assert sessions.use_nonce(connection, name(1), "n" * 16, expires=50)
        assert not sessions.use_nonce(connection, name(1), "n" * 16, expires=50)
        assert sessions.use_nonce(connection, name(2), "n" * 16, expires=50)
        sessions.forget(connection, now=50)
        assert not sessions.use_nonce(connection, name(1), "n" * 16, expires=50)
        sessions.forget(connection, now=51)
        assert sessions.use_nonce(connection, name(1), "n" * 16, expires=99)


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
        batches.add(connection, row)
        assert batches.next_step(connection) == 1
        assert batches.get(connection, 0) == row
    with pytest.raises(IntegrityError), either_store.begin() as connection:
        batches.add(connection, row)


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
        assert event(connection, 1, "RevokedBefore", {"node": NODE, "at": 70})
        assert not event(connection, 1, "RevokedBefore", {"node": NODE, "at": 70})
        assert event(connection, 2, "RevokedBefore", {"node": NODE, "at": 90})
        assert event(connection, 3, "RevokedBefore", {"node": OTHER, "at": 99})
        assert chain.revoked_before(connection, NODE) == 90
        assert [e.block for e in chain.retract(connection, 2)] == [2, 3]
        assert chain.revoked_before(connection, NODE) == 70
        assert chain.revoked_before(connection, OTHER) == 0


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
            intents.enqueue(
                connection, "root:1", lane=NODE, kind="root", payload={"n": amount}, now=1.0
            )
        queued = intents.pending(connection, NODE)
        assert [(i.id, i.arguments()) for i in queued] == [("root:1", {"n": 1})]
        intents.update(connection, "root:1", "sent", now=2.0, tx_hash=name(1))
        intents.update(connection, "root:1", "confirmed", now=3.0, block=7)
        assert intents.pending(connection, NODE) == []
        latest = intents.latest_sent(connection, 5)
        assert [(i.status, i.tx_hash, i.block) for i in latest] == [("confirmed", name(1), 7)]


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
