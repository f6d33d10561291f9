"""What an event is, and those of registry, vault and pools; see prime_chain/events.py.

Field names are the Solidity names in snake_case (`from`, a Python keyword, is `origin`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from prime_core.ids import Address, Digest
from prime_core.signing import ContractName


@dataclass(frozen=True)
class Event:
    """What every event carries. Its key is (block_hash, log_index). `block_time`: Unix seconds."""

    CONTRACT: ClassVar[ContractName]

    block: int
    block_hash: Digest
    block_time: int
    log_index: int
    tx_hash: Digest

    @property
    def name(self) -> str:
        return type(self).__name__

    @classmethod
    @cache
    def own_fields(cls) -> tuple[str, ...]:
        """Names of the event's own fields, in Solidity's order."""
        return tuple(item.name for item in fields(cls) if item.name not in _BASE)

    def args(self) -> dict[str, Any]:
        """The event's own fields, ready for JSON."""
        return {name: getattr(self, name) for name in self.own_fields()}


_BASE = frozenset(item.name for item in fields(Event))


# ── Registry ──


@dataclass(frozen=True)
class ProviderRegistered(Event):
    CONTRACT = "registry"
    provider: Address
    payout: Address


@dataclass(frozen=True)
class PayoutChanged(Event):
    CONTRACT = "registry"
    provider: Address
    payout: Address


@dataclass(frozen=True)
class NodeAdded(Event):
    CONTRACT = "registry"
    provider: Address
    node: Address


@dataclass(frozen=True)
class NodeRemoved(Event):
    CONTRACT = "registry"
    provider: Address
    node: Address


@dataclass(frozen=True)
class NodeMoved(Event):
    """The node has a new key: what it is and owes goes on under `to`."""

    CONTRACT = "registry"
    provider: Address
    origin: Address
    to: Address


@dataclass(frozen=True)
class RevokedBefore(Event):
    CONTRACT = "registry"
    node: Address
    at: int


@dataclass(frozen=True)
class RegistryWired(Event):
    CONTRACT = "registry"
    vault: Address
    pools: Address


# ── StakeVault ──


@dataclass(frozen=True)
class Deposited(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class UnbondStarted(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int
    mature_at: int


@dataclass(frozen=True)
class Rebonded(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class Withdrawn(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class SlashHeld(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class SlashReleased(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class Slashed(Event):
    CONTRACT = "vault"
    provider: Address
    amount: int
    to: Address


@dataclass(frozen=True)
class Committed(Event):
    """A seat needs `amount` more of the provider's stake."""

    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class Released(Event):
    """A seat needs `amount` of the provider's stake no longer."""

    CONTRACT = "vault"
    provider: Address
    amount: int


@dataclass(frozen=True)
class Bound(Event):
    """The account's stake answers to this manager from now on."""

    CONTRACT = "vault"
    account: Address
    manager: Address


@dataclass(frozen=True)
class VaultWired(Event):
    CONTRACT = "vault"
    registry: Address
    pools: Address
    slasher: Address


# ── Pools ──


@dataclass(frozen=True)
class PoolCreated(Event):
    CONTRACT = "pools"
    pool: int
    manager: Address
    trainer: Address
    run_digest: Digest


@dataclass(frozen=True)
class RunRevised(Event):
    CONTRACT = "pools"
    pool: int
    run_digest: Digest
    from_step: int


@dataclass(frozen=True)
class ValidatorSet(Event):
    CONTRACT = "pools"
    pool: int
    validator: Address
    on: bool


@dataclass(frozen=True)
class NodeJoined(Event):
    CONTRACT = "pools"
    pool: int
    node: Address
    provider: Address


@dataclass(frozen=True)
class NodeLeft(Event):
    CONTRACT = "pools"
    pool: int
    node: Address


@dataclass(frozen=True)
class NodeEjected(Event):
    CONTRACT = "pools"
    pool: int
    node: Address


@dataclass(frozen=True)
class BanSet(Event):
    CONTRACT = "pools"
    pool: int
    node: Address
    on: bool


@dataclass(frozen=True)
class SeatsAllowed(Event):
    """The provider allows or forbids new seats of its nodes in this pool."""

    CONTRACT = "pools"
    pool: int
    provider: Address
    on: bool


@dataclass(frozen=True)
class AllowListSet(Event):
    CONTRACT = "pools"
    pool: int
    on: bool


@dataclass(frozen=True)
class ListedSet(Event):
    CONTRACT = "pools"
    pool: int
    provider: Address
    on: bool


@dataclass(frozen=True)
class SeatMoved(Event):
    """A node's seat went over to its new key."""

    CONTRACT = "pools"
    pool: int
    origin: Address
    to: Address
    provider: Address


@dataclass(frozen=True)
class PoolPaused(Event):
    CONTRACT = "pools"
    pool: int


@dataclass(frozen=True)
class PoolStarted(Event):
    CONTRACT = "pools"
    pool: int


@dataclass(frozen=True)
class PolicyPublished(Event):
    CONTRACT = "pools"
    pool: int
    version: int
    manifest_digest: Digest


@dataclass(frozen=True)
class PoolEnded(Event):
    CONTRACT = "pools"
    pool: int


@dataclass(frozen=True)
class SlasherWired(Event):
    CONTRACT = "pools"
    slasher: Address
