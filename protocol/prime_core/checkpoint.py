"""Published policies: manifest, chunks, and the trainer's signed statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from prime_core import encoding
from prime_core.ids import Digest, to_bytes
from prime_core.signing import (
    U64,
    U256,
    ContractName,
    DigestField,
    Domain,
    SignatureField,
    Signer,
    Statement,
    Strict,
)

FILE_TAG = b"prime/file/v1"


def file_digest(size: int, chunk_size: int, chunks: Sequence[Digest]) -> Digest:
    """Returns the digest of a file of `size` bytes: BLAKE3 over FILE_TAG ‖ size ‖ chunk size (8
    bytes each, big endian) ‖ the BLAKE3 of each chunk. Verifying every chunk verifies the file,
    without reading it again (docs/adr/0005)."""
    head = FILE_TAG + size.to_bytes(8, "big") + chunk_size.to_bytes(8, "big")
    return encoding.blake3_digest(head + b"".join(map(to_bytes, chunks)))


class FileEntry(Strict):
    """One file of a policy folder: a plain relative name, its size in bytes, BLAKE3 of each chunk
    of `Manifest.chunk_size` bytes (the last one may be shorter), and the `file_digest` of these."""

    name: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    size: int = Field(ge=0, le=1 << 44)
    digest: DigestField
    chunks: tuple[DigestField, ...]


class DeltaEntry(Strict):
    """A delta object that turns version `base` into this version; named and chunked like a file."""

    base: int = Field(ge=0)
    base_digest: DigestField
    size: int = Field(ge=0, le=1 << 44)
    digest: DigestField
    chunks: tuple[DigestField, ...]


class Manifest(Strict):
    """Describes a policy bit for bit. The policy digest is BLAKE3 of its canonical JSON."""

    schema_version: Literal[1] = 1
    pool: int = Field(ge=0)
    version: int = Field(ge=0, lt=2**63)
    step: int = Field(ge=0, lt=2**63)
    chunk_size: int = Field(ge=1 << 12, le=1 << 26)
    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=4096)
    result_digest: DigestField
    """BLAKE3 over the sorted (name ‖ 0 ‖ file digest) of all files; the same for a full download
    and for a copy built from deltas. It depends on the chunk size through the file digests."""
    deltas: tuple[DeltaEntry, ...] = Field(default=(), max_length=16)

    def canonical(self) -> bytes:
        """The exact bytes that are hashed and published."""
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """The policy digest that goes on chain."""
        return encoding.blake3_digest(self.canonical())

    def statement(self) -> PolicyStatement:
        return PolicyStatement(pool=self.pool, version=self.version, manifest_digest=self.digest())

    def signed(self, trainer: Signer, domain: Domain) -> SignedManifest:
        """The published form; `domain` is that of the contract Pools."""
        return SignedManifest(manifest=self, signature=trainer.sign(self.statement(), domain))


class PolicyStatement(Statement):
    """Signed by the trainer; checked by Pools.publishPolicy. `manifest_digest` = policy digest."""

    CONTRACT: ClassVar[ContractName] = "pools"
    pool: U256
    version: U64
    manifest_digest: DigestField


class SignedManifest(Strict):
    """The published form: the manifest and the trainer's signature over its PolicyStatement."""

    manifest: Manifest
    signature: SignatureField
