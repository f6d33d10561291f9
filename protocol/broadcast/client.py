"""A policy arrives: the cheapest way, verified, whole or not at all.

fetch()   1  plan: the cheapest of one whole download and of any chain of deltas from what is here
          2  get the chunks (protocol/broadcast/chunks.py), resuming what an earlier try left
          3  apply the deltas, if that was the way; a damaged base falls back to the whole
          4  check every file's digest, put the manifest beside them
          5  the folder appears under its name by one rename (protocol/broadcast/durable.py)

The signature on the manifest is the caller's to check (`Trust`), before anything is fetched.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from protocol.broadcast import delta as deltas
from protocol.broadcast.chunks import PATIENCE, PER_SOURCE, ChunkFetcher, ChunkStats
from protocol.broadcast.durable import appear
from protocol.broadcast.files import remove_folder, replace_file, require_space
from protocol.broadcast.layout import Item, delta_items, file_items
from protocol.broadcast.manifest import (
    MANIFEST_NAME,
    check_manifest,
    read_signed,
    signed_bytes,
    total_size,
)
from protocol.broadcast.sources import Fault, SourceBook
from protocol.core.checkpoint import DeltaEntry, Manifest, SignedManifest
from protocol.core.errors import MalformedError, UnavailableError, UntrustedError

DELTA_PATIENCE = 10.0
"""Seconds without a chunk of a delta after which the whole is fetched instead."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Base:
    """A verified policy folder that is already here."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Hop:
    """One delta of a chain: from version `entry.base` to `target`."""

    target: Manifest
    entry: DeltaEntry


@dataclass(frozen=True)
class Plan:
    """What to download: `start` and `hops`, or the whole files if there are none. `cost` bytes."""

    cost: int
    start: Base | None = None
    hops: tuple[Hop, ...] = ()


@dataclass
class FetchStats:
    """How a policy came: for logs, metrics and tests. `refetched` counts chunks, times are in
    seconds; `route` is "present" if it was already there."""

    version: int
    route: Literal["whole", "delta", "present"] = "whole"
    hops: tuple[int, ...] = ()
    policy_bytes: int = 0
    bytes_received: int = 0
    bytes_written: int = 0
    chunks: int = 0
    kept: int = 0
    refetched: int = 0
    seconds: float = 0.0
    first_chunk_seconds: float | None = None
    by_source: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, part: ChunkStats) -> None:
        """Adds one run of the chunk engine."""
        self.bytes_received += part.bytes_received
        self.bytes_written += part.bytes_written
        self.chunks += part.chunks
        self.kept += part.kept
        self.refetched += part.refetched
        if self.first_chunk_seconds is None:
            self.first_chunk_seconds = part.first_chunk_seconds
        for url, count in part.by_source.items():
            self.by_source[url] = self.by_source.get(url, 0) + count
        self.faults.extend(part.faults)

    def as_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def plan_route(
    manifest: Manifest, bases: Sequence[Base], chain: Mapping[int, Manifest] | None = None
) -> Plan:
    """The fewest bytes to `manifest`: the whole, or deltas from a base that is here over versions
    whose manifests are in `chain` (each already trusted). Only deltas whose base digest is that
    very base's are taken."""
    known = {**(chain or {}), manifest.version: manifest}
    best: dict[int, int] = {}
    heap: list[tuple[int, int, int, Base, tuple[Hop, ...]]] = []
    for number, base in enumerate(bases):
        heap.append((0, base.manifest.version, number, base, ()))
    heapq.heapify(heap)
    whole = Plan(total_size(manifest))
    while heap:
        cost, version, number, base, hops = heapq.heappop(heap)
        if cost >= whole.cost:
            return whole
        digest = hops[-1].target.result_digest if hops else base.manifest.result_digest
        if version == manifest.version and digest == manifest.result_digest and hops:
            return Plan(cost, base, hops)
        if best.get(version, cost + 1) <= cost:
            continue
        best[version] = cost
        for target in known.values():
            for entry in target.deltas:
                if entry.base == version and entry.base_digest == digest:
                    step = (*hops, Hop(target, entry))
                    item = (cost + entry.size, target.version, number, base, step)
                    heapq.heappush(heap, item)
    return whole


