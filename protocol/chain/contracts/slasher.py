"""Slasher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from protocol.chain.amounts import prime
from protocol.chain.client import BlockId, Call
from protocol.chain.contracts.base import Contract
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
