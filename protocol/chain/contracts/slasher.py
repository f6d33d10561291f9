"""Slasher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from protocol.chain.amounts import prime
from protocol.chain.client import BlockId, Call
from protocol.chain.contracts.base import Contract, or_none
from protocol.core.ids import Address, Digest, Signature
from protocol.core.rollout import Submission


class ProposalState(IntEnum):
    """Where a proposal stands."""

    NONE = 0
    PROPOSED = 1
    DISPUTED = 2
    EXECUTED = 3
    CANCELLED = 4


@dataclass(frozen=True)
class Proposal:
    """`deadline`: end of the slash window, or of the dispute window once disputed."""

    node: Address
    deadline: int
    reason: int
    state: ProposalState
    provider: Address
    amount: int
    validator: Address
    pool: int


@dataclass(frozen=True)
class AnnouncedTerms:
    """Terms that apply from `act_at` (Unix seconds) on; amounts in wei."""

    dispute_deposit: int
    validator_bond: int
    act_at: int


class Slasher(Contract):
    """Slash proposals: proposed on evidence, executed after a window, or cancelled."""

    NAME = "slasher"

    def proposal(self, number: int, block: BlockId = "latest") -> Proposal | None:
        """None if there is no proposal of that number."""
        node, deadline, reason, state, *rest = self._one("proposal", number, block=block)
        if state == ProposalState.NONE:
            return None
        return Proposal(node, deadline, reason, ProposalState(state), *rest)

    def proposal_of(self, leaf: Digest, block: BlockId = "latest") -> int | None:
        """Number of the proposal about a submission; None if there is none."""
        return cast(int, self._one("proposalOf", leaf, block=block)) or None

    def dispute_deposit(self, block: BlockId = "latest") -> int:
        """What a dispute costs if it is lost."""
        return cast(int, self._one("disputeDeposit", block=block))

    def validator_bond(self, block: BlockId = "latest") -> int:
        """Active stake that a validator needs in order to propose."""
        return cast(int, self._one("validatorBond", block=block))

    def propose(
        self,
        submission: Submission,
        node: Address,
        node_signature: Signature,
        root_seq: int,
        proof: Sequence[Digest],
        evidence: Digest,
        reason: int,
        amount: int,
    ) -> Call:
        what = f"propose to slash {prime(amount)} for a submission of node {node}"
        return self.write(
            "propose",
            submission,
            node,
            node_signature,
            root_seq,
            tuple(proof),
            evidence,
            reason,
            amount,
            what=what,
        )

    def execute(self, number: int) -> Call:
        return self.write("execute", number, what=f"execute slash proposal {number}")

    def dispute(self, number: int) -> Call:
        """By the provider; needs an allowance for the deposit."""
        return self.write("dispute", number, what=f"dispute slash proposal {number}")

    def confirm(self, number: int) -> Call:
        return self.write("confirm", number, what=f"confirm disputed proposal {number}")

    def overturn(self, number: int) -> Call:
        return self.write("overturn", number, what=f"overturn disputed proposal {number}")

    def lapse(self, number: int) -> Call:
        return self.write("lapse", number, what=f"end the unjudged dispute of proposal {number}")

    def cancel(self, number: int) -> Call:
        return self.write("cancel", number, what=f"cancel slash proposal {number}")

    # ── who watches, and who moves the terms ──

    def guardian(self, block: BlockId = "latest") -> tuple[Address, int]:
        """Who may cancel proposals, and until when (Unix seconds)."""
        return self._one("guardian", block=block), self._one("guardianEnds", block=block)

    def governor(self, block: BlockId = "latest") -> Address | None:
        """Who may announce other terms; None: nobody, for good."""
        return or_none(self._one("governor", block=block))

    def pending_governor(self, block: BlockId = "latest") -> Address | None:
        """To whom the role was offered and who has not accepted it yet."""
        return or_none(self._one("pendingGovernor", block=block))

    def announced(self, block: BlockId = "latest") -> AnnouncedTerms | None:
        """The terms that were announced and do not apply yet."""
        found = AnnouncedTerms(*self.read("announced", block=block))
        return found if found.act_at else None

    def deposit_of(self, number: int, block: BlockId = "latest") -> int:
        """What the dispute of a proposal was backed with, in wei."""
        return cast(int, self._one("depositOf", number, block=block))

    def hand_over(self, to: Address) -> Call:
        return self.write("handOver", to, what=f"offer the governor's role to {to}")

    def accept_governor(self) -> Call:
        return self.write("acceptGovernor", what="accept the governor's role")

    def renounce_governor(self) -> Call:
        what = "give the governor's role up for good: the terms never move again"
        return self.write("renounceGovernor", what=what)

    def announce_terms(self, dispute_deposit: int, validator_bond: int) -> Call:
        what = (
            f"announce a dispute deposit of {prime(dispute_deposit)} and a validator's bond of "
            f"{prime(validator_bond)}"
        )
        return self.write("announceTerms", dispute_deposit, validator_bond, what=what)

    def apply_terms(self) -> Call:
        return self.write("applyTerms", what="apply the terms that were announced")
