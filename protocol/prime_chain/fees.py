"""What a sender offers for its transactions, and for how long it waits (EIP-1559)."""

from __future__ import annotations

from dataclasses import dataclass

from prime_chain.client import ChainClient, Fees
from prime_chain.transaction_queue import Attempt


@dataclass(frozen=True)
class FeePolicy:
    """`max_fee`: cap in wei per gas. `stuck_seconds` until a waiting transaction is replaced;
    `resend_seconds` until it is broadcast again. `in_flight`: sent and not yet mined, at most."""

    max_fee: int
    stuck_seconds: float
    resend_seconds: float
    in_flight: int = 16


def default_policy(client: ChainClient) -> FeePolicy:
    """The network's cap; ten blocks until stuck, three until sent again."""
    network = client.network
    return FeePolicy(network.max_fee_wei, 10 * network.block_time, 3 * network.block_time)


def bumped(old: Attempt, fresh: Fees, cap: int) -> tuple[int, int] | None:
    """(max fee, priority fee) of a replacement: at least an eighth above the old on both, as nodes
    demand a tenth; None if that exceeds the cap."""
    least_max = old.max_fee + old.max_fee // 8 + 1
    least_priority = old.priority_fee + old.priority_fee // 8 + 1
    if least_max > cap:
        return None
    max_fee = min(max(least_max, fresh.max_fee), cap)
    return max_fee, min(max(least_priority, fresh.priority_fee), max_fee)
