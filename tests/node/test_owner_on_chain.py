"""What an owner does about stake and nodes, typed as a person types it, on a real local chain."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command import prime_node
from eth_abi import abi
from programs import keystore, typed
from typer.testing import CliRunner

from devnet.chain import dev_signer
from devnet.deployed import TEST_PERIODS, Deployed, opinions_on, pool_config
from devnet.ports import free_port
from prime_chain import flows
from prime_chain.amounts import ETHER
from prime_chain.client import Call
from prime_chain.history import read_slashes
from prime_chain.keystore import create_keystore
from prime_chain.leaves import find_leaf
from prime_chain.sender import Sender
from prime_core.encoding import merkle_proof, merkle_root, reward_leaf, sha256
from prime_core.errors import NotFoundError, UnavailableError, UserError
from prime_core.ids import Address, Digest, address
from prime_core.messages import ReceiptAnswer, RewardInfo
from prime_core.node import Invite
from prime_core.rollout import Receipt, SignedSubmission, Submission
from prime_core.signing import LocalSigner
from prime_core.task import Lease, SignedLease
from prime_core.times import utc
from prime_core.verdict import Reason
from prime_node.cli import app
from prime_node.spool import Spool
from prime_node.wallet import open_provider

MANAGER, TRAINER, VALIDATOR, OWNER, NODE, OTHER = (dev_signer(n) for n in range(1, 7))


@dataclass
class Owner:
    """A pool on a chain, and `prime-node` with the owner's keystore; no orchestrator."""

    deployed: Deployed
    pool: int
    folder: Path

    def run(self, *words: str, wallet: LocalSigner = OWNER) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of one command."""
        flags = ["--rpc", self.deployed.url, "--deployment", str(self.deployed.path)]
        flags += ["--pool", str(self.pool), "--data", str(self.folder / "data")]
        flags += ["--wallet", str(keystore(self.folder, wallet))]
        flags += ["--password-file", str(self.password)]
        done = prime_node(*words, *flags)
        return done.returncode, done.stdout, done.stderr

    def __call__(self, *words: str, wallet: LocalSigner = OWNER) -> Any:
        """JSON of a command that must succeed."""
        status, out, said = self.run(*words, "--json", wallet=wallet)
        assert status == 0, said
        return json.loads(out)

    def refused(self, *words: str, wallet: LocalSigner = OWNER) -> str:
        """The one sentence of a command that must fail, without a traceback."""
        status, _, said = self.run(*words, wallet=wallet)
        assert status not in (0, 1), said
        assert "Traceback" not in said
        assert said.count("\n") <= 2, said
        return said

    @property
    def password(self) -> Path:
        path = self.folder / "password"
        path.write_text("secret")
        return path

    def consent(self, node: LocalSigner, provider: Address = OWNER.address) -> Path:
        path = self.folder / f"consent-{node.address}.json"
        status, _, said = self.run(
            "node", "consent", "--provider", provider, "--out", str(path), wallet=node
        )
        assert status == 0, said
        return path

    def seat(self, node: LocalSigner) -> None:
        """Stake, node, and a seat."""
        self("faucet")
        self("stake", "add", "300")
        self("node", "add", str(self.consent(node)))
        self("node", "allow")
        deployed = self.deployed
        invite = Invite(pool=self.pool, node=node.address, deadline=deployed.now() + 1000)
        signature = MANAGER.sign(invite, deployed.deployment.domain_of(invite))
        deployed.send(MANAGER, deployed.contracts.pools.join(invite, signature))


@pytest.fixture
def owner(deployed: Deployed, tmp_path: Path) -> Owner:
    c = deployed.contracts
    create = c.pools.create(
        pool_config(TRAINER.address, sha256(b"run"), 100 * ETHER, slash=50 * ETHER, capacity=8)
    )
    deployed.send(MANAGER, create)
    pool = c.pools.count()
    deployed.send(MANAGER, c.pools.set_validator(pool, VALIDATOR.address, True))
    return Owner(deployed, pool, tmp_path)


@pytest.mark.slow
def test_a_node_is_added_by_its_signed_consent_shown_listed_and_removed(owner: Owner) -> None:
    consent = owner.consent(NODE)
    done = owner("node", "add", str(consent))
    assert [row["what"].split()[0] for row in done] == ["register", "add"]
    shown = owner("node", "show", NODE.address)
    assert (shown["provider"], shown["payout"], shown["pools"]) == (OWNER.address,) * 2 + ([],)
    assert owner("node", "list") == [NODE.address]
    assert owner("node", "add", str(consent)) == [], "what is done is not sent again"
    owner("node", "remove", NODE.address)
    assert owner("node", "list") == []
    assert owner("node", "show", NODE.address)["provider"] is None
    again = owner.run("node", "add", str(consent))
    assert "ConsentUsed" in again[2], "a consent is good once"


@pytest.mark.slow
def test_one_command_or_one_transaction_of_a_safe_does_all_that_a_seat_needs(owner: Owner) -> None:
    owner("faucet")
    file = str(owner.consent(NODE))
    words = ("node", "add", file, "--stake", "150")
    kinds = ["register", "let", "deposit", "add", "let"]
    unsent = owner(*words, "--calldata")
    as_safe = (*words, "--multisig", "--provider", OWNER.address)
    assert "has no MultiSendCallOnly" in owner.refused(*as_safe)
    anvil = owner.deployed.anvil
    anvil.rpc("anvil_setCode", "0x9641d764fc13c8B624c04430C7356C1C7C8102e2", "0x00")
    (safe,) = owner(*as_safe)
    anvil.rpc("anvil_setCode", "0x9641d764fc13c8B624c04430C7356C1C7C8102e2", "0x")
    (packed,) = abi.decode(["bytes"], bytes.fromhex(safe["data"].removeprefix("0x8d80ff0a")))
    found = []
    while packed:
        head, size = packed[:53], int.from_bytes(packed[53:85])
        assert (head[0], int.from_bytes(head[21:])) == (0, 0), "a call without value"
        found.append((head[1:21].hex(), "0x" + packed[85 : 85 + size].hex()))
        packed = packed[85 + size :]
    assert found == [(row["to"][2:].lower(), row["data"]) for row in unsent]
    assert safe["operation"].startswith("1")
    assert owner("node", "list") == [], "nothing was sent"
    assert [row["what"].split()[0] for row in owner(*words)] == kinds
    contracts = owner.deployed.contracts
    assert contracts.vault.active(OWNER.address) == 150 * ETHER
    assert contracts.pools.allows(OWNER.address, owner.pool)
    assert owner("node", "list") == [NODE.address]
    assert owner(*words) == [], "what is done is not sent again"


def test_a_missing_consent_or_another_owners_is_one_sentence(owner: Owner, tmp_path: Path) -> None:
    consent = owner.consent(NODE, OTHER.address)
    assert f"is for {OTHER.address}" in owner.refused("node", "add", str(consent))
    (tmp_path / "none.json").write_text("{}")
    assert "is not a signed consent" in owner.refused("node", "add", str(tmp_path / "none.json"))
    assert "no signed consent" in owner.refused("node", "add", str(tmp_path / "missing.json"))
    assert "no owner is named" in owner.refused("node", "consent", wallet=NODE)
    for place in (tmp_path, tmp_path / "none" / "consent.json"):
        words = ("node", "consent", "--provider", OWNER.address, "--out", str(place))
        assert f"{place} cannot be written" in owner.refused(*words, wallet=NODE)


@pytest.mark.slow
def test_a_node_moved_to_a_new_key_keeps_its_seat(owner: Owner) -> None:
    owner.seat(NODE)
    assert owner("node", "show", NODE.address)["pools"] == [owner.pool]
    owner("node", "move", NODE.address, str(owner.consent(OTHER)))
    assert owner("node", "show", NODE.address)["moved_to"] == OTHER.address
    assert owner("node", "show", NODE.address)["pools"] == []
    assert owner("node", "show", OTHER.address)["pools"] == [owner.pool]
    assert owner("node", "list") == [OTHER.address]


@pytest.mark.slow
def test_sessions_are_revoked_by_owner_or_node_only(owner: Owner) -> None:
    owner("node", "add", str(owner.consent(NODE)))
    owner("node", "revoke", NODE.address)
    shown = owner("node", "show", NODE.address)["revoked_before"]
    assert shown == pytest.approx(owner.deployed.now(), abs=5)
    owner("node", "revoke", "--before", str(shown + 50), wallet=NODE)
    assert owner("node", "show", NODE.address)["revoked_before"] == shown + 50
    assert "NotAllowed" in owner.refused("node", "revoke", NODE.address, wallet=OTHER)
    assert "RevocationNotLater" in owner.refused("node", "revoke", NODE.address, "--before", "5")


@pytest.mark.slow
def test_an_owner_s_wallet_takes_its_nodes_out_of_the_pool(owner: Owner) -> None:
    pools = owner.deployed.contracts.pools
    assert "has no node in pool" in owner.refused("leave")
    owner.seat(NODE)
    assert "has no node in pool" in owner.refused("leave", wallet=OTHER)
    assert pools.is_member(owner.pool, NODE.address)
    status, said, error = owner.run("leave")
    assert status == 0, error
    assert "it may be withdrawn from" in said
    assert not pools.is_member(owner.pool, NODE.address)
    assert "has no node in pool" in owner.refused("leave"), "nothing is left to do"
    assert pools.allows(OWNER.address, owner.pool)
    owner("node", "allow", "--off")
    assert not pools.allows(OWNER.address, owner.pool)


@pytest.mark.slow
def test_a_node_leaves_on_chain_though_no_orchestrator_answers(owner: Owner) -> None:
    """The stake is free. The command fails for the sessions that it could not end."""
    pools, vault = owner.deployed.contracts.pools, owner.deployed.contracts.vault
    owner.seat(NODE)
    assert vault.committed(OWNER.address)
    nowhere = f"http://127.0.0.1:{free_port()}"
    for _ in range(2):
        status, said, error = owner.run("leave", "--orchestrator", nowhere, wallet=NODE)
        assert not pools.is_member(owner.pool, NODE.address)
        assert not vault.committed(OWNER.address)
        assert status == UnavailableError.exit_code, error
        assert "it may be withdrawn from" in said
        assert "the node has left the pool on chain, but its sessions were not ended" in error
        assert f"{nowhere[7:]} does not answer" in error
        assert "type this again" in error
    assert "no orchestrator is named" in owner.refused("leave", wallet=NODE)


@pytest.mark.slow
def test_the_payout_address_moves_only_by_the_owner(owner: Owner) -> None:
    owner("node", "add", str(owner.consent(NODE)))
    owner("payout", OTHER.address)
    assert owner("stake", "show")["payout"] == OTHER.address
    assert "NotProvider" in owner.refused("payout", NODE.address, wallet=VALIDATOR)
    assert "not an Ethereum address" in owner.refused("payout", "0x12")


@pytest.mark.slow
def test_an_interrupted_command_that_is_typed_again_pays_once(owner: Owner) -> None:
    deployed = owner.deployed
    vault, chain = deployed.contracts.vault, deployed.deployment.chain_id
    folder = owner.folder / "data" / "chain"

    def interrupted(command: str, calls: list[Call]) -> None:
        sender = Sender(deployed.client, OWNER, folder / f"sender-{chain}-{OWNER.address}.sqlite")
        with suppress(KeyboardInterrupt), sender.acting(f"prime_node.cli_owner.{command}") as act:
            for number, call in enumerate(calls):
                sender.submit(f"{act}:{number}", call)
            raise KeyboardInterrupt
        sender.close()

    owner("faucet")
    all_of_it = flows.stake(deployed.contracts, OWNER.address, 10_000 * ETHER)
    interrupted("stake_add(amount=10000)", all_of_it)
    status, out, said = owner.run("stake", "add", "10000", "--json")
    assert status == 0, said
    assert [row["what"] for row in json.loads(out)] == [call.description for call in all_of_it]
    assert "finishing what was interrupted: deposit" in said
    assert vault.active(OWNER.address) == 10_000 * ETHER
    interrupted("stake_unbond(amount=4)", [vault.unbond(4 * ETHER)])
    (row,) = owner("stake", "unbond", "4")
    assert row["transaction"]
    assert vault.active(OWNER.address) == 9_996 * ETHER
    owner("stake", "unbond", "4")
    assert vault.active(OWNER.address) == 9_992 * ETHER, "a finished command is done again"
    interrupted("stake_unbond(amount=1)", [vault.unbond(1 * ETHER)])
    assert len(owner("stake", "unbond", "2")) == 2, "another command does not take its place"
    assert vault.active(OWNER.address) == 9_989 * ETHER
    interrupted("another()", [vault.unbond(3 * ETHER)])
    assert len(owner("stake", "unbond", "3")) == 2, "nor does one with an equal call"
    assert vault.active(OWNER.address) == 9_983 * ETHER


@pytest.mark.slow
def test_stake_on_its_way_out_is_bonded_again(owner: Owner) -> None:
    owner("faucet")
    owner("stake", "add", "10")
    owner("stake", "unbond", "4")
    owner("stake", "rebond", "1.5")
    shown = owner("stake", "show")
    assert shown["active"] == str(75 * ETHER // 10)
    assert [one["amount"] for one in shown["unbonding"]] == [str(25 * ETHER // 10)]
    assert "StakeNotFree" in owner.refused("stake", "rebond", "5")


def test_a_dry_run_tells_the_cost_of_each_step_or_why_it_would_be_refused(owner: Owner) -> None:
    owner("faucet")
    nonce = owner.deployed.client.nonce(OWNER.address)
    rows = owner("stake", "add", "5", "--dry-run")
    assert [row["what"].split()[0] for row in rows] == ["register", "let", "deposit"]
    for row in rows:
        assert row["cost"].endswith("gas, no L1 data fee on this chain"), row
    status, out, _ = owner.run("stake", "unbond", "5", "--calldata", "--json")
    (row,) = json.loads(out)
    assert "StakeNotFree" in row["cost"]
    assert "seats need or slashes hold the rest" in row["cost"]
    assert status == 64, "what would be refused is not a success"
    assert owner.deployed.client.nonce(OWNER.address) == nonce


def test_a_node_key_that_asks_for_stake_learns_that_it_is_the_owners(owner: Owner) -> None:
    owner("node", "add", str(owner.consent(NODE)))
    nonce = owner.deployed.client.nonce(NODE.address)
    for words in (("unbond", "5"), ("withdraw",)):
        said = owner.refused("stake", *words, wallet=NODE)
        assert f"{NODE.address} holds no stake: it is a node of {OWNER.address}" in said
    assert owner.deployed.client.nonce(NODE.address) == nonce


@pytest.mark.slow
def test_stake_nodes_and_faucet_need_no_pool(owner: Owner) -> None:
    flags = ["--rpc", owner.deployed.url, "--deployment", str(owner.deployed.path)]
    flags += ["--data", str(owner.folder / "data"), "--wallet", str(keystore(owner.folder, OTHER))]

    def typed(*words: str) -> str:
        said = CliRunner().invoke(app, [*words, *flags], env={"HOME": "/nonexistent"})
        assert said.exit_code == 0, said.output
        return said.output

    assert "gas, no L1 data fee on this chain" in typed("faucet", "--dry-run")
    assert f"provider      {OTHER.address}" in typed("stake", "show")
    owner("faucet", wallet=OTHER)
    assert "gas" in typed("stake", "add", "5", "--dry-run")
    assert f"{OTHER.address} has no node" in typed("node", "list")
    assert "pools" in typed("node", "show")
    owner("stake", "add", "5", wallet=OTHER)
    assert "gas" in typed("payout", OWNER.address, "--dry-run")
    assert "gas" in typed("stake", "unbond", "5", "--dry-run")


def _propose(owner: Owner) -> Digest:
    """A slash proposal about a seated node; returns its submission."""
    deployed, c = owner.deployed, owner.deployed.contracts
    submission = Submission(
        pool=owner.pool, lease_digest=sha256(b"lease"), node=NODE.address, step=1,
        policy_digest=sha256(b"p"), sha256=sha256(b"file"), size=1, rows=1,
        valid_until=deployed.now() + 1000,
    )  # fmt: skip
    domain = deployed.deployment.domain_of(submission)
    leaf = submission.digest(domain)
    deployed.send(MANAGER, c.work.post_root(owner.pool, merkle_root([leaf]), 1, sha256(b"o")))
    said = opinions_on(deployed.deployment, submission, [VALIDATOR])
    call = c.slasher.propose(submission, NODE.sign(submission, domain), 1, [], said)
    deployed.send(VALIDATOR, call)
    return leaf


@pytest.mark.slow
def test_a_slash_is_disputed_by_its_owner_alone_and_in_time(owner: Owner) -> None:
    owner.seat(NODE)
    leaf = _propose(owner)
    listed = owner("audit", "list")
    assert [(one["leaf"], one["status"]) for one in listed] == [(leaf, "proposed")]
    assert "about a node of" in owner.refused("dispute", leaf, wallet=OTHER)
    assert "no slash was proposed" in owner.refused("dispute", sha256(b"other"))
    said = owner.refused("dispute", leaf)
    assert "the court cannot be asked" in said, "who serves the opinions does not choose the judge"
    assert "--arbiter" in said
    owner("dispute", leaf, "--arbiter")
    (found,) = read_slashes(owner.deployed.client, owner.deployed.deployment)
    assert found.status == "disputed"
    assert "it is disputed" in owner.refused("dispute", leaf)


@pytest.mark.slow
def test_an_owner_objects_without_a_deposit_that_no_evidence_is_served(owner: Owner) -> None:
    owner.seat(NODE)
    leaf = _propose(owner)
    owner("dispute", leaf, "--not-served")
    assert "it is objected" in owner.refused("dispute", leaf)


@pytest.mark.slow
def test_a_closed_window_is_one_sentence(owner: Owner) -> None:
    owner.seat(NODE)
    leaf = _propose(owner)
    owner.deployed.anvil.forward(owner.deployed.deployment.periods.slash_window + 1)
    assert "past its window" in owner.refused("dispute", leaf)


@pytest.mark.slow
def test_rewards_of_all_nodes_of_an_owner_are_claimed_at_once(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed, c = owner.deployed, owner.deployed.contracts
    owner.seat(NODE)
    owner("node", "add", str(owner.consent(OTHER)))
    for step in flows.fund_pool(c, MANAGER.address, owner.pool, 50 * ETHER):
        deployed.send(deployed.accounts[0], c.token.transfer(MANAGER.address, 50 * ETHER))
        deployed.send(MANAGER, step)
    periods, epoch = deployed.deployment.periods, deployed.now() // TEST_PERIODS.epoch_length
    earned = {NODE.address: 7 * ETHER, TRAINER.address: 2 * ETHER}
    leaves = [reward_leaf(node, amount) for node, amount in earned.items()]
    deployed.anvil.forward(2 * periods.epoch_length + periods.validity)
    post = c.rewards.post_reward_root(
        owner.pool, epoch, merkle_root(leaves), 9 * ETHER, sha256(b"object")
    )
    deployed.send(MANAGER, post)

    def reported(_client: object, node: Address) -> RewardInfo:
        """What an orchestrator says; the chain's root is what it is held to."""
        number = list(earned).index(node) if node in earned else None
        return RewardInfo(
            node=node,
            epoch=epoch if number is not None else None,
            cumulative=str(earned.get(node, 0)),
            proof=tuple(merkle_proof(leaves, number)) if number is not None else (),
            claimable_at=None,
            pending_units=0,
            forfeited="0",
        )

    where = ("--orchestrator", "http://127.0.0.1:9")
    claim = ("rewards", "claim", *where)
    assert "audit mirrors --pool N" in owner.refused(*claim, "--node", NODE.address)
    monkeypatch.setattr("prime_chain.claims.fetch_info", reported)
    assert "can be claimed in" in owner.refused("rewards", "claim", "--node", NODE.address, *where)
    deployed.anvil.forward(periods.reward_delay + 1)
    owner("payout", VALIDATOR.address)
    before = c.token.balance_of(VALIDATOR.address)
    (row,) = owner(*claim)
    assert row["what"] == "claim the rewards of 1 nodes", "the other one has nothing payable"
    assert c.token.balance_of(VALIDATOR.address) - before == 7 * ETHER
    assert "paid already" in owner.refused("rewards", "claim", "--node", NODE.address, *where)
    earned[NODE.address] = 8 * ETHER
    said = owner.refused("rewards", "claim", "--node", NODE.address, *where)
    assert "does not lead to the reward root on chain" in said


