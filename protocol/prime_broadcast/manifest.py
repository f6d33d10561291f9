"""Manifests: builds one for a folder, checks one from outside, verifies a folder against one.

A policy is the set of its files, bit for bit. A manifest has the BLAKE3 of each chunk of each file,
so a chunk can be checked on arrival. A file's digest is made of its chunks' digests, and
`result_digest` of the files' digests. In this hash tree every byte is hashed once (docs/adr/0005).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import ValidationError

from prime_broadcast import progress
from prime_broadcast.files import open_regular, read_at, read_into
from prime_core import encoding, ids
from prime_core.checkpoint import (
    DeltaEntry,
    FileEntry,
    Manifest,
    SignedManifest,
    file_digest,
)
from prime_core.errors import MalformedError, UntrustedError, UserError
from prime_core.ids import Address, Digest
from prime_core.signing import Domain

MANIFEST_NAME = "manifest.json"
DELTA_PREFIX = "delta-"

MIN_CHUNK = 1 << 20
MAX_CHUNK = 16 << 20
"""Chunks that this side makes; a receiver holds one chunk a connection in memory."""
FEWEST_CHUNKS = 32
MAX_POLICY_BYTES = 1 << 42
"""4 TiB: nothing larger is believed."""
READ_SIZE = 1 << 20


def choose_chunk_size(total: int) -> int:
    """A power of two from 1 to 16 MiB, the largest of which there are 32 or more: a relay passes
    the first one on early, and a level of relays costs a 32nd of the time at most; while each chunk
    costs its sender and its receiver most of a millisecond besides its bytes. What a file's digest
    is made of, so it never changes (docs/adr/0005)."""
    size = MIN_CHUNK
    while size < MAX_CHUNK and size * FEWEST_CHUNKS < total:
        size *= 2
    return size


def chunk_count(size: int, chunk_size: int) -> int:
    """Number of chunks of a file of `size` bytes; an empty file has none."""
    return -(-size // chunk_size)


def result_digest(files: Iterable[FileEntry]) -> Digest:
    """BLAKE3 over the sorted (name ‖ 0 ‖ file digest)."""
    hasher = blake3()
    for entry in sorted(files, key=lambda entry: entry.name):
        hasher.update(entry.name.encode() + b"\0" + ids.to_bytes(entry.digest))
    return ids.digest(hasher.digest())


def hash_file(path: Path, chunk_size: int) -> tuple[int, Digest, tuple[Digest, ...]]:
    """(size, `file_digest`, BLAKE3 of each chunk) of a plain file, in bounded memory."""
    with open_regular(path) as fd:
        size = os.fstat(fd).st_size
        buffer = memoryview(bytearray(min(READ_SIZE, chunk_size, max(size, 1))))
        chunks: list[Digest] = []
        for begin in range(0, size, chunk_size):
            hasher = blake3()
            for offset in range(begin, min(size, begin + chunk_size), len(buffer)):
                part = buffer[: min(size, begin + chunk_size) - offset]
                read_into(fd, part, offset)
                hasher.update(part)
                progress.went(len(part))
            chunks.append(ids.digest(hasher.digest()))
    return size, file_digest(size, chunk_size, chunks), tuple(chunks)


def policy_files(folder: Path) -> list[Path]:
    """The files of a policy folder in name order, without its `manifest.json`. Raises UserError
    for anything that is not a plain file with a plain name, or if there is no such folder."""
    found: list[Path] = []
    if not folder.is_dir():
        raise UserError(f"there is no folder at {folder}", hint="name the folder of a policy")
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST_NAME:
            continue
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(
                f"{path} is not a regular file; a policy is a flat folder of plain files",
                hint="move links, folders and devices out of it",
            )
        found.append(path)
    if not found:
        raise UserError(f"{folder} holds no file to publish")
    return found


def build_manifest(
    folder: Path,
    *,
    pool: int,
    version: int,
    step: int,
    chunk_size: int | None = None,
) -> Manifest:
    """The manifest of every file in `folder` (but `manifest.json`). Raises UserError if the folder
    holds anything that cannot be published."""
    paths = policy_files(folder)
    total = sum(path.stat().st_size for path in paths)
    if chunk_size is None:
        chunk_size = choose_chunk_size(total)
    progress.part("hashing", total)
    entries: list[FileEntry] = []
    for path in paths:
        size, digest, chunks = hash_file(path, chunk_size)
        try:
            entries.append(FileEntry(name=path.name, size=size, digest=digest, chunks=chunks))
        except ValidationError as error:
            raise UserError(
                f"{path.name!r} cannot be a policy's file: names are letters, digits, '.', '_' "
                "and '-', beginning with a letter or digit",
                hint="rename or remove it",
            ) from error
    manifest = Manifest(
        pool=pool,
        version=version,
        step=step,
        chunk_size=chunk_size,
        files=tuple(entries),
        result_digest=result_digest(entries),
    )
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest, *, max_bytes: int = MAX_POLICY_BYTES) -> Manifest:
    """Returns `manifest` if it is consistent in itself. Raises MalformedError for two files of one
    name (letter case aside), a reserved name, a count of chunks that does not fit its size, a
    digest that is not made of its chunks', more than `max_bytes` in all, a delta from itself or
    from a later version, or a wrong result digest."""
    names: set[str] = set()
    for entry in manifest.files:
        name = entry.name.lower()
        if name in names:
            raise MalformedError(f"the manifest has two files named {entry.name!r}")
        if name == MANIFEST_NAME or name.startswith(DELTA_PREFIX):
            raise MalformedError(f"the manifest uses the reserved name {entry.name!r}")
        names.add(name)
        _check_chunks(entry.name, entry, manifest.chunk_size)
    bases: set[int] = set()
    for delta in manifest.deltas:
        if delta.base >= manifest.version or delta.base in bases:
            raise MalformedError(f"the manifest's delta from version {delta.base} cannot be")
        bases.add(delta.base)
        _check_chunks(f"{DELTA_PREFIX}{delta.base}", delta, manifest.chunk_size)
    total = total_size(manifest) + sum(delta.size for delta in manifest.deltas)
    if total > max_bytes:
        raise MalformedError(f"the manifest names {total} bytes; the limit is {max_bytes}")
    if result_digest(manifest.files) != manifest.result_digest:
        raise MalformedError("the manifest's result digest is not that of its files")
    return manifest


def total_size(manifest: Manifest) -> int:
    """Bytes of all files."""
    return sum(entry.size for entry in manifest.files)


def parse_signed(raw: bytes, *, limit: int = encoding.MAX_JSON_BYTES) -> SignedManifest:
    """A signed manifest from outside: bounded, strict, consistent; its signature is not yet
    checked. Raises MalformedError."""
    if len(raw) > limit:
        raise MalformedError(f"a manifest of {len(raw)} bytes exceeds the limit of {limit}")
    try:
        signed = SignedManifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise MalformedError(f"not a signed manifest: {place}: {first['msg']}") from error
    check_manifest(signed.manifest)
    return signed


def signed_bytes(signed: SignedManifest) -> bytes:
    """Canonical JSON of a signed manifest, as `manifest.json` holds it."""
    return encoding.canonical_json(signed.model_dump(mode="json"))


def read_signed(path: Path) -> SignedManifest:
    """`parse_signed` of a file on disk."""
    with open_regular(path) as fd:
        raw = read_at(fd, 0, min(os.fstat(fd).st_size, encoding.MAX_JSON_BYTES + 1))
    return parse_signed(raw)


@dataclass(frozen=True)
class Trust:
    """Whose policies we take: the pool's trainer, under the Pools contract's EIP-712 domain."""

    trainer: Address
    domain: Domain
    pool: int

    def check(self, signed: SignedManifest) -> Manifest:
        """The manifest, once it is consistent and signed by the trainer for this pool. Raises
        MalformedError or UntrustedError."""
        manifest = check_manifest(signed.manifest)
        if manifest.pool != self.pool:
            raise UntrustedError(
                f"the manifest is for pool {manifest.pool}, not for pool {self.pool}"
            )
        signer = manifest.statement().recover(self.domain, signed.signature)
        if signer != self.trainer:
            raise UntrustedError(
                f"policy {manifest.version} is signed by {signer}, not by the trainer "
                f"{self.trainer}"
            )
        return manifest


class History:
    """What was taken so far, so that nothing old or contradictory passes for new.

    A version has one manifest forever, and steps never run backwards over versions.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Digest, int]] = {}

    def admit(self, manifest: Manifest) -> bool:
        """Takes note of a trusted manifest; True if its version is new here. Raises UntrustedError
        if the version is already known with another digest, or its step contradicts a
        neighbor's."""
        new = self.judge(manifest)
        self._known[manifest.version] = (manifest.digest(), manifest.step)
        return new

    def judge(self, manifest: Manifest) -> bool:
        """`admit` without taking note: for what has yet to arrive."""
        digest = manifest.digest()
        known = self._known.get(manifest.version)
        if known is not None:
            if known[0] != digest:
                raise UntrustedError(
                    f"there are two signed manifests for policy {manifest.version}, {known[0]} "
                    f"and {digest}: one version has one manifest"
                )
            return False
        for version, (_, step) in self._known.items():
            if (version < manifest.version) != (step <= manifest.step) and step != manifest.step:
                raise UntrustedError(
                    f"policy {manifest.version} claims step {manifest.step}, but policy {version} "
                    f"is of step {step}: replayed from an older run"
                )
        return True

    def knows(self, version: int) -> bool:
        """Whether a manifest of `version` was taken."""
        return version in self._known


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Every file of the manifest is there, plain and bit-identical, and nothing else is, but for
    its deltas (a relay has them), which are then verified too. Raises UntrustedError naming the
    file and the first wrong chunk, or MalformedError for a link."""
    check_manifest(manifest)
    deltas = {f"{DELTA_PREFIX}{entry.base}": entry for entry in manifest.deltas}
    present = {path.name for path in folder.iterdir()}
    extra = present - {entry.name for entry in manifest.files} - set(deltas) - {MANIFEST_NAME}
    if extra:
        raise UntrustedError(f"{folder} holds files that the manifest lacks: {sorted(extra)[:5]}")
    there = [entry.size for name, entry in deltas.items() if name in present]
    progress.part("verifying", total_size(manifest) + sum(there))
    for entry in manifest.files:
        if entry.name not in present:
            raise UntrustedError(f"{entry.name} is missing from {folder}")
        _verify_file(folder / entry.name, entry, manifest.chunk_size)
    for name in deltas.keys() & present:
        _verify_file(folder / name, deltas[name], manifest.chunk_size)


def _verify_file(path: Path, entry: FileEntry | DeltaEntry, chunk_size: int) -> None:
    size, digest, chunks = hash_file(path, chunk_size)
    if size != entry.size:
        raise UntrustedError(f"{path.name} has {size} bytes, the manifest says {entry.size}")
    if digest != entry.digest:
        pairs = zip(chunks, entry.chunks, strict=True)
        bad = [index for index, (ours, theirs) in enumerate(pairs) if ours != theirs]
        where = f"chunk {bad[0]} of {len(chunks)}" if bad else "its digest"
        raise UntrustedError(f"{path.name} is not what the manifest says: {where} differs")


def _check_chunks(name: str, entry: FileEntry | DeltaEntry, chunk_size: int) -> None:
    if len(entry.chunks) != chunk_count(entry.size, chunk_size):
        raise MalformedError(
            f"the manifest lists {len(entry.chunks)} chunks for {name}, which has {entry.size} "
            "bytes"
        )
    if entry.digest != file_digest(entry.size, chunk_size, entry.chunks):
        raise MalformedError(f"the manifest's digest of {name} is not made of its chunks'")
