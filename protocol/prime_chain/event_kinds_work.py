"""The events of work, rewards and slasher; see prime_chain/events.py."""

from __future__ import annotations

from dataclasses import dataclass

from prime_chain.event_kinds import Event
from prime_core.ids import Address, Digest

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
class MirrorAnnounced(Event):
    """`url` is printable ASCII, at most 200 bytes; empty if the last one was taken back."""

    CONTRACT = "work"
    pool: int
    validator: Address
    url: str


@dataclass(frozen=True)
class LeafRejected(Event):
    CONTRACT = "work"
    pool: int
    leaf: Digest
    reason: Digest


# ── Rewards ──


@dataclass(frozen=True)
class Funded(Event):
    CONTRACT = "rewards"
    pool: int
    origin: Address
    amount: int


@dataclass(frozen=True)
class BondAdded(Event):
    CONTRACT = "rewards"
    pool: int
    origin: Address
    amount: int


@dataclass(frozen=True)
class BondDrawn(Event):
    CONTRACT = "rewards"
    pool: int
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


@dataclass(frozen=True)
class FileAppealed(Event):
    """The provider asks the arbiter to have a file paid, by `judge_by` (Unix seconds)."""

    CONTRACT = "rewards"
    leaf: Digest
    pool: int
    node: Address
    judge_by: int


@dataclass(frozen=True)
class FileRestored(Event):
    """The arbiter has an appealed file paid; `amount` in wei."""

    CONTRACT = "rewards"
    leaf: Digest
    pool: int
    node: Address
    step: int
    amount: int


# ── Slasher ──


@dataclass(frozen=True)
class SlashProposed(Event):
    CONTRACT = "slasher"
    leaf: Digest
    pool: int
    node: Address
    provider: Address
    evidence: Digest
    reason: Digest
    amount: int
    executable_at: int
    authors: tuple[Address, ...]


@dataclass(frozen=True)
class SlashDisputed(Event):
    CONTRACT = "slasher"
    leaf: Digest
    pool: int
    node: Address
    deposit: int
    judge_by: int


@dataclass(frozen=True)
class SlashObjected(Event):
    """The provider says that the evidence is not served."""

    CONTRACT = "slasher"
    leaf: Digest
    pool: int
    node: Address
    judge_by: int


@dataclass(frozen=True)
class SlashConfirmed(Event):
    CONTRACT = "slasher"
    leaf: Digest
    judge: Address


@dataclass(frozen=True)
class SlashOverturned(Event):
    CONTRACT = "slasher"
    leaf: Digest
    judge: Address
    penalty: int
    compensation: int


@dataclass(frozen=True)
class SlashExecuted(Event):
    CONTRACT = "slasher"
    leaf: Digest
    pool: int
    node: Address
    provider: Address
    amount: int


@dataclass(frozen=True)
class SlashCancelled(Event):
    CONTRACT = "slasher"
    leaf: Digest
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


@dataclass(frozen=True)
class ArbiterAnnounced(Event):
    CONTRACT = "slasher"
    next: Address
    act_at: int


@dataclass(frozen=True)
class ArbiterChanged(Event):
    CONTRACT = "slasher"
    origin: Address
    to: Address


# ── Court ──


@dataclass(frozen=True)
class JurorRegistered(Event):
    CONTRACT = "court"
    verification_class: Digest
    juror: Address
    seat: int


@dataclass(frozen=True)
class JurorLeft(Event):
    """It left the register, or it was struck."""

    CONTRACT = "court"
    verification_class: Digest
    juror: Address


@dataclass(frozen=True)
class JurorWithdrew(Event):
    CONTRACT = "court"
    verification_class: Digest
    juror: Address
    amount: int


@dataclass(frozen=True)
class CaseOpened(Event):
    CONTRACT = "court"
    leaf: Digest
    verification_class: Digest
    provider: Address


@dataclass(frozen=True)
class SeedFixed(Event):
    """The hash of block `at_block` will choose the jurors."""

    CONTRACT = "court"
    leaf: Digest
    at_block: int


@dataclass(frozen=True)
class JurorsDrawn(Event):
    CONTRACT = "court"
    leaf: Digest
    verification_class: Digest
    jurors: tuple[Address, ...]
    reveal_from: int
    reveal_until: int


@dataclass(frozen=True)
class CaseHandedOver(Event):
    """Too few jurors were found: the arbiter judges."""

    CONTRACT = "court"
    leaf: Digest


@dataclass(frozen=True)
class VoteCommitted(Event):
    CONTRACT = "court"
    leaf: Digest
    juror: Address
    commitment: Digest


@dataclass(frozen=True)
class VoteRevealed(Event):
    CONTRACT = "court"
    leaf: Digest
    juror: Address
    vote: int
    digest: Digest


@dataclass(frozen=True)
class JurorStruck(Event):
    CONTRACT = "court"
    leaf: Digest
    juror: Address
    penalty: int


@dataclass(frozen=True)
class CaseSettled(Event):
    CONTRACT = "court"
    leaf: Digest
    pot: int
    penalties: int


@dataclass(frozen=True)
class PayCollected(Event):
    CONTRACT = "court"
    juror: Address
    amount: int


@dataclass(frozen=True)
class CourtWired(Event):
    CONTRACT = "court"
    slasher: Address
