"""Publishes a policy whose largest file is held by several processes, each with one part of it.

Every process writes, hashes and delta-encodes its own part; process 0 also handles the small files
and puts digests and records together. The manifest and every byte of the layout are those that
`publish` makes of a folder with the same files. All processes need the same layout folder (one
machine, or a shared disk).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from prime_broadcast import delta as deltas
from prime_broadcast import layout
from prime_broadcast.delta import Records
from prime_broadcast.files import (
    DATA_MODE,
    create_sized,
    disk_errors,
    remove_folder,
    write_at,
)
from prime_broadcast.manifest import (
    DELTA_PREFIX,
    MANIFEST_NAME,
    check_manifest,
    chunk_count,
    hash_file,
    result_digest,
)
from prime_broadcast.publish import delta_entry, staging_folder
from prime_core import ids
from prime_core.checkpoint import DeltaEntry, FileEntry, Manifest, file_digest
from prime_core.errors import ConflictError, FatalError, PrimeError, UnavailableError

Exchange = Callable[[bytes], list[bytes]]
"""Gives every process the bytes of all, in the order of their numbers; a collective operation."""


def bounds(size: int, chunk_size: int, parts: int) -> list[int]:
    """The offsets that cut a file of `size` bytes into `parts` (parts + 1 numbers, from 0 to
    `size`), at chunk boundaries."""
    chunks = chunk_count(size, chunk_size)
    return [min(size, chunks * part // parts * chunk_size) for part in range(parts + 1)]


@dataclass(frozen=True)
class Part:
    """The bytes of file `name` (`size` bytes) from `begin` on that process `rank` holds; `begin` is
    a multiple of `chunk_size`."""

    name: str
    size: int
    begin: int
    data: memoryview
    chunk_size: int
    rank: int

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


def publish_part(
    part: Part,
    others: Mapping[str, Path | bytes],
    layout_root: Path,
    exchange: Exchange,
    *,
    pool: int,
    version: int,
    step: int,
    delta_from: int,
) -> Manifest:
    """Prepares `version` under `layout_root` from every process's part and the `others` (files and
    contents by name), and returns the manifest to be signed and given to `finalize`; a collective
    operation. A version that is already published is only compared.

    Raises, on every process, UnavailableError if one of them cannot write and FatalError on any
    other error of another one; ConflictError if the version is published with other bytes.
    """
    leads = part.rank == 0
    staging = staging_folder(layout_root, version)

    def begin() -> bytes:
        if not leads:
            return b""
        final = layout.version_folder(layout_root, version)
        if (final / MANIFEST_NAME).exists():
            return b"published"
        remove_folder(staging)
        with disk_errors():
            staging.mkdir(mode=0o755, parents=True)
            for name, content in others.items():
                if isinstance(content, bytes):
                    (staging / name).write_bytes(content)
                else:
                    shutil.copyfile(content, staging / name, follow_symlinks=False)
                (staging / name).chmod(DATA_MODE)
            os.close(create_sized(staging / part.name, part.size))
        return b"new"

    new = _agreed(exchange, begin)[0] == b"new"
    hashed = _agreed(exchange, lambda: _write(part, staging if new else None))
    raw = b"".join(hashed)
    chunks = tuple(ids.digest(raw[at : at + 32]) for at in range(0, len(raw), 32))
    weights = FileEntry(
        name=part.name,
        size=part.size,
        digest=file_digest(part.size, part.chunk_size, chunks),
        chunks=chunks,
    )

    def describe() -> bytes:
        if not leads:
            return b""
        if not new:
            manifest = layout.manifest_of(layout_root, version).manifest
            _require_same(manifest, weights, others, part.chunk_size, pool, step)
            return json.dumps([manifest.model_dump_json(), []]).encode()
        entries = [weights]
        for name in others:
            size, digest, its = hash_file(staging / name, part.chunk_size)
            entries.append(FileEntry(name=name, size=size, digest=digest, chunks=its))
        entries.sort(key=lambda entry: entry.name)
        manifest = Manifest(
            pool=pool, version=version, step=step, chunk_size=part.chunk_size,
            files=tuple(entries), result_digest=result_digest(entries),
        )  # fmt: skip
        known = [v for v in layout.versions(layout_root) if version - delta_from <= v < version]
        bases = sorted(known, reverse=True)
        return json.dumps([manifest.model_dump_json(), bases]).encode()

    text, bases = json.loads(_agreed(exchange, describe)[0])
    whole = Manifest.model_validate_json(text)
    made: list[DeltaEntry] = []
    for base in bases:
        entry = _delta(part, whole, base, layout_root, staging, exchange)
        if entry is not None:
            made.append(entry)
    return check_manifest(whole.model_copy(update={"deltas": tuple(made)}) if new else whole)


def _agreed(exchange: Exchange, work: Callable[[], bytes]) -> list[bytes]:
    """Every process's result of its `work`; raises on all of them if one of them fails, so that
    none waits for another's next result."""
    failure: PrimeError | None = None
    try:
        said = b"+" + work()
    except PrimeError as error:
        failure = error
        kinds = ((UnavailableError, b"u"), (ConflictError, b"c"))
        said = next((k for kind, k in kinds if isinstance(error, kind)), b"f") + str(error).encode()
    answers = exchange(said)
    if failure is not None:
        raise failure
    for answer in answers:
        if answer[:1] != b"+":
            kind = {b"u": UnavailableError, b"c": ConflictError}.get(answer[:1], FatalError)
            raise kind(answer[1:].decode())
    return [answer[1:] for answer in answers]


