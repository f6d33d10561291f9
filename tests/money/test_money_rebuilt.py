"""Anyone's rebuild of reward roots, and leaves that nodes post themselves, on a real chain."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import ARBITER, World, make_world
from fastapi.testclient import TestClient
from money_kit import MANAGER, RUN, TOKEN, VALIDATOR
from walk_kit import (
    HONEST,
    LIAR,
    OTHER,
    OWNER,
    Published,
    amounts,
    one,
    post_own_leaf,
    rebuild_root,
    settled,
)

from prime_chain.contracts import Claim
from prime_chain.event import Event
from prime_chain.events import FileRestored, LeafPosted, RootPosted
from prime_chain.explain import ROOTED_LATE, explain
from prime_chain.history import read_appeals, read_events
from prime_chain.leaves import find_leaf
from prime_chain.mirror import HttpSource
from prime_chain.rewards import Rebuilder
from prime_core.deployment import DEMO_PERIODS
from prime_core.encoding import sha256
from prime_core.errors import UntrustedError
from prime_core.fees import FAULT_FEES
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import ReceiptAnswer, SubmissionInfo
from prime_core.revisions import RunHistory
from prime_core.rollout import Receipt
from prime_core.storage.base import put_object
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason
from prime_orchestrator.api.app import create_app
from prime_orchestrator.manager import loops, revisions
from prime_orchestrator.manager.archiving import KEPT_SECONDS, Archiver
from prime_orchestrator.manager.indexer import _take, derive_root, run_indexer_tick
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.settlement import _leaves, _Turn, settle_epochs
from prime_orchestrator.store import (
    chain,
    rewards,
    runs,
    schema,
    slashes,
    submissions,
)
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.runs import RunRow
from prime_orchestrator.store.submissions import SubmissionRow
from prime_verify.canaries import planting

pytestmark = needs_anvil


def _a_file_that_its_node_posted_and_no_settlement_has(
    world: World, granted: FileRestored, rebuilder: Rebuilder
) -> None:
    """It is reported, and paid if the arbiter restores it."""
    mgr, before = world.mgr, settled(world)
    name = sha256(b"the manager does not know this file")
    events = rebuilder._events
    listed = next(e for e in events if isinstance(e, RootPosted) and e.epoch <= before.epoch)
    root = replace(
        listed, root=name, seq=99, count=1, leaves_object=ZERO_DIGEST, log_index=901
    )  # fmt: skip
    place = {f.name: getattr(root, f.name) for f in fields(Event)} | {"log_index": 902}
    own = LeafPosted(**place, pool=1, node=HONEST.address, seq=99, leaf=name, sha256=name)
    known = Rebuilder(
        [*events, root, own], world.deployment, 1, RunHistory(mgr.context.run), Published(world)
    )
    rebuilt = known.rebuild(before.epoch)
    assert rebuilt.match
    (passed,) = rebuilt.omitted_files
    assert (passed.submission_digest, passed.node, passed.root_seq) == (name, HONEST.address, 99)
    (listed_as,) = rebuilt.as_json()["omitted_files"]
    assert listed_as == {
        "submission_digest": name, "node": HONEST.address, "root_seq": 99, "epoch": root.epoch,
    }  # fmt: skip
    said = explain(known, HONEST.address)
    assert said.omitted_files == (passed,)
    assert any(name in line and "root 99" in line for line in said.lines())
    assert said.as_json()["omitted_files"] == [listed_as]
    assert explain(known, LIAR.address).omitted_files == ()

    paid = replace(
        granted, leaf=name, amount=11, block=before.as_of_block + 1, log_index=998
    )  # fmt: skip
    with mgr.store.begin() as connection:
        _take(connection, [root, own, paid])
    world.forward(RUN.epoch_seconds)
    world.ticks(4)
    last = settled(world)
    assert [(one.submission_digest, one.amount) for one in last.restored] == [(name, "11")]
    periods = world.deployment.periods
    assert last.restored[0].received_at == (
        root.block_time - periods.epoch_length - periods.validity
    )
    assert last.amounts()[HONEST.address] == before.amounts()[HONEST.address] + 11
    known = _rebuilder(world, granted, root, own, paid)
    rebuilt = known.rebuild(last.epoch)
    assert (rebuilt.problems, rebuilt.omitted_files) == ((), ())
    (problem, *_) = _rebuilder(world, granted, root, own).rebuild(last.epoch).problems
    assert name in problem

    # A node posts a file that was settled long ago: the validators' table does not pay it again.
    block, epoch = last.as_of_block + 1, last.epoch + 1
    old = Digest(before.restored[0].submission_digest)
    root = replace(root, root=old, seq=100, epoch=epoch, block=block)
    own = replace(own, leaf=old, seq=100, block=block)
    table = _rebuilder(world, granted, *known._events[-3:], root, own).settle(
        epoch, _no_record, block
    )
    assert (table.files, table.amounts()) == ((), last.amounts())


@pytest.mark.slow
@pytest.mark.parametrize(("page_files", "later"), [(10_000, 10_000), (1, 1), (10_000, 1)])
def test_rebuild_follows_holds_forfeits_and_restorations_over_epochs(
    members: World, monkeypatch: pytest.MonkeyPatch, page_files: int, later: int
) -> None:
    """`later`: of programs that page what was posted as one object."""
    monkeypatch.setattr("prime_core.settlement.PAGE_FILES", page_files)
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    mgr.judge(mgr.submit(HONEST))
    kept, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    mgr.judge(kept)
    mgr.judge(bad, Reason.WRONG_SKETCH)
    mgr.submit(HONEST)  # never judged
    world.until_rooted()
    leaf = one(world, schema.slashes)["submission_digest"]
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    with monkeypatch.context() as idle:  # open when the epoch is settled: no one executes it now
        idle.setattr(loops, "queue_executions", lambda *_: [])
        world.loops.chain_tick()
        world.loops.money_tick()
        for _ in range(2):  # its facts become final, then it is posted
            world.anvil.mine(2)
            world.loops.chain_tick()
    first = settled(world)
    states = sorted(f.state for f in first.files)
    assert states == ["held", "paid", "rejected", "unjudged"]
    assert [s.state for s in first.slashes] == ["open"]
    posted = first.digest()
    monkeypatch.setattr("prime_core.settlement.PAGE_FILES", later)
    assert rebuild_root(world, first.epoch).match

    world.send(ARBITER, world.contracts.slasher.cancel(leaf))
    world.loops.chain_tick()
    world.forward(RUN.epoch_seconds)
    world.ticks()
    second = settled(world)
    assert second.previous == posted
    assert [(f.submission_digest, f.state) for f in second.files] == [(kept.digest, "paid")]
    assert second.amounts() == {
        HONEST.address: 20 * TOKEN // 1000,
        LIAR.address: 20 * TOKEN // 1000,
    }
    rebuilt = rebuild_root(world, second.epoch)
    assert rebuilt.match, rebuilt.problems


@pytest.mark.slow
def test_files_are_archived_once_no_settlement_holds_them_and_are_rebuilt_all_the_same(
    members: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    files = [mgr.submit(node) for node in (HONEST, HONEST, LIAR, LIAR, LIAR)]
    for at, file in enumerate(files):  # the last is rejected; the newest of each node stay
        mgr.judge(file, Reason.WRONG_SKETCH if at == 4 else Reason.NONE)
        mgr.now.time += 1
    paid, held = files[0].digest, files[2].digest
    world.until_rooted()
    leaf = one(world, schema.slashes)["submission_digest"]
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    with monkeypatch.context() as idle:  # open when the epoch is settled
        idle.setattr(loops, "queue_executions", lambda *_: [])
        world.loops.chain_tick()
        world.loops.money_tick()
        for _ in range(2):
            world.anvil.mine(2)
            world.loops.chain_tick()
        first = settled(world)
        assert [f.state for f in first.files if f.submission_digest == held] == ["held"]
        world.send(ARBITER, world.contracts.slasher.cancel(leaf))
        world.loops.chain_tick()
    assert amounts(world)[held] == "earned"

    def a_day_later() -> float:
        return mgr.now() + KEPT_SECONDS

    worker = Archiver(
        mgr.store, mgr.objects, mgr.context, a_day_later, page_files=1, kept=1, kept_of_node=1
    )
    assert worker.tick() == 0, "the arbiter may still disable the reward root"
    claimable = one(world, schema.reward_roots)["claimable_at"]
    world.forward(max(0, claimable - world.client.block("latest").time) + RUN.epoch_seconds)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    world.anvil.mine(2)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    with mgr.store.begin() as connection:  # the batches of their steps are sealed
        values = {"step": 9, "digest": "0x", "body": "", "rows": 1, "mean_reward_micro": 0}
        query = sa.insert(schema.batches).values(**values, staleness_max=0, sealed_at=0.0)
        connection.execute(query)
    assert [worker.tick() for _ in range(2)] == [1, 0]
    assert held in amounts(world)
    assert paid not in amounts(world)

    world.ticks()
    second = settled(world)
    assert second.previous == first.digest()
    assert {f.submission_digest: f.state for f in second.files}[held] == "paid"
    world.forward(world.deployment.periods.reward_delay + RUN.epoch_seconds)
    world.ticks()
    assert [worker.tick() for _ in range(2)] == [1, 0]
    assert held not in amounts(world)
    assert settled(world) == second

    world.start_of_an_epoch()
    for node in (LIAR, HONEST):  # the rejected file is not the newest of its node any more
        mgr.judge(mgr.submit(node))
    world.until_rooted()
    periods = world.deployment.periods
    world.forward(periods.validity + periods.accountable + RUN.epoch_seconds)
    world.ticks(4)
    third = settled(world)
    assert third.previous == second.digest()
    world.forward(periods.reward_delay + RUN.epoch_seconds)
    world.ticks()
    while worker.tick():
        pass
    with mgr.store.read() as connection:
        assert submissions.get(connection, leaf) is None
        ((name, _, status, _),) = slashes.with_receipts(connection)
        assert (name, status) == (leaf, "cancelled")
    world.start_of_an_epoch()
    mgr.judge(mgr.submit(LIAR))
    world.until_rooted()
    world.forward(periods.validity + RUN.epoch_seconds)
    world.ticks(4)
    last = settled(world)
    assert last.previous == third.digest()
    assert last.amounts()[LIAR.address] > third.amounts()[LIAR.address]
    for epoch in (first.epoch, second.epoch, third.epoch, last.epoch):
        assert rebuild_root(world, epoch).match


@pytest.mark.slow
def test_an_appealed_file_is_paid_by_the_next_root_and_rebuilt_so(members: World) -> None:
    world, mgr, rewards = members, members.mgr, members.contracts.rewards
    world.start_of_an_epoch()
    mgr.judge(mgr.submit(HONEST))
    void, other = mgr.submit(HONEST), mgr.submit(HONEST)
    mgr.judge(void, Reason.MALFORMED)
    mgr.judge(other, Reason.MALFORMED)
    world.until_rooted()
    found = find_leaf(
        world.client, world.deployment, read_events(world.client, world.deployment), 1,
        void.digest, None, Published(world).get_object,
    )  # fmt: skip
    world.send(OWNER, rewards.appeal(found.signed.submission, found.root.seq, found.proof))
    world.send(ARBITER, rewards.restore(void.digest, 10**30))
    (appeal,) = read_appeals(world.client, world.deployment)
    assert (appeal.leaf, appeal.node, appeal.amount) == (void.digest, HONEST.address, 10**30)
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    first, earned = settled(world), 20 * TOKEN // 1000
    assert [(one.submission_digest, one.state) for one in first.restored] == [(void.digest, "paid")]
    assert first.amounts() == {HONEST.address: earned + RUN.most_worth}, "capped by the run"
    assert rebuild_root(world, first.epoch).problems == ()

    # the arbiter restores another file after the settlement: the next one takes it up
    events = read_events(world.client, world.deployment)
    granted = next(event for event in events if isinstance(event, FileRestored))
    late = replace(granted, leaf=other.digest, amount=7, block=first.as_of_block + 1, log_index=999)
    mgr.judge(mgr.submit(HONEST))
    world.until_settled(4)
    omitting = settled(world)
    problems = _rebuilder(world, late).rebuild(omitting.epoch).problems
    assert any(other.digest in problem for problem in problems), problems
    late = replace(late, block=omitting.as_of_block + 1)
    with mgr.store.begin() as connection:
        _take(connection, [late])
    world.forward(RUN.epoch_seconds)
    world.ticks(4)
    last = settled(world)
    assert [(one.submission_digest, one.amount) for one in last.restored] == [(other.digest, "7")]
    assert last.amounts() == {HONEST.address: 2 * earned + RUN.most_worth + 7}
    rebuilder = _rebuilder(world, late)
    assert rebuilder.rebuild(last.epoch).problems == ()
    said = explain(rebuilder, HONEST.address)
    assert said.problems == ()
    assert [file.state for file in said.files].count("restored") == 2

    _a_file_that_its_node_posted_and_no_settlement_has(world, late, rebuilder)

    early = last.model_copy(update={"as_of_block": omitting.as_of_block - 1})
    with pytest.raises(UntrustedError, match="as of block"):
        rebuilder._again(early, omitting, 10**9)
    with pytest.raises(UntrustedError, match="as of block"):
        rebuilder.settle(last.epoch + 1, _no_record, last.as_of_block - 1)


def _no_record(digest: Digest) -> SubmissionInfo:
    raise AssertionError(f"{digest} is asked for before the block is checked")


def _rebuilder(world: World, *more: Event) -> Rebuilder:
    events = [*read_events(world.client, world.deployment), *more]
    return Rebuilder(
        events, world.deployment, 1, RunHistory(world.mgr.context.run), Published(world)
    )


@pytest.mark.slow
def test_each_file_is_paid_by_the_revision_of_its_step_and_rebuilt_so(
    members: World,
) -> None:
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    later = RUN.model_copy(update={"price_per_unit": 3 * RUN.price_per_unit})
    with mgr.store.begin() as connection:
        runs.add(connection, RunRow(3, later.digest(), later.raw(), final=False, announced_at=0.0))
        queue_intent(
            connection,
            kind="revise",
            key=f"3:{later.digest()}",
            payload={"run_digest": later.digest(), "from_step": 3},
            now=mgr.now(),
        )
        assert "not final" in revisions.waits_for(connection, 3)
    for _ in range(4):
        world.loops.chain_tick()
        world.anvil.mine(2)
    with mgr.store.read() as connection:
        assert revisions.waits_for(connection, 3) == ""
    (made,) = world.contracts.pools.revisions_of(1)
    assert (made.run_digest, made.from_step) == (later.digest(), 3)
    for step in (2, 3, 4):
        mgr.judge(mgr.submit(HONEST, step=step))
    world.until_settled(4)
    found = settled(world)
    price = RUN.price_per_unit
    assert sorted(int(f.price_per_unit) for f in found.files) == [price, 3 * price, 3 * price]
    assert found.amounts() == {HONEST.address: 7 * 20 * price}
    rebuilt = rebuild_root(world, found.epoch)
    assert rebuilt.match, rebuilt.problems


@pytest.mark.parametrize("how", ["hidden", "announced", "with a later receipt"])
def test_rebuild_finds_a_manager_that_pays_by_a_cheaper_revision(
    members: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """`how`: all but the first revise on chain a step whose files the manager has already."""
    world, mgr = members, members.mgr
    cheap = RUN.model_copy(update={"price_per_unit": RUN.price_per_unit // 2})
    file = mgr.submit(HONEST, step=3)
    mgr.judge(file)
    world.until_rooted()
    if how != "hidden":
        world.send(MANAGER, world.contracts.pools.revise(1, cheap.digest(), 3))
        with mgr.store.begin() as connection:
            runs.add(connection, RunRow(3, cheap.digest(), cheap.raw(), True, announced_at=0.0))
        if how == "with a later receipt":
            at = world.client.block("latest").time + RUN.lease_seconds + 1
            receipt = Receipt(submission_digest=file.digest, received_at=at)
            answer = ReceiptAnswer(receipt=receipt, signature=mgr.backend.sign(receipt))
            with mgr.store.begin() as connection:
                connection.execute(
                    sa.update(schema.submissions)
                    .where(schema.submissions.c.digest == file.digest)
                    .values(received_at=at, receipt=answer.model_dump_json())
                )
    else:
        monkeypatch.setattr(revisions, "history", lambda *_: RunHistory(cheap))
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    found = settled(world)
    assert found.amounts() == {HONEST.address: 20 * RUN.price_per_unit // 2}
    monkeypatch.undo()
    rebuilt = rebuild_root(world, found.epoch)
    assert rebuilt.settlement.amounts() == {HONEST.address: 20 * RUN.price_per_unit}
    assert not rebuilt.match


def rooted_late(world: World, patch: pytest.MonkeyPatch) -> tuple[SubmissionRow, SubmissionRow]:
    """Two accepted files, settled; the first was rooted when a slash of it would be refused, as by
    a root that waited long for its block."""
    patch.setattr("prime_orchestrator.manager.roots.answered_for", lambda **_: True)
    mgr = world.mgr
    late = mgr.submit(HONEST)
    mgr.judge(late)
    until = late.signed().submission.valid_until + DEMO_PERIODS.accountable
    world.forward(until + 1 - int(mgr.now()))  # the manager slept
    good = mgr.submit(LIAR)
    mgr.judge(good)
    world.until_rooted()
    assert one(world, schema.roots)["posted_at"] > until
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    return late, good


@pytest.mark.slow
def test_validators_are_paid_for_each_judged_file_with_any_verdict(tmp_path: Path) -> None:
    world = make_world(tmp_path, RUN.model_copy(update={"price_per_judged_file": TOKEN}))
    try:
        world.join(HONEST, OWNER)
        mgr = world.mgr
        mgr.publish(0)
        world.ticks(2)
        world.start_of_an_epoch()
        files = [mgr.submit(HONEST) for _ in range(3)]
        mgr.judge(files[0])
        mgr.judge(files[1], Reason.MALFORMED)
        world.until_settled()
        settlement = settled(world)
        assert {f.submission_digest: f.state for f in settlement.files} == {
            files[0].digest: "paid", files[1].digest: "void", files[2].digest: "unjudged"
        }  # fmt: skip
        assert settlement.amounts()[VALIDATOR.address] == 2 * TOKEN
        assert settlement.amounts()[HONEST.address] == 20 * RUN.price_per_unit
        rebuilt = rebuild_root(world, settlement.epoch)
        assert rebuilt.match, rebuilt.problems
        events = read_events(world.client, world.deployment)
        runs = RunHistory(mgr.context.run)
        rebuilder = Rebuilder(events, world.deployment, 1, runs, Published(world))
        said = explain(rebuilder, VALIDATOR.address)
        assert ([file.state for file in said.files], said.problems) == (["judged"] * 2, ())
        amount, proof = settlement.proof(VALIDATOR.address)
        world.forward(world.deployment.periods.reward_delay + 1)
        claim = Claim(1, settlement.epoch, VALIDATOR.address, amount, tuple(proof))
        world.send(OWNER, world.contracts.rewards.claim(claim))
        assert world.contracts.token.balance_of(VALIDATOR.address) == 2 * TOKEN
        _an_accused_planted_file_costs_the_validator_its_fees(world)
    finally:
        world.close()


def _an_accused_planted_file_costs_the_validator_its_fees(world: World) -> None:
    mgr, secret = world.mgr, bytes(range(32))
    mgr.admit(LIAR)
    planted = Planted(frozenset({LIAR.address}), secret)
    world.loops = replace(world.loops, planted=planted)
    world.start_of_an_epoch()
    lies = 0
    while planting.kind(secret, (row := mgr.submit(LIAR)).lease_digest) != planting.HONEST:
        lies += 1
        mgr.judge(row, Reason.WRONG_SKETCH)
        reveal(mgr.store, mgr.context, planted, mgr.now)
    mgr.judge(row, Reason.WRONG_SKETCH)
    mgr.judge(mgr.submit(HONEST))
    world.until_settled()
    settlement = settled(world)
    assert settlement.amounts()[VALIDATOR.address] == 2 * TOKEN, "nothing was added"
    (record,) = settlement.fee_records
    assert (record.lies, record.missed, record.accused, record.charged) == (lies, 0, 1, 1)
    assert (int(record.due), int(record.withheld)) == ((FAULT_FEES - 1) * TOKEN, TOKEN)
    rebuilt = rebuild_root(world, settlement.epoch)
    assert rebuilt.match, rebuilt.problems

    events = read_events(world.client, world.deployment)
    runs = RunHistory(mgr.context.run)
    rebuilder = Rebuilder(events, world.deployment, 1, runs, Published(world))
    said = explain(rebuilder, VALIDATOR.address)
    assert (said.withheld, said.problems) == (TOKEN, ())
    (fault,) = settlement.faults
    stranger = fault.opinion.model_copy(update={"validator": LIAR.address})
    other_price = fault.model_copy(update={"fee": "1"})
    paid = settlement.files[0].submission_digest
    rooted = fault.opinion.model_copy(
        update={"opinion": fault.opinion.opinion.model_copy(update={"submission": paid})}
    )
    for lie in (
        fault.model_copy(update={"opinion": stranger}), other_price,
        fault.model_copy(update={"opinion": rooted}),
    ):  # fmt: skip
        with pytest.raises(UntrustedError):
            rebuilder._faults(settlement.model_copy(update={"faults": (lie,)}), set())
    _a_file_that_is_settled_after_it_was_charged_is_refused(world, row)


def _a_file_that_is_settled_after_it_was_charged_is_refused(
    world: World, charged: SubmissionRow
) -> None:
    """By a list of the manager's, or as a leaf that its node posted."""
    mgr = world.mgr
    before = settled(world).epoch
    with mgr.store.begin() as connection:
        connection.execute(
            sa.update(schema.submissions)
            .where(schema.submissions.c.digest == charged.digest)
            .values(shadow=False)
        )
    world.loops = replace(world.loops, planted=Planted())
    world.until_settled()
    later = settled(world)
    assert [file.submission_digest for file in later.files] == [charged.digest]
    events = read_events(world.client, world.deployment)
    by_node: list[Event] = []
    for event in events:
        if isinstance(event, RootPosted) and event.root == charged.digest:
            base = {f.name: getattr(event, f.name) for f in fields(Event)}
            leaf = {"node": charged.node, "leaf": event.root, "sha256": charged.sha256}
            by_node.append(LeafPosted(**base, pool=1, seq=event.seq, **leaf))
            event = replace(event, leaves_object=ZERO_DIGEST)
        by_node.append(event)
    assert len(by_node) == len(events) + 1
    runs = RunHistory(mgr.context.run)
    for posted in (events, by_node):
        rebuilder = Rebuilder(posted, world.deployment, 1, runs, Published(world))
        for _ in range(2):
            with pytest.raises(UntrustedError, match="is rooted"):
                rebuilder.rebuild(later.epoch)
            assert rebuilder.rebuild(before).match, "it was not rooted then"
    until_then = [event for event in by_node if event.block <= later.as_of_block]
    table = Rebuilder(until_then, world.deployment, 1, runs, Published(world)).settle(
        later.epoch, _no_record, later.as_of_block
    )
    assert table.files == (), "a table leaves a planted file out that someone posted"


