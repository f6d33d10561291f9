"""One typed wrapper a contract: reads answer in the project's words, writes are unsent Calls.

A read names the block it is made at ("latest" if not said). Amounts in wei of the token, times in
Unix seconds. All reads raise UnavailableError when no RPC answers, ChainRevertedError when the
contract refuses.
"""

from __future__ import annotations

from prime_chain.amounts import ETHER, prime
from prime_chain.client import ChainClient
from prime_chain.contracts.base import Contract
from prime_chain.contracts.court import (
    Ballot,
    CaseStatus,
    Court,
    CourtCase,
    JurorRecord,
    JurorSeat,
    Vote,
    commitment_of,
)
from prime_chain.contracts.pools import (
    Appointment,
    JoinRules,
    Pool,
    PoolConfig,
    PoolJudgement,
    Pools,
)
from prime_chain.contracts.registry import Registry
from prime_chain.contracts.rewards import Claim, PoolFunds, RewardRoot, Rewards
from prime_chain.contracts.slasher import AnnouncedTerms, Proposal, ProposalState, Slasher
from prime_chain.contracts.token import Token
from prime_chain.contracts.vault import Binding, Unbonding, Vault
from prime_chain.contracts.work import Work, WorkRoot
from prime_core.deployment import Deployment

__all__ = [
    "ETHER", "AnnouncedTerms", "Appointment", "Ballot", "Binding", "CaseStatus", "Claim",
    "Contract", "Contracts", "Court", "CourtCase", "JoinRules", "JurorRecord", "JurorSeat",
    "Pool", "PoolConfig", "PoolFunds", "PoolJudgement", "Pools", "Proposal", "ProposalState",
    "Registry", "RewardRoot", "Rewards", "Slasher", "Token", "Unbonding", "Vault",
    "Vote", "Work", "WorkRoot", "commitment_of", "prime",
]  # fmt: skip


class Contracts:
    """All wrappers of one deployment."""

    def __init__(self, client: ChainClient, deployment: Deployment) -> None:
        self.client = client
        self.deployment = deployment
        self.token = Token(client, deployment)
        self.registry = Registry(client, deployment)
        self.vault = Vault(client, deployment)
        self.pools = Pools(client, deployment)
        self.work = Work(client, deployment)
        self.rewards = Rewards(client, deployment)
        self.slasher = Slasher(client, deployment)
        self.court = Court(client, deployment)
