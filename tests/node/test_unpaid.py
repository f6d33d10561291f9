"""No new lease while the manager owes too much: the decision, the agent's side, the chain's."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from bridge_kit import Kit, hand_in, heartbeat_loop
from made_up import made_up_row
from node_world import MANAGER, NODE, TRAINER

from devnet.deployed import TEST_PERIODS, Deployed, pool_config
from prime_chain import flows
from prime_chain.amounts import ETHER, prime
from prime_core.encoding import merkle_proof, merkle_root, reward_leaf, sha256
from prime_core.errors import UnavailableError
from prime_core.messages import FileEnding, RewardInfo
from prime_core.rollout import CONVERSATION_SCHEMA
from prime_core.verdict import Reason
from prime_node import config
from prime_node.api import NodeApi
from prime_node.bridge_messages import Abandon, LeaseWish
from prime_node.link import Link
from prime_node.overview import overview
from prime_node.rewards import NodeRewards
from prime_node.spool import CLOCK_SECONDS, Spool
from prime_node.unpaid import Backing, BackingReader, UnpaidWork, objection, tokens_in
from prime_node.uploader import deliver
from prime_verify.pages import read_footer
from prime_verify.rollout_file import FileMetadata, write_rollout_file

TOKENS = 7
PRICE = 10
WORTH = TOKENS * PRICE


@pytest.mark.parametrize(
    ("owed", "limit", "money", "why"),
    [
        (0, None, 0, ""),
        (5, None, 5, ""),
        (6, None, 5, "more than the pool's bond and free funds"),
        (5, 5, 10, ""),
        (6, 5, 10, "more than --max-unpaid"),
        (6, 5, 5, "more than --max-unpaid"),
        (6, 9, 5, "more than the pool's bond and free funds"),
    ],
)
def test_a_lease_is_refused_above_the_owner_s_limit_or_the_pool_s_money(
    owed: int, limit: int | None, money: int, why: str
) -> None:
    said = objection(owed * ETHER, limit and limit * ETHER, money * ETHER)
    assert why in said
    assert bool(why) == bool(said)
    if said:
        assert f"{owed} PRIME of this node's work is unpaid" in said
        assert "prime-node" in said.rpartition(";")[2], "what to type next"


@dataclass
class ChainAnswers:
    """What the agent reads of the chain, set by the test; None: it cannot be read."""

    backing: Backing | None

    def __call__(self) -> Backing:
        if self.backing is None:
            raise UnavailableError("no RPC endpoint answers")
        return self.backing


def limited(
    kit: Kit, backing: Backing | None, limit: int | None
) -> tuple[UnpaidWork, ChainAnswers]:
    chain = ChainAnswers(backing)
    kit.broker.unpaid = UnpaidWork(kit.spool, NODE.address, limit, chain)
    kit.broker.unpaid.check()
    return kit.broker.unpaid, chain


def delivered(kit: Kit) -> int:
    """Hands one file in and has its receipt stored; its receipt's time."""
    lease = hand_in(kit, tokens=TOKENS)
    (entry,) = kit.spool.waiting()
    receipt = deliver(entry, kit.spool, kit.broker._api)
    assert receipt is not None
    assert kit.spool.find(lease) is not None
    return receipt.receipt.received_at


def asked(kit: Kit) -> Any:
    return kit.client.lease(LeaseWish(wait_seconds=0))