def _write(part: Part, staging: Path | None) -> bytes:
    """Writes the part to its file (unless `staging` is None) and returns its chunks' digests."""
    digests = []
    with disk_errors():
        out = os.open(staging / part.name, os.O_WRONLY | os.O_CLOEXEC) if staging else None
        try:
            for at in range(0, len(part.data), part.chunk_size):
                chunk = part.data[at : at + part.chunk_size]
                digests.append(blake3(chunk).digest())
                if out is not None:
                    write_at(out, chunk, part.begin + at)
        finally:
            if out is not None:
                os.close(out)
    return b"".join(digests)


def _require_same(
    manifest: Manifest,
    weights: FileEntry,
    others: Mapping[str, Path | bytes],
    chunk_size: int,
    pool: int,
    step: int,
) -> None:
    same = (manifest.chunk_size, manifest.pool, manifest.step) == (chunk_size, pool, step)
    same = same and {entry.name for entry in manifest.files} == {weights.name, *others}
    for entry in manifest.files if same else ():
        if entry.name == weights.name:
            same = same and entry == weights
            continue
        content = others[entry.name]
        found = content if isinstance(content, bytes) else content.read_bytes()
        digests = [
            ids.digest(blake3(found[at : at + chunk_size]).digest())
            for at in range(0, len(found), chunk_size)
        ]
        same = same and entry.digest == file_digest(len(found), chunk_size, digests)
    if not same:
        raise ConflictError(
            f"policy {manifest.version} is already published with other files, pool or step; "
            "publish the next version instead"
        )


def _delta(
    part: Part, whole: Manifest, base: int, layout_root: Path, staging: Path, exchange: Exchange
) -> DeltaEntry | None:
    """Makes `delta-<base>`; None (and no file) if it does not pay. A collective operation."""
    base_manifest = layout.manifest_of(layout_root, base).manifest
    base_folder = layout.version_folder(layout_root, base)
    place = next(at for at, entry in enumerate(whole.files) if entry.name == part.name)
    path = staging / f"{DELTA_PREFIX}{base}"
    mine = path if part.rank == 0 else staging / f".{path.name}.{part.rank}"
    span = (part.begin, part.end)

    def encode() -> bytes:
        with Records(base_folder, base_manifest, staging, mine) as records:
            if part.rank == 0:
                records.head(whole)
                for entry in whole.files[:place]:
                    records.add(entry)
            records.add(whole.files[place], span)
        return b""

    def join() -> bytes:
        if part.rank:
            return b""
        with disk_errors(), path.open("ab") as out:
            for rank in range(1, parts):
                segment = staging / f".{path.name}.{rank}"
                with segment.open("rb") as source:
                    shutil.copyfileobj(source, out, deltas.BLOCK)
                segment.unlink()
        with Records(base_folder, base_manifest, staging, path) as records:
            for entry in whole.files[place + 1 :]:
                records.add(entry)
        made = delta_entry(path, base_manifest, whole)
        return made.model_dump_json().encode() if made else b""

    parts = len(_agreed(exchange, encode))
    found = _agreed(exchange, join)[0]
    return DeltaEntry.model_validate_json(found) if found else None
