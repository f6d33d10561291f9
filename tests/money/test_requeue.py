"""Failed intents of the manager and of validators that are wanted still are tried again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import World
from money_kit import NODE, ManagerSide, key

from prime_core.encoding import sha256
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.storage.base import put_object
from prime_core.verdict import Reason
from prime_orchestrator.manager import settlement
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME, settle_epochs
from prime_orchestrator.manager.transactions import REST_SECONDS, requeue_wanted
from prime_orchestrator.store import chain, intents, meta, nodes, rewards, schema
from prime_orchestrator.store.intents import IntentKind, queue_intent


def failed(mgr: ManagerSide, kind: IntentKind, name: str, payload: dict[str, object]) -> str:
    """An intent of the manager that has just failed."""
    with mgr.store.begin() as connection:
        intent = queue_intent(
            connection,
            kind=kind,
            key=name,
            payload=payload,
            now=mgr.now(),
        )
        intents.fail(connection, intent, "Spurious()", now=mgr.now())
    return intent


def status(mgr: ManagerSide, intent: str) -> str:
    with mgr.store.read() as connection:
        row = intents.get(connection, intent)
    assert row is not None
    return row.status


def requeue(mgr: ManagerSide) -> int:
    return requeue_wanted(mgr.store, mgr.context, mgr.now)


def test_a_failed_intent_rests_first_and_is_requeued_once(mgr: ManagerSide) -> None:
    intent = failed(mgr, "eject", "a", {"node": NODE.address})
    assert requeue(mgr) == 0
    mgr.now.time += REST_SECONDS
    assert requeue(mgr) == 1
    assert requeue(mgr) == 0
    assert status(mgr, intent) == "waiting"


def test_what_has_happened_meanwhile_is_not_tried_again(mgr: ManagerSide) -> None:
    root = sha256(b"root")
    deadline = int(mgr.now()) + 5  # over before the rest is
    done = [
        failed(mgr, "eject", "a", {"node": NODE.address}),
        failed(mgr, "join", "a", {"invite": {"node": NODE.address, "deadline": deadline}}),
        failed(mgr, "root", root, {"root": root}),
        failed(mgr, "policy", "0", {"statement": {"version": 0}}),
        failed(mgr, "execute", root, {"submission_digest": root}),
    ]
    with mgr.store.begin() as connection:
        nodes.set_status(connection, NODE.address, "ejected", last_heartbeat=mgr.now())
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
    mgr.now.time += REST_SECONDS
    assert requeue(mgr) == 0
    assert {status(mgr, intent) for intent in done} == {"failed"}


def test_an_admitted_node_s_join_is_tried_until_its_invite_ends(mgr: ManagerSide) -> None:
    mgr.admit(key(11), "admitted")
    deadline = int(mgr.now() + 1.5 * REST_SECONDS)
    intent = failed(mgr, "join", "b", {"invite": {"node": key(11).address, "deadline": deadline}})
    mgr.now.time += REST_SECONDS
    assert requeue(mgr) == 1
    with mgr.store.begin() as connection:
        intents.fail(connection, intent, "again", now=mgr.now())
    mgr.now.time += REST_SECONDS
    assert requeue(mgr) == 0


# -- on a real chain ------------------------------------------------------------------------------


def spoil(world: World, prefix: str) -> None:
    """The waiting intents whose id begins so fail, as by a spurious revert."""
    table = schema.intents
    with world.mgr.store.begin() as connection:
        done = connection.execute(
            sa.update(table)
            .where(table.c.id.startswith(prefix), table.c.status == "waiting")
            .values(status="failed", note="Spurious()", updated_at=world.mgr.now())
        )
    assert done.rowcount == 1


@needs_anvil
def test_policies_and_roots_come_through_after_a_revert(world: World) -> None:
    mgr = world.mgr
    world.join(NODE, key(12))
    first = _queue_policy(mgr, 0)
    second = _queue_policy(mgr, 1)
    spoil(world, first)
    world.ticks(2)
    assert status(mgr, first) == "failed"
    assert status(mgr, second) == "failed", "versions rise by one: the contract refuses it"

    mgr.judge(mgr.submit(NODE), Reason.NONE)
    world.forward(mgr.context.run.root_seconds)
    world.loops.money_tick()
    spoil(world, "root:")

    for _ in range(2):  # the second policy's turn comes after the first is on chain
        mgr.now.time += REST_SECONDS + 1
        world.ticks(3)
    assert (status(mgr, first), status(mgr, second)) == ("confirmed", "confirmed")
    with mgr.store.read() as connection:
        assert connection.execute(sa.select(schema.roots.c.chain_seq)).scalar_one() is not None


def _queue_policy(mgr: ManagerSide, version: int) -> str:
    """A published policy with its intent, as prime_orchestrator.api.publishing leaves them."""
    signed = mgr.publish(version)
    with mgr.store.begin() as connection:
        return queue_intent(
            connection,
            kind="policy",
            key=str(version),
            payload={
                "statement": signed.manifest.statement().model_dump(mode="json"),
                "signature": signed.signature,
            },
            now=mgr.now(),
        )


def test_a_settlement_that_a_table_on_chain_overtakes_while_it_is_made_is_dropped(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, table = mgr.context.run, schema.roots
    mgr.judge(mgr.submit(NODE), Reason.NONE)
    mgr.now.time += run.root_seconds
    (root,) = post_roots(mgr.store, mgr.objects, mgr.context, mgr.now)
    posted_at = int(mgr.now())
    epoch = posted_at // run.epoch_seconds
    with mgr.store.begin() as connection:
        posted = {"chain_seq": 1, "epoch": epoch, "block": 1, "posted_at": posted_at}
        connection.execute(sa.update(table).where(table.c.root == root).values(**posted))
        end = (epoch + 2) * run.epoch_seconds + run.validity_seconds
        for place, value in ((CHAIN_BLOCK, 9), (CHAIN_TIME, end)):
            meta.put(connection, place, str(value))
    theirs = rewards.RewardRootRow(epoch, Digest("r"), "1", Digest("o"), 0.0, claimable_at=1)
    settle = settlement._settle

    def overtaken(*arguments: Any) -> Any:
        found = settle(*arguments)
        with mgr.store.begin() as connection:  # as the indexer does, in a thread of its own
            rewards.put_root(connection, theirs)
        return found

    monkeypatch.setattr(settlement, "_settle", overtaken)
    assert settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now) is None
    with mgr.store.read() as connection:
        assert rewards.newest_root(connection) == theirs
        assert intents.waiting_of(connection, "reward_root") == []


def test_a_reward_root_below_a_table_that_others_posted_is_settled_again(mgr: ManagerSide) -> None:
    table = schema.reward_roots
    for total, kept in ((110, True), (90, False)):
        with mgr.store.begin() as connection:
            connection.execute(sa.delete(table))
            for epoch, promised, claimable_at in ((4, 100, 1), (5, total, None)):
                connection.execute(
                    sa.insert(table).values(
                        epoch=epoch, root="r", cumulative_total=str(promised), object=f"o{epoch}",
                        created_at=0.0, claimable_at=claimable_at,
                    )
                )  # fmt: skip
        assert settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now) is None
        with mgr.store.read() as connection:
            epochs = connection.execute(sa.select(table.c.epoch).order_by(table.c.epoch)).scalars()
            assert list(epochs) == ([4, 5] if kept else [4])

    # A root whose base was disabled while it waits, or failed for lack of funds, is not posted.
    for ended in (False, True):
        with mgr.store.begin() as connection:
            payload = {"previous": "o4"}
            name = queue_intent(connection, kind="reward_root", key="5:o5", payload=payload, now=0)
            row = rewards.RewardRootRow(5, Digest("r"), "110", Digest("o5"), 0.0)
            rewards.add_root(connection, row)
            if ended:
                intents.fail(connection, name, "InsufficientFunds()", now=0)
        for standing in (True, False):
            with mgr.store.begin() as connection:
                if not standing:
                    rewards.drop_root(connection, 4)
            assert settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now) is None
            with mgr.store.read() as connection:
                assert (rewards.root_of(connection, 5) is not None) == standing
                found = intents.get(connection, name)
            assert found is None or standing or found.status == "failed"
        with mgr.store.begin() as connection:
            connection.execute(sa.delete(schema.intents))
            rewards.put_root(connection, replace(row, epoch=4, object=Digest("o4"), claimable_at=1))

    # Its object may be missing, or be none: that is not a defect of the process.
    junk = put_object(mgr.objects, b"junk")
    for name, why in ((sha256(b"unpublished"), "no object"), (junk, "is not a settlement")):
        with mgr.store.begin() as connection:
            connection.execute(sa.update(table).values(object=name))
            for place, value in ((CHAIN_BLOCK, 9), (CHAIN_TIME, int(mgr.now()))):
                meta.put(connection, place, str(value))
        with pytest.raises(UnavailableError, match=why):
            settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now)
