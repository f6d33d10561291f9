"""A sealed batch: the immutable list of what one optimizer step trains on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from prime_core import encoding
from prime_core.ids import Digest
from prime_core.signing import (
    U64,
    U256,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)


class BatchFile(Strict):
    """One accepted file of a batch: its SHA-256, its verdict table's, and the groups taken."""

    sha256: DigestField
    size: int = Field(ge=0)
    table: DigestField
    submission_digest: DigestField
    policy_version: int = Field(ge=0)
    groups: tuple[int, ...]


class BatchManifest(Strict):
    """Immutable; files sorted by sha256. `step` s trains policy s into s + 1. `rows` = samples."""

    schema_version: Literal[1] = 1
    pool: int
    step: int = Field(ge=0)
    run_digest: DigestField
    files: tuple[BatchFile, ...]
    rows: int = Field(ge=1)
    policy_versions: tuple[int, ...]
    seed: DigestField

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """SHA-256 of the canonical bytes."""
        return encoding.sha256(self.canonical())


class BatchStatement(Statement):
    """Signed by the manager over a sealed batch."""

    CONTRACT: ClassVar[ContractName] = "work"
    pool: U256
    step: U64
    manifest_digest: DigestField


class SignedBatch(Strict):
    manifest: BatchManifest
    signature: SignatureField

    def statement(self) -> BatchStatement:
        m = self.manifest
        return BatchStatement(pool=m.pool, step=m.step, manifest_digest=m.digest())
