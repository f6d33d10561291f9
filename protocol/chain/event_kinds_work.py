"""The events of work, rewards and slasher; see protocol/chain/events.py."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.chain.event_kinds import Event
from protocol.core.ids import Address, Digest

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
    origin: Address
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


@dataclass(frozen=True)
class GovernorOffered(Event):
    CONTRACT = "slasher"
    governor: Address
    to: Address


@dataclass(frozen=True)
class GovernorChanged(Event):
    CONTRACT = "slasher"
    origin: Address
    to: Address


@dataclass(frozen=True)
class TermsAnnounced(Event):
    CONTRACT = "slasher"
    dispute_deposit: int
    validator_bond: int
    act_at: int


@dataclass(frozen=True)
class TermsChanged(Event):
    CONTRACT = "slasher"
    dispute_deposit: int
    validator_bond: int
