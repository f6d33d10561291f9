"""What the agent and its owner's commands do on a real local chain."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from command import prime_node
from node_world import MANAGER, NODE, TRAINER, NodeWorld, node_world, run_definition, until

from devnet.deployed import Deployed, pool_config
from prime_chain import flows
from prime_chain.contracts import ETHER
from prime_chain.keystore import save_keystore
from prime_core.node import Invite
from prime_core.signing import LocalSigner
from prime_node import join
from prime_node.link import Link
from prime_node.owner import Standing
from prime_node.state import DataFolder
from prime_orchestrator.store import schema

STAKE = 100 * ETHER


@dataclass
class Chain:
    """A pool on a local chain, served."""

    world: NodeWorld
    deployed: Deployed
    pool: int

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--rpc", self.deployed.url, "--deployment", str(self.deployed.path))

    def cli(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """`prime-node …` with the pool's flags; asserts its exit status."""
        done = prime_node(
            *(*words, "--orchestrator", self.world.url, "--wallet", str(self.world.keystore)),
            *("--password-file", str(self.world.password_file)),
            *("--data", str(self.world.folder / "owner"), *self.flags),
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.cli(*words, "--json").stdout)

    def carry_invite(self) -> None:
        """Sends the queued join, as the orchestrator's outbox does, and indexes it by hand."""
        (intent,) = until(
            lambda: [row for row in self.world.rows(schema.intents) if row["kind"] == "join"],
            "the invite is queued",
        )
        payload = json.loads(intent["payload"])
        invite = Invite.model_validate_json(json.dumps(payload["invite"]))
        call = self.deployed.contracts.pools.join(invite, payload["signature"])
        self.deployed.send(MANAGER, call)
        self.world.admit()


@pytest.fixture
def chain(deployed: Deployed, tmp_path: Path) -> Iterator[Chain]:
    for account in (MANAGER, NODE):
        deployed.anvil.fund(account.address)
    run = run_definition(stake_per_seat=STAKE)
    create = deployed.contracts.pools.create(
        pool_config(TRAINER.address, run.digest(), STAKE, capacity=16)
    )
    deployed.send(MANAGER, create)
    pool = deployed.contracts.pools.count()
    bank = deployed.accounts[0]
    for step in flows.fund_pool(deployed.contracts, bank.address, pool, ETHER):
        deployed.send(bank, step)
    with node_world(tmp_path, deployed.deployment, pool, stake_per_seat=STAKE) as world:
        yield Chain(world, deployed, pool)


@pytest.mark.soak
def test_own_provider_on_a_test_network_stakes_and_joins_by_itself(chain: Chain) -> None:
    agent = chain.world.join(*chain.flags)
    chain.carry_invite()
    contracts = chain.deployed.contracts
    assert contracts.registry.provider_of(NODE.address) == NODE.address
    assert contracts.vault.active(NODE.address) >= STAKE
    assert contracts.pools.is_member(chain.pool, NODE.address)
    until(chain.world.submissions, "it works")

    # nothing is done twice by a restart
    staked = contracts.vault.active(NODE.address)
    nonce = chain.deployed.client.nonce(NODE.address)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 0
    handed_in = len(chain.world.submissions())
    second = chain.world.join(*chain.flags)
    until(lambda: len(chain.world.submissions()) > handed_in, "it works again")
    assert contracts.vault.active(NODE.address) == staked
    assert chain.deployed.client.nonce(NODE.address) == nonce

    # its settings are remembered: no flag but the folder
    data = str(chain.world.folder / "node")
    command = [
        sys.executable,
        "-m",
        "prime_node.cli",
        "status",
        "--data",
        data,
        "--json",
        "--chain",
    ]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert shown["agent"] == f"running (process {second.pid})"
    assert shown["node"] == NODE.address
    assert shown["directive"] == "work"
    assert shown["member"] is True

    # leaving: the agent ends first, then the chain hears of it
    command = [sys.executable, "-m", "prime_node.cli", "leave", "--data", data]
    left = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    assert second.wait(120) == 0
    stopping, _, ended = left.stderr.partition("the agent has ended")
    assert f"the agent (process {second.pid}) is asked to stop" in stopping
    assert re.search(r"gives its open leases back \(\d+\)", stopping), stopping
    assert ended
    assert "it may be withdrawn from" in left.stdout
    assert not contracts.pools.is_member(chain.pool, NODE.address)
    (revoked,) = chain.world.rows(schema.revocations)
    assert revoked["account"] == NODE.address

    # typed again while the orchestrator is away, it knows the pool, and says what is left
    chain.world.stop_api()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 69, again.stderr
    assert f"using the saved facts of pool {chain.pool}" in again.stderr
    assert "its sessions were not ended" in again.stderr
    chain.world.start_api()
    subprocess.run(command, capture_output=True, check=True)


