"""Anyone's rebuild of reward roots, and leaves that nodes post themselves, on a real chain."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import GUARDIAN, World
from money_kit import RUN, TOKEN
from walk_kit import HONEST, LIAR, OWNER, Published, one, rebuild_root, settled

from orchestrator.indexer import derive_root, run_indexer_tick
from orchestrator.settlement import counted_units, settle_epochs
from orchestrator.store import chain, leases, schema
from orchestrator.store.submissions import SubmissionRow
from protocol.chain.deployment import DEMO_PERIODS
from protocol.chain.history import read_events
from protocol.core.errors import UntrustedError
from protocol.core.ids import ZERO_DIGEST
from protocol.core.verdict import Reason
from protocol.verification.explain import ROOTED_LATE, explain
from protocol.verification.rewards import Rebuilder

pytestmark = needs_anvil


def test_rebuild_follows_holds_forfeits_and_restorations_over_epochs(members: World) -> None:
    world, shop = members, members.shop
    world.start_of_an_epoch()
    shop.judge(shop.submit(HONEST))
    kept, bad = shop.submit(LIAR), shop.submit(LIAR)
    shop.judge(kept)
    shop.judge(bad, Reason.WRONG_SKETCH)
    shop.submit(HONEST)  # never judged
    world.until_rooted()
    number = one(world, schema.slashes)["proposal_id"]
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    # still open when the epoch is settled: the validator does not execute it now
    world.loops.chain_tick()
    world.loops.money_tick()
    for _ in range(2):  # its facts become final, then it is posted
        world.anvil.mine(2)
        world.loops.chain_tick()
    first = settled(world)
    states = sorted(f.state for f in first.files)
    assert states == ["held", "paid", "rejected", "unjudged"]
    assert [s.state for s in first.slashes] == ["open"]
    assert rebuild_root(world, first.epoch).match

    world.send(GUARDIAN, world.contracts.slasher.cancel(number))
    world.loops.chain_tick()
    world.forward(RUN.epoch_seconds)
    world.ticks()
    second = settled(world)
    assert second.previous == first.digest()
    assert [(f.submission_digest, f.state) for f in second.files] == [(kept.digest, "paid")]
    assert second.amounts() == {
        HONEST.address: 20 * TOKEN // 1000,
        LIAR.address: 20 * TOKEN // 1000,
    }
    rebuilt = rebuild_root(world, second.epoch)
    assert rebuilt.match, rebuilt.problems


def rooted_late(world: World, patch: pytest.MonkeyPatch) -> tuple[SubmissionRow, SubmissionRow]:
    """Two accepted files, settled; the first was rooted when a slash of it would be refused, as by
    a root that waited long for its block."""
    patch.setattr("orchestrator.roots.answered_for", lambda **_: True)
    shop = world.shop
    late = shop.submit(HONEST)
    shop.judge(late)
    until = late.signed().submission.valid_until + DEMO_PERIODS.accountable
    world.forward(until + 1 - int(shop.now()))  # the manager slept
    good = shop.submit(LIAR)
    shop.judge(good)
    world.until_rooted()
    assert one(world, schema.roots)["posted_at"] > until
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    return late, good


def test_work_rooted_too_late_to_be_answered_for_is_void_in_settlement_and_rebuild(
    members: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, good = rooted_late(members, monkeypatch)
    found = settled(members)
    states = {f.submission_digest: f.state for f in found.files}
    assert states == {late.digest: "void", good.digest: "paid"}
    assert found.amounts() == {LIAR.address: 20 * TOKEN // 1000}
    rebuilt = rebuild_root(members, found.epoch)
    assert rebuilt.match, rebuilt.problems
    events = read_events(members.client, members.deployment)
    books = Rebuilder(events, members.deployment, 1, members.shop.context.run, Published(members))
    (told,) = explain(books, HONEST.address).files
    assert (told.state, told.amount, told.why) == ("void", 0, ROOTED_LATE)
    with members.shop.store.read() as connection:
        assert counted_units(connection, HONEST.address) == 0, "it no longer shows as earned"
        assert counted_units(connection, LIAR.address) == 20


def test_rebuild_finds_a_manager_that_pays_work_rooted_too_late(
    members: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.settlement.answered_for", lambda **_: True)
    late, _ = rooted_late(members, monkeypatch)
    found = settled(members)
    assert found.amounts()[HONEST.address] == 20 * TOKEN // 1000
    rebuilt = rebuild_root(members, found.epoch)
    assert not rebuilt.match
    states = {f.submission_digest: f.state for f in rebuilt.settlement.files}
    assert states[late.digest] == "void"


def test_rebuild_finds_a_root_that_promises_more_than_was_earned(members: World) -> None:
    world, shop = members, members.shop
    shop.judge(shop.submit(HONEST))
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    run_indexer_tick(shop.store, shop.context, world.loops.watcher, shop.now)
    with shop.store.begin() as connection:
        connection.execute(sa.update(schema.submissions).values(units=1_000_000))
    world.ticks()
    greedy = settled(world)
    assert greedy.amounts() == {HONEST.address: 1_000_000 * TOKEN // 1000}
    rebuilt = rebuild_root(world, greedy.epoch)
    assert not rebuilt.match
    assert rebuilt.settlement.amounts() == {HONEST.address: 20 * TOKEN // 1000}


def test_rebuild_refuses_a_settlement_that_leaves_a_file_out(members: World) -> None:
    world, shop = members, members.shop
    shop.judge(shop.submit(HONEST))
    left_out = shop.submit(HONEST)
    shop.judge(left_out)
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    run_indexer_tick(shop.store, shop.context, world.loops.watcher, shop.now)
    with shop.store.begin() as connection:
        connection.execute(
            sa.update(schema.submissions)
            .where(schema.submissions.c.digest == left_out.digest)
            .values(root_id=None)
        )
    world.loops.chain_tick()
    settle_epochs(shop.store, shop.objects, shop.context, shop.now)
    for _ in range(2):  # its facts become final, then it is posted
        world.anvil.mine(2)
        world.loops.chain_tick()
    with pytest.raises(UntrustedError, match="leaves out"):
        rebuild_root(world, settled(world).epoch)


def post_own_leaf(world: World, row: SubmissionRow) -> None:
    """The node roots its own submission, as the contract lets it an epoch after the receipt."""
    with world.shop.store.read() as connection:
        lease = leases.get(connection, row.lease_digest)
    assert lease is not None
    promise, claim, receipt = lease.signed(), row.signed(), row.receipt_answer()
    call = world.contracts.work.post_leaf(
        promise.lease,
        promise.signature,
        claim.submission,
        claim.signature,
        receipt.receipt,
        receipt.signature,
    )
    world.send(OWNER, call)


def test_a_leaf_that_its_node_posted_is_paid_once_and_rebuilt(members: World) -> None:
    world, shop = members, members.shop
    world.start_of_an_epoch()
    row = shop.submit(HONEST)
    shop.judge(row)
    world.forward(RUN.epoch_seconds + 1)
    post_own_leaf(world, row)  # the manager slept all the while
    world.anvil.mine(1)
    world.loops.chain_tick()
    root = one(world, schema.roots)
    assert (root["root"], root["count"], root["leaves_object"]) == (row.digest, 1, ZERO_DIGEST)
    world.ticks()
    assert one(world, schema.roots)["chain_seq"] == 1, "the manager roots it no more"
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    rebuilt = rebuild_root(world, settled(world).epoch)
    assert rebuilt.problems == ()
    assert rebuilt.settlement.amounts() == {HONEST.address: 20 * TOKEN // 1000}


def test_a_leaf_posted_by_node_and_manager_is_paid_by_the_managers_root_alone(
    members: World,
) -> None:
    world, shop = members, members.shop
    world.start_of_an_epoch()
    twice, other = shop.submit(HONEST), shop.submit(HONEST)
    shop.judge(twice)
    shop.judge(other)
    world.forward(RUN.epoch_seconds + 1)
    world.loops.money_tick()  # taken into a root that is not sent yet
    post_own_leaf(world, twice)
    world.ticks()
    assert one(world, schema.roots)["count"] == 2
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    rebuilt = rebuild_root(world, settled(world).epoch)
    assert rebuilt.problems == ()
    assert rebuilt.settlement.amounts() == {HONEST.address: 2 * 20 * TOKEN // 1000}


def test_a_retracted_leaf_of_a_node_is_rooted_by_the_manager(members: World) -> None:
    world, shop = members, members.shop
    row = shop.submit(HONEST)
    with shop.store.begin() as connection:
        chain.add_event(
            connection,
            block_hash=row.digest,
            log_index=0,
            block=10**6,
            block_time=10**6,
            tx_hash=row.digest,
            name="RootPosted",
            args={
                "pool": 1, "seq": 9, "root": row.digest, "count": 1, "epoch": 1,
                "leaves_object": ZERO_DIGEST,
            },
        )  # fmt: skip
        derive_root(connection, row.digest)
    assert shop.row(row.digest).root_id is not None
    with shop.store.begin() as connection:
        chain.retract(connection, 10**6)
        derive_root(connection, row.digest)
    assert shop.row(row.digest).root_id is None
    world.until_rooted()
    assert one(world, schema.roots)["leaves_object"] != ZERO_DIGEST