def _receipted(owner: Owner, index: int = 0) -> tuple[Digest, Lease]:
    """A file in the agent's journal with lease and receipt, as the lease broker leaves it, received
    `index` seconds from now."""
    deployed = owner.deployed
    domain, now = deployed.deployment.domain("work"), deployed.now() + index
    lease = Lease(
        pool=owner.pool, step=1, node=NODE.address, index=index, policy_digest=sha256(b"p"),
        run_digest=sha256(b"run"), target=2, salt=sha256(b"s"), deadline=now + 100,
    )  # fmt: skip
    submission = Submission(
        pool=owner.pool, lease_digest=lease.digest(domain), node=NODE.address, step=1,
        policy_digest=sha256(b"p"), sha256=sha256(b"f"), size=1, rows=1, valid_until=now + 100,
    )  # fmt: skip
    leaf = submission.digest(domain)
    receipt = Receipt(submission_digest=leaf, received_at=now)
    spool = Spool(owner.folder / "data" / "spool", now=lambda: float(now))
    body = SignedSubmission(
        submission=submission, node=NODE.address, signature=NODE.sign(submission, domain)
    )
    signed = SignedLease(lease=lease, signature=MANAGER.sign(lease, domain), policy_version=0)
    spool.add(leaf, body, signed)
    answer = ReceiptAnswer(receipt=receipt, signature=MANAGER.sign(receipt, domain))
    spool.settle(lease.digest(domain), answer)
    return leaf, lease


