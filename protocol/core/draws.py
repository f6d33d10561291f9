"""Which rows a validator replays: secrets committed to before a lease, revealed once it is over.

    secret of an epoch ─► DrawReveal ─SHA-256─► commitment, signed ─► DrawList of an epoch ─┐
                                                       Lease.salt = keccak(random ‖ list) ◄─┘
    node's signature on its submission ─► lease digest ─► salt ─► list ─► commitment

For each epoch a validator draws a secret, and signs the SHA-256 of its *reveal* ahead. Every lease
names the commitments of its epoch, by its salt; since the node signs the lease's digest with its
file, a commitment that the salt opens to is older than the file, whoever colludes. A file is judged
under the secret that its lease names, so the validator has no choice of randomness after it has
seen one. Each file has a secret of its own, derived from the epoch's: evidence can show it at once
without giving away the draw of any other file. The epoch's secret appears under its commitment's
name when no lease that names it can be fulfilled any more: earlier, a node could compute its rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from protocol.core import encoding
from protocol.core.ids import Address, Digest, to_bytes
from protocol.core.signing import (
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
"""Commitments that one lease may name."""
REVEAL_MARGIN_SECONDS = 30
"""How far the clocks of validator and orchestrator may lie apart before a secret shows early."""


class DrawReveal(Strict):
    """The epoch secret of one validator; its SHA-256 is the commitment."""

    version: Literal[1] = 1
    pool: int = Field(ge=0)
    validator: AddressField
    epoch: int = Field(ge=0)
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
    """What is published ahead of the epoch."""

    commitment: DrawCommitment
    validator: AddressField
    signature: SignatureField

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))


class DrawList(Strict):
    """Object named by its SHA-256: whose commitments a lease names. One each, by address."""

    version: Literal[1] = 1
    pool: int = Field(ge=0)
    commitments: tuple[SignedDrawCommitment, ...] = Field(min_length=1, max_length=MAX_VALIDATORS)

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        """With two commitments of one validator it could choose afterwards."""
        names = [signed.validator for signed in self.commitments]
        if any(a >= b for a, b in pairwise(names)):
            raise ValueError("commitments are sorted by validator, one each")
        return self

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """Its name."""
        return encoding.sha256(self.canonical())

    def of(self, validator: Address) -> SignedDrawCommitment | None:
        """The validator's commitment, or None."""
        return next((c for c in self.commitments if c.validator == validator), None)


class SaltOpening(Strict):
    """What a lease's salt was made of: fresh randomness, and the digest of its DrawList."""

    random: DigestField
    draws: DigestField

    def salt(self) -> Digest:
        """keccak256("prime/salt/v1" ‖ random ‖ draws)."""
        return encoding.keccak256(b"prime/salt/v1" + to_bytes(self.random) + to_bytes(self.draws))


def reveal_at(epoch: int, *, epoch_seconds: int, lease_seconds: int) -> int:
    """Unix time from which the secret of `epoch` may be shown: every lease given in that epoch,
    and so named its commitment, is past its deadline."""
    return (epoch + 1) * epoch_seconds + lease_seconds + REVEAL_MARGIN_SECONDS


def file_secret(epoch_secret: Digest, submission_digest: Digest) -> Digest:
    """keccak256("prime/draw/file/v1" ‖ epoch secret ‖ submission digest): one file's draw secret,
    the `draw_secret` of evidence."""
    return encoding.keccak256(
        b"prime/draw/file/v1" + to_bytes(epoch_secret) + to_bytes(submission_digest)
    )
