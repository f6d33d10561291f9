"""How deep a fact must lie before something is done about it.

    admit a node                    latest
    count stake, queue a slash      safe        (its data lies on L1)
    release a payout                finalized   (L1 cannot take it back)

Each read names the number of the block at the network's tag, so that several endpoints can be asked
for the very same state (`ChainClient.agree`).
"""

from __future__ import annotations

from typing import Literal

from prime_chain.client import Block, ChainClient
from prime_chain.contracts import Contracts, RewardRoot
from prime_chain.networks import BlockTag, Network
from prime_core.ids import Address

Purpose = Literal["admit", "stake", "payout"]


def tag_for(network: Network, purpose: Purpose) -> BlockTag:
    """The block tag that facts for `purpose` are read at."""
    tags: dict[Purpose, BlockTag] = {
        "admit": network.admit_tag, "stake": network.stake_tag, "payout": network.payout_tag,
    }  # fmt: skip
    return tags[purpose]


def block_for(client: ChainClient, purpose: Purpose) -> Block:
    """The newest block deep enough for `purpose`.

    Raises UnavailableError if no endpoint answers, or the chain is so young that it has none yet.
    """
    return client.agreed_block(tag_for(client.network, purpose))


def counted_stake(contracts: Contracts, provider: Address) -> int:
    """Active stake of `provider`, in wei, as it counts for a seat or a slash: at the safe block."""
    block = block_for(contracts.client, "stake").number
    return contracts.client.agree(
        lambda one: Contracts(one, contracts.deployment).vault.active(provider, block)
    )


def is_final(client: ChainClient, block: int) -> bool:
    """Whether block number `block` can no longer leave the chain: what payouts wait for."""
    return block <= block_for(client, "payout").number


def final_reward_root(contracts: Contracts, pool: int, epoch: int) -> RewardRoot | None:
    """The epoch's reward root as the finalized block has it; None if it is not posted there yet."""
    block = block_for(contracts.client, "payout").number
    return contracts.client.agree(
        lambda one: Contracts(one, contracts.deployment).rewards.reward_root(pool, epoch, block)
    )
