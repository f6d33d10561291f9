"""Money on a real chain: root → slash → ejected; epoch → reward root → claim; reorg; RPC down."""

from __future__ import annotations

import dataclasses
import json

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import ARBITER, DEPLOYER, FUNDS, STAKE, TREASURY, World
from money_kit import MANAGER, RUN, TOKEN, VALIDATOR, key
from typer.testing import CliRunner
from walk_kit import HONEST, LIAR, OTHER, OWNER, amounts, one, rebuild_root, settled, until

from prime_chain.contracts import Claim
from prime_core.errors import UnavailableError
from prime_core.verdict import Reason
from prime_orchestrator.cli import costs
from prime_orchestrator.manager.indexer import run_indexer_tick
from prime_orchestrator.manager.settlement import settle_epochs
from prime_orchestrator.store import checks, intents, meta, schema
from prime_orchestrator.store.rewards import newest_root

pytestmark = needs_anvil


@pytest.mark.slow
def test_a_rejected_file_is_rooted_proposed_executed_and_its_node_ejected(members: World) -> None:
    world, mgr = members, members.mgr
    good, earned, bad = mgr.submit(HONEST), mgr.submit(LIAR), mgr.submit(LIAR)
    mgr.judge(good)
    mgr.judge(earned)
    mgr.judge(bad, Reason.WRONG_ACTIVATIONS)
    assert mgr.node_status(LIAR.address) == "quarantined"

    world.ticks()
    root = one(world, schema.roots)
    assert root["chain_seq"] is not None
    assert root["posted_at"] > 0
    slash = one(world, schema.slashes)
    assert slash["status"] == "proposed"
    assert slash["executable_at"] is not None
    proposal = world.contracts.slasher.proposal(slash["submission_digest"])
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
    assert mgr.node_status(LIAR.address) == "ejected"
    assert mgr.node_status(HONEST.address) == "active"
    assert not world.contracts.pools.is_member(1, LIAR.address)
    assert world.contracts.vault.active(OTHER.address) == STAKE - RUN.slash_amount
    assert world.contracts.vault.active(OWNER.address) == STAKE
    assert world.contracts.token.balance_of(TREASURY.address) == RUN.slash_amount
    assert amounts(world) == {good.digest: "earned", earned.digest: "forfeited"}


def test_a_cancelled_slash_restores_credits_and_node(members: World) -> None:
    world, mgr = members, members.mgr
    earned, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    mgr.judge(earned)
    mgr.judge(bad, Reason.WRONG_SKETCH)
    world.until_rooted()
    assert amounts(world) == {earned.digest: "held"}
    leaf = one(world, schema.slashes)["submission_digest"]
    world.send(ARBITER, world.contracts.slasher.cancel(leaf))
    world.ticks()
    assert one(world, schema.slashes)["status"] == "cancelled"
    assert amounts(world) == {earned.digest: "earned"}
    assert mgr.node_status(LIAR.address) == "active"


@pytest.mark.slow
def test_an_epochs_reward_root_is_posted_and_claimed_to_the_unit(members: World) -> None:
    world, mgr = members, members.mgr
    rewards = world.contracts.rewards
    for _ in range(2):
        mgr.judge(mgr.submit(HONEST))
    mgr.judge(mgr.submit(LIAR), Reason.MALFORMED)
    world.ticks()
    epoch = one(world, schema.roots)["epoch"]
    with mgr.store.read() as connection:
        assert newest_root(connection, confirmed=True) is None

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
    claim = rewards.claim(Claim(1, settlement.epoch, HONEST.address, amount, tuple(proof)))
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


@pytest.mark.slow
def test_work_goes_on_while_the_rpc_is_down_and_is_sent_later(members: World) -> None:
    world, mgr = members, members.mgr
    files = [mgr.submit(HONEST), mgr.submit(HONEST), mgr.submit(LIAR)]
    world.anvil.stop()
    for file in files[:2]:
        mgr.judge(file)
    mgr.judge(files[2], Reason.WRONG_SKETCH)
    world.loops.money_tick()
    assert world.loops.batch_tick() == [0], "batches are sealed without the chain"
    with pytest.raises(UnavailableError):
        world.loops.chain_tick()
    with mgr.store.read() as connection:
        waiting = intents.pending(connection, intents.UNFINISHED)
    assert {row.kind: row.status for row in waiting} == {
        "root": "queued",  # its call is built, no more
        "propose": "waiting",  # until its root is confirmed
    }
    assert one(world, schema.roots)["chain_seq"] is None
    assert mgr.node_status(LIAR.address) == "quarantined"

    world.anvil.start()
    until(world, lambda: one(world, schema.slashes)["status"] == "proposed")
    assert one(world, schema.roots)["chain_seq"] is not None


