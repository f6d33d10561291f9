"""How policies lie on a server: plain files under plain names, so that any HTTP server, cache or
bucket can mirror them.

    policies/index.json                    PolicyList: the newest signed manifests, newest first
    policies/<version>/manifest.json       SignedManifest, canonical JSON
    policies/<version>/<file>              each file as it is; clients ask for it chunk by chunk
    policies/<version>/delta-<base>        turns version <base> into <version>

A version's folder appears by one rename, after its manifest is signed, and never changes after;
but an origin may thin out old ones: it keeps an anchor every few versions, and of those between
only the deltas and manifests, from which any client can make the files again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from prime_broadcast.files import remove_folder, write_whole
from prime_broadcast.manifest import DELTA_PREFIX, MANIFEST_NAME, read_signed
from prime_core import encoding
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.errors import MalformedError
from prime_core.ids import Digest
from prime_core.messages import PolicyList

POLICIES = "policies"
INDEX_NAME = "index.json"
THIN_NAME = ".thin"
KEEP_WHOLE = 8
ANCHOR_EVERY = 8
"""What an origin keeps whole: the newest versions, and older ones at this interval."""
INDEX_LENGTH = 16
"""Manifests in the index; older ones are at their own address."""
MAX_INDEX_BYTES = 16 << 20

_ADDRESS = re.compile(
    r"/policies/(?:(?P<index>index\.json)|(?P<version>0|[1-9][0-9]{0,17})/"
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,254}))\Z"
)


@dataclass(frozen=True)
class Named:
    """A parsed address: the index (`version` None), or one file of a version."""

    version: int | None
    name: str


def parse_address(path: str) -> Named | None:
    """What a URL path under the layout names; None for every other path."""
    match = _ADDRESS.match(path)
    if match is None:
        return None
    if match["index"]:
        return Named(None, INDEX_NAME)
    return Named(int(match["version"]), match["name"])


def address_of(version: int, name: str) -> str:
    """The URL path of one file of a version."""
    return f"/{POLICIES}/{version}/{name}"


@dataclass(frozen=True)
class Item:
    """One object to fetch: a file of a policy, or a delta."""

    version: int
    name: str
    size: int
    digest: Digest
    chunks: tuple[Digest, ...]
    chunk_size: int

    @property
    def address(self) -> str:
        return address_of(self.version, self.name)

    def span(self, index: int) -> tuple[int, int]:
        """(offset, length) of a chunk."""
        offset = index * self.chunk_size
        return offset, min(self.chunk_size, self.size - offset)


def file_items(manifest: Manifest) -> list[Item]:
    """The policy's files."""
    return [
        Item(manifest.version, f.name, f.size, f.digest, f.chunks, manifest.chunk_size)
        for f in manifest.files
    ]


def delta_items(manifest: Manifest) -> list[Item]:
    """The policy's deltas, each under the name `delta-<base>`."""
    return [
        Item(
            manifest.version,
            f"{DELTA_PREFIX}{d.base}",
            d.size,
            d.digest,
            d.chunks,
            manifest.chunk_size,
        )
        for d in manifest.deltas
    ]


def policies_folder(root: Path) -> Path:
    """`<root>/policies`, made if it is missing."""
    folder = root / POLICIES
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder


def version_folder(root: Path, version: int) -> Path:
    """`<root>/policies/<version>`."""
    return root / POLICIES / str(version)


def versions(root: Path) -> list[int]:
    """Returns the complete versions that an origin or relay serves from `root`, ascending."""
    return complete_in(root / POLICIES)


