"""Pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract, or_none
from prime_core.checkpoint import PolicyStatement
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.node import Invite


@dataclass(frozen=True)
class Pool:
    """One training run as the chain knows it. `members`: nodes in it now."""

    manager: Address
    trainer: Address
    run_digest: Digest
    stake_per_seat: int
    capacity: int
    members: int
    ended: bool


class PoolConfig(NamedTuple):
    """What a pool fixes at its creation; in the order of the contract's struct. Amounts in wei.
    `slash_amount`: what one slash takes, at most `stake_per_seat`. `quorum`: how many validators'
    opinions reject or slash. `lease_seconds`: the longest lease."""

    trainer: Address
    run_digest: Digest
    stake_per_seat: int
    slash_amount: int
    capacity: int
    quorum: int
    lease_seconds: int


@dataclass(frozen=True)
class PoolJudgement:
    """What a pool's judgement rests on; the words are those of PoolConfig."""

    quorum: int
    slash_amount: int
    lease_seconds: int


@dataclass(frozen=True)
class Appointment:
    """A validator's number in a pool, whether its opinions count now, and the earliest end of a
    submission (`validUntil`, Unix seconds) that they count for."""

    number: int
    on: bool
    counts_from: int


@dataclass(frozen=True)
class Revision:
    """Leases of steps from `from_step` on are given under this run. `at`: Unix seconds."""

    run_digest: Digest
    from_step: int
    at: int


@dataclass(frozen=True)
class JoinRules:
    """Who may join now. `ended_at`: Unix seconds, 0 while the pool runs."""

    paused: bool
    list_only: bool
    ended_at: int


class Pools(Contract):
    """Pools, their members, validators and published policies."""

    NAME = "pools"

    def pool_of(self, pool: int, block: BlockId = "latest") -> Pool:
        """Raises ChainRevertedError (UnknownPool) if there is no such pool."""
        return Pool(*self.read("poolOf", pool, block=block))

    def revisions_of(self, pool: int, block: BlockId = "latest") -> tuple[Revision, ...]:
        """The revisions of the pool's run after its first definition (`pool_of`), by step."""
        return tuple(Revision(*one) for one in self._one("revisionsOf", pool, block=block))

    def count(self) -> int:
        """How many pools there are, which is the newest one's number."""
        return cast(int, self._one("count"))

    def is_member(self, pool: int, node: Address, block: BlockId = "latest") -> bool:
        """Whether the node has a seat in the pool."""
        return bool(self._one("isMember", pool, node, block=block))

    def is_validator(self, pool: int, account: Address, block: BlockId = "latest") -> bool:
        return bool(self._one("isValidator", pool, account, block=block))

    def judgement_of(self, pool: int, block: BlockId = "latest") -> PoolJudgement:
        """Raises ChainRevertedError (UnknownPool) if there is no such pool."""
        return PoolJudgement(*self.read("judgementOf", pool, block=block))

    def validator_of(
        self, pool: int, account: Address, block: BlockId = "latest"
    ) -> Appointment | None:
        """An account's appointment in a pool; None if it never had one."""
        found = Appointment(*self.read("validatorOf", pool, account, block=block))
        return found if found.number else None

    def validator_at(self, pool: int, number: int, block: BlockId = "latest") -> Address | None:
        """The account that was appointed under `number` (from 1 on); None if none was."""
        return or_none(self._one("validatorAt", pool, number, block=block))

    def policy_digest(self, pool: int, version: int, block: BlockId = "latest") -> Digest | None:
        """Digest of a published policy's manifest; None if it is not published."""
        found = cast(Digest, self._one("policyDigest", pool, version, block=block))
        return None if found == ZERO_DIGEST else found

    def next_version(self, pool: int, block: BlockId = "latest") -> int:
        """The policy version that can be published next."""
        return cast(int, self._one("nextVersion", pool, block=block))

    def rules_of(self, pool: int, block: BlockId = "latest") -> JoinRules:
        """Raises ChainRevertedError (UnknownPool) if there is no such pool."""
        return JoinRules(*self.read("rulesOf", pool, block=block))

    def allows(self, provider: Address, pool: int, block: BlockId = "latest") -> bool:
        """Whether the provider lets the pool seat its nodes."""
        return bool(self._one("allows", provider, pool, block=block))

    def create(self, config: PoolConfig) -> Call:
        """The sender becomes the manager. The PoolCreated event carries the pool's number."""
        what = f"create a pool for run {config.run_digest}"
        return self.write("create", config, what=what)

    def revise(self, pool: int, run_digest: Digest, from_step: int) -> Call:
        """By the manager: leases of steps from `from_step` on are given under another run."""
        what = f"revise the run of pool {pool} from step {from_step}: {run_digest}"
        return self.write("revise", pool, run_digest, from_step, what=what)

    def set_validator(self, pool: int, validator: Address, on: bool) -> Call:
        what = f"{'appoint' if on else 'dismiss'} validator {validator} in pool {pool}"
        return self.write("setValidator", pool, validator, on, what=what)

    def resign(self, pool: int) -> Call:
        """By a validator; its open proposals stay."""
        return self.write("resign", pool, what=f"resign as a validator of pool {pool}")

    def pause(self, pool: int) -> Call:
        return self.write("pause", pool, what=f"admit no node to pool {pool} for now")

    def start(self, pool: int) -> Call:
        return self.write("start", pool, what=f"let nodes into pool {pool} again")

    def set_allow_list(self, pool: int, on: bool) -> Call:
        whom = "listed providers only" if on else "any provider"
        return self.write("setAllowList", pool, on, what=f"let {whom} into pool {pool}")

    def set_listed(self, pool: int, provider: Address, on: bool) -> Call:
        act = "put on" if on else "take off"
        what = f"{act} pool {pool}'s list: provider {provider}"
        return self.write("setListed", pool, provider, on, what=what)

    def set_ban(self, pool: int, node: Address, on: bool) -> Call:
        what = f"{'bar' if on else 'let back'} node {node} {'from' if on else 'into'} pool {pool}"
        return self.write("setBan", pool, node, on, what=what)

    def allow(self, pool: int, on: bool) -> Call:
        """By a provider: the pool may seat its nodes, and so commit its stake, or may no more."""
        what = f"let pool {pool} seat nodes" if on else f"let pool {pool} seat no more nodes"
        return self.write("allow", pool, on, what=what)

    def join(self, invite: Invite, manager_signature: Signature) -> Call:
        what = f"admit node {invite.node} to pool {invite.pool}"
        return self.write("join", invite, manager_signature, what=what)

    def leave(self, pool: int, node: Address) -> Call:
        return self.write("leave", pool, node, what=f"take node {node} out of pool {pool}")

    def eject(self, pool: int, node: Address) -> Call:
        return self.write("eject", pool, node, what=f"eject node {node} from pool {pool}")

    def publish_policy(self, statement: PolicyStatement, trainer_signature: Signature) -> Call:
        what = f"publish policy {statement.version} of pool {statement.pool}"
        return self.write("publishPolicy", statement, trainer_signature, what=what)

    def end(self, pool: int) -> Call:
        return self.write("end", pool, what=f"end pool {pool}")
