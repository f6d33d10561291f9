"""Which rows a validator replays: secrets committed to before an epoch, revealed after it.

For each epoch a validator draws a secret. Its *reveal* is an object whose SHA-256 is signed and
published before the epoch starts (the commitment); the object itself appears under that name once
the epoch is over. Each file is judged under a secret of its own, derived from the epoch's: evidence
can show it at once without giving away the draw of any other file.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from protocol.core import encoding
from protocol.core.ids import Digest, to_bytes
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


def file_secret(epoch_secret: Digest, submission_digest: Digest) -> Digest:
    """keccak256("prime/draw/file/v1" ‖ epoch secret ‖ submission digest): one file's draw secret,
    the `draw_secret` of evidence."""
    return encoding.keccak256(
        b"prime/draw/file/v1" + to_bytes(epoch_secret) + to_bytes(submission_digest)
    )
