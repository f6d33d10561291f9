"""`orchestrator deployment` as an operator types it, on chains that call themselves Base and Base
Sepolia: what is printed, kept next to the file, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anvil_kit import needs_anvil
from programs import typed

from devnet.chain import Anvil, dev_signer
from prime_chain import networks
from prime_chain.amounts import ETHER
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.costs import GAS_PRICE_ORACLE
from prime_chain.keystore import save_keystore
from prime_core.deployment import Deployment
from prime_core.encoding import sha256
from prime_core.ids import address
from prime_orchestrator.cli.deployment import commit_of, default_file
from prime_orchestrator.cli.main import main

DEPLOYER = dev_signer(0)
MULTISIG = address("0x00000000000000000000000000000000000a11ce")
A_FEE = 10**9
# CALLDATASIZE PUSH4 10^9 MUL PUSH0 MSTORE PUSH1 32 PUSH0 RETURN: 10^9 wei for each byte of the ask
ORACLE = "0x36633b9aca00025f5260205ff3"


FEED = networks.BASE.uptime_feed
pytestmark = needs_anvil


def feed(answer: int, since: int) -> str:
    """A sequencer uptime feed of one round: MSTORE 1, answer, since at 0, 32, 64; RETURN 160."""
    return f"0x60015f5260{answer:02x}60205263{since:08x}60405260a05ff3"


class Deployer:
    """A chain, a keystore, and the command."""

    def __init__(self, anvil: Anvil, folder: Path) -> None:
        self.anvil = anvil
        self.folder = folder
        self.file = folder / "deployment.json"
        save_keystore(folder / "k.json", bytes(DEPLOYER.account.key), "secret", light=True)
        (folder / "pw").write_text("secret")

    def run(self, *words: str) -> tuple[int, str, str]:
        return typed(main, "orchestrator", "deployment", *words)

    def deploy(self, network: str, *words: str) -> tuple[int, str, str]:
        return self.run(
            *("deploy", "--network", network, "--rpc", self.anvil.url, "--out", str(self.file)),
            *("--wallet", str(self.folder / "k.json")),
            *("--password-file", str(self.folder / "pw"), *words),
        )

    def checks(self) -> dict[str, Any]:
        _, out, said = self.run(
            "check", "--rpc", self.anvil.url, "--deployment", str(self.file), "--json"
        )
        assert out, said
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture
def deployer(tmp_path: Path) -> Iterator[Deployer]:
    with Anvil(block_time=0.1) as anvil:  # blocks come: Base asks for some on top
        yield Deployer(anvil, tmp_path)


def become(anvil: Anvil, chain_id: int) -> None:
    """The local chain calls itself another from here on."""
    anvil.rpc("anvil_setChainId", chain_id)


@pytest.mark.slow
def test_base_sepolia_is_deployed_kept_and_read_back(deployer: Deployer) -> None:
    become(deployer.anvil, 84532)
    status, out, said = deployer.deploy("base-sepolia", "--json")
    assert status == 0, said
    made = Deployment.model_validate_json(out)
    assert (made.chain_id, made) == (84532, Deployment.load(deployer.file))
    assert made.commit.removesuffix("-dirty") == commit_of(Path.cwd()).removesuffix("-dirty")
    kept = deployer.file.with_suffix(".input.json").read_bytes()
    assert made.source_input == sha256(kept)
    assert "contracts/src/Slasher.sol" in json.loads(kept)["sources"]
    client = ChainClient([deployer.anvil.url], 84532)
    assert Contracts(client, made).slasher.validator_bond() == 1000 * ETHER
    client.close()
    found = deployer.checks()
    assert found["ok"]
    notes = {one["name"] for one in found["checks"] if not one["ok"]}
    assert "deployer is not arbiter" in notes, "one key for all is said on a test network"
    status, _, said = deployer.deploy("base-sepolia")
    assert (status, "holds a deployment already" in said) == (64, True)


@pytest.mark.slow
def test_base_wants_a_multisig_tells_the_l1_data_fee_and_leaves_the_deployer_nothing(
    deployer: Deployer,
) -> None:
    become(deployer.anvil, 8453)
    status, _, said = deployer.deploy("base", "--dry-run")
    assert status == 64
    assert f"arbiter {DEPLOYER.address} is not a contract" in said
    assert "--multisig" in said
    deployer.anvil.rpc("anvil_setCode", MULTISIG, "0x00")
    deployer.anvil.rpc("anvil_setCode", GAS_PRICE_ORACLE, ORACLE)
    status, _, said = deployer.deploy("base", "--multisig", MULTISIG, "--dry-run")
    assert (status, f"uptime feed {FEED} is not a contract" in said) == (64, True)
    deployer.anvil.rpc("anvil_setCode", FEED, feed(0, 0))
    status, out, said = deployer.deploy("base", "--multisig", MULTISIG, "--dry-run", "--json")
    assert status == 0, said
    plan = json.loads(out)
    assert len(plan["steps"]) == 12
    for step in plan["steps"]:
        size = (len(step["data"]) - 2) // 2
        assert A_FEE * size < int(step["l1_fee_wei"]) < A_FEE * (size + 400)
    total = plan["total"]
    assert total["gas"] == sum(step["gas"] for step in plan["steps"])
    assert int(total["l1_fee_wei"]) == sum(int(step["l1_fee_wei"]) for step in plan["steps"])
    assert int(total["wei"]) > int(total["l1_fee_wei"])
    assert not deployer.file.exists()

    status, _, said = deployer.deploy("base", "--multisig", MULTISIG)
    assert status == 0, said
    made = Deployment.load(deployer.file)
    assert made.roles is not None
    assert {made.roles.arbiter, made.roles.governor, made.roles.holder} == {MULTISIG}
    found = deployer.checks()
    assert found["ok"], found
    names = {one["name"]: one["ok"] for one in found["checks"]}
    assert names["arbiter is a multisig"]
    assert names["deployer is not governor"]
    client = ChainClient([deployer.anvil.url], 8453, quorum=1)
    vault = Contracts(client, made).vault
    assert vault.uptime_feed() == FEED
    block = client.block("latest")
    assert vault.window_time(block.number) == block.time - 3600
    down = block.time - 5000
    deployer.anvil.rpc("anvil_setCode", FEED, feed(1, down))
    assert vault.window_time() == down - 1
    client.close()


def test_a_dry_run_on_the_local_chain_says_that_there_is_no_l1_data_fee(
    deployer: Deployer,
) -> None:
    status, out, said = deployer.deploy("local", "--dry-run")
    assert status == 0, said
    assert "no L1 data fee on this chain" in out
    assert out.count("gas") == 13
    status, _, said = deployer.deploy("base-sepolia", "--dry-run")
    assert (status, "serves chain 31337" in said) == (64, True)
    assert said.count("\n") == 1


def test_terms_may_be_deployed_without_anybody_to_move_them(deployer: Deployer) -> None:
    status, _, said = deployer.deploy("local", "--governor", "none", "--dispute-deposit", "0")
    assert status == 0, said
    made = Deployment.load(deployer.file)
    client = ChainClient([deployer.anvil.url], 31337)
    slasher = Contracts(client, made).slasher
    assert slasher.governor() is None
    assert slasher.dispute_deposit() == 0
    client.close()
    assert deployer.checks()["ok"]


def test_a_deployment_to_a_public_chain_is_not_written_to_an_ignored_folder() -> None:
    assert default_file(84532) == Path("deployments/84532.json")
    assert default_file(8453) == Path("deployments/8453.json")
    assert default_file(31337) == Path("var/deployments/31337.json")
