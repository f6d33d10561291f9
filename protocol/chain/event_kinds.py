"""What an event is, and those of registry, vault and pools; see protocol/chain/events.py.

Field names are the Solidity names in snake_case (`from`, a Python keyword, is `origin`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from protocol.core.ids import Address, Digest
from protocol.core.signing import ContractName


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


# ── Pools ──


@dataclass(frozen=True)
class PoolCreated(Event):
    CONTRACT = "pools"
    pool: int
    manager: Address
    trainer: Address
    run_digest: Digest


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
    speed_class: int


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
    """The provider agrees to seats of its nodes in this pool, up to a class."""

    CONTRACT = "pools"
    pool: int
    provider: Address
    up_to_class: int


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
