"""Work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from protocol.chain.client import BlockId, Call
from protocol.chain.contracts.base import Contract
from protocol.chain.deployment import Periods
from protocol.core.ids import ZERO_DIGEST, Digest, Signature
from protocol.core.rollout import Receipt, Submission
from protocol.core.task import Lease


@dataclass(frozen=True)
class WorkRoot:
    """One posted root. `posted_at`: its block's time."""

    root: Digest
    posted_at: int
    count: int


class Work(Contract):
    """Merkle roots over submission digests, and rejections of single leaves."""

    NAME = "work"

    def root_of(self, pool: int, seq: int, block: BlockId = "latest") -> WorkRoot | None:
        """Root number `seq` of a pool; None if it is not posted."""
        found = WorkRoot(*self.read("rootOf", pool, seq, block=block))
        return None if found.root == ZERO_DIGEST else found

    def is_rejected(self, pool: int, leaf: Digest, block: BlockId = "latest") -> bool:
        return bool(self._one("isRejected", pool, leaf, block=block))

    def leaf_in(
        self, pool: int, seq: int, leaf: Digest, proof: Sequence[Digest], block: BlockId = "latest"
    ) -> bool:
        return bool(self._one("leafIn", pool, seq, leaf, tuple(proof), block=block))

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
        self, pool: int, seq: int, leaf: Digest, proof: Sequence[Digest], reason: int
    ) -> Call:
        what = f"reject submission {leaf} of pool {pool} (reason {reason})"
        return self.write("reject", pool, seq, leaf, tuple(proof), reason, what=what)