def complete_in(folder: Path) -> list[int]:
    """Returns the versions that lie complete in a folder of policies, ascending; none if there is
    no such folder."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isascii() and path.name.isdigit() and (path / MANIFEST_NAME).is_file()
    )


def manifest_of(root: Path, version: int) -> SignedManifest:
    """The signed manifest of a complete version. Raises UnavailableError, MalformedError."""
    return read_signed(version_folder(root, version) / MANIFEST_NAME)


def write_index(root: Path) -> list[SignedManifest]:
    """Writes `index.json` again from the folders that are there."""
    newest = sorted(versions(root), reverse=True)[:INDEX_LENGTH]
    listing = [manifest_of(root, version) for version in newest]
    write_whole(policies_folder(root) / INDEX_NAME, index_bytes(listing))
    return listing


def index_bytes(newest: Sequence[SignedManifest]) -> bytes:
    """The index of these manifests, in canonical JSON."""
    listing = PolicyList(policies=tuple(newest))
    return encoding.canonical_json(listing.model_dump(mode="json"))


def parse_index(raw: bytes) -> list[SignedManifest]:
    """An index from outside, strictly, newest first. It names few versions, each once, so that
    processing it stays cheap. Signatures are not checked here. Raises
    MalformedError."""
    if len(raw) > MAX_INDEX_BYTES:
        raise MalformedError(f"an index of {len(raw)} bytes exceeds the limit")
    try:
        listed = newest_first(PolicyList.model_validate_json(raw).policies)
    except ValidationError as error:
        raise MalformedError(f"not an index of policies: {error.errors()[0]['msg']}") from error
    for newer, older in itertools.pairwise(listed):
        if newer.manifest.version == older.manifest.version:
            raise MalformedError(f"the index names version {older.manifest.version} twice")
    return listed


def is_thin(root: Path, version: int) -> bool:
    """Whether only manifest and deltas of a version are kept."""
    return (version_folder(root, version) / THIN_NAME).is_file()


def thin(
    root: Path, *, keep_whole: int, anchor_every: int, pinned: Collection[int] = ()
) -> list[int]:
    """Removes the files of old versions that deltas make again; returns the versions thinned out.

    The newest `keep_whole` stay whole, and every version that `anchor_every` divides, the `pinned`,
    and those to which no chain of deltas from an older whole version leads.
    """
    present = versions(root)
    recent = set(present[max(0, len(present) - keep_whole) :])
    reachable: dict[int, Digest] = {}
    thinned: list[int] = []
    for version in present:
        manifest = manifest_of(root, version).manifest
        whole = version in recent or version % anchor_every == 0 or version in set(pinned)
        if not whole and any(reachable.get(d.base) == d.base_digest for d in manifest.deltas):
            if not is_thin(root, version):
                _thin_out(version_folder(root, version), manifest)
                thinned.append(version)
            reachable[version] = manifest.result_digest
        elif not is_thin(root, version):
            reachable[version] = manifest.result_digest
    return thinned


def _thin_out(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / THIN_NAME, b"")  # first, so that what is half removed is not taken whole
    for entry in manifest.files:
        (folder / entry.name).unlink(missing_ok=True)


def _bases_needed(root: Path, kept: Collection[int]) -> set[int]:
    """The versions on the way from an anchor to each thin version that is kept."""
    needed: set[int] = set()
    todo = [version for version in kept if is_thin(root, version)]
    while todo:
        for delta in manifest_of(root, todo.pop()).manifest.deltas:
            if delta.base not in needed:
                needed.add(delta.base)
                if is_thin(root, delta.base):
                    todo.append(delta.base)
    return needed


def prune(root: Path, keep: int, pinned: Collection[int] = ()) -> list[int]:
    """Removes all but the newest `keep` versions, the pinned ones, and what thin ones among them
    are made from; returns what went. Files that a reader has open stay readable."""
    present = versions(root)
    kept = set(present[max(0, len(present) - keep) :]) | set(pinned)
    kept |= _bases_needed(root, kept & set(present))
    gone = [version for version in present if version not in kept]
    remove(root, gone)
    return gone


def expired(
    root: Path, before: float, *, keep: int, later: int, named: Collection[int] = ()
) -> list[int]:
    """Returns the versions that an origin may remove.

    Let N be the newest version such that it and all earlier ones were published before `before`
    (Unix seconds). Versions up to N - `later` may go, except version 0, the newest `keep`, those
    `named`, and those from which the remaining deltas are made.
    """
    present = versions(root)

    def is_old(version: int) -> bool:
        return (version_folder(root, version) / MANIFEST_NAME).stat().st_mtime < before

    newest = max(itertools.takewhile(is_old, present), default=0)
    kept = {v for v in present if v > newest - later} | {0, *named, *present[-keep:]}
    kept |= _bases_needed(root, kept & set(present))
    return [version for version in present if version not in kept]


def remove(root: Path, gone: Collection[int]) -> None:
    """Removes versions. Files that a reader has open stay readable."""
    for version in gone:
        remove_folder(version_folder(root, version))
    if gone:
        write_index(root)


def newest_first(manifests: Iterable[SignedManifest]) -> list[SignedManifest]:
    """Sorted by version, descending."""
    return sorted(manifests, key=lambda signed: signed.manifest.version, reverse=True)
