"""Wrappers, events and flows against the real contracts on a real anvil."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from devnet.deployed import TEST_PERIODS, Deployed, opinions_on, pool_config
from prime_chain import codec, events, flows
from prime_chain import contracts as contracts_module
from prime_chain.contracts import ETHER, Claim, Contracts, ProposalState, prime
from prime_chain.errors import ChainRevertedError
from prime_chain.history import read_events, read_slashes, slash_of, slashes, why_nothing
from prime_core.checkpoint import PolicyStatement
from prime_core.deployment import SOLIDITY_NAMES
from prime_core.encoding import merkle_proof, merkle_root, reward_leaf, sha256
from prime_core.errors import MalformedError, UserError
from prime_core.ids import ZERO_ADDRESS, Digest
from prime_core.node import Invite, NodeConsent
from prime_core.rollout import Receipt, Submission
from prime_core.signing import CONTRACT_NAMES, LocalSigner
from prime_core.task import Lease
from prime_core.verdict import Reason

SALT = sha256(b"salt")
EVIDENCE = sha256(b"evidence")


@dataclasses.dataclass
class Stage:
    """A pool with one staked member, through the wrappers only."""

    deployed: Deployed
    pool: int
    manager: LocalSigner
    trainer: LocalSigner
    validator: LocalSigner
    provider: LocalSigner
    node: LocalSigner

    @property
    def contracts(self) -> Contracts:
        return self.deployed.contracts


@pytest.fixture
def stage(deployed: Deployed) -> Stage:
    c, accounts = deployed.contracts, deployed.accounts
    manager, trainer, validator, provider, node = accounts[1:6]
    call = c.pools.create(
        pool_config(trainer.address, sha256(b"run"), 100 * ETHER, slash=50 * ETHER)
    )
    deployed.send(manager, call)
    pool = c.pools.count()
    deployed.send(manager, c.pools.set_validator(pool, validator.address, True))
    deployed.send(provider, c.token.faucet())
    for step in flows.register_and_stake(c, provider.address, provider.address, 300 * ETHER):
        deployed.send(provider, step)
    stage = Stage(deployed, pool, manager, trainer, validator, provider, node)
    for step in flows.add_node(c, *_consent(stage)):
        deployed.send(provider, step)
    for step in flows.allow(c, provider.address, pool):
        deployed.send(provider, step)
    for step in flows.join(c, *_invite(stage)):
        deployed.send(accounts[0], step)  # anyone carries it
    return stage


def _consent(stage: Stage) -> tuple[NodeConsent, str]:
    consent = NodeConsent(
        provider=stage.provider.address,
        node=stage.node.address,
        salt=SALT,
        deadline=stage.deployed.now() + 1000,
    )
    domain = stage.deployed.deployment.domain_of(consent)
    return consent, stage.node.sign(consent, domain)


def _invite(stage: Stage) -> tuple[Invite, str]:
    invite = Invite(
        pool=stage.pool,
        node=stage.node.address,
        deadline=stage.deployed.now() + 1000,
    )
    return invite, stage.manager.sign(invite, stage.deployed.deployment.domain_of(invite))


def _submission(stage: Stage, number: int) -> tuple[Submission, str, Digest]:
    submission = Submission(
        pool=stage.pool,
        lease_digest=sha256(b"lease%d" % number),
        node=stage.node.address,
        step=number,
        policy_digest=sha256(b"policy"),
        sha256=sha256(b"file%d" % number),
        size=10,
        rows=64,
        valid_until=stage.deployed.now() + 1000,
    )
    domain = stage.deployed.deployment.domain_of(submission)
    return submission, stage.node.sign(submission, domain), submission.digest(domain)


def test_every_state_changing_function_of_the_contracts_has_a_wrapper() -> None:
    """Except what only the contracts say to one another, or the deployer once."""
    internal = {
        "wire", "depositFor", "commit", "release", "openSlash", "releaseSlash", "settleSlash",
        "pledge", "unpledge", "fine",
        "expel", "moveSeat", "permit", "burn", "burnFrom", "transferFrom",
    }  # fmt: skip
    folder = Path(codec.__file__).parent / "abi"
    for name in CONTRACT_NAMES:
        body = json.loads((folder / f"{SOLIDITY_NAMES[name]}.json").read_text())
        wrapper = getattr(contracts_module, name.capitalize())
        for entry in body["abi"]:
            if entry["type"] == "function" and entry["stateMutability"] == "nonpayable":
                done = entry["name"] in internal or hasattr(wrapper, events.snake(entry["name"]))
                assert done, (name, entry["name"])


def test_every_event_of_the_contracts_has_a_class_with_its_fields() -> None:
    ignored = {"Transfer", "Approval", "EIP712DomainChanged"}
    seen = set()
    for name in CONTRACT_NAMES:
        for item in codec.artifact(SOLIDITY_NAMES[name]).events.values():
            if item.name in ignored:
                continue
            kind = events.EVENTS[item.name]
            assert name == kind.CONTRACT
            base = {f.name for f in dataclasses.fields(events.Event)}
            own = [f.name for f in dataclasses.fields(kind) if f.name not in base]
            assert own == [events.snake(str(entry["name"])) for entry in item.inputs], item.name
            seen.add(item.name)
    assert seen == set(events.EVENTS)


def test_a_newcomer_registers_stakes_and_is_seated(stage: Stage) -> None:
    c = stage.contracts
    provider, node = stage.provider.address, stage.node.address
    assert c.registry.is_provider(provider)
    assert c.registry.payout_of(provider) == provider
    assert c.registry.provider_of(node) == provider
    assert c.registry.provider_of(stage.manager.address) is None
    assert c.pools.is_member(stage.pool, node)
    view = flows.stake_view(c, provider, stage.deployed.now())
    assert (view.active, view.committed, view.unbondable) == (
        300 * ETHER, 100 * ETHER, 200 * ETHER,
    )  # fmt: skip
    pool = c.pools.pool_of(stage.pool)
    assert (pool.manager, pool.trainer) == (stage.manager.address, stage.trainer.address)
    assert (pool.members, pool.capacity, pool.ended) == (1, 10, False)
    judged = c.pools.judgement_of(stage.pool)
    assert (judged.quorum, judged.slash_amount, judged.lease_seconds) == (1, 50 * ETHER, 60)
    found = c.pools.validator_of(stage.pool, stage.validator.address)
    assert found is not None
    assert (found.number, found.on) == (1, True)
    assert c.pools.validator_of(stage.pool, node) is None
    assert c.pools.is_validator(stage.pool, stage.validator.address)
    # flows list nothing that is done already
    assert flows.register_and_stake(c, provider, provider, 300 * ETHER) == []
    assert flows.add_node(c, *_consent(stage)) == []
    assert flows.join(c, *_invite(stage)) == []


def test_enroll_does_it_all_in_one_transaction_after_the_allowance(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    newcomer = deployed.accounts[7]
    deployed.send(newcomer, c.token.faucet())
    other = dataclasses.replace(stage, provider=newcomer, node=deployed.accounts[8])
    deployed.send(newcomer, c.token.approve(c.vault.address, 100 * ETHER))
    enroll = c.registry.enroll
    deployed.send(
        newcomer, enroll(newcomer.address, 100 * ETHER, *_consent(other), *_invite(other))
    )
    assert c.pools.is_member(stage.pool, deployed.accounts[8].address)


def test_a_permit_replaces_the_allowance(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    permit = c.token.permit(stage.provider, c.vault.address, 5 * ETHER, deployed.now() + 100)
    before = c.vault.active(stage.provider.address)
    deployed.send(stage.provider, c.vault.deposit_with_permit(5 * ETHER, permit))
    assert c.vault.active(stage.provider.address) == before + 5 * ETHER
    assert c.token.nonces(stage.provider.address) == 1


def test_unbonding_matures_and_is_withdrawn(stage: Stage) -> None:
    c, deployed, provider = stage.contracts, stage.deployed, stage.provider
    with pytest.raises(ChainRevertedError) as caught:
        deployed.send(provider, c.vault.unbond(250 * ETHER))  # 100 are needed by the seat
    assert caught.value.name == "StakeNotFree"
    assert caught.value.arguments == {"available": 200 * ETHER, "asked": 250 * ETHER}
    deployed.send(provider, c.vault.unbond(100 * ETHER))
    view = flows.stake_view(c, provider.address, deployed.now())
    assert [one.amount for one in view.unbonding] == [100 * ETHER]
    assert view.withdrawable == 0
    deployed.anvil.forward(TEST_PERIODS.unbonding + 1)
    view = flows.stake_view(c, provider.address, deployed.now())
    assert view.withdrawable == 100 * ETHER
    deployed.send(provider, c.vault.withdraw())
    assert c.vault.unbondings(provider.address) == ()


def test_policies_are_published_in_order_by_the_trainers_signature(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    domain = deployed.deployment.domain("pools")
    assert c.pools.policy_digest(stage.pool, 0) is None
    for version in (0, 1):
        statement = PolicyStatement(
            pool=stage.pool, version=version, manifest_digest=sha256(b"m%d" % version)
        )
        signature = stage.trainer.sign(statement, domain)
        deployed.send(deployed.accounts[0], c.pools.publish_policy(statement, signature))
        assert c.pools.policy_digest(stage.pool, version) == sha256(b"m%d" % version)
    assert c.pools.next_version(stage.pool) == 2
    with pytest.raises(ChainRevertedError) as caught:
        deployed.client.call(c.pools.publish_policy(statement, signature))
    assert caught.value.name == "WrongVersion"
    assert caught.value.arguments == {"expected": 2, "given": 1}


def test_a_work_root_holds_its_leaves_and_a_leaf_can_be_rejected(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    made = [_submission(stage, number) for number in range(3)]  # each is valid from now on
    leaves = [digest for _, _, digest in made]
    receipt = deployed.send(
        stage.manager, c.work.post_root(stage.pool, merkle_root(leaves), 3, sha256(b"object"))
    )
    posted = events.of_receipt(receipt, 7, deployed.deployment)
    assert isinstance(posted[0], events.RootPosted)
    assert (posted[0].count, posted[0].block_time) == (3, 7)
    seq = posted[0].seq
    root = c.work.root_of(stage.pool, seq)
    assert root is not None
    assert root.root == merkle_root(leaves)
    assert posted[0].epoch == c.work.epoch_at(root.posted_at)
    assert c.work.root_of(stage.pool, seq + 1) is None
    proof = merkle_proof(leaves, 1)
    assert c.work.read("rootedAt", stage.pool, seq, leaves[1], tuple(proof)) != (0,)
    assert c.work.read("rootedAt", stage.pool, seq, leaves[0], tuple(proof)) == (0,)
    submission = made[1][0]
    said = opinions_on(deployed.deployment, submission, [stage.validator], reason=Reason.WRONG_ROWS)
    deployed.send(deployed.accounts[9], c.work.reject(submission, seq, proof, said))
    assert c.work.read("isRejected", stage.pool, leaves[1]) == (True,)
    assert c.work.read("isRejected", stage.pool, leaves[0]) == (False,)


def _propose(stage: Stage) -> tuple[Digest, Digest]:
    """A proposed slash: its submission and transaction."""
    c, deployed = stage.contracts, stage.deployed
    submission, signature, leaf = _submission(stage, 0)
    leaves = [leaf, _submission(stage, 1)[2]]
    deployed.send(
        stage.manager, c.work.post_root(stage.pool, merkle_root(leaves), 2, sha256(b"object"))
    )
    said = opinions_on(deployed.deployment, submission, [stage.validator], evidence=EVIDENCE)
    call = c.slasher.propose(submission, signature, 1, merkle_proof(leaves, 0), said)
    return leaf, deployed.send(deployed.accounts[9], call).tx_hash


def test_a_slash_is_proposed_waits_and_is_executed_by_anyone(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    leaf, proposed_tx = _propose(stage)
    held = c.slasher.proposal(leaf)
    assert held is not None
    assert (held.state, held.amount) == (ProposalState.PROPOSED, 50 * ETHER)
    assert held.authors == (stage.validator.address,)
    assert c.vault.pending_slash(stage.provider.address) == 50 * ETHER
    with pytest.raises(ChainRevertedError) as caught:
        deployed.client.call(c.slasher.execute(leaf))
    assert caught.value.name == "WindowOpen"
    deployed.anvil.forward(TEST_PERIODS.slash_window + 1)
    (supply,) = c.token.read("totalSupply")
    executed = deployed.send(deployed.accounts[9], c.slasher.execute(leaf))
    assert c.token.read("totalSupply") == (supply - 50 * ETHER,), "without a treasury it is burned"
    assert not c.pools.is_member(stage.pool, stage.node.address)
    names = [e.name for e in events.of_receipt(executed, 0, deployed.deployment)]
    assert {"Slashed", "NodeEjected", "SlashExecuted"} <= set(names)

    (found,) = read_slashes(deployed.client, deployed.deployment)
    assert (found.status, found.node, found.leaf) == ("executed", stage.node.address, leaf)
    assert (found.evidence, found.amount) == (EVIDENCE, 50 * ETHER)
    assert found.reason is Reason.WRONG_ACTIVATIONS
    assert (found.proposed_tx, found.ended_tx) == (proposed_tx, executed.tx_hash)
    assert slash_of(deployed.client, deployed.deployment, proposed_tx) == found
    assert slash_of(deployed.client, deployed.deployment, executed.tx_hash) == found


def test_a_slash_that_takes_nothing_says_why(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    cap, periods = c.vault.slash_cap(), deployed.deployment.periods
    leaf, _ = _propose(stage)
    (slash,) = read_slashes(deployed.client, deployed.deployment)
    assert (slash.held, slash.note) == (50 * ETHER, "")
    ended = replace(slash, status="executed", amount=0, ended_at=slash.proposed_at)
    earlier = replace(ended, leaf=sha256(b"earlier"), amount=cap)
    assert "already lost" in why_nothing(ended, [ended], cap, periods)
    none = replace(ended, held=0)
    assert "no stake of the provider was free" in why_nothing(none, [none], cap, periods)
    assert "already lost" in why_nothing(none, [none, earlier], cap, periods)
    later = replace(none, ended_at=slash.proposed_at + periods.validity)
    assert "was free" in why_nothing(later, [later, earlier], cap, periods)
    waiting = replace(slash, amount=0, held=0)
    assert why_nothing(waiting, [waiting], cap, periods).startswith("holds nothing")
    deployed.send(deployed.accounts[0], c.slasher.cancel(leaf))
    assert why_nothing(replace(waiting, status="cancelled"), [], cap, periods) == ""


def test_a_cancelled_slash_takes_nothing(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    leaf, _ = _propose(stage)
    assert c.slasher.proposal(sha256(b"other")) is None
    deployed.send(deployed.accounts[0], c.slasher.cancel(leaf))  # the arbiter
    (found,) = read_slashes(deployed.client, deployed.deployment)
    assert found.status == "cancelled"
    assert c.vault.pending_slash(stage.provider.address) == 0


def test_a_disputed_slash_is_overturned_by_the_arbiter(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    leaf, _ = _propose(stage)
    deployed.send(stage.provider, c.slasher.dispute(leaf))
    found = slashes(read_events(deployed.client, deployed.deployment))
    assert [one.status for one in found] == ["disputed"]
    with pytest.raises(ChainRevertedError, match="NotAllowed"):
        deployed.send(stage.validator, c.slasher.confirm(leaf))
    deployed.send(deployed.accounts[0], c.slasher.overturn(leaf))
    assert [one.status for one in read_slashes(deployed.client, deployed.deployment)] == [
        "cancelled"
    ]


def test_an_objection_that_no_evidence_is_served_needs_the_arbiter(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    leaf, _ = _propose(stage)
    deployed.send(stage.provider, c.slasher.object(leaf))
    deployed.anvil.forward(TEST_PERIODS.slash_window + 1)
    with pytest.raises(ChainRevertedError, match="WrongState"):
        deployed.send(deployed.accounts[9], c.slasher.execute(leaf))
    deployed.send(deployed.accounts[9], c.slasher.lapse(leaf))
    assert c.vault.pending_slash(stage.provider.address) == 0


def test_the_arbiter_is_replaced_behind_a_delay(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    following = deployed.accounts[8].address
    deployed.send(deployed.accounts[0], c.slasher.announce_arbiter(following))
    announced = c.slasher.announced_arbiter()
    assert announced is not None
    assert announced[0] == following
    deployed.anvil.forward(TEST_PERIODS.unbonding + 1)
    deployed.send(deployed.accounts[9], c.slasher.apply_arbiter())
    assert c.slasher.arbiter() == following
    assert c.slasher.announced_arbiter() is None


def test_a_transaction_that_is_about_no_slash_says_so(stage: Stage) -> None:
    deployed = stage.deployed
    receipt = deployed.send(stage.manager, stage.contracts.token.faucet())
    with pytest.raises(UserError, match="about no slash"):
        slash_of(deployed.client, deployed.deployment, receipt.tx_hash)
    with pytest.raises(UserError, match="no mined transaction"):
        slash_of(deployed.client, deployed.deployment, sha256(b"none"))


def test_rewards_are_funded_posted_and_claimed_to_the_payout_address(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    for step in flows.fund_pool(c, deployed.accounts[0].address, stage.pool, 1000 * ETHER):
        deployed.send(deployed.accounts[0], step)
    assert c.rewards.funds(stage.pool).free == 1000 * ETHER
    epoch = deployed.now() // TEST_PERIODS.epoch_length
    node = stage.node.address
    leaves = [reward_leaf(node, 7 * ETHER), reward_leaf(ZERO_ADDRESS, 1)]
    call = c.rewards.post_reward_root(
        stage.pool, epoch, merkle_root(leaves), 7 * ETHER, sha256(b"object")
    )
    with pytest.raises(ChainRevertedError) as caught:
        deployed.send(stage.manager, call)
    assert caught.value.name == "EpochStillOpen"
    deployed.anvil.forward(TEST_PERIODS.epoch_length + TEST_PERIODS.validity)
    deployed.send(stage.manager, call)
    root = c.rewards.reward_root(stage.pool, epoch)
    assert root is not None
    assert not root.disabled
    assert root.claimable_at == deployed.now() + TEST_PERIODS.reward_delay
    assert c.rewards.reward_root(stage.pool, epoch + 1) is None
    deployed.anvil.forward(TEST_PERIODS.reward_delay)
    before = c.token.balance_of(stage.provider.address)
    claim = c.rewards.claim(
        Claim(stage.pool, epoch, node, 7 * ETHER, tuple(merkle_proof(leaves, 0)))
    )
    deployed.send(deployed.accounts[9], claim)
    assert c.token.balance_of(stage.provider.address) == before + 7 * ETHER
    assert c.rewards.claimed(stage.pool, node) == 7 * ETHER
    assert c.rewards.funds(stage.pool).reserved == 0


def test_a_node_that_is_ignored_posts_its_own_leaf(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    domain = deployed.deployment.domain("work")
    now = deployed.now()
    lease = Lease(
        pool=stage.pool, step=1, node=stage.node.address, index=0, policy_digest=sha256(b"p"),
        run_digest=sha256(b"run"), target=2, salt=SALT, deadline=now + 100,
    )  # fmt: skip
    submission = Submission(
        pool=stage.pool, lease_digest=lease.digest(domain), node=stage.node.address, step=1,
        policy_digest=sha256(b"p"), sha256=sha256(b"f"), size=1, rows=1, valid_until=now + 100,
    )  # fmt: skip
    receipt = Receipt(submission_digest=submission.digest(domain), received_at=now)
    deployed.anvil.forward(TEST_PERIODS.epoch_length)
    mined = deployed.send(
        stage.node,
        c.work.post_leaf(
            lease,
            stage.manager.sign(lease, domain),
            submission,
            stage.node.sign(submission, domain),
            receipt,
            stage.manager.sign(receipt, domain),
        ),
    )
    posted = events.of_receipt(mined, 0, deployed.deployment)
    assert any(
        isinstance(e, events.LeafPosted) and e.leaf == submission.digest(domain) for e in posted
    )


def test_an_event_survives_json_and_back(stage: Stage) -> None:
    for event in read_events(stage.deployed.client, stage.deployed.deployment):
        head = {
            "block": event.block,
            "block_hash": event.block_hash,
            "block_time": event.block_time,
            "log_index": event.log_index,
            "tx_hash": event.tx_hash,
        }
        assert events.rebuild(event.name, head, json.loads(json.dumps(event.args()))) == event
    with pytest.raises(MalformedError):
        events.rebuild("Nothing", {}, {})


def test_reads_at_an_older_block_show_the_older_state(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    block = deployed.client.block_number()
    before = c.vault.active(stage.provider.address)
    for step in flows.stake(c, stage.provider.address, ETHER):
        deployed.send(stage.provider, step)
    assert c.vault.active(stage.provider.address, block) == before
    assert c.vault.active(stage.provider.address) == before + ETHER


def test_a_revoked_session_time_is_read_back(stage: Stage) -> None:
    c, deployed = stage.contracts, stage.deployed
    deployed.send(stage.node, c.registry.set_revoked_before(stage.node.address, 12345))
    assert c.registry.revoked_before(stage.node.address) == 12345


@pytest.mark.parametrize(
    ("wei", "text"),
    [
        (0, "0 PRIME"),
        (ETHER, "1 PRIME"),
        (ETHER * 5 // 2, "2.5 PRIME"),
        (1, f"0.{'0' * 17}1 PRIME"),
    ],
)
def test_amounts_are_written_as_people_write_them(wei: int, text: str) -> None:
    assert prime(wei) == text
