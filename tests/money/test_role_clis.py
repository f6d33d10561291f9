"""What managers, validators, arbiter and governor type, against a real chain; and mistype."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anvil_kit import needs_anvil
from money_kit import RUN
from programs import keystore, typed

from devnet.chain import Anvil, dev_signer
from devnet.deployed import Deployed, opinions_on
from prime_chain import flows
from prime_chain.amounts import ETHER
from prime_chain.contracts import Claim, ProposalState
from prime_chain.deployer import Options, deploy
from prime_chain.mirror import announced
from prime_chain.sender import Sender
from prime_core.deployment import Deployment
from prime_core.encoding import merkle_proof, merkle_root, reward_leaf, sha256
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_ADDRESS, ZERO_DIGEST, Digest
from prime_core.messages import RewardInfo
from prime_core.node import NodeConsent
from prime_core.rollout import Submission
from prime_core.settlement import entries_of, settle
from prime_core.signing import LocalSigner
from prime_orchestrator.cli.main import main as orchestrator
from prime_validator.cli import main as validator

ADMIN, MANAGER, TRAINER, VALIDATOR, SECOND, OWNER, NODE, STRANGER = (
    dev_signer(n) for n in range(8)
)


pytestmark = needs_anvil


@dataclass
class Office:
    """A chain with a bond and a deposit at stake, and the commands as people type them.

    Words that begin with `validator` go to that program, all others to `orchestrator`.
    """

    deployed: Deployed
    folder: Path
    pool: int = 0

    def run(self, *words: str, who: LocalSigner | None = MANAGER) -> tuple[int, str, str]:
        """Exit status, standard output and standard error. `who` None: a reading command."""
        flags = ["--rpc", self.deployed.url, "--deployment", str(self.deployed.path)]
        if who is not None:
            flags += ["--wallet", str(keystore(self.folder, who))]
            flags += ["--password-file", str(self.folder / "password")]
        if words[0] == "validator":
            return typed(validator, *words, *flags)
        return typed(orchestrator, "orchestrator", *words, *flags)

    def __call__(self, *words: str, who: LocalSigner | None = MANAGER) -> Any:
        """JSON of a command that must succeed."""
        status, out, said = self.run(*words, "--json", who=who)
        assert status == 0, said
        return json.loads(out)

    def refused(self, *words: str, who: LocalSigner | None = MANAGER) -> str:
        """The sentence of a command that must fail: one line, no traceback."""
        status, _, said = self.run(*words, who=who)
        assert status not in (0, 1), said
        assert len(said.strip().splitlines()) == 1, said
        return said

    @property
    def number(self) -> tuple[str, str]:
        return "--pool", str(self.pool)

    def seat(self) -> None:
        """The owner's node in the pool, by an invite file that anyone carries."""
        deployed, c = self.deployed, self.deployed.contracts
        deployed.send(OWNER, c.token.faucet())
        for call in flows.register_and_stake(c, OWNER.address, OWNER.address, 300 * ETHER):
            deployed.send(OWNER, call)
        consent = NodeConsent(
            provider=OWNER.address, node=NODE.address, salt=sha256(b"salt"),
            deadline=deployed.now() + 1000,
        )  # fmt: skip
        signature = NODE.sign(consent, deployed.deployment.domain_of(consent))
        deployed.send(OWNER, c.registry.add_node(consent, signature))
        deployed.send(OWNER, c.pools.allow(self.pool, True))
        file = self.folder / "invite.json"
        self("pool", "invite", NODE.address, "--out", str(file), *self.number)
        self("pool", "join", str(file), who=STRANGER)

    def proposal(self, leaf: Digest) -> ProposalState:
        found = self.deployed.contracts.slasher.proposal(leaf)
        assert found is not None
        return found.state

    def root(self, index: int = 0) -> Submission:
        """A file of NODE, the only leaf of its root."""
        deployed = self.deployed
        submission = Submission(
            pool=self.pool, lease_digest=sha256(b"lease%d" % index), node=NODE.address, step=1,
            policy_digest=sha256(b"p"), sha256=sha256(b"file%d" % index), size=1, rows=1,
            valid_until=deployed.now() + 1000,
        )  # fmt: skip
        leaf = submission.digest(deployed.deployment.domain_of(submission))
        work = deployed.contracts.work
        post = work.post_root(self.pool, merkle_root([leaf]), 1, sha256(b"object"))
        deployed.send(MANAGER, post)
        return submission

    def propose(self, index: int = 0) -> Digest:
        """A slash proposal by both validators about NODE; its submission."""
        deployed, c = self.deployed, self.deployed.contracts
        submission = self.root(index)
        domain = deployed.deployment.domain_of(submission)
        said = opinions_on(deployed.deployment, submission, [VALIDATOR, SECOND])
        call = c.slasher.propose(submission, NODE.sign(submission, domain), index + 1, [], said)
        deployed.send(STRANGER, call)
        return submission.digest(domain)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    folder = tmp_path_factory.mktemp("office")
    from devnet.deployed import TEST_PERIODS
    from prime_chain.client import ChainClient

    with Anvil() as anvil:
        client = ChainClient([anvil.url], 31337)
        options = Options(
            periods=TEST_PERIODS.model_copy(
                update={
                    "epoch_length": RUN.epoch_seconds, "validity": RUN.validity_seconds,
                    "slash_window": 20, "dispute_window": 20,
                    "unbonding": RUN.validity_seconds + 60,
                }
            ),
            testnet=True, holder=ADMIN.address, supply=10**9 * ETHER, arbiter=ADMIN.address,
            validator_bond=1000 * ETHER,
        )  # fmt: skip
        deployment = deploy(client, ADMIN, options, journal=folder / "deploy.sqlite")
        deployment.save(folder / "deployment.json")
        (folder / "password").write_text("secret")
        (folder / "run.json").write_bytes(RUN.raw())
        accounts = [dev_signer(n) for n in range(10)]
        deployed = Deployed(anvil, deployment, folder / "deployment.json", accounts, client)
        office = Office(deployed, folder)
        made = office(
            "pool", "create", "--run", str(folder / "run.json"), "--trainer", TRAINER.address,
            "--validator", VALIDATOR.address, "--quorum", "2", "--faucet",
        )  # fmt: skip
        office.pool = made["pool"]
        yield office
        client.close()


