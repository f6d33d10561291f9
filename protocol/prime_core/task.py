"""Tasks (container specs) and leases (the right and duty to produce one rollout file)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from prime_core.draws import SaltOpening
from prime_core.ids import Digest
from prime_core.signing import (
    U32,
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)

IMAGE_VARIABLE = "PRIME_IMAGE"
"""Environment variable with the image that a program runs in, as a run names it. The agent sets it
for tasks; for a validator in such an image its operator does."""


class Task(Strict):
    """A container spec. `image` is a reference by digest (or a bare image id without a registry).

    `memory_mb` is in MiB, `cpus_milli` in thousandths of a core.
    """

    image: str = Field(max_length=512)
    command: tuple[str, ...] = Field(default=(), max_length=64)
    memory_mb: int = Field(default=4096, ge=64)
    cpus_milli: int = Field(default=1000, ge=100)
    pids: int = Field(default=256, ge=8)
    gpus: bool = False


SHADOW_POOLS = 1 << 255
"""Pool numbers from here on are reserved for shadow leases. Contracts count pools from 1 and never
reach it."""


def shadow_pool(pool: int) -> int:
    """Returns the pool number under which shadow leases of `pool` are signed.

    No contract knows such a pool, so a file made for it can never be rooted, paid or slashed on
    chain, regardless of who holds the signatures.
    """
    return SHADOW_POOLS + pool


def real_pool(pool: int) -> int:
    """Returns the pool that a lease signed for `pool` is of: the inverse of `shadow_pool` for
    shadow leases, and `pool` itself for others."""
    return pool - SHADOW_POOLS if pool >= SHADOW_POOLS else pool


class Lease(Statement):
    """A lease, signed by the manager. `seed = keccak256("prime/lease/v1" ‖ digest)` determines
    everything that is paid for."""

    CONTRACT: ClassVar[ContractName] = "work"
    pool: U256
    step: U64
    node: AddressField
    index: U64
    policy_digest: DigestField
    run_digest: DigestField
    target: U32
    """Target length in tokens for every group of the lease."""
    salt: DigestField
    deadline: U64

    @property
    def shadow(self) -> bool:
        """Whether its file is only judged: never rooted, paid, trained on or slashed."""
        return self.pool >= SHADOW_POOLS


class SignedLease(Strict):
    """A lease with the manager's signature and what the worker needs to fulfill it.

    `policy_version` names the policy whose manifest digest is `lease.policy_digest`. `opening`
    lists the draw commitments behind the salt (prime_core/draws.py).
    """

    lease: Lease
    signature: SignatureField
    policy_version: int = Field(ge=0)
    opening: SaltOpening | None = None
    """What the salt commits to. None where slashing is impossible (calibration); a node refuses
    such a lease, and validators do not judge its file."""

    @property
    def heldout(self) -> int | None:
        """First held-out problem of an evaluation lease (SaltOpening.heldout); else None."""
        return self.opening.heldout if self.opening is not None else None

    def numeric_class(self) -> Digest | None:
        """The exact class in which the file must be proved; None if statistics alone judge it."""
        return self.opening.numeric_class if self.opening is not None else None

    def opens(self) -> bool:
        """Whether the salt matches `opening`."""
        return self.opening is not None and self.opening.salt() == self.lease.salt


LeaseStatus = Literal["open", "submitted", "expired"]
SubmissionStatus = Literal["submitted", "accepted", "rejected", "void"]
LeaseOutcome = Literal[LeaseStatus, SubmissionStatus]
"""What became of a lease: its status, or that of its submission once there is one."""