@pytest.mark.slow
def test_prompts_are_paid_once_each_at_their_own_price_and_rebuilt_so(tmp_path: Path) -> None:
    price = RUN.price_per_unit // 20
    world = make_world(tmp_path, RUN.model_copy(update={"price_per_prompt_token": price}))
    try:
        world.join(HONEST, OWNER)
        mgr = world.mgr
        mgr.publish(0)
        world.ticks(2)
        world.start_of_an_epoch()
        row = mgr.submit(HONEST)
        mgr.judge(row)
        world.until_settled()
        settlement = settled(world)
        due = 20 * RUN.price_per_unit + 6 * price  # two prompts of 3 tokens, two rows each
        assert settlement.amounts() == {HONEST.address: due}
        assert one(world, schema.credits)["amount"] == str(due)
        rebuilt = rebuild_root(world, settlement.epoch)
        assert rebuilt.match, rebuilt.problems
        events = read_events(world.client, world.deployment)
        runs = RunHistory(mgr.context.run)
        said = explain(
            Rebuilder(events, world.deployment, 1, runs, Published(world)), HONEST.address
        )
        assert ([file.amount for file in said.files], said.problems) == ([due], ())
    finally:
        world.close()


def test_a_run_without_a_price_for_prompts_settles_in_the_same_bytes_as_before(
    members: World,
) -> None:
    assert b"prompt_token" not in RUN.raw()
    members.start_of_an_epoch()
    members.mgr.judge(members.mgr.submit(HONEST))
    members.until_settled()
    (file,) = settled(members).model_dump(mode="json")["files"]
    assert not {"prompt_units", "price_per_prompt_token"} & set(file)


