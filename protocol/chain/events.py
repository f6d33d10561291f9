"""Every event of the contracts as a frozen dataclass, decoded purely from a log.

Field names are the Solidity names in snake_case. An event serialises to JSON (`args`) and back
(`rebuild`), so that an indexer may keep it in a store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from protocol.chain import codec
from protocol.chain.client import Log, TxReceipt
from protocol.chain.deployment import SOLIDITY_NAMES, Deployment
from protocol.core.errors import MalformedError
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

    def args(self) -> dict[str, Any]:
        """The event's own fields, ready for JSON."""
        return {name: getattr(self, name) for name in _own(type(self))}


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
class PolicyPublished(Event):
    CONTRACT = "pools"
    pool: int
    version: int
    manifest_digest: Digest


@dataclass(frozen=True)
class PoolEnded(Event):
    CONTRACT = "pools"
    pool: int


# ── Work ──


@dataclass(frozen=True)
class RootPosted(Event):
    CONTRACT = "work"
    pool: int
    seq: int
    root: Digest
    count: int
    leaves_object: Digest
    epoch: int


@dataclass(frozen=True)
class LeafPosted(Event):
    CONTRACT = "work"
    pool: int
    node: Address
    seq: int
    leaf: Digest
    sha256: Digest


@dataclass(frozen=True)
class LeafRejected(Event):
    CONTRACT = "work"
    pool: int
    leaf: Digest
    reason: int


# ── Rewards ──


@dataclass(frozen=True)
class Funded(Event):
    CONTRACT = "rewards"
    pool: int
    sender: Address
    amount: int


@dataclass(frozen=True)
class RewardRootPosted(Event):
    CONTRACT = "rewards"
    pool: int
    epoch: int
    root: Digest
    cumulative_total: int
    object: Digest
    claimable_at: int


@dataclass(frozen=True)
class RewardRootDisabled(Event):
    """The roots of epochs `epoch` to `last` count no longer."""

    CONTRACT = "rewards"
    pool: int
    epoch: int
    last: int


@dataclass(frozen=True)
class Claimed(Event):
    CONTRACT = "rewards"
    pool: int
    node: Address
    payout: Address
    amount: int


@dataclass(frozen=True)
class Refunded(Event):
    CONTRACT = "rewards"
    pool: int
    to: Address
    amount: int


# ── Slasher ──


@dataclass(frozen=True)
class SlashProposed(Event):
    CONTRACT = "slasher"
    id: int
    pool: int
    node: Address
    provider: Address
    leaf: Digest
    evidence: Digest
    reason: int
    amount: int
    executable_at: int


@dataclass(frozen=True)
class SlashDisputed(Event):
    CONTRACT = "slasher"
    id: int
    pool: int
    node: Address
    deposit: int
    judge_by: int


@dataclass(frozen=True)
class SlashConfirmed(Event):
    CONTRACT = "slasher"
    id: int
    validator: Address


@dataclass(frozen=True)
class SlashOverturned(Event):
    CONTRACT = "slasher"
    id: int
    validator: Address
    penalty: int


@dataclass(frozen=True)
class SlashExecuted(Event):
    CONTRACT = "slasher"
    id: int
    pool: int
    node: Address
    provider: Address
    amount: int


@dataclass(frozen=True)
class SlashCancelled(Event):
    CONTRACT = "slasher"
    id: int
    pool: int
    node: Address


EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""Every event class by its name."""

_BASE = frozenset(item.name for item in fields(Event))
_RENAMED = {"from": "sender"}  # `from` is a Python keyword


def snake(name: str) -> str:
    """A Solidity parameter name as our field name."""
    plain = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name.strip("_")).lower()
    return _RENAMED.get(plain, plain)


def _own(kind: type[Event]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind) if item.name not in _BASE)


def decode(log: Log, block_time: int, deployment: Deployment) -> Event | None:
    """The typed event of a log of ours; None for a log of another contract or another event.

    Raises MalformedError if the log claims to be one of our events and does not decode.
    """
    contract = deployment.addresses().get(log.address)
    if contract is None or not log.topics:
        return None
    item = codec.artifact(SOLIDITY_NAMES[contract]).events.get(log.topics[0])
    kind = EVENTS.get(item.name) if item is not None else None
    if item is None or kind is None or contract != kind.CONTRACT:
        return None
    values = {snake(key): v for key, v in codec.decode_log(item, log.topics, log.data).items()}
    head = {
        "block": log.block,
        "block_hash": log.block_hash,
        "block_time": block_time,
        "log_index": log.log_index,
        "tx_hash": log.tx_hash,
    }
    return _make(kind, head, values)


def of_receipt(receipt: TxReceipt, block_time: int, deployment: Deployment) -> list[Event]:
    """Our events that one transaction emitted, in order. `block_time` is its block's."""
    found = (decode(log, block_time, deployment) for log in receipt.logs)
    return [event for event in found if event is not None]


def rebuild(name: str, head: Mapping[str, Any], args: Mapping[str, Any]) -> Event:
    """The event that `args()` and the base fields came from. Raises MalformedError if unknown."""
    if name not in EVENTS:
        raise MalformedError(f"there is no event {name!r}")
    return _make(EVENTS[name], head, args)


def _make(kind: type[Event], head: Mapping[str, Any], args: Mapping[str, Any]) -> Event:
    if set(args) != set(_own(kind)):
        raise MalformedError(f"{kind.__name__} has fields {_own(kind)}, not {tuple(args)}")
    return kind(**head, **args)
