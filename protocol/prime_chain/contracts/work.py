"""Work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract
from prime_core.deployment import Periods
from prime_core.errors import FatalError
from prime_core.ids import ZERO_DIGEST, Digest, Signature
from prime_core.rollout import Receipt, Submission
from prime_core.task import Lease
from prime_core.verdict import SignedOpinion


@dataclass(frozen=True)
class WorkRoot:
    """One posted root. `posted_at`: its block's time."""

    root: Digest
    posted_at: int
    count: int


def opinions_argument(opinions: Sequence[SignedOpinion]) -> tuple[Any, ...]:
    """Opinions as the contracts' `Opinions` struct. Raises FatalError if they do not agree."""
    first = opinions[0].opinion
    voices = []
    for signed in opinions:
        said = signed.opinion
        if (said.law, said.outcome) != (first.law, first.outcome):
            raise FatalError("opinions of different law or outcome do not count together")
        voices.append((said.reason, said.table, said.evidence, said.judged_at, signed.signature))
    return first.law, first.outcome, tuple(voices)


class Work(Contract):
    """Merkle roots over submission digests, and rejections of single leaves."""

    NAME = "work"

    def root_of(self, pool: int, seq: int, block: BlockId = "latest") -> WorkRoot | None:
        """Root number `seq` of a pool; None if it is not posted."""
        found = WorkRoot(*self.read("rootOf", pool, seq, block=block))
        return None if found.root == ZERO_DIGEST else found

    def root_count(self, pool: int, block: BlockId = "latest") -> int:
        """How many roots the pool has; they are numbered from 1."""
        return cast(int, self._one("rootCount", pool, block=block))

    def epoch_at(self, time: int, block: BlockId = "latest") -> int:
        return cast(int, self._one("epochAt", time, block=block))

    def periods(self, block: BlockId = "latest") -> Periods:
        values = self.read("periods", block=block)
        return Periods(**dict(zip(Periods.FIELDS, values, strict=True)))

    def post_root(self, pool: int, root: Digest, count: int, leaves_object: Digest) -> Call:
        what = f"post a work root of {count} submissions in pool {pool}"
        return self.write("postRoot", pool, root, count, leaves_object, what=what)

    def post_leaf(
        self,
        lease: Lease,
        manager_signature: Signature,
        submission: Submission,
        node_signature: Signature,
        receipt: Receipt,
        receipt_signature: Signature,
    ) -> Call:
        """Roots one leaf that the manager countersigned and then ignored for an epoch."""
        return self.write(
            "postLeaf", lease, manager_signature, submission, node_signature, receipt,
            receipt_signature,
            what=f"post the forgotten submission of node {lease.node} in pool {lease.pool}",
        )  # fmt: skip

    def reject(
        self,
        submission: Submission,
        seq: int,
        proof: Sequence[Digest],
        opinions: Sequence[SignedOpinion],
    ) -> Call:
        """`opinions`: of outcome rejected or void, in rising order of their validators' numbers in
        the pool. Anyone may send it."""
        what = f"reject a submission of node {submission.node} in pool {submission.pool}"
        return self.write(
            "reject", submission, seq, tuple(proof), opinions_argument(opinions), what=what
        )

    def announce_mirror(self, pool: int, url: str) -> Call:
        """By a validator, also a dismissed one. An empty `url` takes the last one back."""
        what = f"name {url or 'no URL'} as a mirror of pool {pool}"
        return self.write("announceMirror", pool, url, what=what)