@pytest.fixture
def office(chain: Office) -> Iterator[Office]:
    revert = chain.deployed.anvil.snapshot()
    yield chain
    revert()
    for journal in chain.folder.glob("*.journal.sqlite*"):
        journal.unlink()  # the chain has forgotten what they remember


def test_a_manager_funds_pauses_starts_and_shows_a_pool(office: Office) -> None:
    assert office("pool", "fund", "--amount", "12.5", *office.number)["free"] == str(
        25 * ETHER // 2
    )
    office("pool", "pause", *office.number)
    assert office("pool", "show", *office.number, who=None)["paused"] is True
    office("pool", "start", *office.number)
    shown = office("pool", "show", *office.number, who=None)
    assert (shown["paused"], shown["list_only"], shown["validators"]) == (
        False, False, [VALIDATOR.address],
    )  # fmt: skip
    assert "NotAllowed" in office.refused("pool", "pause", *office.number, who=STRANGER)


def test_an_invite_is_a_file_that_anyone_carries(office: Office) -> None:
    office.seat()
    assert office.deployed.contracts.pools.is_member(office.pool, NODE.address)
    said = office.refused("pool", "invite", NODE.address, *office.number, who=STRANGER)
    assert f"is managed by {MANAGER.address}" in said
    (office.folder / "bad.json").write_text("[]")
    assert "is not a signed invite" in office.refused(
        "pool", "join", str(office.folder / "bad.json")
    )


