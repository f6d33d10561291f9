"""Several orchestrators on one store: one runs the loops, and its journal is everybody's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from stores import migrate

from devnet.deployed import Deployed
from prime_chain.client import Call
from prime_chain.sender import Sender
from prime_core.errors import ConflictError, UnavailableError, UserError
from prime_core.ids import address
from prime_orchestrator.store import Store, leaders, open_store
from prime_orchestrator.store.intents import StoreQueue
from prime_orchestrator.store.leaders import BEAT_SECONDS, LEASE_SECONDS, LoopLease
from prime_orchestrator.store.rows import insert_new


class Clock:
    """A clock of one process; those of two need not agree."""

    def __init__(self, start: float) -> None:
        self.time = start

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def other_store(either_store: Store) -> Iterator[Store]:
    """The same database, opened by another process."""
    opened = open_store(either_store.engine.url.render_as_string(hide_password=False))
    yield opened
    opened.close()


def test_one_holds_the_loops_and_the_other_takes_over_only_after_a_whole_lease_of_silence(
    either_store: Store, other_store: Store
) -> None:
    a_clock, b_clock = Clock(10.0), Clock(99_999.0)
    a = LoopLease(either_store, "a", now=a_clock)
    b = LoopLease(other_store, "b", now=b_clock)
    assert (a.tick(), b.tick()) == (True, False)
    for _ in range(20):  # a lives
        a_clock.time += 2
        b_clock.time += 2
        assert (a.tick(), b.tick()) == (True, False)
        assert (a.held(), b.held()) == (True, False)
    a_clock.time += LEASE_SECONDS * 0.6  # a is killed, or hangs
    assert not a.held(), "it stops believing long before b may take over"
    b_clock.time += LEASE_SECONDS - 0.1
    assert not b.tick()
    b_clock.time += 0.2
    assert b.tick()
    assert b.held()
    assert not a.tick(), "back again, it finds another's lease"
    assert not a.held()


@pytest.mark.parametrize("late", [-0.01, 0.01])
@pytest.mark.parametrize("after", [0.001, 0.4, BEAT_SECONDS])
def test_another_takes_over_within_five_seconds_of_a_kill(
    either_store: Store, other_store: Store, after: float, late: float
) -> None:
    """`after`: seconds from the last beat of the killed one, at 0, to the other's next tick;
    `late`: seconds by which each tick is late."""
    clock = Clock(after)
    assert LoopLease(either_store, "a", now=Clock(0.0)).tick()
    b = LoopLease(other_store, "b", now=clock)
    while not b.tick():
        clock.time += BEAT_SECONDS + late
    assert LEASE_SECONDS < clock.time <= 5.0


def test_a_restart_from_the_same_folder_need_not_wait_and_a_clean_end_leaves_it_free(
    either_store: Store, other_store: Store
) -> None:
    a, b = (LoopLease(either_store, "a", now=Clock(0)), LoopLease(other_store, "b", now=Clock(0)))
    assert a.tick()
    again = LoopLease(either_store, "a", now=Clock(0))
    assert again.tick()
    again.release()
    assert b.tick()
    a.release()  # another's is not let go
    assert not LoopLease(either_store, "c", now=Clock(0)).tick()


@pytest.mark.postgres
def test_a_lease_released_while_another_looks_at_it_is_taken(
    empty_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL the row can go between two statements of one transaction."""
    ours, theirs = open_store(empty_postgres), open_store(empty_postgres)
    migrate(ours)
    a, b = LoopLease(ours, "a", now=Clock(0)), LoopLease(theirs, "b", now=Clock(0))
    assert a.tick()

    def insert_then_release(connection: sa.Connection, table: sa.Table, row: Any) -> None:
        insert_new(connection, table, row)
        a.release()

    monkeypatch.setattr(leaders, "insert_new", insert_then_release)
    assert b.tick()
    ours.close()
    theirs.close()


