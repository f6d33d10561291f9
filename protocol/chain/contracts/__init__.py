"""One typed wrapper a contract: reads answer in the project's words, writes are unsent Calls.

A read names the block it is made at ("latest" if not said). Amounts in wei of the token, times in
Unix seconds. All reads raise UnavailableError when no RPC answers, ChainRevertedError when the
contract refuses.
"""

from __future__ import annotations

from protocol.chain.amounts import ETHER, prime
from protocol.chain.client import ChainClient
from protocol.chain.contracts.base import Contract
from protocol.chain.contracts.pools import Pool, Pools, Rules, Seat
from protocol.chain.contracts.registry import Registry
from protocol.chain.contracts.rewards import Claim, PoolFunds, RewardRoot, Rewards
from protocol.chain.contracts.slasher import AnnouncedTerms, Proposal, ProposalState, Slasher
from protocol.chain.contracts.token import Token
from protocol.chain.contracts.vault import Binding, Unbonding, Vault
from protocol.chain.contracts.work import Work, WorkRoot
from protocol.chain.deployment import Deployment

__all__ = [
    "ETHER", "AnnouncedTerms", "Binding", "Claim", "Contract", "Contracts", "Pool", "PoolFunds",
    "Pools", "Proposal", "ProposalState", "Registry", "RewardRoot", "Rewards", "Rules", "Seat",
    "Slasher", "Token", "Unbonding", "Vault", "Work", "WorkRoot", "prime",
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