def test_a_node_is_ejected_banned_and_let_back(office: Office) -> None:
    office.seat()
    pools = office.deployed.contracts.pools

    def banned() -> bool:
        (seat,) = pools.read("seatOf", office.pool, NODE.address)
        return bool(seat[1])

    office("pool", "eject", NODE.address, *office.number)
    assert not pools.is_member(office.pool, NODE.address)
    office("pool", "ban", NODE.address, *office.number)
    assert banned()
    office("pool", "unban", NODE.address, *office.number)
    assert not banned()
    assert "NotMember" in office.refused("pool", "eject", NODE.address, *office.number)


def test_a_pool_may_let_in_listed_providers_only(office: Office) -> None:
    office("pool", "list-only", *office.number)
    office("pool", "allow", OWNER.address, STRANGER.address, *office.number)
    office("pool", "allow", STRANGER.address, "--off", *office.number)
    pools = office.deployed.contracts.pools
    assert pools.rules_of(office.pool).list_only
    assert pools.read("isListed", office.pool, OWNER.address) == (True,)
    assert pools.read("isListed", office.pool, STRANGER.address) == (False,)
    office("pool", "list-only", "--off", *office.number)
    assert not pools.rules_of(office.pool).list_only


@pytest.mark.slow
def test_an_ended_pool_is_refunded_once_and_not_before_its_last_rewards(office: Office) -> None:
    deployed = office.deployed
    office("pool", "fund", "--amount", "5", *office.number)
    assert "PoolNotEnded" in office.refused("pool", "refund", *office.number)
    assert office("pool", "show", *office.number, who=None)["refundable_at"] is None
    when = office("pool", "end", *office.number)["refundable_at"]
    assert when > deployed.now()
    said = office.refused("pool", "refund", *office.number)
    assert "RefundNotYet" in said
    assert "can still be promised its pay" in said
    assert office("pool", "show", *office.number, who=None)["refundable_at"] == when
    deployed.anvil.forward(when - deployed.now())
    assert office("pool", "refund", *office.number)["refunded"] == str(5 * ETHER)
    assert "NothingToRefund" in office.refused("pool", "refund", *office.number)
    assert "PoolHasEnded" in office.refused("pool", "fund", "--amount", "5", *office.number)


@pytest.mark.slow
def test_anyone_posts_what_validators_signed_where_the_manager_is_silent(
    office: Office,
) -> None:
    deployed, c = office.deployed, office.deployed.contracts
    office("pool", "set-validator", SECOND.address, *office.number)
    office("pool", "fund", "--amount", "3", *office.number)
    assert office("pool", "bond", "--amount", "10", *office.number)["bond"] == str(10 * ETHER)
    epoch = deployed.now() // RUN.epoch_seconds
    settlement = settle(
        chain_id=31337, pool=office.pool, epoch=epoch, as_of_block=1, previous=None,
        previous_name=ZERO_DIGEST, leaves=[], slashes=[],
    ).model_copy(
        update={
            "entries": entries_of({VALIDATOR.address: 4 * ETHER, SECOND.address: 5 * ETHER}),
            "cumulative_total": str(9 * ETHER),
        }
    )  # fmt: skip
    path = office.folder / "settlement.json"
    path.write_bytes(settlement.canonical())
    sign = ("validator", "sign-table", str(path), *office.number)
    signed = [office(*sign, who=who)["signature"] for who in (VALIDATOR, SECOND)]
    post = ("rewards", "post-table", str(path), *reversed(signed))
    assert "ManagerNotSilent" in office.refused(*post, who=STRANGER)
    silent = office("pool", "show", *office.number, who=None)["silent_from"]
    deployed.anvil.forward(silent - deployed.now())
    strange = office(*sign, who=STRANGER)["signature"]
    said = office.refused("rewards", "post-table", str(path), signed[0], strange, who=STRANGER)
    assert "never a validator" in said
    office(*post, who=STRANGER)
    shown = office("pool", "show", *office.number, who=None)
    assert (shown["free"], shown["reserved"], shown["bond"]) == (
        "0", str(9 * ETHER), str(4 * ETHER)
    )  # fmt: skip
    claim = ("rewards", "claim", str(path), SECOND.address)
    assert "can be claimed in" in office.refused(*claim, who=STRANGER)
    deployed.anvil.forward(deployed.deployment.periods.reward_delay + 1)
    assert office(*claim, who=STRANGER)["paid"] == str(5 * ETHER)
    assert c.token.balance_of(SECOND.address) == 5 * ETHER
    assert "paid already" in office.refused(*claim, who=STRANGER)
    path.write_bytes(settlement.model_copy(update={"cumulative_total": "1"}).canonical())
    assert "do not sum" in office.refused(*sign, who=VALIDATOR)


