"""Requests that arrive together share transactions, and nothing else."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from orchestrator_world import AUDIENCE, Session, World, signer
from served import until

from bench import seats
from prime_core.errors import MalformedError, PolicyError, UnavailableError, UntrustedError
from prime_core.messages import Heartbeat, LeaseAnswer, LeaseRequest
from prime_core.node import Hardware
from prime_core.transport.signatures import sign_headers
from prime_orchestrator.api import leasing, liveness
from prime_orchestrator.api.auth import Caller, Head, authenticate
from prime_orchestrator.api.gathered import MOST, Gathered
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.store import nodes, open_store, schema

PATH = "/v1/heartbeat"
BEAT = Heartbeat(policy_version=0, heard_at=1_800_000_000)


def test_items_that_wait_for_one_another_are_served_in_one_batch() -> None:
    batches: list[list[int]] = []
    free = threading.Event()

    def serve(items: Sequence[int]) -> list[int | Exception]:
        batches.append(list(items))
        assert free.wait(20)
        return [MalformedError("odd") if item == 3 else 2 * item for item in items]

    async def ask() -> list[int | BaseException]:
        gathered = Gathered(serve)
        first = asyncio.create_task(gathered.ask(0))
        while not batches:
            await asyncio.sleep(0)
        rest = [asyncio.create_task(gathered.ask(item)) for item in range(1, MOST + 2)]
        gone = asyncio.create_task(gathered.ask(-1))
        await asyncio.sleep(0)
        gone.cancel()
        free.set()
        return await asyncio.gather(first, *rest, return_exceptions=True)

    answers = asyncio.run(ask())
    assert batches == [[0], [*range(1, MOST + 1)], [MOST + 1, -1]]
    assert isinstance(answers[3], MalformedError), "it fails alone"
    assert [one for one in answers if one is not answers[3]] == [
        2 * item for item in range(MOST + 2) if item != 3
    ]


def test_an_item_that_breaks_its_batch_fails_alone() -> None:
    batches: list[list[int]] = []
    first = threading.Event()

    def serve(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        if items == [0]:
            assert first.wait(20)
        return [6 // (item - 3) for item in items]

    async def ask() -> list[int | BaseException]:
        gathered = Gathered(serve)
        tasks = [asyncio.create_task(gathered.ask(0))]
        while not batches:
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(gathered.ask(item)) for item in (2, 3, 4)]
        await asyncio.sleep(0)
        first.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    zero, two, three, four = asyncio.run(ask())
    assert (zero, two, four) == (-2, -6, 6)
    assert isinstance(three, ZeroDivisionError)
    assert batches == [[0], [2, 3, 4], [2], [3], [4]]


def test_a_database_that_is_away_fails_all_items_of_a_batch_and_none_of_the_next() -> None:
    calls = 0

    def serve(items: Sequence[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise UnavailableError("the database is away")
        return list(items)

    async def ask() -> None:
        gathered = Gathered(serve)
        for one in await asyncio.gather(*map(gathered.ask, range(3)), return_exceptions=True):
            assert isinstance(one, UnavailableError)
        assert await gathered.ask(4) == 4

    asyncio.run(ask())


def test_callers_that_ask_in_turn_share_batches_and_the_only_one_does_not_wait() -> None:
    batches: list[list[int]] = []

    def serve(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        return list(items)

    async def ask() -> None:
        gathered = Gathered(serve, wait=1e9, caller=lambda item: item % 10)
        alone = Gathered(serve, wait=1e9, caller=lambda item: item % 10)
        for item in (1, 11):
            assert await alone.ask(item) == item
        both = [asyncio.create_task(gathered.ask(item)) for item in (1, 2)]
        await asyncio.gather(*both)
        first = asyncio.create_task(gathered.ask(11))
        for _ in range(9):  # more than it takes to serve the item if it does not wait
            await asyncio.sleep(0)
        assert await gathered.ask(12) == 12
        assert await first == 11

    asyncio.run(ask())
    assert batches == [[1], [11], [1, 2], [11, 12]]


def head(world: World, session: Session, nonce: str) -> Head:
    signed = sign_headers(
        session.key, "POST", AUDIENCE + PATH, b"", now=world.clock(), nonce=nonce.rjust(16, "-")
    )
    headers = {name.lower(): value for name, value in signed.items()}
    return Head("POST", AUDIENCE.removeprefix("http://"), PATH, headers)


def test_of_requests_with_one_nonce_in_a_batch_the_first_is_taken(world: World) -> None:
    one, two = world.login(signer(1)), world.login(signer(2))
    heads = [
        head(world, two, "b"),
        head(world, one, "a"),
        head(world, one, "a"),
        head(world, two, "a"),
        head(world, Session(signer(3)), "a"),
        Head("POST", "testserver", PATH, {}),
    ]
    found = authenticate(world.backend, "node", heads)
    named = [item.account if isinstance(item, Caller) else type(item) for item in found]
    assert named == [
        signer(2).address, signer(1).address, UntrustedError, signer(2).address,
        UntrustedError, MalformedError,
    ]  # fmt: skip
    again = authenticate(world.backend, "node", [*heads[:4], head(world, one, "c")])
    assert [isinstance(item, Caller) for item in again] == [False] * 4 + [True]


def test_each_node_of_a_batch_gets_its_own_answer(world: World) -> None:
    for number in (1, 2, 3):
        world.member(number)
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, signer(2).address, "quarantined", last_heartbeat=0)
        nodes.set_status(connection, signer(3).address, "silent", last_heartbeat=0)
    world.clock.advance(7)
    said = [(signer(number).address, BEAT) for number in (4, 3, 2, 1, 1)]
    found = liveness.heartbeats(world.backend, said)
    assert [(one.directive, one.status) for one in found] == [
        ("join", "left"), ("work", "active"), ("wait", "quarantined"),
        ("work", "active"), ("work", "active"),
    ]  # fmt: skip
    with world.backend.store.read() as connection:
        for number in (1, 2, 3):
            row = nodes.get(connection, signer(number).address)
            assert row is not None
            assert (row.last_heartbeat, row.policy_version) == (world.clock(), 0)


@pytest.mark.postgres
def test_a_node_whose_row_is_held_keeps_no_other_waiting(world: World, empty_postgres: str) -> None:
    """A verdict holds the row of its node: the rest of the batch is written meanwhile."""
    store = open_store(empty_postgres)
    store.migrate()
    backend = replace(world.backend, store=store)
    held, free = signer(1).address, signer(2).address
    for account in (held, free):
        with store.begin() as connection:
            nodes.admit(
                connection, account, now=0, status="active", runtime="process",
                hardware=Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=()),
            )  # fmt: skip
    found: list[int] = []

    def beat() -> None:
        found.append(len(liveness.heartbeats(backend, [(held, BEAT), (free, BEAT)])))

    def received(account: str) -> float:
        with store.read() as connection:
            row = nodes.get(connection, account)  # type: ignore[arg-type]
        assert row is not None
        return row.last_heartbeat

    beating = threading.Thread(target=beat)
    try:
        with store.begin() as connection:
            nodes.lock_row(connection, held)
            beating.start()
            until(lambda: received(free) == world.clock())
            assert received(held) == 0
        beating.join(20)
        assert (found, received(held)) == ([2], world.clock())
    finally:
        beating.join(20)
        store.close()


@pytest.mark.slow
def test_leases_asked_for_together_are_those_asked_for_one_after_the_other(tmp_path: Path) -> None:
    answers: list[list[LeaseAnswer | PolicyError]] = []
    for name in ("together", "apart"):
        run = seats.definition().model_copy(update={"groups_per_batch": 9})
        pool = seats.Pool.make(tmp_path / name, run=run)
        pool.backend = replace(pool.backend, draws=DrawBoard(random.Random(8).randbytes))
        pool.seat(5, honest=True)
        pool.seat(4, honest=False)
        pool.pass_time(4 * seats.STEP)  # the droppers' leases stay open
        now, opened = pool.clock[0], schema.leases.c
        with pool.backend.store.begin() as connection:
            for node in (*pool.honest[1:3], pool.droppers[0], pool.droppers[2]):
                nodes.set_member(connection, node, provider=pool.honest[0])
            for node in pool.droppers[:2]:
                nodes.note_missed(connection, node, 1.0, misses=1, rests_until=now + 60)
            expired = sa.update(schema.leases).where(opened.node.in_(pool.droppers[1:]))
            connection.execute(expired.values(status="expired"))
        pool.seat(6, honest=False)
        everyone = (*pool.honest, signer(99).address, *reversed(pool.droppers))
        asks = [leasing.Ask(node, LeaseRequest(policy_version=1 << 40)) for node in everyone]
        asks += asks[:2]
        if name == "together":
            answers.append(leasing.lease_all(pool.backend, asks))
        else:
            answers.append([leasing.lease_all(pool.backend, [ask])[0] for ask in asks])
        pool.backend.store.close()
    together, apart = (
        [one if isinstance(one, LeaseAnswer) else str(one) for one in some] for some in answers
    )
    assert together == apart
    given = [one.lease for one in together if isinstance(one, LeaseAnswer) and one.lease]
    assert any(signed.opening and signed.opening.problems for signed in given)
    reasons = {one.reason[:20] for one in together if isinstance(one, LeaseAnswer)}
    assert len(reasons) == 3, reasons
    assert len({signed.lease.index for signed in given}) > 4
    assert together[-2:] == together[:2]
