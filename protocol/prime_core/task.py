"""Tasks (container specs) and leases (the right and duty to make one rollout file)."""

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


class Task(Strict):
    """A container spec. `image` is a reference by digest (or a bare image id without a registry).

    Memory in MiB, `cpus` in thousandths of a core.
    """

    image: str = Field(max_length=512)
    command: tuple[str, ...] = Field(default=(), max_length=64)
    memory_mb: int = Field(default=4096, ge=64)
    cpus_milli: int = Field(default=1000, ge=100)
    pids: int = Field(default=256, ge=8)
    gpus: bool = False


SHADOW_POOLS = 1 << 255
"""Pool numbers from here on are no pools: contracts count theirs from 1 and never reach it."""


def shadow_pool(pool: int) -> int:
    """The number under which shadow leases of a pool are signed.

    No contract knows such a pool, so a file made for it has no way onto the chain: no root, no pay,
    no slash, whoever holds the signatures."""
    return SHADOW_POOLS + pool


class Lease(Statement):
    """Signed by the manager. `seed = keccak256("prime/lease/v1" ‖ digest)` fixes all that pays."""

    CONTRACT: ClassVar[ContractName] = "work"
    pool: U256
    step: U64
    node: AddressField
    index: U64
    policy_digest: DigestField
    run_digest: DigestField
    target: U32
    """The length in tokens that every group of the lease asks for."""
    salt: DigestField
    deadline: U64

    @property
    def shadow(self) -> bool:
        """Whether its file is judged and nothing else: never rooted, paid, trained on, slashed."""
        return self.pool >= SHADOW_POOLS


class SignedLease(Strict):
    """A lease with the manager's signature and what the worker must know to fulfil it.

    `policy_version` names the policy whose manifest digest is `lease.policy_digest`; `opening` says
    which draw commitments the salt stands for (prime_core/draws.py).
    """

    lease: Lease
    signature: SignatureField
    policy_version: int = Field(ge=0)
    opening: SaltOpening | None = None
    """What the salt commits to. None where nobody will be slashed (calibration); a node refuses
    such a lease, and no validator judges its file."""

    def problems(self) -> Digest | None:
        """The seed that the lease's problems are drawn from, if it is not the lease's own."""
        return self.opening.problems if self.opening is not None else None

    def opens(self) -> bool:
        """Whether the salt is what `opening` says."""
        return self.opening is not None and self.opening.salt() == self.lease.salt


LeaseStatus = Literal["open", "submitted", "accepted", "rejected", "void", "expired"]
