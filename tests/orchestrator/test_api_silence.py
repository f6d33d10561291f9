"""The passing of time over nodes and leases: silence, our own downtime, deadlines."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from orchestrator_world import World, signer

from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.messages import Heartbeat
from prime_core.node import Hardware
from prime_orchestrator.api.liveness import LifeTicks, heartbeats
from prime_orchestrator.manager.indexer import derive
from prime_orchestrator.manager.members import apply_node_event
from prime_orchestrator.store import chain, leases, lock, nodes, open_store
from prime_orchestrator.store.chain import EventRow


def lives(world: World, life: LifeTicks, seconds: int) -> str:
    """Time passes with the orchestrator up; the first node's status then."""
    for _ in range(seconds):
        world.clock.advance(1)
        life.tick()
    return str(world.http.get("/v1/nodes").json()[0]["status"])


def test_a_node_is_silent_after_the_death_period_and_back_with_its_next_heartbeat(
    world: World,
) -> None:
    session = world.member(1)
    life = LifeTicks(world.backend)
    assert lives(world, life, 20) == "active"
    assert lives(world, life, 1) == "silent"
    answer = world.post("/v1/leases", b'{"policy_version":0}', session).json()
    assert (answer["lease"], answer["reason"]) == (None, "the node is silent")
    assert (
        world.post("/v1/heartbeat", b'{"policy_version":0}', session).json()["status"] == "active"
    )


def test_our_own_downtime_counts_against_no_node(world: World) -> None:
    world.member(1)
    world.clock.advance(3600)
    life = LifeTicks(world.backend)  # the orchestrator comes up again
    life.tick()
    assert lives(world, life, 20) == "active"
    assert lives(world, life, 1) == "silent"