def fetch(
    manifest: Manifest | SignedManifest,
    sources: Sequence[str],
    dest: Path,
    *,
    bases: Sequence[Base] = (),
    chain: Mapping[int, Manifest] | None = None,
    book: SourceBook | None = None,
    parallel: int = 4,
    per_source: int = PER_SOURCE,
    patience: float = PATIENCE,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> FetchStats:
    """Brings the policy of an already trusted `manifest` into the folder `dest`, from any of the
    base URLs `sources`. If `manifest` is signed, it is written beside the files.

    Safe against a second process doing the same. Raises UnavailableError (sources or disk; what
    was verified is kept and the next call goes on), UntrustedError (the manifest contradicts
    itself, or `dest` holds another policy), MalformedError.
    """
    signed = manifest if isinstance(manifest, SignedManifest) else None
    policy = check_manifest(signed.manifest if signed else manifest)  # type: ignore[arg-type]
    stats = FetchStats(policy.version, policy_bytes=total_size(policy))
    begun = clock()
    dest.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(dest):
        if dest.exists():
            _require_same(dest, policy)
            stats.route = "present"
            return stats
        partial = dest.parent / f".partial-{dest.name}-{policy.digest()[2:18]}"
        files = partial / "files"
        files.mkdir(mode=0o755, parents=True, exist_ok=True)
        _Arriving(policy, sources, partial, files, stats).run(
            plan_route(policy, bases, chain),
            book or SourceBook(),
            {"parallel": parallel, "per_source": per_source, "progress": progress},
            patience,
        )
        if signed is not None:
            replace_file(files / MANIFEST_NAME, signed_bytes(signed), durable=False)
        appear(files, dest)
        remove_folder(partial)
    stats.seconds = clock() - begun
    return stats


@dataclass(frozen=True)
class _Arriving:
    policy: Manifest
    sources: Sequence[str]
    partial: Path
    files: Path
    stats: FetchStats

    def run(self, plan: Plan, book: SourceBook, options: dict[str, Any], patience: float) -> None:
        if plan.hops:
            try:
                self._by_deltas(plan, book, options, min(patience, DELTA_PATIENCE))
                return
            except (UntrustedError, MalformedError, UnavailableError) as error:
                base = plan.start.folder.name if plan.start else ""
                self.stats.faults.append(Fault(f"delta from {base}", "delta", str(error)))
        self._whole(book, options, patience)

    def _whole(self, book: SourceBook, options: dict[str, Any], patience: float) -> None:
        self.stats.route, self.stats.hops = "whole", ()
        have = sum(path.stat().st_blocks * 512 for path in self.files.iterdir())
        require_space(self.files, total_size(self.policy) - have)
        items = file_items(self.policy)
        options = {**options, "whole_digests": True}
        fetcher = self._get(items, self.files, book, options, patience)
        for item in items:
            if fetcher.digest(item) != item.digest:
                remove_folder(self.partial)
                raise UntrustedError(
                    f"the manifest of policy {self.policy.version} contradicts itself: all chunks "
                    f"of {item.name} are right and the file is not"
                )

    def _by_deltas(
        self, plan: Plan, book: SourceBook, options: dict[str, Any], patience: float
    ) -> None:
        assert plan.start is not None
        self.stats.route = "delta"
        self.stats.hops = tuple(hop.target.version for hop in plan.hops)
        require_space(self.files, plan.cost + min(2, len(plan.hops)) * total_size(self.policy))
        folder, manifest = plan.start.folder, plan.start.manifest
        for number, hop in enumerate(plan.hops):
            name = f"delta-{hop.entry.base}"
            item = next(item for item in delta_items(hop.target) if item.name == name)
            into = self.partial / f"deltas-{hop.target.version}"
            into.mkdir(exist_ok=True)
            self._get([item], into, book, options, patience)
            last = number == len(plan.hops) - 1
            target = self.files if last else self.partial / f"version-{hop.target.version}"
            target.mkdir(exist_ok=True)
            written = deltas.apply(folder, manifest, into / name, hop.target, target)
            self.stats.bytes_written += written
            shutil.rmtree(into)
            if folder != plan.start.folder:
                shutil.rmtree(folder)
            folder, manifest = target, hop.target

    def _get(
        self,
        items: Sequence[Item],
        folder: Path,
        book: SourceBook,
        options: dict[str, Any],
        patience: float,
    ) -> ChunkFetcher:
        fetcher = ChunkFetcher(items, folder, self.sources, book, patience=patience, **options)
        try:
            fetcher.run()
        finally:
            self.stats.add(fetcher.stats)
        return fetcher


def _require_same(dest: Path, policy: Manifest) -> None:
    """Raises UntrustedError if the manifest beside the files in `dest` is another one."""
    path = dest / MANIFEST_NAME
    if path.is_file():
        present = read_signed(path).manifest.digest()
        if present != policy.digest():
            raise UntrustedError(
                f"{dest} holds policy {present}, and now {policy.digest()} is offered under the "
                "same name: one version has one manifest"
            )


@contextmanager
def _locked(dest: Path) -> Iterator[None]:
    """One fetch of a folder at a time on this machine; the second waits and finds it done."""
    path = dest.parent / f".lock-{dest.name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
