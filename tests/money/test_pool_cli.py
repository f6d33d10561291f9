"""`orchestrator pool` against a real chain: create, fund, show, end; twice, dry, and wrongly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anvil_kit import needs_anvil
from chain_kit import ARBITER, DEPLOYER, FUNDS
from money_kit import RUN, TOKEN, TRAINER, VALIDATOR, key
from typer.testing import CliRunner

from devnet.chain import Anvil
from prime_chain.amounts import parse_amount
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.deployer import Options, deploy
from prime_chain.keystore import save_keystore
from prime_core.deployment import DEMO_PERIODS
from prime_core.errors import UserError
from prime_orchestrator.cli.deployment import app as deployment_app
from prime_orchestrator.cli.pool import app
from prime_orchestrator.economics import warnings

MANAGER = key(40)


pytestmark = needs_anvil


class ChainSession:
    """A chain with contracts, a keystore, and the command."""

    def __init__(self, folder: Path) -> None:
        self.anvil = Anvil().start()
        self.client = ChainClient([self.anvil.url], 31337)
        for account in (DEPLOYER.address, MANAGER.address):
            self.anvil.fund(account)
        options = Options(
            periods=DEMO_PERIODS,
            testnet=True,
            holder=DEPLOYER.address,
            supply=FUNDS,
            arbiter=ARBITER.address,
        )
        deployment = deploy(self.client, DEPLOYER, options, journal=folder / "deploy.sqlite")
        self.contracts = Contracts(self.client, deployment)
        self.deployment = folder / "deployment.json"
        deployment.save(self.deployment)
        self.run_file = folder / "run.json"
        self.run_file.write_bytes(RUN.raw())
        self.keystore, self.password = folder / "manager.json", folder / "password"
        save_keystore(self.keystore, (0x1000 + 40).to_bytes(32, "big"), "secret", light=True)
        self.password.write_text("secret\n")

    def __call__(self, command: str, *words: str, key: bool = True) -> Any:
        flags = ["--rpc", self.anvil.url, "--deployment", str(self.deployment), "--json"]
        if key:
            flags += ["--wallet", str(self.keystore), "--password-file", str(self.password)]
        result = CliRunner().invoke(app, [command, *flags, *words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def create(self, *words: str) -> Any:
        return self(
            "create",
            *("--run", str(self.run_file), "--trainer", TRAINER.address),
            *("--validator", VALIDATOR.address, "--faucet", *words),
        )


@pytest.fixture
def session(tmp_path: Path) -> Iterator[ChainSession]:
    made = ChainSession(tmp_path)
    yield made
    made.client.close()
    made.anvil.stop()


def test_a_dry_run_of_create_shows_the_appointments_too(session: ChainSession) -> None:
    faucet, create, appoint = session.create("--dry-run")["calls"]
    assert all(call["error"] is None for call in (faucet, create, appoint))
    call = session.contracts.pools.set_validator(1, VALIDATOR.address, True)
    assert appoint["data"] == call.calldata()
    assert session.contracts.pools.count() == 0


@pytest.mark.slow
def test_a_pool_is_created_funded_shown_and_ended(session: ChainSession) -> None:
    created = session.create()
    pool = created["pool"]
    on_chain = session.contracts.pools.pool_of(pool)
    assert on_chain.manager == created["manager"] == MANAGER.address
    assert (on_chain.trainer, on_chain.run_digest) == (TRAINER.address, RUN.digest())
    assert session.contracts.pools.is_validator(pool, VALIDATOR.address)

    assert "one key alone" in created["warning"]
    assert created["warnings"] == warnings(RUN)
    assert created["warnings"]

    again = session.create()
    assert again["pool"] == pool, "typed again it repeats its answer"

    session("fund", "--pool", str(pool), "--amount", "12.5")
    session("fund", "--pool", str(pool), "--amount", "12.5")
    assert session.contracts.rewards.funds(pool).free == 25 * TOKEN

    shown = session("show", "--pool", str(pool), key=False)
    assert (shown["free"], shown["members"], shown["ended"]) == (str(25 * TOKEN), 0, False)
    assert "one key alone" in shown["warning"]
    assert (shown["quorum"], shown["lease_seconds"]) == (1, RUN.lease_seconds)
    when = session("end", "--pool", str(pool))["refundable_at"]
    shown = session("show", "--pool", str(pool), key=False)
    assert (shown["ended"], shown["refundable_at"]) == (True, when)
    session.anvil.forward(when - session.client.block("latest").time)
    assert session("refund", "--pool", str(pool))["refunded"] == str(25 * TOKEN)
    assert session.contracts.rewards.funds(pool).free == 0


def test_a_dry_run_prints_calldata_and_sends_nothing(session: ChainSession) -> None:
    before = session.client.nonce(MANAGER.address)
    said = session.create("--dry-run")
    words = [call["description"].split()[0] for call in said["calls"]]
    assert words == ["take", "create", "appoint"]
    assert all(call["data"].startswith("0x") for call in said["calls"])
    assert session.client.nonce(MANAGER.address) == before


def test_mistakes_are_one_sentence(session: ChainSession) -> None:
    with pytest.raises(UserError, match="holds 0 PRIME"):
        session("fund", "--pool", "1", "--amount", "5")
    with pytest.raises(UserError, match="no pool 7"):
        session("show", "--pool", "7", key=False)
    other = RUN.model_copy(update={"epoch_seconds": 60})
    session.run_file.write_bytes(other.raw())
    with pytest.raises(UserError, match="epoch_seconds is 60"):
        session.create()
    session.run_file.write_text("{}")
    with pytest.raises(UserError, match="it is not a run definition"):
        session.create()


def test_an_account_without_ether_is_refused_at_once_but_may_rehearse(
    session: ChainSession,
) -> None:
    session.anvil.fund(MANAGER.address, 0)
    for command in (
        ("create", "--run", str(session.run_file), "--trainer", TRAINER.address),
        ("fund", "--pool", "1", "--amount", "5"),
        ("end", "--pool", "1"),
    ):
        with pytest.raises(UserError, match=f"{MANAGER.address} holds no ETH") as caught:
            session(*command)
        assert "send it some" in caught.value.hint
    assert session.create("--dry-run")["calls"]

    def deploy_again(*words: str) -> Any:
        out = session.deployment.with_name("second.json")
        flags = ["--rpc", session.anvil.url, "--out", str(out), "--json"]
        flags += ["--wallet", str(session.keystore), "--password-file", str(session.password)]
        return CliRunner().invoke(
            deployment_app, ["deploy", *flags, *words], catch_exceptions=False
        )

    with pytest.raises(UserError, match=f"{MANAGER.address} holds no ETH"):
        deploy_again()
    assert deploy_again("--dry-run").exit_code == 0


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "0.0000000000000000001"])
def test_amounts_are_positive_and_exact(text: str) -> None:
    with pytest.raises(UserError):
        parse_amount(text)
    assert parse_amount("12.5") == 125 * TOKEN // 10


def test_a_number_that_no_pool_has_is_refused_in_one_sentence() -> None:
    done = CliRunner().invoke(app, ["show", "--pool", str(1 << 256)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "Invalid value for '--pool'" in done.output
