"""Rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from prime_chain.amounts import prime
from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.rollout import Submission
from prime_core.settlement import RewardTable


@dataclass(frozen=True)
class PoolFunds:
    """Money a pool holds for rewards: free, and reserved by posted roots."""

    free: int
    reserved: int


@dataclass(frozen=True)
class RewardRoot:
    """A posted reward root. Claims open at `claimable_at` unless it is disabled."""

    root: Digest
    claimable_at: int
    disabled: bool


@dataclass(frozen=True)
class Claim:
    """One node's or validator's claim on a reward root; `cumulative` in wei."""

    pool: int
    epoch: int
    node: Address
    cumulative: int
    proof: tuple[Digest, ...]


@dataclass(frozen=True)
class Appeal:
    """A provider's request to have a file paid; the arbiter can grant it before `judge_by` (Unix
    seconds)."""

    pool: int
    judge_by: int
    restored: bool
    node: Address
    step: int


class Rewards(Contract):
    """The pools' money and the cumulative reward roots it is claimed by."""

    NAME = "rewards"

    def funds(self, pool: int, block: BlockId = "latest") -> PoolFunds:
        return PoolFunds(*self.read("funds", pool, block=block))

    def claimed(self, pool: int, node: Address, block: BlockId = "latest") -> int:
        """What has been paid for a node or validator so far."""
        return cast(int, self._one("claimed", pool, node, block=block))

    def reward_root(self, pool: int, epoch: int, block: BlockId = "latest") -> RewardRoot | None:
        found = RewardRoot(*self.read("rewardRoot", pool, epoch, block=block))
        return None if found.root == ZERO_DIGEST else found

    def progress(self, pool: int, block: BlockId = "latest") -> tuple[int, int]:
        """The cumulative total of the newest root that stands, in wei, and the earliest epoch of
        the next one."""
        total, next_epoch = self.read("progress", pool, block=block)
        return total, next_epoch

    def fund(self, pool: int, amount: int) -> Call:
        """Needs an allowance for this contract."""
        return self.write("fund", pool, amount, what=f"fund pool {pool} with {prime(amount)}")

    def bond_of(self, pool: int, block: BlockId = "latest") -> int:
        """What stands behind the pool's unpaid work besides its funds."""
        return cast(int, self._one("bondOf", pool, block=block))

    def bond(self, pool: int, amount: int) -> Call:
        """Needs an allowance for this contract. It comes back by `refund` alone."""
        return self.write("bond", pool, amount, what=f"bond {prime(amount)} for pool {pool}")

    def silent_from(self, pool: int, block: BlockId = "latest") -> int | None:
        """From when on anyone may post the validators' table (Unix seconds); None: the pool never
        had money."""
        return cast(int, self._one("silentFrom", pool, block=block)) or None

    def post_table(self, table: RewardTable, signatures: Sequence[Signature]) -> Call:
        """In the place of a silent manager; signatures in rising order of validators' numbers."""
        what = f"post the validators' table of epoch {table.epoch} in pool {table.pool}"
        return self.write("postTable", table, tuple(signatures), what=what)

    def refundable_at(self, pool: int, block: BlockId = "latest") -> int | None:
        """From when on its manager may refund an ended pool (Unix seconds); None while it runs."""
        return cast(int, self._one("refundableAt", pool, block=block)) or None

    def refund(self, pool: int) -> Call:
        """From `refundable_at` on: until then the pool's last work can be promised its pay."""
        return self.write("refund", pool, what=f"take back what ended pool {pool} does not owe")

    def post_reward_root(
        self, pool: int, epoch: int, root: Digest, cumulative_total: int, published: Digest
    ) -> Call:
        what = f"post the reward root of epoch {epoch} in pool {pool}"
        return self.write(
            "postRewardRoot", pool, epoch, root, cumulative_total, published, what=what
        )

    def disable(self, pool: int, epoch: int) -> Call:
        what = f"disable the reward root of epoch {epoch} in pool {pool}"
        return self.write("disable", pool, epoch, what=what)

    def claim(self, claim: Claim) -> Call:
        c = claim
        what = f"claim the rewards of {c.node} in pool {c.pool}"
        return self.write("claim", c.pool, c.epoch, c.node, c.cumulative, c.proof, what=what)

    def claim_many(self, claims: Sequence[Claim]) -> Call:
        """Several claims at once; what is paid already is passed over."""
        rows = [(c.pool, c.epoch, c.node, c.cumulative, c.proof) for c in claims]
        return self.write("claimMany", rows, what=f"claim the rewards of {len(claims)} nodes")

    def appeal(self, submission: Submission, root_seq: int, proof: Sequence[Digest]) -> Call:
        """By the provider: asks the arbiter to have a rooted file paid. Costs no deposit."""
        what = f"appeal to the arbiter for a file of node {submission.node}"
        return self.write("appeal", submission, root_seq, tuple(proof), what=what)

    def restore(self, leaf: Digest, amount: int) -> Call:
        """By the arbiter: has an appealed file paid; `amount` in wei."""
        what = f"have the appealed file {leaf} paid with {prime(amount)}"
        return self.write("restore", leaf, amount, what=what)

    def appeal_of(self, leaf: Digest, block: BlockId = "latest") -> Appeal | None:
        """The appeal about a file; None if there is none."""
        found = Appeal(*self._one("appealOf", leaf, block=block))
        return found if found.judge_by else None