@pytest.mark.slow
def test_a_reorganization_takes_back_roots_slashes_and_ejections(members: World) -> None:
    world, mgr = members, members.mgr
    earned, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    mgr.judge(earned)
    mgr.judge(bad, Reason.WRONG_PROMPTS)
    revert = world.anvil.snapshot()
    world.until_rooted()
    world.forward(world.deployment.periods.slash_window + 1)
    world.ticks()
    assert mgr.node_status(LIAR.address) == "ejected"
    assert one(world, schema.slashes)["status"] == "executed"
    assert amounts(world) == {earned.digest: "forfeited"}
    height = world.client.block_number()

    def compared() -> int:
        with mgr.store.read() as connection:
            return checks.load(connection).block

    with mgr.store.begin() as connection:
        checks.save(connection, checks.Progress(block=height))
    revert()
    kept = world.client.block_number()
    world.anvil.mine(height - world.client.block_number() + 5)
    # the indexer alone, before any sender had its turn
    assert run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now) == []
    assert one(world, schema.roots)["chain_seq"] is None
    assert compared() <= kept, "blocks that are gone count as compared no longer"
    slash = one(world, schema.slashes)
    assert (slash["status"], slash["propose_tx"]) == ("queued", None)
    assert mgr.node_status(LIAR.address) == "quarantined"
    assert amounts(world) == {earned.digest: "held"}

    # the senders find their transactions gone and send them again
    until(world, lambda: one(world, schema.slashes)["status"] == "proposed")
    assert one(world, schema.roots)["chain_seq"] is not None
    world.forward(world.deployment.periods.slash_window + 1)
    until(world, lambda: one(world, schema.slashes)["status"] == "executed")
    assert mgr.node_status(LIAR.address) == "ejected"
    assert amounts(world) == {earned.digest: "forfeited"}


def test_a_slash_that_came_too_late_gives_credits_back_and_ejects_without_burning(
    members: World,
) -> None:
    world, mgr = members, members.mgr
    earned, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    world.until_rooted()
    mgr.judge(earned)
    world.forward(RUN.validity_seconds + 1)
    mgr.now.time -= RUN.validity_seconds + 1  # judged in time by its validator's clock
    mgr.judge(bad, Reason.WRONG_PROMPTS)
    assert amounts(world) == {earned.digest: "held"}
    world.ticks()
    assert one(world, schema.slashes)["status"] == "cancelled"
    assert amounts(world) == {earned.digest: "earned"}
    assert world.contracts.vault.active(OTHER.address) == STAKE
    assert mgr.node_status(LIAR.address) == "ejected"


def test_a_file_not_judged_in_time_is_void_by_our_fault(members: World) -> None:
    world, mgr = members, members.mgr
    file = mgr.submit(HONEST)
    world.until_rooted()
    world.forward(RUN.validity_seconds + 1)
    world.ticks()
    after = mgr.row(file.digest)
    assert (after.status, after.reason) == ("void", Reason.UNAVAILABLE)
    assert mgr.node_status(HONEST.address) == "active"
    assert amounts(world) == {}


@pytest.mark.slow
def test_a_disabled_reward_root_is_replaced_by_the_next(members: World) -> None:
    world, mgr = members, members.mgr
    mgr.judge(mgr.submit(HONEST))
    world.until_rooted()
    # so far that later epochs, which hold no work, are looked at before the root is disabled
    world.forward(RUN.validity_seconds + 3 * RUN.epoch_seconds)
    world.ticks()
    first = one(world, schema.reward_roots)
    assert first["claimable_at"] is not None
    world.send(ARBITER, world.contracts.rewards.disable(1, first["epoch"]))
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
    world, mgr = members, members.mgr
    earned, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    world.until_rooted()
    mgr.judge(earned)
    world.forward(RUN.validity_seconds + 2 * RUN.epoch_seconds)
    mgr.now.time -= RUN.validity_seconds + 2 * RUN.epoch_seconds  # the judge is in time
    mgr.judge(bad, Reason.WRONG_PROMPTS)
    world.loops.chain_tick()
    assert settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now) is None
    assert amounts(world) == {earned.digest: "held"}
    with mgr.store.read() as connection:
        assert connection.execute(sa.select(schema.reward_roots)).all() == [], "nothing is owed yet"

    world.ticks()
    assert one(world, schema.slashes)["status"] == "cancelled", "proposed after the validity"
    world.forward(2 * RUN.epoch_seconds)
    world.ticks()
    assert one(world, schema.reward_roots)["claimable_at"] is not None
    assert int(one(world, schema.reward_roots)["cumulative_total"]) == 20 * TOKEN // 1000


