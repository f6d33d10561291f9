"""The chains we run on, and how much certainty each asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prime_core.errors import UserError
from prime_core.ids import ZERO_ADDRESS, Address, address

BlockTag = Literal["latest", "safe", "finalized"]
POLL_SECONDS = 0.5
"""The longest pause between two looks at a chain while something is awaited there."""


@dataclass(frozen=True)
class Network:
    """One chain.

    `block_time` in seconds. `confirmations`: blocks that must lie on top of a block before its
    events and receipts count. `min_agreeing`: RPC endpoints that must give the same answer where
    stake is at risk. The tags name how deep a fact must lie: to admit a node, to count stake or
    queue a slash, to release a payout. `max_fee_wei`: default cap on the fee per gas.
    `idle_seconds`: pause between two reads of events while no transaction is awaited.
    `uptime_feed`: Chainlink's L2 sequencer uptime feed, zero where there is none. `explorer`: URL
    of the block explorer, empty where there is none.
    """

    name: str
    chain_id: int
    block_time: float
    confirmations: int
    min_agreeing: int
    testnet: bool
    max_fee_wei: int
    admit_tag: BlockTag = "latest"
    stake_tag: BlockTag = "safe"
    payout_tag: BlockTag = "finalized"
    uptime_feed: Address = ZERO_ADDRESS
    explorer: str = ""
    idle_seconds: float = 12.0


GWEI = 10**9

LOCAL = Network("local", 31337, 1.0, 0, 1, True, 500 * GWEI, idle_seconds=0.0)
BASE_SEPOLIA = Network(
    "base-sepolia", 84532, 2.0, 2, 1, True, 50 * GWEI, explorer="https://sepolia.basescan.org"
)
BASE = Network(
    "base", 8453, 2.0, 5, 2, False, 20 * GWEI,
    uptime_feed=address("0xBCF85224fc0756B9Fa45aA7892530B47e10b6433"),
    explorer="https://basescan.org",
)  # fmt: skip

NETWORKS: tuple[Network, ...] = (LOCAL, BASE_SEPOLIA, BASE)


def by_chain_id(chain_id: int) -> Network:
    """The network with this id. Raises UserError if we know none."""
    for network in NETWORKS:
        if network.chain_id == chain_id:
            return network
    raise UserError(
        f"chain id {chain_id} is not one of the networks that this program knows",
        hint="known: " + ", ".join(f"{n.name} ({n.chain_id})" for n in NETWORKS),
    )


def by_name(name: str) -> Network:
    """The network called `name`. Raises UserError if we know none."""
    for network in NETWORKS:
        if network.name == name:
            return network
    raise UserError(
        f"there is no network called {name!r}",
        hint="known: " + ", ".join(n.name for n in NETWORKS),
    )