def test_a_validator_names_its_mirror_on_chain(office: Office) -> None:
    deployed, announce = office.deployed, ("validator", "announce-mirror")
    client = deployed.client
    assert announced(client, deployed.deployment, office.pool) == {}
    office(*announce, "http://one.example", *office.number, who=VALIDATOR)
    office(*announce, "http://two.example:8490", *office.number, who=VALIDATOR)
    found = announced(client, deployed.deployment, office.pool)
    assert found == {VALIDATOR.address: "http://two.example:8490"}
    assert "NotAllowed" in office.refused(*announce, "http://x", *office.number, who=STRANGER)
    assert "printable ASCII" in office.refused(*announce, "a b", *office.number, who=VALIDATOR)
    office(*announce, "", *office.number, who=VALIDATOR)
    assert announced(client, deployed.deployment, office.pool) == {}


@pytest.mark.slow
def test_an_interrupted_command_that_is_typed_again_pays_once(office: Office) -> None:
    deployed, wei = office.deployed, 10_000 * ETHER
    deployed.send(VALIDATOR, deployed.contracts.token.faucet())
    path = deployed.path.with_name(f"{deployed.path.stem}.{VALIDATOR.address}.journal.sqlite")
    sender = Sender(deployed.client, VALIDATOR, path)
    command = "prime_validator.cli.bond(amount=10000)"
    with suppress(KeyboardInterrupt), sender.acting(command) as act:
        for number, call in enumerate(flows.stake(deployed.contracts, VALIDATOR.address, wei)):
            sender.submit(f"{act}:{number}", call)
        raise KeyboardInterrupt
    sender.close()
    office("validator", "bond", "10000", who=VALIDATOR)
    assert deployed.contracts.vault.active(VALIDATOR.address) == wei
    assert "holds" in office.refused("validator", "bond", "10000", who=VALIDATOR)