@pytest.mark.slow
def test_an_owner_elsewhere_learns_what_to_send_and_is_awaited(chain: Chain) -> None:
    owner = chain.deployed.accounts[3]
    chain.world.join(*chain.flags, "--provider", owner.address)
    asked = "a Safe instead adds"
    log = until(
        lambda: chain.world.log() if asked in chain.world.log() else "", "it asks the owner"
    )
    lines = [line for line in log.splitlines() if "waits for its owner" in line]
    assert len(lines) == 1, log
    command = log[log.index("prime-node node add") : log.index(asked)]
    assert all(len(line) <= 80 for line in command.splitlines()), command
    assert chain.world.node_status() is None, "no challenge before the owner's part"
    assert "--stake 100 " in command

    keystore, contracts = chain.world.folder / "owner.json", chain.deployed.contracts
    save_keystore(keystore, bytes(owner.account.key), "secret", light=True)
    password = chain.world.folder / "owner-password"
    password.write_text("secret")
    chain.deployed.send(owner, contracts.token.faucet())
    done = prime_node(
        *("node", "add", str(chain.world.folder / "node" / "consent.json"), "--stake", "100"),
        *("--orchestrator", chain.world.url, "--wallet", str(keystore), "--password-file",
          str(password), "--data", str(chain.world.folder / "owner"), *chain.flags),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chain.carry_invite()
    assert contracts.registry.provider_of(NODE.address) == owner.address
    until(chain.world.submissions, "it works")


def test_stake_commands_move_what_the_chain_then_shows(chain: Chain) -> None:
    chain.cli("faucet")
    chain.cli("stake", "add", "150.5")
    shown = chain.json("stake", "show")
    assert shown["active"] == str(int(150.5 * ETHER))
    assert shown["provider"] == NODE.address
    chain.cli("stake", "unbond", "50.5")
    shown = chain.json("stake", "show")
    assert shown["active"] == str(100 * ETHER)
    assert [one["amount"] for one in shown["unbonding"]] == [str(int(50.5 * ETHER))]
    before = chain.deployed.contracts.token.balance_of(NODE.address)
    chain.deployed.anvil.forward(chain.deployed.deployment.periods.unbonding + 1)
    chain.cli("stake", "withdraw")
    after = chain.deployed.contracts.token.balance_of(NODE.address)
    assert after - before == int(50.5 * ETHER)


def test_dry_run_prints_calldata_and_sends_nothing(chain: Chain) -> None:
    chain.cli("faucet")
    nonce = chain.deployed.client.nonce(NODE.address)
    rows = chain.json("stake", "add", "5", "--dry-run")
    assert [row["what"].split()[0] for row in rows] == ["register", "let", "deposit"]
    vault = chain.deployed.contracts.vault
    assert rows[-1]["to"] == vault.address
    assert rows[-1]["data"] == vault.deposit(5 * ETHER).calldata()
    assert chain.deployed.client.nonce(NODE.address) == nonce


def test_contracts_reason_reaches_the_person(chain: Chain) -> None:
    said = chain.cli("stake", "unbond", "5", status=64).stderr
    assert "refused by the contract" in said


def test_wallet_without_tokens_or_ether_is_one_sentence(chain: Chain) -> None:
    said = chain.cli("stake", "add", "5", status=64).stderr
    assert "holds 0 PRIME, less than 5 PRIME" in said
    assert "prime-node faucet" in said
    chain.deployed.anvil.rpc("anvil_setBalance", NODE.address, "0x0")
    said = chain.cli("faucet", status=64).stderr
    assert f"holds no ETH on {chain.deployed.client.network.name}" in said


def test_rewards_of_a_node_that_earned_nothing(chain: Chain) -> None:
    shown = chain.json("rewards", "show")
    assert (shown["cumulative"], shown["paid"]) == ("0", "0")
    said = chain.cli("rewards", "claim", status=64).stderr
    assert "no settled rewards yet" in said


def test_audit_list_of_a_clean_pool_is_empty(chain: Chain) -> None:
    assert chain.json("audit", "list") == []


@pytest.mark.slow
def test_orchestrator_that_names_other_contracts_is_not_believed(
    chain: Chain, tmp_path: Path
) -> None:
    other = chain.deployed.deployment.model_dump(mode="json")
    other["contracts"]["vault"] = NODE.address
    (tmp_path / "other.json").write_text(json.dumps(other))
    agent = chain.world.join(
        "--rpc", chain.deployed.url, "--deployment", str(tmp_path / "other.json")
    )
    assert agent.wait(120) == 65
    assert "names other contracts than the deployment file" in chain.world.log()


@pytest.mark.slow
def test_dead_rpc_does_not_stop_a_member(chain: Chain) -> None:
    agent = chain.world.join(*chain.flags)
    chain.carry_invite()
    until(chain.world.submissions, "it works")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 0
    handed_in = len(chain.world.submissions())
    digest = chain.world.submissions()[0]["digest"]
    shown = chain.cli("audit", "show", digest).stdout.splitlines()
    assert shown[:2] == [digest, "  submission"]
    assert not [line for line in shown if "{" in line or "'" in line]
    case = chain.world.folder / "case"
    assert str(case / "rollout.parquet") in chain.json("audit", "export", digest, str(case))
    dead = ("--rpc", "http://127.0.0.1:9", "--deployment", str(chain.deployed.path))
    chain.world.join(*dead)
    until(lambda: len(chain.world.submissions()) > handed_in, "it works without the chain")
    assert "the pool is not checked against the chain" in chain.world.log()


def test_the_stake_that_a_seat_needs_is_the_chains_and_not_the_orchestrators_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract adds the seat to all that the provider's stake stands for, in any pool."""
    standing = Standing(
        MANAGER.address,
        True,
        MANAGER.address,
        active=STAKE,
        committed=STAKE,
        member=False,
        allows=True,
    )
    asked: list[int] = []
    monkeypatch.setattr(join, "read_standing", lambda *_: standing)
    monkeypatch.setattr(join, "missing_calls", lambda _, __, needed, *___: asked.append(needed))
    node = LocalSigner(bytes([9]) * 32)
    orchestrator: Any = SimpleNamespace(nodes_of=lambda provider: ())
    run: Any = SimpleNamespace(stake_per_seat=STAKE)
    accounts = join.Accounts(node, MANAGER.address)
    data, link = DataFolder(tmp_path), cast(Link, None)
    part = join.OwnersPart(orchestrator, link, run, accounts, data, now=lambda: 0.0)
    part._missing(link)
    assert asked == [2 * STAKE]