def test_a_reward_root_without_funds_is_queued_again_once_there_are_some(members: World) -> None:
    world, mgr = members, members.mgr
    rich = dataclasses.replace(
        mgr.context,
        run=RUN.model_copy(update={"price_per_unit": 100 * TOKEN}),  # 2,000 for one file
    )
    mgr.context = rich
    world.loops = dataclasses.replace(world.loops, context=rich)
    mgr.judge(mgr.submit(HONEST))
    world.until_settled()
    with mgr.store.read() as connection:
        [failed] = intents.pending(connection, ("failed",))
    assert "InsufficientFunds" in (failed.error or "")
    c = world.contracts
    world.send(DEPLOYER, c.token.approve(c.rewards.address, 2 * FUNDS))
    world.send(DEPLOYER, c.rewards.fund(1, 2 * FUNDS))
    world.forward(RUN.epoch_seconds)
    world.ticks()
    assert one(world, schema.reward_roots)["claimable_at"] is not None
    assert c.rewards.funds(1).reserved == 2000 * TOKEN


def test_a_proposal_waits_until_the_pools_quorum_stands_behind_it(members: World) -> None:
    world, mgr = members, members.mgr
    pools = world.contracts.pools
    world.send(MANAGER, pools.set_validator(1, VALIDATOR.address, False))
    bad = mgr.submit(LIAR)
    mgr.judge(bad, Reason.WRONG_PROMPTS)
    world.until_rooted()
    with mgr.store.read() as connection:
        [waiting] = intents.pending(connection)
    assert waiting.kind == "propose"
    assert one(world, schema.slashes)["status"] == "queued"
    world.send(MANAGER, pools.set_validator(1, VALIDATOR.address, True))
    world.ticks()
    assert one(world, schema.slashes)["status"] == "proposed"


def test_costs_are_the_fees_that_the_manager_paid(members: World) -> None:
    world, mgr = members, members.mgr
    url = mgr.store.engine.url.render_as_string(hide_password=False)
    with mgr.store.begin() as connection:
        place = f"{world.deployment.chain_id}/{world.deployment.contracts.pools}/1"
        meta.put(connection, meta.SERVES, place)

    def said(*words: str) -> str:
        arguments = ["--database", url, "--rpc", world.anvil.url, *words]
        answer = CliRunner().invoke(costs.app, arguments, catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        return answer.stdout

    held, before = world.client.balance(MANAGER.address), json.loads(said("--json"))
    mgr.judge(mgr.submit(LIAR), Reason.WRONG_PROMPTS)
    world.until_rooted()
    after = json.loads(said("--json", "--hours", "12"))
    assert int(after["wei"]) - int(before["wei"]) == held - world.client.balance(MANAGER.address)
    assert int(after["wei_a_day"]) == 2 * int(after["wei"])
    assert {"root", "propose"} <= after["kinds"].keys()
    assert (after["files"], after["l1_wei"], after["others"]) == (1, "0", {})
    assert "for 1 files" in said()

    vault = world.contracts.vault
    world.send(VALIDATOR, world.contracts.token.faucet())
    world.send(VALIDATOR, world.contracts.token.approve(vault.address, 2))
    manager, held = (world.client.balance(one.address) for one in (MANAGER, VALIDATOR))
    world.send(VALIDATOR, world.contracts.work.announce_mirror(1, "https://mirror.example"))
    for call in (vault.deposit(2), vault.unbond(1), vault.rebond(1)):
        world.send(VALIDATOR, call)
    world.ticks()
    paid = held - world.client.balance(VALIDATOR.address)
    found = json.loads(said("--json"))
    assert found["others"] == {"validators": {"transactions": 4, "wei": str(paid)}}
    spent = manager - world.client.balance(MANAGER.address)
    assert int(found["wei"]) - int(after["wei"]) == spent, "the validator's is not the manager's"
    assert "validators, paid by themselves" in said()