@pytest.mark.slow
def test_a_command_whose_last_look_at_the_chain_fails_pays_once(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transactions are confirmed, then the endpoint goes: exit code 69 asks for a retry."""
    vault = office.deployed.contracts.vault
    held = vault.active(VALIDATOR.address)
    for _ in range(3):
        office.deployed.send(VALIDATOR, office.deployed.contracts.token.faucet())
    with monkeypatch.context() as patched:

        def gone(*_: object) -> None:
            raise UnavailableError("no RPC endpoint answers")

        patched.setattr(type(vault), "active", gone)
        for _ in range(2):
            status, _, said = office.run("validator", "bond", "700", who=VALIDATOR)
            assert (status, "no RPC" in said) == (UnavailableError.exit_code, True)
    assert "done already by what was interrupted: deposit" in said
    office("validator", "bond", "700", who=VALIDATOR)
    assert vault.active(VALIDATOR.address) == held + 700 * ETHER
    office("validator", "bond", "700", who=VALIDATOR)
    assert vault.active(VALIDATOR.address) == held + 1400 * ETHER, "a finished one is done again"


@pytest.mark.slow
def test_another_command_with_an_equal_call_leaves_nothing_out(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the same allowance first. What an interrupted one did stays known meanwhile."""
    rewards, amount = office.deployed.contracts.rewards, ("--amount", "7", *office.number)
    office.deployed.send(MANAGER, office.deployed.contracts.token.faucet())
    held, bonded = rewards.funds(office.pool).free, rewards.bond_of(office.pool)
    with monkeypatch.context() as patched:

        def gone(*_: object) -> None:
            raise UnavailableError("no RPC endpoint answers")

        patched.setattr(type(rewards), "funds", gone)
        assert "no RPC" in office.refused("pool", "fund", *amount)
    office("pool", "bond", *amount)
    assert rewards.bond_of(office.pool) == bonded + 7 * ETHER
    office("pool", "fund", *amount)
    assert rewards.funds(office.pool).free == held + 7 * ETHER


@pytest.mark.slow
def test_a_validator_bonds_unbonds_rebonds_withdraws_and_resigns(office: Office) -> None:
    deployed = office.deployed
    status = ("validator", "status", VALIDATOR.address, *office.number)
    assert office(*status, who=None)["may_propose"] is False
    mistyped = office.folder / "mistyped"
    said = office.refused(*status, "--data", str(mistyped), who=None)
    assert "is not a validator's folder" in said
    assert not mistyped.exists()
    deployed.send(VALIDATOR, deployed.contracts.token.faucet())
    office("validator", "bond", "1500", who=VALIDATOR)
    found = office(*status, who=None)
    assert (found["may_propose"], found["bond_needed"]) == (True, str(1000 * ETHER))
    office("validator", "unbond", "600", who=VALIDATOR)
    assert office(*status, who=None)["may_propose"] is False
    office("validator", "rebond", "100", who=VALIDATOR)
    assert office(*status, who=None)["may_propose"] is True
    assert "NothingToWithdraw" in office.refused("validator", "withdraw", who=VALIDATOR)
    deployed.anvil.forward(deployed.deployment.periods.unbonding + 1)
    office("validator", "withdraw", who=VALIDATOR)
    office("validator", "resign", *office.number, who=VALIDATOR)
    assert office(*status, who=None)["appointed"] is False
    assert "holds" in office.refused("validator", "bond", "1", who=STRANGER)


def test_a_validator_claims_what_it_earned_by_judging(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed, c = office.deployed, office.deployed.contracts
    office("pool", "fund", "--amount", "10", *office.number)
    epoch = deployed.now() // RUN.epoch_seconds
    deployed.anvil.forward(2 * RUN.epoch_seconds + RUN.validity_seconds)
    leaves = [reward_leaf(VALIDATOR.address, 3 * ETHER), reward_leaf(NODE.address, ETHER)]
    root = merkle_root(leaves)
    post = c.rewards.post_reward_root(office.pool, epoch, root, 4 * ETHER, sha256(b"object"))
    deployed.send(MANAGER, post)
    info = RewardInfo(
        node=VALIDATOR.address, epoch=epoch, cumulative=str(3 * ETHER), claimable_at=None,
        proof=tuple(merkle_proof(leaves, 0)), pending_units=0, forfeited="0",
    )  # fmt: skip
    monkeypatch.setattr("prime_chain.claims.fetch_info", lambda *_: info)
    claim = ("validator", "claim", *office.number, "--orchestrator", "http://127.0.0.1:9")
    assert "can be claimed in" in office.refused(*claim, who=VALIDATOR)
    deployed.anvil.forward(deployed.deployment.periods.reward_delay + 1)
    assert office(*claim, who=VALIDATOR)["paid"] == str(3 * ETHER)
    assert c.token.balance_of(VALIDATOR.address) == 3 * ETHER
    assert "paid already" in office.refused(*claim, who=VALIDATOR)


@pytest.fixture
def disputed(office: Office) -> tuple[Office, Digest]:
    """A seated node, two validators with three bonds each, one disputed proposal."""
    deployed, c = office.deployed, office.deployed.contracts
    office.seat()
    for signer in (VALIDATOR, SECOND):
        deployed.send(signer, c.token.faucet())
        office("validator", "bond", "3000", who=signer)
    office("pool", "set-validator", SECOND.address, *office.number)
    leaf = office.propose()
    deployed.send(OWNER, c.token.approve(c.slasher.address, c.slasher.dispute_deposit()))
    deployed.send(OWNER, c.slasher.dispute(leaf))
    return office, leaf


def test_the_arbiter_confirms_a_disputed_slash(disputed: tuple[Office, Digest]) -> None:
    office, leaf = disputed
    status = ("validator", "status", SECOND.address, *office.number)
    assert [one["leaf"] for one in office(*status, who=None)["disputes"]] == [leaf]
    assert "NotAllowed" in office.refused("slash", "confirm", leaf, who=VALIDATOR)
    office("slash", "confirm", leaf, who=ADMIN)
    assert office.proposal(leaf) is ProposalState.EXECUTED
    assert "WrongState" in office.refused("slash", "overturn", leaf, who=ADMIN)


def test_the_arbiter_overturns_a_disputed_slash(disputed: tuple[Office, Digest]) -> None:
    office, leaf = disputed
    office("slash", "overturn", leaf, who=ADMIN)
    assert office.proposal(leaf) is ProposalState.CANCELLED
    (listed,) = office("slash", "list", *office.number, who=None)
    assert listed["status"] == "cancelled"


def test_a_dispute_that_was_not_judged_lapses_by_anyone(disputed: tuple[Office, Digest]) -> None:
    office, leaf = disputed
    assert "WindowOpen" in office.refused("slash", "lapse", leaf, who=STRANGER)
    office.deployed.anvil.forward(office.deployed.deployment.periods.dispute_window + 1)
    assert "WindowClosed" in office.refused("slash", "confirm", leaf, who=ADMIN)
    office("slash", "lapse", leaf, who=STRANGER)
    assert office.proposal(leaf) is ProposalState.CANCELLED


def test_an_undisputed_slash_is_executed_by_anyone_and_another_cancelled_by_the_arbiter(
    disputed: tuple[Office, Digest],
) -> None:
    office, _ = disputed
    second, third = office.propose(1), office.propose(2)
    assert "NotAllowed" in office.refused("slash", "cancel", second, who=MANAGER)
    office("slash", "cancel", second, who=ADMIN)
    assert office.proposal(second) is ProposalState.CANCELLED
    assert "WindowOpen" in office.refused("slash", "execute", third, who=STRANGER)
    office.deployed.anvil.forward(office.deployed.deployment.periods.slash_window + 1)
    office("slash", "execute", third, who=STRANGER)
    assert office.proposal(third) is ProposalState.EXECUTED


def test_the_arbiter_has_an_appealed_file_paid(office: Office) -> None:
    office.seat()
    deployed, rewards = office.deployed, office.deployed.contracts.rewards
    submission = office.root()
    leaf = submission.digest(deployed.deployment.domain_of(submission))
    assert "NoOpenAppeal" in office.refused("slash", "restore", leaf, "--amount", "1", who=ADMIN)
    deployed.send(OWNER, rewards.appeal(submission, 1, []))
    (listed,) = office("slash", "appeals", *office.number, who=None)
    assert (listed["leaf"], listed["restored"]) == (leaf, False)
    assert "NotAllowed" in office.refused("slash", "restore", leaf, "--amount", "1", who=MANAGER)
    assert "not an amount" in office.refused("slash", "restore", leaf, "--amount", "0", who=ADMIN)
    office("slash", "restore", leaf, "--amount", "0.25", who=ADMIN)
    (listed,) = office("slash", "appeals", who=None)
    assert (listed["amount"], listed["restored"]) == (str(ETHER // 4), True)
    assert leaf in office.run("slash", "appeals", who=None)[1]


def test_the_arbiter_announces_its_successor(office: Office) -> None:
    assert office("slash", "arbiter", who=None)["arbiter"] == ADMIN.address
    assert "NotAllowed" in office.refused("slash", "announce-arbiter", SECOND.address)
    office("slash", "announce-arbiter", SECOND.address, who=ADMIN)
    assert office("slash", "arbiter", who=None)["next"] == SECOND.address
    assert "TooEarly" in office.refused("slash", "apply-arbiter", who=STRANGER)
    office.deployed.anvil.forward(office.deployed.deployment.periods.unbonding + 1)
    office("slash", "apply-arbiter", who=STRANGER)
    assert office("slash", "arbiter", who=None)["arbiter"] == SECOND.address


def test_the_arbiter_disables_a_reward_root_in_time(office: Office) -> None:
    deployed, c = office.deployed, office.deployed.contracts
    office("pool", "fund", "--amount", "10", *office.number)
    epoch = deployed.now() // RUN.epoch_seconds
    deployed.anvil.forward(2 * RUN.epoch_seconds + RUN.validity_seconds)
    leaves = [reward_leaf(NODE.address, ETHER), reward_leaf(ZERO_ADDRESS, 1)]
    post = c.rewards.post_reward_root(
        office.pool, epoch, merkle_root(leaves), ETHER, sha256(b"object")
    )
    deployed.send(MANAGER, post)
    # a root of another pool is not a root of this one
    claim = c.rewards.claim(
        Claim(office.pool + 1, epoch, NODE.address, ETHER, tuple(merkle_proof(leaves, 0)))
    )
    with pytest.raises(Exception, match="UnknownRewardRoot"):
        deployed.client.call(claim)
    assert "UnknownRewardRoot" in office.refused(
        "slash", "disable", "--pool", str(office.pool + 1), "--epoch", str(epoch), who=ADMIN
    )
    office("slash", "disable", "--epoch", str(epoch), *office.number, who=ADMIN)
    root = c.rewards.reward_root(office.pool, epoch)
    assert root is not None
    assert root.disabled


def test_the_governor_announces_hands_over_and_renounces(office: Office) -> None:
    show = ("terms", "show")
    assert office(*show, who=None)["governor"] == ADMIN.address
    announce = ("terms", "announce", "--deposit", "7", "--bond", "0")
    assert "NotAllowed" in office.refused(*announce, who=MANAGER)
    office(*announce, who=ADMIN)
    announced = office(*show, who=None)["announced"]
    assert (announced["dispute_deposit"], announced["bond"]) == (str(7 * ETHER), "0")
    assert "TooEarly" in office.refused("terms", "apply", who=STRANGER)
    office.deployed.anvil.forward(office.deployed.deployment.periods.unbonding + 1)
    office("terms", "apply", who=STRANGER)
    assert office(*show, who=None)["dispute_deposit"] == str(7 * ETHER)
    office("terms", "hand-over", STRANGER.address, who=ADMIN)
    assert office(*show, who=None)["pending_governor"] == STRANGER.address
    office("terms", "accept", who=STRANGER)
    office("terms", "renounce", who=STRANGER)
    assert office(*show, who=None)["governor"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("pool", "fund", "--amount", "1"), ("pool", "pause"), ("pool", "end"), ("pool", "refund"),
        ("pool", "eject", NODE.address), ("pool", "ban", NODE.address),
        ("pool", "allow", OWNER.address), ("pool", "list-only"),
        ("pool", "set-validator", SECOND.address), ("validator", "resign"),
        ("slash", "disable", "--epoch", "3"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_prints_calldata_without_a_key_and_rehearses_without_sending(
    office: Office, words: tuple[str, ...]
) -> None:
    block = office.deployed.client.block_number()
    base = (*words, *office.number, "--sender", MANAGER.address)
    bare = office(*base, "--calldata", who=None)
    assert (bare["chain_id"], bare["sender"]) == (31337, MANAGER.address)
    assert bare["calls"]
    for call in bare["calls"]:
        assert call["data"].startswith("0x")
        assert set(call) == {"to", "value", "data", "description"}
    status, out, _ = office.run(*base, "--dry-run", "--json", who=None)
    dry = json.loads(out)
    assert (status != 0) == any(call["error"] for call in dry["calls"]), (
        "a refusal is not a success"
    )
    for call in dry["calls"]:
        assert (call["gas"] is None) or call["gas"] > 20_000
        assert call["l1_fee_wei"] is None
    assert office.deployed.client.block_number() == block


def test_a_dry_run_reads_as_sentences(office: Office) -> None:
    _, out, _ = office.run("pool", "end", *office.number, "--dry-run")
    assert "gas, no L1 data fee on this chain" in out
    assert "in all about" in out
    status, out, _ = office.run("pool", "refund", *office.number, "--dry-run")
    assert "would be refused: PoolNotEnded" in out
    assert "has not ended" in out
    assert status == 75


# ── bad input: a named error, one sentence ──


def test_an_amount_over_the_balance(office: Office) -> None:
    said = office.refused("pool", "fund", "--amount", "20000", *office.number)
    assert "holds 10000 PRIME, less than 20000 PRIME" in said


def test_an_unknown_pool(office: Office) -> None:
    for words in (("pool", "show"), ("pool", "fund", "--amount", "1")):
        said = office.refused(*words, "--pool", "77", who=None if words[1] == "show" else MANAGER)
        assert "there is no pool 77 on this chain: UnknownPool(pool=77)" in said
    assert "UnknownPool(pool=77)" in office.refused("pool", "end", "--pool", "77")


def test_a_wrong_chain(office: Office, tmp_path: Path) -> None:
    other = office.deployed.deployment.model_copy(update={"chain_id": 84532})
    other.save(tmp_path / "other.json")
    moved = Office(office.deployed, office.folder, office.pool)
    moved.deployed = Deployed(
        office.deployed.anvil, other, tmp_path / "other.json", office.deployed.accounts,
        office.deployed.client,
    )  # fmt: skip
    said = moved.refused("pool", "show", *office.number, who=None)
    assert "serves chain 31337, not the deployment's chain 84532" in said


def test_an_expired_permit_and_a_used_window_name_their_errors(office: Office) -> None:
    deployed, c = office.deployed, office.deployed.contracts
    deployed.send(OWNER, c.token.faucet())
    permit = c.token.permit(OWNER, c.vault.address, ETHER, deployed.now() - 1)
    from prime_chain.errors import ChainRevertedError

    with pytest.raises(ChainRevertedError) as caught:
        deployed.client.call(c.vault.deposit_with_permit(ETHER, permit), sender=OWNER.address)
    assert caught.value.name == "ERC2612ExpiredSignature"
    assert caught.value.arguments == {"deadline": permit.deadline}
    assert str(caught.value) == (
        "deposit 1 PRIME of stake by permit is refused by the contract: "
        f"ERC2612ExpiredSignature(deadline={permit.deadline}): the permit has expired: sign another"
    )


def test_a_missing_wallet_or_account_is_reported(office: Office) -> None:
    assert "no wallet is named" in office.refused("pool", "end", *office.number, who=None)
    said = office.refused("pool", "end", *office.number, "--calldata", who=None)
    assert "nothing says which account would send" in said
    said = office.refused("pool", "end", *office.number, "--sender", STRANGER.address)
    assert f"is of {MANAGER.address}, not of {STRANGER.address}" in said


def test_a_deployment_is_checked_by_the_command(office: Office, tmp_path: Path) -> None:
    found = office("deployment", "check", who=None)
    assert found["ok"] is True
    names = {c["name"] for c in found["checks"]}
    assert {"code of Slasher", "periods", "treasury as the file says"} <= names
    file = office.deployed.deployment
    wrong = file.model_copy(update={"code": {**file.code, "work": Digest("0x" + "11" * 32)}})
    wrong.save(tmp_path / "wrong.json")
    moved = Office(office.deployed, office.folder)
    moved.deployed = Deployed(
        office.deployed.anvil, wrong, tmp_path / "wrong.json", office.deployed.accounts,
        office.deployed.client,
    )  # fmt: skip
    status, out, _ = moved.run("deployment", "check", who=None)
    assert status == 1
    assert "✗ code of Work" in out
    assert Deployment.load(tmp_path / "wrong.json") == wrong
