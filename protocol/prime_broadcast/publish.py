"""The trainer's side: a checkpoint folder becomes a version that an origin can serve.

publish()   copies the files aside, hashes them, writes deltas from recent versions, and returns the
            manifest to sign; nothing is visible yet
finalize()  adds the signature; the version appears by one rename, then in the index

Both may be repeated after a crash: publishing the same bytes again gives the same manifest.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from prime_broadcast import delta as deltas
from prime_broadcast import layout, progress
from prime_broadcast.files import (
    DATA_MODE,
    disk_error,
    remove_folder,
    rename_folder,
    write_whole,
)
from prime_broadcast.manifest import (
    DELTA_PREFIX,
    MANIFEST_NAME,
    build_manifest,
    check_manifest,
    choose_chunk_size,
    hash_file,
    policy_files,
    signed_bytes,
)
from prime_core.checkpoint import DeltaEntry, Manifest, SignedManifest
from prime_core.errors import ConflictError
from prime_core.signing import Domain, Signer

WORTHWHILE = 0.9
"""A delta larger than this share of the whole is not published."""


def publish(
    folder: Path,
    layout_root: Path,
    *,
    pool: int,
    version: int,
    step: int,
    delta_from: int = 1,
    chunk_size: int | None = None,
    link: bool = False,
) -> Manifest:
    """Prepares `folder` as `version` under `layout_root` and returns the manifest to be signed and
    given to `finalize`. Deltas are made from the last `delta_from` complete versions (version − 1
    first). `link` hard-links instead of copying: only for files that are never written to again.

    Raises UserError if the folder cannot be published, ConflictError if the version is already
    published with other bytes, UnavailableError if the disk is full.
    """
    final = layout.version_folder(layout_root, version)
    if (final / MANIFEST_NAME).exists():
        return _already_published(folder, layout_root, pool=pool, version=version, step=step)
    staging = staging_folder(layout_root, version)
    remove_folder(staging)
    staging.mkdir(mode=0o755, parents=True)
    try:
        for path in policy_files(folder):
            _place(path, staging / path.name, link=link)
    except OSError as error:
        raise disk_error(error) from error
    if chunk_size is None:
        chunk_size = choose_chunk_size(sum(p.stat().st_size for p in policy_files(staging)))
    whole = build_manifest(staging, pool=pool, version=version, step=step, chunk_size=chunk_size)
    bases = [v for v in layout.versions(layout_root) if version - delta_from <= v < version]
    made: list[DeltaEntry] = []
    for base in sorted(bases, reverse=True):
        entry = _make_delta(layout_root, staging, base, whole)
        if entry is not None:
            made.append(entry)
    return check_manifest(whole.model_copy(update={"deltas": tuple(made)}))


def finalize(layout_root: Path, signed: SignedManifest) -> None:
    """Makes a prepared version visible under its signed manifest, then lists it in the index.

    Raises ConflictError if no such manifest was prepared, or the version is published otherwise.
    """
    manifest = check_manifest(signed.manifest)
    final = layout.version_folder(layout_root, manifest.version)
    staging = staging_folder(layout_root, manifest.version)
    if (final / MANIFEST_NAME).exists():
        present = layout.manifest_of(layout_root, manifest.version)
        if present.manifest.digest() != manifest.digest():
            raise ConflictError(
                f"policy {manifest.version} is already published as {present.manifest.digest()}"
            )
    else:
        expected = {item.name for item in layout.file_items(manifest)}
        expected |= {item.name for item in layout.delta_items(manifest)}
        found = {path.name for path in staging.iterdir()} if staging.is_dir() else set()
        if found - {MANIFEST_NAME} != expected:
            raise ConflictError(f"policy {manifest.version} was not prepared under {layout_root}")
        write_whole(staging / MANIFEST_NAME, signed_bytes(signed))
        rename_folder(staging, final)
    layout.write_index(layout_root)


def _already_published(
    folder: Path, layout_root: Path, *, pool: int, version: int, step: int
) -> Manifest:
    manifest = layout.manifest_of(layout_root, version).manifest
    again = build_manifest(
        folder, pool=pool, version=version, step=step, chunk_size=manifest.chunk_size
    )
    if again != manifest.model_copy(update={"deltas": ()}):
        raise ConflictError(
            f"policy {version} is already published with other files, pool or step; "
            "publish the next version instead"
        )
    return manifest


def staging_folder(layout_root: Path, version: int) -> Path:
    """Where a version is prepared."""
    return layout.policies_folder(layout_root) / f".staging-{version}"


def _place(source: Path, target: Path, *, link: bool) -> None:
    if link:
        os.link(source, target, follow_symlinks=False)
    else:
        shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(DATA_MODE)


def _make_delta(
    layout_root: Path, staging: Path, base: int, manifest: Manifest
) -> DeltaEntry | None:
    """Writes `delta-<base>` into the staging folder; None (and no file) if it does not pay."""
    base_manifest = layout.manifest_of(layout_root, base).manifest
    base_folder = layout.version_folder(layout_root, base)
    path = staging / f"{DELTA_PREFIX}{base}"
    deltas.encode(base_folder, base_manifest, staging, manifest, path)
    return delta_entry(path, base_manifest, manifest)


def delta_entry(path: Path, base: Manifest, manifest: Manifest) -> DeltaEntry | None:
    """Describes the delta at `path` from `base` to `manifest`; removes it and returns None if it
    is too large to pay."""
    progress.part("hashing the delta", path.stat().st_size)
    size, digest, chunks = hash_file(path, manifest.chunk_size)
    if size > WORTHWHILE * sum(entry.size for entry in manifest.files):
        path.unlink()
        return None
    return DeltaEntry(
        base=base.version,
        base_digest=base.result_digest,
        size=size,
        digest=digest,
        chunks=chunks,
    )


def publish_next(
    folder: Path, data: Path, version: int | None, pool: int, signer: Signer, domain: Domain
) -> Manifest:
    """Publishes and signs `folder` as `version`, by default the next one, and returns its manifest.
    Without `version`, a folder with the newest version's content is not published again. Raises
    ConflictError if `version` is older than the newest one."""
    present = layout.versions(data)
    number = version if version is not None else (present[-1] + 1 if present else 0)
    if version is None and present:
        last = layout.manifest_of(data, present[-1]).manifest
        same = build_manifest(
            folder, pool=pool, version=last.version, step=last.step, chunk_size=last.chunk_size
        )
        if same.result_digest == last.result_digest:
            return last
    elif version is not None and present and version < present[-1]:
        raise ConflictError(f"version {present[-1]} is published already; {version} is older")
    manifest = publish(folder, data, pool=pool, version=number, step=number)
    finalize(data, manifest.signed(signer, domain))
    return manifest
