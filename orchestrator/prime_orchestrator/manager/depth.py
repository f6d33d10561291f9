"""Required depth of chain facts before an intent is sent.

    join         the provider's stake covers the seat at the safe block
    propose      the root that holds the bad leaf is in a safe block
    reward_root  the settlement's block is final

Until then the intent waits in its queue. A reorganization that removes the facts behind any other
kind also removes its transaction, so those kinds do not wait. Each read names the number of the
block at the network's tag, so that several endpoints can be asked for the very same state
(`ChainClient.agree`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prime_chain.client import Block, ChainClient
from prime_chain.contracts import Contracts
from prime_chain.networks import BlockTag, Network
from prime_core import ids
from prime_core.ids import Address
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import Connection, roots

STATE_BLOCKS = 64
"""Endpoints are asked for states of blocks at most this far below the newest."""
Purpose = Literal["admit", "stake", "payout"]
"""Admitting a node (facts at latest), counting stake or queueing a slash (safe: the data lies on
L1), releasing a payout (finalized: L1 cannot take it back)."""


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


def has_state(client: ChainClient, block: int) -> bool:
    """Whether endpoints still hold the state of `block`: those without an archive drop old ones.
    Raises UnavailableError."""
    return client.block_number() - block <= STATE_BLOCKS


@dataclass(frozen=True)
class Confirmed:
    """Requires block `number` to have the confirmations that facts for `purpose` need."""

    purpose: Purpose
    number: int


@dataclass(frozen=True)
class Staked:
    """Requires `node`'s provider to have `amount` wei of active stake at the safe block."""

    node: Address
    amount: int


Need = Confirmed | Staked


def need_of(
    connection: Connection, context: PoolContext, kind: str, payload: Mapping[str, Any]
) -> Need | None:
    """Returns what an intent waits for, from the store; None if nothing."""
    match kind:
        case "join":
            return Staked(ids.address(payload["invite"]["node"]), context.run.stake_per_seat)
        case "propose":
            root = roots.of(connection, ids.digest(payload["submission_digest"]))
            return None if root is None or root.block is None else Confirmed("stake", root.block)
        case "reward_root":
            return Confirmed("payout", int(payload["as_of_block"]))
    return None


class Depths:
    """Checks needs against the chain for one tick; each block is requested once."""

    def __init__(self, contracts: Contracts) -> None:
        self._contracts = contracts
        self._blocks: dict[Purpose, int] = {}

    def meets(self, need: Need | None) -> bool:
        """Whether an intent may be sent. Raises UnavailableError if no endpoint answers."""
        match need:
            case None:
                return True
            case Staked(node, amount):
                provider = self._contracts.registry.provider_of(node)
                # Without a provider, send it: the contract's error says what is missing.
                return provider is None or counted_stake(self._contracts, provider) >= amount
            case Confirmed(purpose, number):
                if purpose not in self._blocks:
                    self._blocks[purpose] = block_for(self._contracts.client, purpose).number
                return number <= self._blocks[purpose]
