"""Our contracts on a local chain, with anvil's funded accounts: for tests and small tools."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from devnet.chain import CHAIN_ID, Anvil, dev_signer
from prime_chain.amounts import ETHER
from prime_chain.client import Call, ChainClient, TxReceipt
from prime_chain.contracts import Contracts, PoolConfig
from prime_chain.deployer import Options, deploy
from prime_chain.errors import ChainRevertedError
from prime_core import ids
from prime_core.deployment import Deployment, Periods
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.rollout import Submission
from prime_core.signing import LocalSigner
from prime_core.verdict import Law, Opinion, Outcome, Reason, SignedOpinion, reason_digest

TEST_PERIODS = Periods(
    epoch_length=10, validity=30, slash_window=10, dispute_window=10, reward_delay=10, unbonding=60
)
"""Seconds; tests move the chain's clock with `Anvil.forward`."""


EVIDENCE = Digest("0x" + "e1" * 32)
"""What the opinions of `opinions_on` name."""


@dataclass
class Deployed:
    """A deployment and everything to use it with.

    `accounts` are anvil's ten development keys, each with 10,000 ETH; account 0 deployed, holds the
    token's initial supply (10^9 PRIME) and is the arbiter.
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


def pool_config(
    trainer: Address,
    run_digest: Digest,
    stake: int,
    *,
    slash: int | None = None,
    capacity: int = 10,
    lease_seconds: int = 60,
) -> PoolConfig:
    """A pool for tests: a slash takes a whole seat's stake unless `slash` (wei) says otherwise."""
    slash = stake if slash is None else slash
    return PoolConfig(trainer, run_digest, stake, slash, capacity, 1, lease_seconds)


def opinions_on(
    deployment: Deployment,
    submission: Submission,
    signers: Sequence[LocalSigner],
    *,
    reason: Reason = Reason.WRONG_ACTIVATIONS,
    evidence: Digest = EVIDENCE,
) -> list[SignedOpinion]:
    """What `signers` say of a submission, under one law. `evidence` counts for rejections only."""
    nothing = ZERO_DIGEST
    law = Law(
        lease=submission.lease_digest, run=nothing, verification_class=nothing, verifier=nothing,
        draws=nothing,
    )  # fmt: skip
    said = Opinion(
        pool=submission.pool,
        submission=submission.digest(deployment.domain_of(submission)),
        law=law.struct_hash(),
        outcome=int(reason.outcome),
        reason=reason_digest(reason),
        table=nothing,
        evidence=evidence if reason.outcome is Outcome.REJECTED else nothing,
        judged_at=0,
    )
    domain = deployment.domain_of(said)
    return [
        SignedOpinion(
            opinion=said, law=law, validator=one.address, signature=one.sign(said, domain)
        )
        for one in signers
    ]


def deploy_local(anvil: Anvil, folder: Path) -> Deployed:
    """Deploys from anvil's account 0 into `folder` (journal and deployment file)."""
    accounts = [dev_signer(index) for index in range(10)]
    client = ChainClient([anvil.url], CHAIN_ID)
    options = Options(
        periods=TEST_PERIODS,
        testnet=True,
        holder=accounts[0].address,
        supply=10**9 * ETHER,
        arbiter=accounts[0].address,
        dispute_deposit=0,
    )
    deployment = deploy(client, accounts[0], options, journal=folder / "deployer.sqlite")
    path = folder / "deployment.json"
    deployment.save(path)
    return Deployed(anvil, deployment, path, accounts, client)
