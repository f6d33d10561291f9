"""What an account can claim: the orchestrator's word, held to the reward root on chain."""

from __future__ import annotations

from prime_chain.amounts import prime
from prime_chain.contracts import Claim, Contracts
from prime_core.encoding import merkle_verify, reward_leaf
from prime_core.errors import ConflictError, UntrustedError, UserError
from prime_core.ids import Address
from prime_core.messages import RewardInfo
from prime_core.transport.client import OrchestratorClient


def fetch_info(client: OrchestratorClient, account: Address) -> RewardInfo:
    """What the orchestrator says that a node or validator has earned, with the proof of it."""
    return client.get(f"/v1/rewards/{account}", RewardInfo)


def payable_claim(
    client: OrchestratorClient, contracts: Contracts, pool: int, account: Address
) -> Claim:
    """What can be claimed for a node or validator now, its proof checked against the root on chain.

    Raises UserError if there is nothing to claim or not yet, UntrustedError if the orchestrator's
    proof does not lead to the root, ConflictError if that root was disabled.
    """
    info = fetch_info(client, account)
    if info.epoch is None or int(info.cumulative) == 0:
        raise UserError(
            f"{account} has no settled rewards yet",
            hint="an epoch is settled once its last file's validity has passed",
        )
    return checked_claim(
        contracts, Claim(pool, info.epoch, account, int(info.cumulative), info.proof)
    )


def checked_claim(contracts: Contracts, claim: Claim) -> Claim:
    """Returns `claim` after checking it against the root on chain. Its proof may come from anyone.
    Raises like `payable_claim`."""
    rewards = contracts.rewards
    on_chain = rewards.reward_root(claim.pool, claim.epoch)
    if on_chain is None:
        raise UserError(
            f"the reward root of epoch {claim.epoch} is not on chain yet",
            hint="try again in a little while",
        )
    if on_chain.disabled:
        raise ConflictError(f"the arbiter disabled the reward root of epoch {claim.epoch}")
    if not merkle_verify(on_chain.root, reward_leaf(claim.node, claim.cumulative), claim.proof):
        raise UntrustedError("the proof does not lead to the reward root on chain")
    paid = rewards.claimed(claim.pool, claim.node)
    if paid >= claim.cumulative:
        raise UserError(f"all {prime(paid)} of epoch {claim.epoch} and before are paid already")
    now = contracts.vault.window_time()
    if now < on_chain.claimable_at:
        raise UserError(
            f"the rewards of epoch {claim.epoch} can be claimed in {on_chain.claimable_at - now} s",
            hint="the delay lets anyone check the root first",
        )
    return claim