@pytest.mark.slow
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
    books = Rebuilder(
        events, members.deployment, 1, RunHistory(members.mgr.context.run), Published(members)
    )
    (reported,) = explain(books, HONEST.address).files
    assert (reported.state, reported.amount, reported.why) == ("void", 0, ROOTED_LATE)
    with members.mgr.store.read() as connection:
        assert rewards.pending_units(connection, HONEST.address, -1) == 0, (
            "it no longer shows as earned"
        )
        assert rewards.pending_units(connection, LIAR.address, -1) == 20


def test_rebuild_finds_a_manager_that_pays_work_rooted_too_late(
    members: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_orchestrator.manager.settlement.answered_for", lambda **_: True)
    late, _ = rooted_late(members, monkeypatch)
    found = settled(members)
    assert found.amounts()[HONEST.address] == 20 * TOKEN // 1000
    rebuilt = rebuild_root(members, found.epoch)
    assert not rebuilt.match
    states = {f.submission_digest: f.state for f in rebuilt.settlement.files}
    assert states[late.digest] == "void"


def test_rebuild_finds_a_root_that_promises_more_than_was_earned(members: World) -> None:
    world, mgr = members, members.mgr
    mgr.judge(mgr.submit(HONEST))
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    with mgr.store.begin() as connection:
        connection.execute(sa.update(schema.submissions).values(units=1_000_000))
    world.ticks()
    greedy = settled(world)
    assert greedy.amounts() == {HONEST.address: 1_000_000 * TOKEN // 1000}
    rebuilt = rebuild_root(world, greedy.epoch)
    assert not rebuilt.match
    assert rebuilt.settlement.amounts() == {HONEST.address: 20 * TOKEN // 1000}


def test_rebuild_refuses_a_settlement_that_leaves_a_file_out(members: World) -> None:
    world, mgr = members, members.mgr
    mgr.judge(mgr.submit(HONEST))
    left_out = mgr.submit(HONEST)
    mgr.judge(left_out)
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    with mgr.store.begin() as connection:
        connection.execute(
            sa.update(schema.submissions)
            .where(schema.submissions.c.digest == left_out.digest)
            .values(root_id=None)
        )
    world.loops.chain_tick()
    settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now)
    for _ in range(2):  # its facts become final, then it is posted
        world.anvil.mine(2)
        world.loops.chain_tick()
    with pytest.raises(UntrustedError, match="leaves out"):
        rebuild_root(world, settled(world).epoch)


def test_a_leaf_that_its_node_posted_is_paid_once_and_rebuilt(members: World) -> None:
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    row = mgr.submit(HONEST)
    mgr.judge(row)
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

    # The manager may not leave it out while it is held.
    (file,) = rebuilt.settlement.files
    held = rebuilt.settlement.model_copy(
        update={"files": (file.model_copy(update={"state": "held"}),)}
    )
    found = _rebuilder(world)._open_leaves(
        held.epoch + 1, held.as_of_block, held, {row.digest: held.files[0]}, claims={}
    )
    assert [leaf.digest for _, leaf in found] == [row.digest]


def test_a_leaf_that_a_table_settled_before_the_manager_rooted_it_is_not_settled_again(
    members: World,
) -> None:
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    twice, other = mgr.submit(HONEST), mgr.submit(HONEST)
    mgr.judge(twice)
    mgr.judge(other)
    world.forward(RUN.epoch_seconds + 1)
    world.loops.money_tick()  # taken into a root that is not sent for long
    post_own_leaf(world, twice)
    silent = world.contracts.rewards.silent_from(1)
    assert silent is not None
    world.forward(silent - world.client.block("latest").time)

    books = _rebuilder(world)
    (own,) = [event for event in books._events if isinstance(event, RootPosted)]
    with TestClient(create_app(mgr.backend), follow_redirects=False) as http:
        client = OrchestratorClient("http://testserver")
        client._http = http
        table = books.settle(own.epoch, HttpSource(client).submission)
    assert table.amounts() == {HONEST.address: 20 * TOKEN // 1000}
    put_object(mgr.objects, table.canonical())
    said = table.table()
    signature = VALIDATOR.sign(said, world.deployment.domain_of(said))
    world.send(OTHER, world.contracts.rewards.post_table(said, [signature]))

    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    world.anvil.mine(2)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    turn = _Turn(own.epoch + 1, own.epoch, table.digest(), True)
    with mgr.store.begin() as connection:
        (held,) = _leaves(connection, turn, table.files, mgr.context)
    assert (held.fact.root_seq, held.fact.expires) == (
        own.seq, own.block_time + RUN.validity_seconds,
    ), "a file that it held comes up by the root that it was settled by"  # fmt: skip

    world.ticks()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    last = settled(world)
    assert [file.submission_digest for file in last.files] == [other.digest]
    assert last.amounts() == {HONEST.address: 2 * 20 * TOKEN // 1000}
    assert rebuild_root(world, last.epoch).problems == ()


def test_a_leaf_posted_by_node_and_manager_is_paid_by_the_managers_root_alone(
    members: World,
) -> None:
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    twice, other = mgr.submit(HONEST), mgr.submit(HONEST)
    mgr.judge(twice)
    mgr.judge(other)
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
    world, mgr = members, members.mgr
    row = mgr.submit(HONEST)
    with mgr.store.begin() as connection:
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
    assert mgr.row(row.digest).root_id is not None
    with mgr.store.begin() as connection:
        chain.retract(connection, 10**6)
        derive_root(connection, row.digest)
    assert mgr.row(row.digest).root_id is None
    world.until_rooted()
    assert one(world, schema.roots)["leaves_object"] != ZERO_DIGEST
