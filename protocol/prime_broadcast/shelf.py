"""A relay's folder: what it has whole, what is arriving, and how both go again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prime_broadcast import delta as deltas
from prime_broadcast import files, layout
from prime_broadcast.content import LiveContent, LiveVersion, live_version
from prime_broadcast.durable import settle
from prime_broadcast.files import disk_errors, remove_folder, require_space
from prime_broadcast.layout import Item, file_items
from prime_broadcast.manifest import History, Trust, total_size
from prime_core.checkpoint import SignedManifest
from prime_core.errors import MalformedError, UntrustedError, UserError


def partial_folder(root: Path, signed: SignedManifest) -> Path:
    """Where a version lies while it arrives."""
    manifest = signed.manifest
    return root / layout.POLICIES / f".partial-{manifest.version}-{manifest.digest()[2:18]}"


def make_folder(live: LiveVersion, root: Path) -> None:
    """The folder of an arriving version: what rotted, if that is still in its place. Raises
    DiskError."""
    if layout.version_folder(root, live.signed.manifest.version).exists():
        take_aside(live.signed, root)
    files.make_folder(live.folder)


def make_room(live: LiveVersion, items: Iterable[Item]) -> list[Item]:
    """Those of `items` that are not wholly there. Raises DiskError if what is missing of them does
    not fit."""
    missing = [item for item in items if not live.arrivals[item.name].complete or not item.size]
    with disk_errors():
        there = [path for item in missing if (path := live.folder / item.name).exists()]
        have = sum(path.stat().st_blocks * 512 for path in there)
        require_space(live.folder, sum(item.size for item in missing) - have)
    return missing


def restored(root: Path, trust: Trust, history: History, keep: int) -> list[LiveVersion]:
    """The versions that are wholly there; what kills left of versions that are no longer among the
    newest `keep` goes. Raises UserError if they are another run's."""
    with disk_errors():
        settle(layout.policies_folder(root))
    found = []
    for version in layout.versions(root):
        try:
            signed = layout.manifest_of(root, version)
            history.admit(trust.check(signed))
        except (UntrustedError, MalformedError) as error:
            raise UserError(
                f"{root} holds policies of another run: {error}",
                hint="give this relay a folder of its own with --data",
            ) from error
        live = live_version(signed, layout.version_folder(root, version))
        for arrival in live.arrivals.values():
            arrival.mark_all()
        found.append(live)
    _sweep(layout.policies_folder(root), layout.versions(root), keep)
    return found


def _sweep(folder: Path, versions: Iterable[int], keep: int) -> None:
    for path in folder.glob(".partial-*-*"):
        number = path.name.split("-")[1]
        if number.isdigit() and int(number) <= max(versions, default=0) - keep:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".trash-*"):
        shutil.rmtree(path, ignore_errors=True)


def to_read(content: LiveContent, versions: Iterable[int]) -> list[tuple[int, Path, list[Item]]]:
    """What the scrubber reads of `versions`: number, folder, items."""
    live = (content.get(version) for version in versions)
    return [
        (one.signed.manifest.version, one.folder, list(one.items.values()))
        for one in live
        if one is not None
    ]


def take_aside(signed: SignedManifest, root: Path) -> bool:
    """A complete version becomes one that is arriving; False if it was dropped meanwhile. Raises
    DiskError."""
    partial = partial_folder(root, signed)
    with disk_errors():
        remove_folder(partial)
        try:
            layout.version_folder(root, signed.manifest.version).rename(partial)
        except FileNotFoundError:
            return False
    return True


def outlived(present: Iterable[int], keep: int, floor: int) -> list[int]:
    """Which of the versions `present` go, oldest first: all but the newest `keep`, and what is
    older than `floor`."""
    ordered = sorted(present)
    kept = ordered[max(0, len(ordered) - keep) :]
    return [v for v in ordered if v < floor or v not in kept]


def remove_version(root: Path, version: int) -> None:
    """Removes a version and what had arrived of it. Raises DiskError."""
    with disk_errors():
        remove_folder(layout.version_folder(root, version))
        for path in layout.policies_folder(root).glob(f".partial-{version}-*"):
            shutil.rmtree(path, ignore_errors=True)


def make_from_delta(
    live: LiveVersion, bases: Mapping[int, LiveVersion], tell: Callable[[str], None]
) -> bool:
    """Makes the files of an arriving version, whose deltas are here, from one of `bases`; False if
    none of them leads to it, or those that do are damaged, which is told."""
    manifest = live.signed.manifest
    for entry in sorted(manifest.deltas, key=lambda entry: entry.size):
        base = bases.get(entry.base)
        if base is None or base.signed.manifest.result_digest != entry.base_digest:
            continue
        if entry.size >= total_size(manifest):
            continue
        if any(live.arrivals[item.name].begun for item in file_items(manifest)):
            return False  # a delta's bytes are verified after they are written: over nothing that
            # is being served
        try:
            deltas.apply(
                base.folder,
                base.signed.manifest,
                live.folder / f"delta-{entry.base}",
                manifest,
                live.folder,
                on_chunk=lambda name, index: live.arrivals[name].mark(index),
            )
        except (UntrustedError, MalformedError) as error:
            tell(str(error))
            continue
        return True
    return False
