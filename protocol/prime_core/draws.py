"""Draws of the rows a validator replays: two secrets, committed to before a lease, revealed later.

    secret of an epoch ─► DrawReveal ─SHA-256─► commitment, signed ─► DrawList of an epoch ─┐
    the manager's second secret ─► DrawReveal ─SHA-256─► DrawList.second ───────────────────┤
                                                       Lease.salt = keccak(random ‖ list) ◄─┘
    node's signature on its submission ─► lease digest ─► salt ─► list ─► both commitments

For each epoch a validator draws a secret and signs the SHA-256 of its *reveal* in advance; the
manager does the same with a second secret. Every lease commits to both through its salt. Since the
node signs the lease's digest with its file, any commitment that the salt opens to is older than the
file. The rows of a file are drawn from both secrets: a validator cannot know which rows it will
replay before it has the file, and the manager never knows. Whether an acceptance is judged again,
and by which validator, is drawn from the second secret alone and stays hidden until the first
opinion has arrived. Each file has its own secrets, derived from the epoch's, so evidence does not
reveal the draw of any other file. The epoch's secrets are published under their commitments' names
once every lease that names them has passed its deadline; before that, a node could compute its
rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_core import encoding
from prime_core.ids import ZERO_DIGEST, Address, Digest, to_bytes
from prime_core.signing import (
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)

MAX_VALIDATORS = 64
"""Maximum number of commitments in one lease."""
REVEAL_MARGIN_SECONDS = 30
"""Allowed clock difference between validator and orchestrator, so that no secret is revealed
early."""


class DrawReveal(Strict):
    """The epoch secret of one party; its SHA-256 is the commitment."""

    version: Literal[1] = 1
    pool: int = Field(ge=0)
    validator: AddressField
    """The author: a validator, or the manager for the second secret."""
    epoch: int = Field(ge=0, lt=2**63)
    secret: DigestField

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """The commitment."""
        return encoding.sha256(self.canonical())


class DrawCommitment(Statement):
    """Signed by the validator before `epoch`; `commitment` = digest of its DrawReveal."""

    CONTRACT: ClassVar[ContractName] = "slasher"
    pool: U256
    epoch: U64
    commitment: DigestField


class SignedDrawCommitment(Strict):
    """A commitment as published before the epoch."""

    commitment: DrawCommitment
    validator: AddressField
    signature: SignatureField

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))


class DrawList(Strict):
    """Object named by its SHA-256: the commitments behind a lease, at most one per validator,
    sorted by address. `second` is the manager's commitment (the SHA-256 of its DrawReveal)."""

    version: Literal[1] = 1
    pool: int = Field(ge=0)
    second: DigestField
    commitments: tuple[SignedDrawCommitment, ...] = Field(min_length=1, max_length=MAX_VALIDATORS)

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        """A validator with two commitments could choose between them afterwards."""
        names = [signed.validator for signed in self.commitments]
        if any(a >= b for a, b in pairwise(names)):
            raise ValueError("commitments are sorted by validator, one each")
        return self

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """The object's name."""
        return encoding.sha256(self.canonical())

    def of(self, validator: Address) -> SignedDrawCommitment | None:
        """The validator's commitment, or None."""
        return next((c for c in self.commitments if c.validator == validator), None)


class SaltOpening(Strict):
    """The preimage of a lease's salt: fresh randomness and the digest of its DrawList."""

    random: DigestField
    draws: DigestField
    problems: DigestField | None = None
    """Seed of the lease's problems, if it reissues the groups of an expired lease. None: problems
    are drawn from the lease's own seed."""

    numeric_class: DigestField | None = Field(default=None, exclude_if=lambda value: value is None)
    """Digest of the exact class in which the file must be proved (prime_engine.exact). None: the
    file is judged by statistics alone."""

    heldout: int | None = Field(
        default=None, ge=0, lt=1 << 32, exclude_if=lambda value: value is None
    )
    """First held-out problem of an evaluation lease, from 0: its groups ask this problem and those
    that follow. Its file is judged and paid like any other and never trained on. None: the lease
    asks problems to train on."""

    def salt(self) -> Digest:
        """keccak256("prime/salt/v1" ‖ random ‖ draws ‖ problems, if any), or with a class
        keccak256("prime/salt/v2" ‖ random ‖ draws ‖ problems or zero ‖ class), or for evaluation
        keccak256("prime/salt/v3" ‖ random ‖ draws ‖ class or zero ‖ heldout as uint32)."""
        if self.heldout is not None:
            parts = [self.random, self.draws, self.numeric_class or ZERO_DIGEST]
            label, last = b"prime/salt/v3", self.heldout.to_bytes(4, "big")
        elif self.numeric_class is not None:
            parts = [self.random, self.draws, self.problems or ZERO_DIGEST, self.numeric_class]
            label, last = b"prime/salt/v2", b""
        else:
            parts = [self.random, self.draws] + ([self.problems] if self.problems else [])
            label, last = b"prime/salt/v1", b""
        return encoding.keccak256(label + b"".join(to_bytes(part) for part in parts) + last)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.heldout is not None and self.problems is not None:
            raise ValueError("a lease asks held-out problems or the problems of another, not both")
        return self


def reveal_at(epoch: int, *, epoch_seconds: int, lease_seconds: int) -> int:
    """Unix time from which the secret of `epoch` may be revealed: every lease issued in that epoch,
    and hence every lease that names its commitment, is past its deadline."""
    return (epoch + 1) * epoch_seconds + lease_seconds + REVEAL_MARGIN_SECONDS


def file_secret(epoch_secret: Digest, submission_digest: Digest) -> Digest:
    """keccak256("prime/draw/file/v1" ‖ epoch secret ‖ submission digest): one party's secret for
    one file. The validator receives the manager's together with the file."""
    return encoding.keccak256(
        b"prime/draw/file/v1" + to_bytes(epoch_secret) + to_bytes(submission_digest)
    )


def rows_secret(validators: Digest, managers: Digest) -> Digest:
    """keccak256("prime/draw/rows/v1" ‖ the validator's file secret ‖ the manager's): the draw
    secret in evidence and tables, which selects the rows to replay."""
    return encoding.keccak256(b"prime/draw/rows/v1" + to_bytes(validators) + to_bytes(managers))


def lot(label: str, second_secret: Digest, submission_digest: Digest, more: bytes = b"") -> int:
    """Draws a number below 2^256 for one file from the manager's epoch secret. `label` names its
    purpose. It cannot be derived from the file secret that a validator receives."""
    return int(
        encoding.keccak256(
            f"prime/draw/lot/{label}/v1".encode()
            + to_bytes(second_secret)
            + to_bytes(submission_digest)
            + more
        ),
        16,
    )