def test_receipts_are_listed_by_number_and_time(owner: Owner) -> None:
    leaves = [_receipted(owner, 1000 * number)[0] for number in range(3)]

    def listed(*words: str) -> list[str]:
        return [one["submission_digest"] for one in owner("work", "list", *words)]

    assert listed() == leaves
    assert listed("--last", "2") == leaves[1:]
    assert "1 older receipts are not shown" in owner.run("work", "list", "--last", "2")[1]
    since = utc(owner.deployed.now() + 500).replace(" ", "T")
    assert listed("--since", since) == leaves[1:]
    assert listed("--since", since, "--last", "1") == leaves[2:]
    assert listed("--since", "2999-01-01") == []
    assert "is not a time" in owner.refused("work", "list", "--since", "yesterday")


@pytest.mark.slow
def test_a_receipt_that_the_manager_forgot_is_posted_by_its_node_and_found_again(
    owner: Owner,
) -> None:
    owner.seat(NODE)
    leaf, _ = _receipted(owner)
    listed = owner("work", "list")
    assert [(one["submission_digest"], one["state"]) for one in listed] == [(leaf, "unknown")]
    assert "known to be forgotten" in owner.refused("work", "post")
    assert "NotYourTurn" in owner.refused("work", "post", leaf), "not before an epoch has passed"
    owner.deployed.anvil.forward(owner.deployed.deployment.periods.epoch_length)
    owner("work", "post", leaf)
    assert [one["state"] for one in owner("work", "list")] == ["rooted"]
    assert "AlreadyPosted" in owner.refused("work", "post", leaf)

    # what was signed is read back from the transaction itself: no object lists this leaf
    from prime_chain.history import read_events

    deployed = owner.deployed
    events = read_events(deployed.client, deployed.deployment, contracts=("work",))

    def nothing(digest: Digest, limit: int) -> bytes:
        raise NotFoundError("no object is needed")

    found = find_leaf(deployed.client, deployed.deployment, events, owner.pool, leaf, None, nothing)
    assert found.signed.node == NODE.address
    domain = deployed.deployment.domain_of(found.signed.submission)
    assert found.signed.submission.digest(domain) == leaf == found.root.root
    assert found.signed.submission.recover(domain, found.signed.signature) == NODE.address
    work = deployed.contracts.work
    assert work.read("rootedAt", owner.pool, found.root.seq, leaf, tuple(found.proof)) != (0,)
    assert "NotAllowed" in owner.refused("appeal", leaf, wallet=OTHER)
    owner("appeal", leaf)
    assert "was appealed before" in owner.refused("appeal", leaf)
    assert "no root on chain holds" in owner.refused("appeal", sha256(b"another file"))
    # and anyone with the quorum's opinions may strike it from pay by its digest
    from prime_orchestrator.cli.main import main as orchestrator

    said = opinions_on(
        deployed.deployment, found.signed.submission, [VALIDATOR], reason=Reason.WRONG_ROWS
    )
    file = owner.folder / "opinions.json"
    file.write_text(json.dumps([one.model_dump(mode="json") for one in said]))
    words = ["orchestrator", "pool", "reject", leaf, str(file), "--pool", str(owner.pool)]
    words += ["--rpc", deployed.url, "--deployment", str(deployed.path)]
    words += ["--wallet", str(keystore(owner.folder, MANAGER))]
    words += ["--password-file", str(owner.password)]
    words += ["--orchestrator", "http://127.0.0.1:9", "--journal", str(owner.folder / "journal")]
    status, _, complaint = typed(orchestrator, *words)
    assert status == 0, complaint
    assert work.read("isRejected", owner.pool, leaf) == (True,)
    with pytest.raises(NotFoundError, match="no root on chain holds"):
        find_leaf(
            deployed.client, deployed.deployment, events, owner.pool, sha256(b"x"), None, nothing
        )


