"""The deployer against a real anvil."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from devnet.__main__ import QUICK_PERIODS
from devnet.chain import CHAIN_ID, Anvil, dev_signer
from devnet.deployed import TEST_PERIODS, Deployed
from prime_chain import codec
from prime_chain.client import ChainClient
from prime_chain.deployer import Options, check_options, create_address, deploy, dry_run
from prime_chain.deployment_check import verify
from prime_core.deployment import DEMO_PERIODS, SOLIDITY_NAMES, Deployment, Periods
from prime_core.errors import FatalError, UserError
from prime_core.signing import CONTRACT_NAMES


def _options(**changes: object) -> Options:
    account = dev_signer(0).address
    values: dict[str, object] = {
        "periods": TEST_PERIODS, "testnet": True, "holder": account, "supply": 1,
        "arbiter": account,
    }  # fmt: skip
    return Options(**{**values, **changes})  # type: ignore[arg-type]


def test_deployment_is_verified_and_read_back_from_its_file(deployed: Deployed) -> None:
    loaded = Deployment.load(deployed.path)
    assert loaded == deployed.deployment
    verify(deployed.client, loaded)
    assert deployed.contracts.work.periods() == TEST_PERIODS
    assert set(loaded.abi) == set(CONTRACT_NAMES)
    assert loaded.abi["work"] == codec.artifact(SOLIDITY_NAMES["work"]).digest


def test_verify_refuses_a_file_whose_address_is_another_contract(deployed: Deployed) -> None:
    contracts = deployed.deployment.contracts
    swapped = deployed.deployment.model_copy(
        update={"contracts": contracts.model_copy(update={"slasher": contracts.pools})}
    )
    with pytest.raises(FatalError):
        verify(deployed.client, swapped)


def test_deploying_again_with_the_same_journal_sends_nothing(
    deployed: Deployed, tmp_path: Path
) -> None:
    signer = deployed.accounts[9]
    first = deploy(deployed.client, signer, _options(), journal=tmp_path / "journal")
    nonce = deployed.client.nonce(signer.address)
    again = deploy(
        deployed.client,
        signer,
        _options(),
        journal=tmp_path / "journal",
        now=lambda: 10**10,
    )
    assert again == first
    assert deployed.client.nonce(signer.address) == nonce


def test_deployment_cut_off_midway_is_finished_without_sending_twice(
    deployed: Deployed, tmp_path: Path
) -> None:
    signer = deployed.accounts[8]
    before = deployed.client.nonce(signer.address)

    class Killed(BaseException):
        pass

    def kill_after_vault(line: str) -> None:
        if "StakeVault" in line:
            raise Killed

    with pytest.raises(Killed):
        deploy(deployed.client, signer, _options(), journal=tmp_path / "j", report=kill_after_vault)
    deployment = deploy(deployed.client, signer, _options(), journal=tmp_path / "j")
    verify(deployed.client, deployment)
    assert deployed.client.nonce(signer.address) - before == 12  # 8 contracts, 4 wirings


def test_dry_run_names_every_transaction_its_gas_and_future_address(
    deployed: Deployed, tmp_path: Path
) -> None:
    signer = deployed.accounts[7]
    block = deployed.client.block_number()
    steps = dry_run(deployed.client, signer.address, _options())
    assert deployed.client.block_number() == block  # nothing was sent
    real = deploy(deployed.client, signer, _options(), journal=tmp_path / "journal")
    foreseen = {step.name: step.address for step in steps if step.address is not None}
    assert foreseen == {name: real.address(name) for name in CONTRACT_NAMES}
    for step in steps:
        receipt = deployed.client.receipt(real.transactions[step.name])  # type: ignore[arg-type]
        assert receipt is not None
        assert step.gas is not None
        assert receipt.gas_used <= step.gas <= receipt.gas_used * 1.1 + 10_000


def test_create_address_matches_a_known_vector() -> None:
    # The first contract of anvil's first account, known from every Ethereum tutorial.
    found = create_address(dev_signer(0).address, 0)
    assert found == "0x5FbDB2315678afecb367f032d93F642f64180aa3"


def test_periods_that_let_stake_outrun_its_liability_are_refused_before_sending(
    deployed: Deployed, tmp_path: Path
) -> None:
    bad = Periods(
        epoch_length=10, validity=30, slash_window=10, dispute_window=10, reward_delay=1,
        unbonding=50,
    )  # fmt: skip
    with pytest.raises(UserError, match="unbonding"):
        deploy(deployed.client, deployed.accounts[6], _options(periods=bad), journal=tmp_path / "j")
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize(("slash_window", "refused"), [(9, True), (10, True), (11, False)])
def test_periods_in_which_no_node_can_help_itself_are_refused_before_sending(
    slash_window: int, refused: bool
) -> None:
    """Work.postLeaf opens an epoch after the receipt; by then somebody must still answer."""
    periods = Periods(
        epoch_length=20, validity=30, slash_window=slash_window, dispute_window=10, reward_delay=1,
        unbonding=60,
    )  # fmt: skip
    assert periods.problem() == "", "the contracts would take them"
    client = ChainClient(["http://127.0.0.1:9"], 31337)
    with (
        pytest.raises(UserError, match="must exceed the epoch of 20 s")
        if refused
        else nullcontext()
    ):
        check_options(_options(periods=periods), client)


def test_the_periods_that_we_ship_let_a_node_help_itself() -> None:
    default = Periods()
    assert default.self_help == default.validity, "for a whole validity"
    for periods in (default, DEMO_PERIODS, TEST_PERIODS, QUICK_PERIODS):
        assert periods.problem() == periods.trap() == ""
        assert periods.self_help > 0


def test_a_faucet_is_refused_on_a_network_of_real_value(tmp_path: Path) -> None:
    client = ChainClient(["http://127.0.0.1:9"], 8453)
    with pytest.raises(UserError, match="faucet"):
        deploy(client, dev_signer(0), _options(), journal=tmp_path / "j")


@pytest.mark.parametrize("text", ["{", "[]", '{"chain_id": "x"}'])
def test_a_malformed_deployment_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deployment.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a deployment file"):
        Deployment.load(path)


def test_a_missing_deployment_file_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Deployment.load(tmp_path / "none.json")
    assert "--deployment" in caught.value.hint


def test_deployment_file_is_plain_json(deployed: Deployed) -> None:
    body = json.loads(deployed.path.read_text())
    assert body["chain_id"] == CHAIN_ID
    assert body["contracts"]["token"] == deployed.deployment.contracts.token


@pytest.mark.slow
def test_the_same_deployer_serves_a_chain_that_mines_by_the_clock(tmp_path: Path) -> None:
    with Anvil(block_time=0.1) as slow:
        client = ChainClient([slow.url], CHAIN_ID)
        deployment = deploy(client, dev_signer(0), _options(), journal=tmp_path / "j")
        verify(client, deployment)
        client.close()
