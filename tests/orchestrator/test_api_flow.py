"""From a grant to a receipt over HTTP, and many nodes at once, on both databases."""

from __future__ import annotations

import threading

import pytest
from orchestrator_world import MakeWorld, World

from prime_core.messages import LeaseRequest
from prime_core.task import SignedLease
from prime_orchestrator.api import leasing
from prime_orchestrator.store import Store


@pytest.fixture
def store(either_store: Store) -> Store:
    """The worlds of this file stand on each kind of store in turn."""
    return either_store


def test_a_member_takes_a_lease_and_hands_in_its_file(world: World) -> None:
    node = world.member(1)
    digest = world.hand_in(node)
    info = world.http.get(f"/v1/submissions/{digest}").json()
    assert info["status"] == "submitted"
    assert info["node"] == node.account.address
    assert world.http.get("/v1/status").json()["files"] == {"submitted": 1}
    assert world.http.get("/metrics").status_code == 200
    lease = world.lease(node)  # the next one
    assert lease.lease.index == 1


@pytest.mark.slow
def test_nodes_that_ask_at_once_get_leases_of_their_own_and_no_more_than_the_lead(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.publish(0)
    accounts = [world.member(number).account.address for number in range(1, 13)]
    given: list[SignedLease] = []
    failures: list[BaseException] = []

    def ask(account: str) -> None:
        try:
            for _ in range(2):  # the second time the same one comes back
                answer = leasing.lease(world.backend, account, LeaseRequest(policy_version=0))  # type: ignore[arg-type]
                if answer.lease is not None:
                    given.append(answer.lease)
        except BaseException as error:  # reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(account,)) for account in accounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    leases = {(signed.lease.step, signed.lease.index): signed for signed in given}
    assert len({signed.lease.node for signed in leases.values()}) == len(leases) == 9
    assert all(given.count(signed) == 2 for signed in leases.values())


def test_openapi_names_every_body(world: World) -> None:
    document = world.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in document["paths"].values():
        for operation in path.values():
            if name := operation.get("x-body-model"):
                assert name in schemas
    assert "/v1/leases/{digest}/upload" in document["paths"]