def test_a_holder_without_database_stops_believing_in_its_lease(either_store: Store) -> None:
    clock = Clock(0)
    lease = LoopLease(either_store, "a", now=clock)
    assert lease.tick()

    def away() -> None:
        raise UnavailableError("the database is away")

    with pytest.MonkeyPatch.context() as outage:
        outage.setattr(either_store, "begin", away)
        clock.time += LEASE_SECONDS
        with contextlib.suppress(UnavailableError):
            lease.tick()
    assert not lease.held()


def transfer(value: int) -> Call:
    return Call(address("0x" + "0d" * 20), b"", value, f"a transfer of {value}")


def test_a_transaction_that_one_signed_is_finished_by_the_other_and_mined_once(
    either_store: Store, other_store: Store, deployed: Deployed
) -> None:
    """The first dies between its signature and the receipt: no second transaction is made."""
    account = deployed.accounts[4]
    chain = deployed.client.chain_id
    before = deployed.client.nonce(account.address)

    def sender(store: Store) -> Sender:
        journal = StoreQueue(store, account.address, chain)
        return Sender(deployed.client, account, journal)

    first, second = sender(either_store), sender(other_store)
    first.submit("one", transfer(5))
    with pytest.MonkeyPatch.context() as death:

        def lost(_self: object, raw: bytes) -> None:
            raise UnavailableError("killed before it was sent")

        death.setattr(type(deployed.client), "send_raw", lost)
        first.tick()
    signed = second.status("one")
    assert signed is not None
    assert (signed.status, len(signed.hashes)) == ("sent", 1)
    second.submit("one", transfer(5))
    with pytest.raises(ConflictError, match="another call"):
        second.submit("one", transfer(6))
    done = second.wait("one", 30)
    assert (done.status, done.hashes) == ("confirmed", signed.hashes)
    assert first.wait("one", 30).tx_hash == done.tx_hash
    first.submit("two", transfer(7))
    assert first.wait("two", 30).status == "confirmed"
    assert second.tick() == 0
    assert deployed.client.nonce(account.address) == before + 2
    assert [len(found.hashes) for found in map(first.status, ("one", "two")) if found] == [1, 1]


def test_a_process_that_lost_the_lease_signs_nothing(
    either_store: Store, deployed: Deployed
) -> None:
    account, held = deployed.accounts[4], [True]
    queue = StoreQueue(either_store, account.address, deployed.client.chain_id, lambda: held[0])
    sender = Sender(deployed.client, account, queue)
    sender.submit("late", transfer(8))
    held[0] = False  # it was paused, and another process took over
    sender.tick()
    assert "another process" in sender.trouble
    found = sender.status("late")
    assert found is not None
    assert (found.status, found.hashes) == ("queued", ())
    held[0] = True
    done = sender.wait("late", 30)
    assert done.status == "confirmed"
    [attempt] = done.attempts
    with pytest.raises(UnavailableError, match="not to be sent"):  # it ended meanwhile
        queue.record_signed("late", 1, attempt, 1.0)


def test_the_store_s_journal_belongs_to_one_account(
    either_store: Store, deployed: Deployed
) -> None:
    StoreQueue(either_store, deployed.accounts[4].address, 31337)
    with pytest.raises(UserError, match="belongs to account"):
        StoreQueue(either_store, deployed.accounts[5].address, 31337)


def test_a_failed_call_is_kept_with_its_error_and_tried_again(
    either_store: Store, deployed: Deployed, tmp_path: Path
) -> None:
    """As in the journal of a file: the same SQL on both databases."""
    account = deployed.accounts[4]
    sender = Sender(
        deployed.client,
        account,
        StoreQueue(either_store, account.address, deployed.client.chain_id),
    )
    sender.submit("bad", deployed.contracts.pools.eject(999, account.address))
    failed = sender.wait("bad", 30)
    assert failed.status == "failed"
    assert failed.error is not None
    assert sender.remember("place", "here") == sender.remember("place", "there") == "here"
    sender.retry("bad")
    assert [intent.id for intent in sender.open_intents()] == ["bad"]
    assert sender.wait("bad", 30).status == "failed"
