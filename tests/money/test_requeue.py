"""Failed intents of the manager and of validators that are wanted still are tried again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import World
from money_kit import MANAGER, TRAINER, VALIDATOR, Shop, key, open_shop

from prime_core.checkpoint import PolicyStatement
from prime_core.encoding import sha256
from prime_core.ids import Digest
from prime_core.verdict import Reason
from prime_orchestrator.manager.intents import IntentKind, queue_intent
from prime_orchestrator.manager.requeue import REST_SECONDS, requeue_wanted
from prime_orchestrator.store import chain, intents, nodes, schema

NODE = key(10)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = open_shop(tmp_path)
    made.publish(0)
    made.admit(NODE)
    yield made
    made.store.close()


def failed(shop: Shop, kind: IntentKind, name: str, payload: dict[str, object]) -> str:
    """An intent of the manager that has just failed."""
    with shop.store.begin() as connection:
        intent = queue_intent(
            connection,
            lane=MANAGER.address,
            kind=kind,
            key=name,
            payload=payload,
            now=shop.now(),
        )
        intents.update(connection, intent, "failed", now=shop.now(), error="Spurious()")
    return intent


def status(shop: Shop, intent: str) -> str:
    with shop.store.read() as connection:
        row = intents.get(connection, intent)
    assert row is not None
    return row.status


def requeue(shop: Shop) -> int:
    return requeue_wanted(shop.store, MANAGER.address, shop.now)


def test_a_failed_intent_rests_first_and_is_requeued_once(shop: Shop) -> None:
    intent = failed(shop, "eject", "a", {"node": NODE.address})
    assert requeue(shop) == 0
    shop.now.time += REST_SECONDS
    assert requeue_wanted(shop.store, VALIDATOR.address, shop.now) == 0, "another's lane"
    assert requeue(shop) == 1
    assert requeue(shop) == 0
    assert status(shop, intent) == "queued"


def test_what_has_happened_meanwhile_is_not_tried_again(shop: Shop) -> None:
    root = sha256(b"root")
    deadline = int(shop.now()) + 5  # over before the rest is
    done = [
        failed(shop, "eject", "a", {"node": NODE.address}),
        failed(shop, "join", "a", {"invite": {"node": NODE.address, "deadline": deadline}}),
        failed(shop, "root", root, {"root": root}),
        failed(shop, "policy", "0", {"statement": {"version": 0}}),
        failed(shop, "execute", root, {"submission_digest": root}),
    ]
    with shop.store.begin() as connection:
        nodes.set_status(connection, NODE.address, "ejected", last_heartbeat=shop.now())
        connection.execute(
            sa.insert(schema.roots).values(
                root=root, leaves_object=root, count=1, created_at=0.0, chain_seq=1
            )
        )
        chain.add_event(
            connection,
            block_hash=root,
            log_index=0,
            block=1,
            block_time=1,
            tx_hash=root,
            name="PolicyPublished",
            args={"pool": 1, "version": 0, "manifest_digest": root},
        )
    shop.now.time += REST_SECONDS
    assert requeue(shop) == 0
    assert {status(shop, intent) for intent in done} == {"failed"}


def test_an_admitted_node_s_join_is_tried_until_its_invite_ends(shop: Shop) -> None:
    shop.admit(key(11), "admitted")
    deadline = int(shop.now() + 1.5 * REST_SECONDS)
    intent = failed(shop, "join", "b", {"invite": {"node": key(11).address, "deadline": deadline}})
    shop.now.time += REST_SECONDS
    assert requeue(shop) == 1
    with shop.store.begin() as connection:
        intents.update(connection, intent, "failed", now=shop.now())
    shop.now.time += REST_SECONDS
    assert requeue(shop) == 0


# -- on a real chain ------------------------------------------------------------------------------


def spoil(world: World, prefix: str) -> None:
    """The queued intents whose id begins so fail, as by a spurious revert."""
    table = schema.intents
    with world.shop.store.begin() as connection:
        done = connection.execute(
            sa.update(table)
            .where(table.c.id.startswith(prefix), table.c.status == "queued")
            .values(status="failed", error="Spurious()", updated_at=world.shop.now())
        )
    assert done.rowcount == 1


@needs_anvil
def test_policies_and_roots_come_through_after_a_revert(world: World) -> None:
    shop = world.shop
    world.join(NODE, key(12))
    first = _queue_policy(shop, 0)
    second = _queue_policy(shop, 1)
    spoil(world, first)
    world.ticks(2)
    assert status(shop, first) == "failed"
    assert status(shop, second) == "failed", "versions rise by one: the contract refuses it"

    shop.judge(shop.submit(NODE), Reason.NONE)
    world.forward(shop.context.run.root_seconds)
    world.loops.money_tick()
    spoil(world, "root:")

    for _ in range(2):  # the second policy's turn comes after the first is on chain
        shop.now.time += REST_SECONDS + 1
        world.ticks(3)
    assert (status(shop, first), status(shop, second)) == ("confirmed", "confirmed")
    with shop.store.read() as connection:
        assert connection.execute(sa.select(schema.roots.c.chain_seq)).scalar_one() is not None


def _queue_policy(shop: Shop, version: int) -> str:
    """A published policy with its intent, as prime_orchestrator.api.publishing leaves them."""
    manifest = shop.publish(version).manifest
    statement = PolicyStatement(pool=1, version=version, manifest_digest=Digest(manifest.digest()))
    with shop.store.begin() as connection:
        return queue_intent(
            connection,
            lane=MANAGER.address,
            kind="policy",
            key=str(version),
            payload={
                "statement": statement.model_dump(mode="json"),
                "signature": TRAINER.sign(statement, shop.context.domain(statement)),
            },
            now=shop.now(),
        )