def test_a_database_outage_counts_against_no_node(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was up, but no heartbeat could have been written down."""
    world.member(1)
    life = LifeTicks(world.backend)
    assert lives(world, life, 5) == "active"

    def away() -> None:
        raise UnavailableError("the database is away")

    with monkeypatch.context() as outage:
        outage.setattr(world.backend.store, "begin", away)
        for _ in range(30):
            world.clock.advance(1)
            with pytest.raises(UnavailableError):
                life.tick()
    assert lives(world, life, 20) == "active"
    assert lives(world, life, 2) == "silent"


def test_an_overdue_lease_expires(world: World) -> None:
    session = world.member(1)
    digest = world.lease_digest(world.lease(session))
    life = LifeTicks(world.backend)
    for seconds, status in ((60, "open"), (1, "expired")):
        world.clock.advance(seconds)
        life.tick()
        with world.backend.store.read() as connection:
            row = leases.get(connection, digest)
            assert row is not None
            assert row.status == status


def test_a_second_machine_with_the_same_key_must_stop(world: World) -> None:
    first, second = "1" * 32, "2" * 32
    session = world.member(1)

    def beat(instance: str) -> dict[str, object]:
        body = json.dumps({"policy_version": 0, "instance": instance}).encode()
        return dict(world.post("/v1/heartbeat", body, session).json())

    assert beat(first)["directive"] == "work"
    world.clock.advance(3)
    answer = beat(second)
    assert (answer["directive"], answer["another_machine"]) == ("stop", True)
    assert "seen 3 s ago" in str(answer["reason"])
    again = beat(first)
    assert (again["directive"], again["another_machine"]) == ("work", False)
    assert beat("")["directive"] == "work", "an agent that sends no id"
    world.clock.advance(world.backend.context.run.death_seconds)
    assert beat(second)["directive"] == "work", "the first has ended: the node has moved"
    assert beat(first)["directive"] == "stop"


def test_heartbeats_of_two_machines_in_one_batch_differ(world: World) -> None:
    account = world.member(1).account.address
    beats = [Heartbeat(policy_version=0, instance=digit * 32) for digit in "12"]
    one, two = heartbeats(world.backend, [(account, beat) for beat in beats])
    assert [one.directive, two.directive] == ["work", "stop"]


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.parametrize("other", ["issues leases", "takes files in", "rejects a file"])
@pytest.mark.parametrize("waits", ["expiry", "the indexer"])
def test_what_ends_several_leases_waits_for_other_writers_without_a_deadlock(
    world: World, empty_postgres: str, waits: str, other: str
) -> None:
    """Issuing leases writes rows of nodes in the order of the requests, here against the order of
    the leases that end; files are taken in by the order of their leases; a verdict locks a node,
    then ends that node's leases."""
    session = world.member(1)
    row = leases.new_row(Digest("0x" + "00" * 32), world.lease(session), now=world.clock())
    row = replace(row, deadline=int(world.clock()) - 1)
    store = open_store(empty_postgres)
    store.migrate()
    backend = replace(world.backend, store=store)
    accounts = sorted(signer(number).address for number in (1, 2, 3))
    digests = [Digest("0x" + f"{number:02x}" * 32) for number in (3, 2, 1)]
    left: list[EventRow] = []
    with store.begin() as connection:
        for account, digest in zip(accounts, digests, strict=True):
            nodes.admit(
                connection, account, now=world.clock(), status="active", runtime="process",
                hardware=Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=()),
            )  # fmt: skip
            one = replace(row, digest=digest, node=account, lease_index=digests.index(digest))
            leases.add(connection, [one])
            args = {"pool": backend.context.pool, "node": account}
            place: dict[str, Any] = {
                "block_hash": digest, "log_index": 0, "block": 1, "block_time": 1,
                "tx_hash": digest,
            }  # fmt: skip
            left.append(chain.event_row(name="NodeLeft", args=args, **place))
            chain.add_event(connection, **place, name="NodeLeft", args=args)

    order = -1 if other == "issues leases" else 1

    def read_leaving() -> None:
        with store.begin() as connection:
            derive(connection, backend.context, left[::order], world.clock())

    ending = threading.Thread(target=LifeTicks(backend).tick if waits == "expiry" else read_leaving)
    try:
        with store.begin() as connection:
            if other == "issues leases":
                lock(connection, "leases")
                nodes.set_class(connection, accounts[0], 2)
            elif other == "takes files in":
                leases.lock_rows(connection, digests[2:])
            else:
                nodes.lock_row(connection, accounts[2])
            ending.start()
            blocked = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            for _ in range(2000):
                if connection.execute(blocked).scalar_one():
                    break
                threading.Event().wait(0.01)
            if other == "issues leases":
                nodes.set_class(connection, accounts[2], 2)
            elif other == "takes files in":
                leases.lock_rows(connection, digests[:1])
            else:
                apply_node_event(
                    connection, backend.context, accounts[2], "rejected", world.clock()
                )
        ending.join(20)
        with store.read() as connection:
            after = leases.those(connection, digests)
        assert {one.status for one in after.values()} == {"expired"}
    finally:
        if ending.is_alive():
            ending.join(20)
        store.close()


@pytest.mark.postgres
def test_a_file_that_is_taken_in_while_its_node_is_quarantined_keeps_its_lease(
    world: World, empty_postgres: str
) -> None:
    """Another file of the node is rejected meanwhile: that ends its open leases only."""
    lease = world.lease(world.member(1))
    row = leases.new_row(Digest("0x" + "01" * 32), lease, now=world.clock())
    store = open_store(empty_postgres)
    store.migrate()
    with store.begin() as connection:
        nodes.admit(
            connection, row.node, now=world.clock(), status="active", runtime="process",
            hardware=Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=()),
        )  # fmt: skip
        leases.add(connection, [row])

    def reject() -> None:
        with store.begin() as other:
            apply_node_event(other, world.backend.context, row.node, "rejected", world.clock())

    rejecting = threading.Thread(target=reject)
    try:
        with store.begin() as connection:
            leases.lock_rows(connection, [row.digest])
            leases.set_statuses(connection, [replace(row, status="submitted")])
            rejecting.start()
            blocked = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while rejecting.is_alive() and not connection.execute(blocked).scalar_one():
                rejecting.join(0.01)
        rejecting.join(20)
        with store.read() as connection:
            after = leases.get(connection, row.digest)
            node = nodes.get(connection, row.node)
        assert after is not None
        assert node is not None
        assert (after.status, node.status) == ("submitted", "quarantined")
    finally:
        rejecting.join(20)
        store.close()
