"""Court."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import cast

from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract, or_none
from prime_chain.contracts.work import opinions_argument
from prime_core import encoding
from prime_core.ids import Address, Digest
from prime_core.rollout import Submission
from prime_core.verdict import Law, SignedOpinion


class CaseStatus(IntEnum):
    """Where a case stands."""

    NONE = 0
    OPEN = 1
    DRAWN = 2
    HANDED_OVER = 3
    SETTLED = 4


class Vote(IntEnum):
    """What a juror finds: the same as the authors, otherwise, or that it cannot tell."""

    NONE = 0
    CONFIRM = 1
    OVERTURN = 2
    ABSTAIN = 3


@dataclass(frozen=True)
class JurorSeat:
    """A seat of a class's register. `account` None: the seat is free. `since`: Unix seconds."""

    account: Address | None
    since: int


@dataclass(frozen=True)
class JurorRecord:
    """`bond` in wei. `seated`: it can be drawn. `drawn`: cases that are not settled."""

    bond: int
    seated: bool
    drawn: int


@dataclass(frozen=True)
class CourtCase:
    """`jurors` is empty before the draw. They commit before `reveal_from` and reveal before
    `reveal_until` (Unix seconds). `seed_block`: its hash chooses the jurors; 0 if not fixed."""

    verification_class: Digest
    provider: Address
    latest: int
    pool: int
    validators: int
    status: CaseStatus
    confirming: int
    seed_block: int
    seats: int
    reveal_from: int
    reveal_until: int
    overturning: int
    pot: int
    jurors: tuple[Address, ...]


@dataclass(frozen=True)
class Ballot:
    """A juror's commitment, and its vote: NONE until it is revealed."""

    commitment: Digest
    vote: Vote


def commitment_of(leaf: Digest, juror: Address, vote: Vote, digest: Digest, salt: Digest) -> Digest:
    """What a juror commits to: keccak256(abi.encode(…)) as in `Court.commitmentOf`."""
    words = (leaf, juror, f"0x{vote:02x}", digest, salt)
    return encoding.keccak256(b"".join(bytes.fromhex(word[2:]).rjust(32, b"\0") for word in words))


class Court(Contract):
    """Jurors of disputed slashes: their register, and the cases that they judge."""

    NAME = "court"

    def juror_bond(self, block: BlockId = "latest") -> int:
        """What a juror has at stake for a class, in wei."""
        return cast(int, self._one("jurorBond", block=block))

    def seats_of(self, verification_class: Digest, block: BlockId = "latest") -> list[JurorSeat]:
        """The register of a class, in the order of the seats' numbers."""
        found = self._one("seatsOf", verification_class, block=block)
        return [JurorSeat(or_none(account), since) for account, since in found]

    def juror_of(
        self, verification_class: Digest, account: Address, block: BlockId = "latest"
    ) -> JurorRecord:
        bond, seat, drawn = self._one("jurorOf", verification_class, account, block=block)
        return JurorRecord(bond, seat != 0, drawn)

    def case_of(self, leaf: Digest, block: BlockId = "latest") -> CourtCase | None:
        """The case about a submission; None if no provider asked for the court."""
        case, jurors = self.read("caseOf", leaf, block=block)
        found = CourtCase(*(*case, tuple(jurors)))
        if found.status == CaseStatus.NONE:
            return None
        return replace(found, status=CaseStatus(found.status))

    def ballot_of(self, leaf: Digest, juror: Address, block: BlockId = "latest") -> Ballot:
        commitment, vote = self._one("ballotOf", leaf, juror, block=block)
        return Ballot(commitment, Vote(vote))

    def window_time(self, block: BlockId = "latest") -> int:
        """The time that the court's windows are measured by, in Unix seconds."""
        return cast(int, self._one("windowTime", block=block))

    def pay_of(self, juror: Address, block: BlockId = "latest") -> int:
        """What a juror can collect, in wei."""
        return cast(int, self._one("payOf", juror, block=block))

    def register(self, verification_class: Digest) -> Call:
        """By the juror; needs an allowance for the bond."""
        what = f"register as a juror of class {verification_class}"
        return self.write("register", verification_class, what=what)

    def leave(self, verification_class: Digest) -> Call:
        what = f"leave the register of class {verification_class}"
        return self.write("leave", verification_class, what=what)

    def withdraw(self, verification_class: Digest) -> Call:
        what = f"withdraw the juror's bond of class {verification_class}"
        return self.write("withdraw", verification_class, what=what)

    def collect(self) -> Call:
        return self.write("collect", what="collect the juror's pay")

    def open(
        self,
        submission: Submission,
        opinions: Sequence[SignedOpinion],
        law: Law,
        seats: Sequence[int],
        validators: int,
    ) -> Call:
        """By the provider before it disputes. `seats`: seven that count, rising; `validators`: how
        many accounts the pool has ever appointed."""
        return self.write(
            "open", submission, opinions_argument(opinions), law, tuple(seats), validators,
            what="ask for the court of jurors",
        )  # fmt: skip

    def draw(self, leaf: Digest) -> Call:
        return self.write("draw", leaf, what=f"draw the jurors for {leaf}")

    def commit(self, leaf: Digest, commitment: Digest) -> Call:
        return self.write("commit", leaf, commitment, what=f"commit to a vote on {leaf}")

    def reveal(self, leaf: Digest, vote: Vote, digest: Digest, salt: Digest) -> Call:
        what = f"reveal the vote on {leaf}"
        return self.write("reveal", leaf, vote, digest, salt, what=what)

    def settle(self, leaf: Digest) -> Call:
        return self.write("settle", leaf, what=f"settle the case of {leaf}")
