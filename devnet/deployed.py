"""Our contracts on a local chain, with anvil's funded accounts: for tests and small tools."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from devnet.chain import CHAIN_ID, Anvil, dev_signer
from protocol.chain.amounts import ETHER
from protocol.chain.client import Call, ChainClient, TxReceipt
from protocol.chain.contracts import Contracts
from protocol.chain.deployer import Options, deploy
from protocol.chain.deployment import Deployment, Periods
from protocol.chain.errors import ChainRevertedError
from protocol.core import ids
from protocol.core.errors import UnavailableError
from protocol.core.signing import LocalSigner

TEST_PERIODS = Periods(
    epoch_length=10, validity=30, slash_window=10, dispute_window=10, reward_delay=10, unbonding=60
)
"""Seconds; tests move the chain's clock with `Anvil.forward`."""


@dataclass
class Deployed:
    """A deployment and everything to use it with.

    `accounts` are anvil's ten development keys, each with 10,000 ETH; account 0 deployed, holds the
    token's initial supply (10^9 PRIME) and is the guardian.
    """

    anvil: Anvil
    deployment: Deployment
    path: Path
    """The deployment file."""
    accounts: list[LocalSigner]
    client: ChainClient
    contracts: Contracts = field(init=False)

    def __post_init__(self) -> None:
        self.contracts = Contracts(self.client, self.deployment)

    @property
    def url(self) -> str:
        return self.anvil.url

    def send(self, signer: LocalSigner, call: Call) -> TxReceipt:
        """Signs, sends and mines one transaction on an automining chain, without a journal.

        Raises ChainRevertedError with the contract's reason, as a dry run, before sending.
        """
        gas = self.client.estimate_gas(call, signer.address)
        fees = self.client.fees()
        transaction = {
            "type": 2,
            "chainId": CHAIN_ID,
            "nonce": self.client.nonce(signer.address),
            "gas": gas * 3 // 2,
            "maxFeePerGas": fees.max_fee,
            "maxPriorityFeePerGas": fees.priority_fee,
            "value": call.value,
            "data": call.data,
            **({"to": call.to} if call.to is not None else {}),
        }
        signed = signer.account.sign_transaction(transaction)
        self.client.send_raw(bytes(signed.raw_transaction))
        deadline = time.monotonic() + 10
        while (receipt := self.client.receipt(ids.digest(bytes(signed.hash)))) is None:
            if time.monotonic() > deadline:
                raise UnavailableError(f"not mined: {call.description}")
            time.sleep(0.01)
        if not receipt.success:
            raise ChainRevertedError("Unknown", {"tx": receipt.tx_hash}, call.description)
        return receipt

    def now(self) -> int:
        """The chain's clock: the newest block's time."""
        return self.client.block("latest").time


def deploy_local(
    anvil: Anvil, folder: Path, *, periods: Periods = TEST_PERIODS, dispute_deposit: int = 0
) -> Deployed:
    """Deploys from anvil's account 0 into `folder` (journal and deployment file)."""
    accounts = [dev_signer(index) for index in range(10)]
    client = ChainClient([anvil.url], CHAIN_ID)
    options = Options(
        periods=periods,
        testnet=True,
        holder=accounts[0].address,
        supply=10**9 * ETHER,
        guardian=accounts[0].address,
        dispute_deposit=dispute_deposit,
    )
    deployment = deploy(client, accounts[0], options, journal=folder / "deployer.sqlite")
    path = folder / "deployment.json"
    deployment.save(path)
    return Deployed(anvil, deployment, path, accounts, client)
