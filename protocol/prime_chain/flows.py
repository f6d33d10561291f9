"""What people do with the contracts, as lists of unsent calls, and what they look at.

Each flow reads what is there already and lists only what is missing, in the order to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_chain.client import Call
from prime_chain.contracts import Binding, Contracts, Unbonding
from prime_chain.contracts.base import Contract
from prime_core.ids import Address, Signature
from prime_core.node import Invite, NodeConsent


def stake(contracts: Contracts, provider: Address, amount: int) -> list[Call]:
    """Deposits `amount` wei of stake from `provider`'s tokens."""
    vault = contracts.vault
    return [*_allow(contracts, provider, vault, amount), vault.deposit(amount)]


def register_and_stake(
    contracts: Contracts, provider: Address, payout: Address, amount: int
) -> list[Call]:
    """Makes `provider` a provider whose active stake is at least `amount` wei."""
    calls = []
    if not contracts.registry.is_provider(provider):
        calls.append(contracts.registry.register_provider(payout))
    missing = amount - contracts.vault.active(provider)
    return [*calls, *stake(contracts, provider, missing)] if missing > 0 else calls


def add_node(contracts: Contracts, consent: NodeConsent, node_signature: Signature) -> list[Call]:
    """Binds the node to the provider that its consent names, if it is not bound to it."""
    if contracts.registry.provider_of(consent.node) == consent.provider:
        return []
    return [contracts.registry.add_node(consent, node_signature)]


def allow(contracts: Contracts, provider: Address, pool: int) -> list[Call]:
    """Lets the pool seat `provider`'s nodes, if it may not yet. Without it only the provider itself
    can carry an invite."""
    if contracts.pools.allows(provider, pool):
        return []
    return [contracts.pools.allow(pool, True)]


def join(contracts: Contracts, invite: Invite, manager_signature: Signature) -> list[Call]:
    """Seats the invited node, if it has no seat in that pool."""
    if contracts.pools.is_member(invite.pool, invite.node):
        return []
    return [contracts.pools.join(invite, manager_signature)]


def fund_pool(contracts: Contracts, funder: Address, pool: int, amount: int) -> list[Call]:
    """Moves `amount` wei of `funder`'s tokens into the pool's reward funds."""
    rewards = contracts.rewards
    return [*_allow(contracts, funder, rewards, amount), rewards.fund(pool, amount)]


def bond_pool(contracts: Contracts, account: Address, pool: int, amount: int) -> list[Call]:
    """Moves `amount` wei of `account`'s tokens into the bond behind the pool's unpaid work."""
    rewards = contracts.rewards
    return [*_allow(contracts, account, rewards, amount), rewards.bond(pool, amount)]


@dataclass(frozen=True)
class StakeView:
    """A provider's money at one block, in wei. `committed`: needed by its seats in pools;
    `pending`: held by open slashes; `withdrawable`: matured, held by nothing; `bound`: the one
    manager to whom it answers."""

    provider: Address
    payout: Address | None
    active: int
    committed: int
    unbondable: int
    unbonding: tuple[Unbonding, ...]
    pending: int
    withdrawable: int
    wallet: int
    bound: Binding


def stake_view(contracts: Contracts, provider: Address, now: int) -> StakeView:
    """What `provider` has staked; `now` in Unix seconds decides what has matured."""
    vault = contracts.vault
    queue = vault.unbondings(provider)
    matured = sum(one.amount for one in queue if one.mature_at <= now)
    return StakeView(
        provider=provider,
        payout=contracts.registry.payout_of(provider),
        active=vault.active(provider),
        committed=vault.committed(provider),
        unbondable=vault.unbondable(provider),
        unbonding=queue,
        pending=vault.pending_slash(provider),
        withdrawable=min(matured, vault.unbonding(provider)),
        wallet=contracts.token.balance_of(provider),
        bound=vault.bound_to(provider),
    )


def _allow(contracts: Contracts, owner: Address, spender: Contract, amount: int) -> list[Call]:
    if contracts.token.allowance(owner, spender.address) >= amount:
        return []
    return [contracts.token.approve(spender.address, amount)]
