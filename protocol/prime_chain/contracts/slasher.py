"""Slasher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from prime_chain.amounts import prime
from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract, or_none
from prime_chain.contracts.work import opinions_argument
from prime_core.ids import Address, Digest, Signature
from prime_core.rollout import Submission
from prime_core.verdict import SignedOpinion


class ProposalState(IntEnum):
    """Where a proposal stands."""

    NONE = 0
    PROPOSED = 1
    DISPUTED = 2
    EXECUTED = 3
    CANCELLED = 4
    OBJECTED = 5


@dataclass(frozen=True)
class Proposal:
    """`deadline`: end of the slash window, or of the dispute window once disputed or objected to.
    `authors`: the validators on whose opinions it rests."""

    node: Address
    deadline: int
    state: ProposalState
    provider: Address
    amount: int
    pool: int
    authors: tuple[Address, ...]


@dataclass(frozen=True)
class AnnouncedTerms:
    """Terms that apply from `act_at` (Unix seconds) on; amounts in wei."""

    dispute_deposit: int
    validator_bond: int
    act_at: int


class Slasher(Contract):
    """Slash proposals, each named by its submission's digest: proposed by the quorum's opinions,
    executed after a window, or cancelled."""

    NAME = "slasher"

    def proposal(self, leaf: Digest, block: BlockId = "latest") -> Proposal | None:
        """The proposal about a submission; None if there is none."""
        node, deadline, state, *rest = self._one("proposal", leaf, block=block)
        if state == ProposalState.NONE:
            return None
        return Proposal(node, deadline, ProposalState(state), *rest)

    def dispute_deposit(self, block: BlockId = "latest") -> int:
        """What a dispute costs if it is lost."""
        return cast(int, self._one("disputeDeposit", block=block))

    def validator_bond(self, block: BlockId = "latest") -> int:
        """Active stake that each author needs for each of its open proposals."""
        return cast(int, self._one("validatorBond", block=block))

    def propose(
        self,
        submission: Submission,
        node_signature: Signature,
        root_seq: int,
        proof: Sequence[Digest],
        opinions: Sequence[SignedOpinion],
    ) -> Call:
        """`opinions`: of outcome rejected, in rising order of their validators' numbers in the
        pool. Anyone may send it."""
        what = f"propose to slash node {submission.node} for a submission"
        return self.write(
            "propose", submission, node_signature, root_seq, tuple(proof),
            opinions_argument(opinions),
            what=what,
        )  # fmt: skip

    def execute(self, leaf: Digest) -> Call:
        return self.write("execute", leaf, what=f"execute the slash for {leaf}")

    def dispute(self, leaf: Digest) -> Call:
        """By the provider; needs an allowance for the deposit."""
        return self.write("dispute", leaf, what=f"dispute the slash for {leaf}")

    def object(self, leaf: Digest) -> Call:
        """By the provider: the evidence is not served. Costs no deposit."""
        return self.write("object", leaf, what=f"object that no evidence is served for {leaf}")

    def confirm(self, leaf: Digest) -> Call:
        return self.write("confirm", leaf, what=f"confirm the disputed slash for {leaf}")

    def overturn(self, leaf: Digest) -> Call:
        return self.write("overturn", leaf, what=f"overturn the disputed slash for {leaf}")

    def lapse(self, leaf: Digest) -> Call:
        return self.write("lapse", leaf, what=f"end the unjudged dispute over {leaf}")

    def cancel(self, leaf: Digest) -> Call:
        return self.write("cancel", leaf, what=f"cancel the slash for {leaf}")

    # ── who watches, and who moves the terms ──

    def arbiter(self, block: BlockId = "latest") -> Address:
        """Who judges disputes, and may cancel proposals and void reward roots."""
        return cast(Address, self._one("arbiter", block=block))

    def announced_arbiter(self, block: BlockId = "latest") -> tuple[Address, int] | None:
        """The next arbiter and when it takes over (Unix seconds); None if none is announced."""
        account, act_at = self.read("announcedArbiter", block=block)
        return (account, act_at) if act_at else None

    def announce_arbiter(self, account: Address) -> Call:
        """By the arbiter or the governor."""
        return self.write("announceArbiter", account, what=f"announce {account} as arbiter")

    def apply_arbiter(self) -> Call:
        return self.write("applyArbiter", what="put the announced arbiter in force")

    def governor(self, block: BlockId = "latest") -> Address | None:
        """Who may announce other terms; None: no one, for good."""
        return or_none(self._one("governor", block=block))

    def pending_governor(self, block: BlockId = "latest") -> Address | None:
        """To whom the role was offered and who has not accepted it yet."""
        return or_none(self._one("pendingGovernor", block=block))

    def announced(self, block: BlockId = "latest") -> AnnouncedTerms | None:
        """The terms that were announced and do not apply yet."""
        found = AnnouncedTerms(*self.read("announced", block=block))
        return found if found.act_at else None

    def hand_over(self, to: Address) -> Call:
        return self.write("handOver", to, what=f"offer the governor's role to {to}")

    def accept_governor(self) -> Call:
        return self.write("acceptGovernor", what="accept the governor's role")

    def renounce_governor(self) -> Call:
        what = "give up the governor's role permanently: the terms never change again"
        return self.write("renounceGovernor", what=what)

    def announce_terms(self, dispute_deposit: int, validator_bond: int) -> Call:
        what = (
            f"announce a dispute deposit of {prime(dispute_deposit)} and a validator's bond of "
            f"{prime(validator_bond)}"
        )
        return self.write("announceTerms", dispute_deposit, validator_bond, what=what)

    def apply_terms(self) -> Call:
        return self.write("applyTerms", what="apply the terms that were announced")