def test_what_is_owed_is_counted_in_the_file_and_not_by_the_worker(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FileMetadata(lease="0x" + "11" * 32, engine="plain/1", dtype="float32", device="cpu")
    content = write_rollout_file([made_up_row(number) for number in range(4)], made)
    for claimed in (0, 2**40 - 1):
        (kit.folder / "made").write_bytes(content)
        assert tokens_in(kit.folder / "made", claimed) == 4 * 5
    unpaid, _ = limited(kit, Backing(0, 10 * ETHER), limit=None)
    hand_in(kit, content, tokens=0)
    (entry,) = kit.spool.waiting()
    assert deliver(entry, kit.spool, kit.broker._api) is not None
    assert unpaid.owed() == min(4 * 5 * PRICE, kit.world.backend.context.run.most_worth)

    with monkeypatch.context() as patch:  # a number that a footer can state, and no file has
        footer = read_footer(content)
        columns = tuple(replace(one, values=-(2**60)) for one in footer.columns)
        patch.setattr("prime_node.unpaid.read_footer", lambda _: replace(footer, columns=columns))
        assert tokens_in(kit.folder / "made", 7) == 7

    talk = replace(made, schema_version=CONVERSATION_SCHEMA)
    rows = [replace(made_up_row(0, 9), spans=(2, 4, 3))]
    (kit.folder / "talk").write_bytes(write_rollout_file(rows, talk))
    assert [tokens_in(kit.folder / "talk", one) for one in (5, 99)] == [5, 9]


def test_no_lease_is_asked_for_above_the_limit_and_work_resumes_when_paid(
    kit: Kit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpaid, chain = limited(kit, Backing(0, 10 * ETHER), limit=WORTH - 1)
    received_at = delivered(kit)
    leases = len(kit.world.leases())
    assert unpaid.owed() == WORTH
    looked: list[str] = []
    real = NodeApi.leases
    monkeypatch.setattr(NodeApi, "leases", lambda api, node: looked.append(node) or real(api, node))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            offer = asked(kit)
            assert offer.lease is None
            assert "more than --max-unpaid" in offer.reason
    assert looked == [NODE.address], "no lease of its own waits, and none is given meanwhile"
    assert len(kit.world.leases()) == leases, "the orchestrator gave none"
    warnings = [line for line in caplog.messages if "no new lease is taken" in line]
    assert len(warnings) == 1, "said once"

    chain.backing = Backing(received_at + 1, 10 * ETHER)
    unpaid.check()
    assert unpaid.owed() == 0
    assert asked(kit).lease is not None
    assert "leases are taken again" in caplog.text


def test_a_receipt_dated_back_leaves_its_file_owed(kit: Kit) -> None:
    received_at = delivered(kit)
    (entry,) = kit.spool.receipted()
    assert entry.receipt is not None
    receipt = entry.receipt.receipt.model_copy(update={"received_at": 1})
    kit.spool.settle(entry.lease_digest, entry.receipt.model_copy(update={"receipt": receipt}))
    assert kit.spool.worth_since(received_at - CLOCK_SECONDS - 60) == WORTH
    assert kit.spool.worth_since(received_at) == 0, "perhaps this clock is ahead"


def test_bond_and_free_funds_limit_a_node_without_a_limit_of_its_own(kit: Kit) -> None:
    unpaid, chain = limited(kit, Backing(0, WORTH), limit=None)
    delivered(kit)
    assert not unpaid.why_not(), "the money covers it"
    chain.backing = Backing(0, WORTH - 1)
    unpaid.check()
    assert "bond and free funds" in asked(kit).reason
    chain.backing = Backing(0, WORTH)
    unpaid.check()
    assert asked(kit).lease is not None


def test_a_chain_that_cannot_be_read_stops_no_work(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    unpaid, chain = limited(kit, Backing(0, 0), limit=1)
    delivered(kit)
    assert unpaid.why_not()
    chain.backing = None
    unpaid.check()
    assert unpaid.owed() is None
    assert "no RPC endpoint answers; work goes on" in caplog.text
    assert asked(kit).lease is not None


def test_the_chain_is_read_again_soon_once_half_of_a_limit_is_owed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.unpaid.CHECK_SECONDS", 0.0)
    reads = threading.Semaphore(0)

    def read() -> Backing:
        reads.release()
        return Backing(0, 2 * WORTH)

    unpaid = UnpaidWork(kit.spool, NODE.address, None, read, calm_seconds=3600.0)
    unpaid.check()
    assert reads.acquire(blocking=False)
    unpaid.thread.start()
    assert reads.acquire(timeout=60)
    delivered(kit)
    assert not unpaid.why_not()
    assert not unpaid._read_soon.is_set(), "half of the pool's money is owed"
    delivered(kit)
    for _ in range(600):
        assert not unpaid.why_not(), "the money covers it"
        if reads.acquire(timeout=0.1):
            break
    else:
        pytest.fail("the chain was not read again")
    unpaid.stop(60)
    assert not unpaid.thread.is_alive(), "it ends also while it waits for the next read"


def test_a_file_that_was_not_accepted_is_not_owed(kit: Kit) -> None:
    unpaid, _ = limited(kit, Backing(0, ETHER), limit=1)
    received_at = delivered(kit)
    (entry,) = kit.spool.receipted()
    ending = FileEnding(
        submission_digest=entry.submission_digest, lease_digest=entry.lease_digest, status="void",
        reason=int(Reason.MALFORMED), detail="", judged_at=received_at,
    )  # fmt: skip
    assert kit.spool.note(ending)
    assert unpaid.owed() == 0
    assert asked(kit).lease is not None


def test_a_reward_root_that_gives_less_than_the_node_s_own_files_earned_is_logged_once(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    unpaid, chain = limited(kit, None, limit=None)
    received_at = delivered(kit)
    for cumulative, until, warned in (
        (0, received_at, 0), (WORTH, received_at + 1, 0), (WORTH - 1, received_at + 1, 1),
    ):  # fmt: skip
        chain.backing = Backing(0, ETHER, cumulative, until)
        unpaid.check()
        unpaid.check()
        assert sum("the newest reward root gives" in line for line in caplog.messages) == warned
    assert "0.000000000000000001 PRIME more" in caplog.text
    assert "prime-node rewards explain" in caplog.text


def test_what_files_earned_is_kept_when_their_entries_are_deleted(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    received_at = delivered(kit)
    monkeypatch.setattr("prime_node.spool.KEPT_RECEIPTS", 0)
    for _ in range(2):  # a second start deletes nothing more
        spool = Spool(kit.folder.parent / "spool", now=time.time)
        assert spool.receipted() == []
        assert spool.worth_before(received_at + 1, NODE.address) == WORTH
        assert spool.worth_before(received_at + 1, MANAGER.address) == 0


def test_rewards_show_compares_the_root_with_the_files_in_this_machine_s_journal() -> None:
    info = RewardInfo(
        node=NODE.address, epoch=1, cumulative="60", proof=(), claimable_at=None, pending_units=0,
        forfeited="0",
    )  # fmt: skip
    shown = NodeRewards(info, paid=10, own=WORTH).as_json()
    assert (shown["own_files"], shown["difference"]) == ("70", "-10")
    shown = NodeRewards(info, None).as_json()
    assert (shown["own_files"], shown["difference"]) == (None, None)
    assert prime(-WORTH * 10**16) == "-0.7 PRIME"


def test_an_open_lease_is_taken_up_above_the_limit_too(kit: Kit) -> None:
    """Its expiry would count against the node."""
    unpaid, _ = limited(kit, Backing(0, 10 * ETHER), limit=WORTH)
    delivered(kit)
    offer = asked(kit)
    assert offer.lease is not None
    digest = offer.lease.lease.digest(offer.domain)
    unpaid._limit = 1
    assert asked(kit).lease == offer.lease, "open in this agent"
    kit.broker.abandon(Abandon(lease_digest=digest))
    assert asked(kit).lease == offer.lease, "given back: it waits at the orchestrator"


def test_unpaid_work_and_the_reason_are_in_the_status(kit: Kit) -> None:
    limited(kit, Backing(0, 10 * ETHER), limit=1)
    delivered(kit)
    loop, data = heartbeat_loop(kit, threading.Event.set)
    assert loop.run() == 0
    data.lock()
    try:
        shown = overview(config.load({"data": data.root}))
    finally:
        data.unlock()
    assert shown["unpaid"] == str(WORTH)
    assert "more than --max-unpaid" in shown["reason"]


def test_the_limit_is_typed_in_tokens_and_remembered(tmp_path: Path) -> None:
    settings = config.load({"data": tmp_path, "max_unpaid": "12.5"})
    assert settings.max_unpaid_wei == 12_500_000_000_000_000_000
    assert settings.to_remember()["max_unpaid"] == "12.5"
    assert config.load({"data": tmp_path}).max_unpaid_wei is None


def test_the_chain_decides_what_is_settled_and_what_stands_behind_the_rest(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, bank = deployed.contracts, deployed.accounts[0]
    deployed.anvil.fund(MANAGER.address)
    create = c.pools.create(pool_config(TRAINER.address, sha256(b"run"), 100 * ETHER, capacity=4))
    deployed.send(MANAGER, create)
    pool = c.pools.count()
    deployed.send(bank, c.token.transfer(MANAGER.address, 60 * ETHER))
    for step in (
        *flows.fund_pool(c, MANAGER.address, pool, 50 * ETHER),
        *flows.bond_pool(c, MANAGER.address, pool, 10 * ETHER),
    ):
        deployed.send(MANAGER, step)
    length = TEST_PERIODS.epoch_length
    epoch = deployed.now() // length
    leaves = [reward_leaf(NODE.address, 7 * ETHER), reward_leaf(TRAINER.address, 2 * ETHER)]
    stated = RewardInfo(
        node=NODE.address, epoch=epoch, cumulative=str(7 * ETHER),
        proof=tuple(merkle_proof(leaves, 0)), claimable_at=None, pending_units=0, forfeited="0",
    )  # fmt: skip
    answers: list[RewardInfo | UnavailableError] = [stated]

    def fetch(_client: object, node: str) -> RewardInfo:
        assert node == NODE.address
        if isinstance(answers[-1], UnavailableError):
            raise answers[-1]
        return answers[-1]

    monkeypatch.setattr("prime_node.unpaid.fetch_info", fetch)
    made: Any = type("Api", (), {"client": None, "close": lambda self: None})
    link = Link(deployed.client, c, deployed.deployment, pool)
    read = BackingReader(link, made, NODE.address)

    assert read() == Backing(0, 60 * ETHER), "no root: the orchestrator's word alone is nothing"
    deployed.anvil.forward(2 * length + TEST_PERIODS.validity)
    post = c.rewards.post_reward_root(
        pool, epoch, merkle_root(leaves), 9 * ETHER, sha256(b"object")
    )
    deployed.send(MANAGER, post)
    until = max(0, epoch * length - TEST_PERIODS.validity)
    settled = Backing((epoch + 1) * length, 51 * ETHER, 7 * ETHER, until)
    answers.append(stated.model_copy(update={"cumulative": str(8 * ETHER)}))
    assert read() == Backing(0, 51 * ETHER), "a false amount settles nothing"
    answers.append(stated)
    assert read() == settled
    for lie in ({"epoch": None}, {"epoch": -1}, {"cumulative": "x"}, {"proof": ()}):
        answers.append(stated.model_copy(update=lie))
        assert read() == settled, "what was proved is kept"
    answers.append(UnavailableError("it does not answer"))
    assert read() == settled
    deployed.send(bank, c.rewards.disable(pool, epoch))
    assert read().settled_until == 0, "a disabled root pays nothing"