def test_the_owners_password_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    from prime_node.config import load

    (tmp_path / "node-pw").write_text("node's")
    (tmp_path / "owner-pw").write_text("owner's")
    node = create_keystore(tmp_path / "node.json", "node's", light=True)
    cold = create_keystore(tmp_path / "owner.json", "owner's", light=True)
    flags = {
        "data": tmp_path, "wallet": tmp_path / "node.json", "password_file": tmp_path / "node-pw",
        "provider_wallet": tmp_path / "owner.json",
    }  # fmt: skip
    settings = load({**flags, "provider_password_file": tmp_path / "owner-pw"})
    opened = open_provider(settings, None)
    assert opened is not None
    assert opened.address == cold != node
    assert "owner-pw" not in json.dumps(settings.to_remember())
    with pytest.raises(UserError, match="the password does not open"):
        open_provider(load(flags), None)


def test_calldata_for_a_multisig_needs_no_key(owner: Owner) -> None:
    status, out, said = owner.run(
        "stake", "unbond", "5", "--calldata", "--json", "--provider", OTHER.address
    )
    assert status == 64, said  # printed all the same: the account has no stake to unbond yet
    (row,) = json.loads(out)
    c = owner.deployed.contracts
    assert (row["to"], row["data"]) == (c.vault.address, c.vault.unbond(5 * ETHER).calldata())
    assert Call(address(row["to"]), bytes.fromhex(row["data"][2:])).to == c.vault.address
