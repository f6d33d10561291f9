"""Money on a real chain: root → slash → ejected; epoch → reward root → claim; reorg; RPC down."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from chain_kit import DEPLOYER, FUNDS, GUARDIAN, STAKE, TREASURY, World, make_world
from money_kit import MANAGER, RUN, TOKEN, VALIDATOR, key

from devnet.chain import find_anvil
from orchestrator.depth import Depths, Staked
from orchestrator.indexer import derive_root, run_indexer_tick
from orchestrator.outbox import run_outbox_tick
from orchestrator.requeue import forget_unsent
from orchestrator.settlement import newest_settlement, settle_epochs
from orchestrator.slashing import RETRY_SECONDS
from orchestrator.store import chain, intents, leases, schema
from orchestrator.store.submissions import SubmissionRow
from protocol.chain.history import read_events
from protocol.core.errors import UnavailableError, UntrustedError, UserError
from protocol.core.ids import ZERO_DIGEST, Digest
from protocol.core.settlement import Settlement
from protocol.core.verdict import Reason
from protocol.storage.base import digest_key
from protocol.verification.rewards import Rebuilt, rebuild

HONEST, LIAR = key(10), key(11)
OWNER, OTHER = key(12), key(13)


def _anvil_is_here() -> bool:
    try:
        find_anvil()
    except UserError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _anvil_is_here(), reason="needs anvil: make setup")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path)
    yield made
    made.close()


@pytest.fixture
def members(world: World) -> World:
    """A pool with an honest node and a liar, and policy 0."""
    world.join(HONEST, OWNER)
    world.join(LIAR, OTHER)
    world.shop.publish(0)
    world.ticks(2)
    assert world.shop.node_status(HONEST.address) == "active"
    assert world.shop.node_status(LIAR.address) == "active"
    return world


def one(world: World, table: sa.Table) -> sa.RowMapping:
    with world.shop.store.read() as connection:
        return connection.execute(sa.select(table)).mappings().one()


def amounts(world: World) -> dict[str, str]:
    with world.shop.store.read() as connection:
        rows = connection.execute(
            sa.select(schema.credits.c.submission_digest, schema.credits.c.status)
        ).all()
    return {digest: status for digest, status in rows}  # noqa: C416


def until(world: World, holds: Callable[[], bool]) -> None:
    """Ticks until `holds`; an endpoint that is not back yet is asked again."""
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline
        with contextlib.suppress(UnavailableError):
            world.ticks(1)
        world.shop.now.time += 1  # as the block that each tick mines moves the chain's clock
        time.sleep(0.05)


class Published:
    """The object store as anyone reads it."""

    def __init__(self, world: World) -> None:
        self._objects = world.shop.objects

    def get_object(self, digest: Digest, limit: int) -> bytes:
        return self._objects.get(digest_key(digest), limit)


def rebuild_root(world: World, epoch: int) -> Rebuilt:
    events = read_events(world.client, world.deployment)
    return rebuild(events, world.deployment, 1, world.shop.context.run, Published(world), epoch)


def settled(world: World) -> Settlement:
    with world.shop.store.read() as connection:
        found = newest_settlement(connection, world.shop.objects)
    assert found is not None
    return found


def test_a_rejected_file_is_rooted_proposed_executed_and_its_node_ejected(members: World) -> None:
    world, shop = members, members.shop
    good, earned, bad = shop.submit(HONEST), shop.submit(LIAR), shop.submit(LIAR)
    shop.judge(good)
    shop.judge(earned)
    shop.judge(bad, Reason.WRONG_ACTIVATIONS)
    assert shop.node_status(LIAR.address) == "quarantined"

    world.ticks()
    root = one(world, schema.roots)
    assert root["chain_seq"] is not None
    assert root["posted_at"] > 0
    slash = one(world, schema.slashes)
    assert slash["status"] == "proposed"
    assert slash["executable_at"] is not None
    proposal = world.contracts.slasher.proposal(slash["proposal_id"])
    assert proposal is not None
    assert world.contracts.vault.pending_slash(OTHER.address) == RUN.slash_amount
    assert amounts(world) == {good.digest: "earned", earned.digest: "held"}

    world.ticks(1)
    assert one(world, schema.slashes)["status"] == "proposed", "the window is still open"
    world.forward(world.deployment.periods.slash_window + 1)
    world.ticks()
    slash = one(world, schema.slashes)
    assert slash["status"] == "executed"
    assert slash["execute_tx"] is not None
    assert shop.node_status(LIAR.address) == "ejected"
    assert shop.node_status(HONEST.address) == "active"
    assert world.contracts.pools.class_of(1, LIAR.address) == 0
    assert world.contracts.vault.active(OTHER.address) == STAKE - RUN.slash_amount
    assert world.contracts.vault.active(OWNER.address) == STAKE
    assert world.contracts.token.balance_of(TREASURY.address) == RUN.slash_amount
    assert amounts(world) == {good.digest: "earned", earned.digest: "forfeited"}


def test_a_cancelled_slash_restores_credits_and_node(members: World) -> None:
    world, shop = members, members.shop
    earned, bad = shop.submit(LIAR), shop.submit(LIAR)
    shop.judge(earned)
    shop.judge(bad, Reason.WRONG_SKETCH)
    world.until_rooted()
    assert amounts(world) == {earned.digest: "held"}
    number = one(world, schema.slashes)["proposal_id"]
    world.send(GUARDIAN, world.contracts.slasher.cancel(number))
    world.ticks()
    assert one(world, schema.slashes)["status"] == "cancelled"
    assert amounts(world) == {earned.digest: "earned"}
    assert shop.node_status(LIAR.address) == "active"


def test_an_epochs_reward_root_is_posted_and_claimed_to_the_unit(members: World) -> None:
    world, shop = members, members.shop
    rewards = world.contracts.rewards
    for _ in range(2):
        shop.judge(shop.submit(HONEST))
    shop.judge(shop.submit(LIAR), Reason.MALFORMED)
    world.ticks()
    epoch = one(world, schema.roots)["epoch"]
    with shop.store.read() as connection:
        assert newest_settlement(connection, shop.objects) is None

    world.forward(RUN.validity_seconds)
    world.ticks(1)
    world.forward(RUN.epoch_seconds)
    world.ticks()
    settlement = settled(world)
    assert settlement.epoch == epoch
    due = 2 * 20 * TOKEN // 1000
    assert settlement.amounts() == {HONEST.address: due}
    assert [f.state for f in settlement.files].count("paid") == 2
    assert rewards.funds(1).reserved == due
    on_chain = rewards.reward_root(1, settlement.epoch)
    assert on_chain is not None
    assert on_chain.root == settlement.root()

    amount, proof = settlement.proof(HONEST.address)
    world.forward(world.deployment.periods.reward_delay + 1)
    before = world.contracts.token.balance_of(OWNER.address)
    claim = rewards.claim(1, settlement.epoch, HONEST.address, amount, proof)
    world.send(key(30), claim)
    assert world.contracts.token.balance_of(OWNER.address) - before == due
    assert rewards.claimed(1, HONEST.address) == due
    rebuilt = rebuild_root(world, settlement.epoch)
    assert rebuilt.match, rebuilt.problems
    assert rebuilt.settlement.amounts() == {HONEST.address: due}

    # nothing new is owed: no further root
    world.forward(3 * RUN.epoch_seconds)
    world.ticks()
    assert settled(world) == settlement


def test_work_goes_on_while_the_rpc_is_down_and_is_sent_later(members: World) -> None:
    world, shop = members, members.shop
    files = [shop.submit(HONEST), shop.submit(HONEST), shop.submit(LIAR)]
    world.anvil.stop()
    for file in files[:2]:
        shop.judge(file)
    shop.judge(files[2], Reason.WRONG_SKETCH)
    world.loops.money_tick()
    assert world.loops.batch_tick() == [0], "batches are sealed without the chain"
    with pytest.raises(UnavailableError):
        world.loops.chain_tick()
    with shop.store.read() as connection:
        waiting = intents.pending(connection, MANAGER.address, ("sent", "queued"))
    assert [row.kind for row in waiting] == ["root"], "handed to the sender's journal, no more"
    assert one(world, schema.roots)["chain_seq"] is None
    assert shop.node_status(LIAR.address) == "quarantined"

    world.anvil.start()
    until(world, lambda: one(world, schema.slashes)["status"] == "proposed")
    assert one(world, schema.roots)["chain_seq"] is not None


def test_a_reorganisation_takes_back_roots_slashes_and_ejections(members: World) -> None:
    world, shop = members, members.shop
    earned, bad = shop.submit(LIAR), shop.submit(LIAR)
    shop.judge(earned)
    shop.judge(bad, Reason.WRONG_PROMPTS)
    revert = world.anvil.snapshot()
    world.until_rooted()
    world.forward(world.deployment.periods.slash_window + 1)
    world.ticks()
    assert shop.node_status(LIAR.address) == "ejected"
    assert one(world, schema.slashes)["status"] == "executed"
    assert amounts(world) == {earned.digest: "forfeited"}
    height = world.client.block_number()

    revert()
    world.anvil.mine(height - world.client.block_number() + 5)
    # the indexer alone, before any sender had its turn
    assert run_indexer_tick(shop.store, shop.context, world.loops.watcher, shop.now) == []
    assert one(world, schema.roots)["chain_seq"] is None
    slash = one(world, schema.slashes)
    assert (slash["status"], slash["proposal_id"]) == ("queued", None)
    assert shop.node_status(LIAR.address) == "quarantined"
    assert amounts(world) == {earned.digest: "held"}

    # the senders find their transactions gone and send them again
    until(world, lambda: one(world, schema.slashes)["status"] == "proposed")
    assert one(world, schema.roots)["chain_seq"] is not None
    world.forward(world.deployment.periods.slash_window + 1)
    until(world, lambda: one(world, schema.slashes)["status"] == "executed")
    assert shop.node_status(LIAR.address) == "ejected"
    assert amounts(world) == {earned.digest: "forfeited"}


def test_a_slash_that_came_too_late_gives_credits_back_and_ejects_without_burning(
    members: World,
) -> None:
    world, shop = members, members.shop
    earned, bad = shop.submit(LIAR), shop.submit(LIAR)
    world.until_rooted()
    shop.judge(earned)
    world.forward(RUN.validity_seconds + 1)
    shop.now.time -= RUN.validity_seconds + 1  # judged in time by its validator's clock
    shop.judge(bad, Reason.WRONG_PROMPTS)
    assert amounts(world) == {earned.digest: "held"}
    world.ticks()
    assert one(world, schema.slashes)["status"] == "cancelled"
    assert amounts(world) == {earned.digest: "earned"}
    assert world.contracts.vault.active(OTHER.address) == STAKE
    assert shop.node_status(LIAR.address) == "ejected"


def test_a_file_nobody_judged_in_time_is_void_by_our_fault(members: World) -> None:
    world, shop = members, members.shop
    file = shop.submit(HONEST)
    world.until_rooted()
    world.forward(RUN.validity_seconds + 1)
    world.ticks()
    after = shop.row(file.digest)
    assert (after.status, after.reason) == ("void", Reason.UNAVAILABLE)
    assert shop.node_status(HONEST.address) == "active"
    assert amounts(world) == {}


def test_a_disabled_reward_root_is_replaced_by_the_next(members: World) -> None:
    world, shop = members, members.shop
    shop.judge(shop.submit(HONEST))
    world.until_rooted()
    # so far that later epochs, which hold no work, are looked at before the root is disabled
    world.forward(RUN.validity_seconds + 3 * RUN.epoch_seconds)
    world.ticks()
    first = one(world, schema.reward_roots)
    assert first["claimable_at"] is not None
    world.send(GUARDIAN, world.contracts.rewards.disable(1, first["epoch"]))
    world.ticks(1)
    world.forward(RUN.epoch_seconds)
    world.ticks()
    second = one(world, schema.reward_roots)
    assert second["object"] != first["object"]
    assert second["claimable_at"] is not None
    assert second["cumulative_total"] == first["cumulative_total"]
    assert world.contracts.rewards.funds(1).reserved == int(second["cumulative_total"])


def test_a_credit_held_at_settlement_is_paid_after_its_slash_fell_though_no_work_came_since(
    members: World,
) -> None:
    world, shop = members, members.shop
    earned, bad = shop.submit(LIAR), shop.submit(LIAR)
    world.until_rooted()
    shop.judge(earned)
    world.forward(RUN.validity_seconds + 2 * RUN.epoch_seconds)
    shop.now.time -= RUN.validity_seconds + 2 * RUN.epoch_seconds  # the judge is in time
    shop.judge(bad, Reason.WRONG_PROMPTS)
    world.loops.chain_tick()
    assert settle_epochs(shop.store, shop.objects, shop.context, shop.now) is None
    assert amounts(world) == {earned.digest: "held"}
    with shop.store.read() as connection:
        assert connection.execute(sa.select(schema.reward_roots)).all() == [], "nobody is owed yet"

    world.ticks()
    assert one(world, schema.slashes)["status"] == "cancelled", "proposed after the validity"
    world.forward(2 * RUN.epoch_seconds)
    world.ticks()
    assert one(world, schema.reward_roots)["claimable_at"] is not None
    assert int(one(world, schema.reward_roots)["cumulative_total"]) == 20 * TOKEN // 1000


def test_a_reward_root_without_funds_is_queued_again_once_there_are_some(members: World) -> None:
    world, shop = members, members.shop
    rich = dataclasses.replace(
        shop.context,
        run=RUN.model_copy(update={"price_per_unit": 100 * TOKEN}),  # 2,000 for one file
    )
    shop.context = rich
    world.loops = dataclasses.replace(world.loops, context=rich)
    shop.judge(shop.submit(HONEST))
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks()
    with shop.store.read() as connection:
        [failed] = intents.pending(connection, MANAGER.address, ("failed",))
    assert "InsufficientFunds" in (failed.error or "")
    c = world.contracts
    world.send(DEPLOYER, c.token.approve(c.rewards.address, 2 * FUNDS))
    world.send(DEPLOYER, c.rewards.fund(1, 2 * FUNDS))
    world.forward(RUN.epoch_seconds)
    world.ticks()
    assert one(world, schema.reward_roots)["claimable_at"] is not None
    assert c.rewards.funds(1).reserved == 2000 * TOKEN


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


def test_a_proposal_that_the_contract_refused_is_tried_again(members: World) -> None:
    world, shop = members, members.shop
    pools = world.contracts.pools
    world.send(MANAGER, pools.set_validator(1, VALIDATOR.address, False))
    bad = shop.submit(LIAR)
    shop.judge(bad, Reason.WRONG_PROMPTS)
    world.until_rooted()
    with shop.store.read() as connection:
        [failed] = intents.pending(connection, VALIDATOR.address, ("failed",))
    assert "NotAllowed" in (failed.error or "")
    world.send(MANAGER, pools.set_validator(1, VALIDATOR.address, True))
    shop.now.time += RETRY_SECONDS + 1
    world.ticks()
    assert one(world, schema.slashes)["status"] == "proposed"


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


def test_money_waits_until_its_facts_are_deep_enough(members: World) -> None:
    """A slash waits for its root to be safe, a reward root for its facts to be final."""
    world, shop = members, members.shop

    def status(kind: str) -> str | None:
        with shop.store.read() as connection:
            return connection.execute(
                sa.select(schema.intents.c.status).where(schema.intents.c.kind == kind)
            ).scalar()

    world.start_of_an_epoch()
    good, bad = shop.submit(HONEST), shop.submit(LIAR)
    shop.judge(good)
    shop.judge(bad, Reason.WRONG_SKETCH)
    world.forward(RUN.root_seconds)
    world.loops.money_tick()
    world.loops.chain_tick()  # sends the root, which anvil mines at once
    world.loops.chain_tick()
    root = one(world, schema.roots)
    assert root["block"] == world.client.block_number()

    def outbox() -> None:
        run_outbox_tick(shop.store, shop.context, world.contracts, world.validator, shop.now)

    outbox()
    assert status("propose") == "queued", "the root's block is not safe yet"
    world.anvil.mine(1)
    outbox()
    assert status("propose") == "sent"

    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.loops.chain_tick()
    world.loops.money_tick()
    world.loops.chain_tick()
    assert status("reward_root") == "queued", "the settlement's block is not final yet"
    world.anvil.mine(2)
    world.loops.chain_tick()
    assert status("reward_root") in ("sent", "confirmed")


def test_a_reward_root_whose_facts_left_the_chain_before_it_was_sent_is_settled_anew(
    members: World,
) -> None:
    world, shop = members, members.shop
    world.start_of_an_epoch()
    shop.judge(shop.submit(HONEST))
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.loops.chain_tick()
    block = world.client.block_number()
    world.loops.money_tick()
    with shop.store.begin() as connection:
        assert forget_unsent(connection, block) == [], "its facts are all there still"
        (dropped,) = forget_unsent(connection, block - 1)
    assert dropped.startswith("reward_root:")
    world.loops.money_tick()
    for _ in range(2):
        world.anvil.mine(2)
        world.loops.chain_tick()
    assert rebuild_root(world, settled(world).epoch).match


def test_a_seat_is_asked_for_once_the_stake_is_safe(members: World) -> None:
    world = members
    seat = Staked(HONEST.address, STAKE + TOKEN)
    assert not Depths(world.contracts).meets(seat)
    world.send(OWNER, world.contracts.token.approve(world.contracts.vault.address, TOKEN))
    world.send(OWNER, world.contracts.vault.deposit(TOKEN))
    assert world.contracts.vault.active(OWNER.address) == STAKE + TOKEN
    assert not Depths(world.contracts).meets(seat), "its block may still leave the chain"
    world.anvil.mine(1)
    assert Depths(world.contracts).meets(seat)
