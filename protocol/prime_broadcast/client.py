"""Fetches one policy into a folder by the cheapest route; the folder appears complete or not at
all.

fetch()   1  plan the route (plans.py): a whole download, or a chain of deltas from a local version
          2  get the chunks (chunks.py), resuming what an earlier attempt left
          3  apply the deltas, if any. If the base is damaged, fetch the whole policy; if no source
             has it whole, fetch an older whole policy and the deltas from it
          policy 0 comes from `base_model`, if that is named (base_model.py): then (2) gets only
          what it lacks, and deltas from there are a route to a later policy
          4  write the manifest next to the files; every chunk was verified when it was written
          5  rename the folder to its final name (durable.py)

The caller checks the manifest's signature (`Trust`) before calling.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prime_broadcast import delta as deltas
from prime_broadcast import layout
from prime_broadcast.base_model import BaseModelSource, bring
from prime_broadcast.chunks import PATIENCE, PER_SOURCE, ChunkFetcher, Hooks, Pace
from prime_broadcast.durable import appear
from prime_broadcast.files import (
    DiskError,
    disk_errors,
    make_folder,
    remove_folder,
    replace_file,
    require_space,
)
from prime_broadcast.layout import Item, delta_items, file_items
from prime_broadcast.manifest import (
    MANIFEST_NAME,
    Trust,
    check_manifest,
    parse_signed,
    read_signed,
    signed_bytes,
    total_size,
)
from prime_broadcast.plans import Base, Plan, plan_from_anchor, plan_route
from prime_broadcast.sources import Fault, SourceBook
from prime_broadcast.tasks import ChunkStats, GoneError
from prime_broadcast.transfer import Link
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.errors import (
    MalformedError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)

__all__ = ["Base", "FetchStats", "Plan", "Progress", "fetch", "plan_route"]

MOST_MISSING = 10
"""A later policy is made from the base model if at most one part in MOST_MISSING of that model has
to come from the pool."""
DELTA_PATIENCE = 10.0
"""After this many seconds without a chunk of a delta, the whole policy is fetched instead."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass
class FetchStats:
    """How a policy was fetched, for logs, metrics and tests. `refetched` counts chunks; times are
    in seconds; `route` is "present" if the policy was already there."""

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
        """Adds the statistics of one ChunkFetcher run."""
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
        """Returns a JSON-serializable dictionary."""
        return asdict(self)


def fetch(
    manifest: Manifest | SignedManifest,
    sources: Sequence[str],
    dest: Path,
    *,
    bases: Sequence[Base] = (),
    chain: Mapping[int, Manifest] | None = None,
    book: SourceBook | None = None,
    base_model: BaseModelSource | None = None,
    parallel: int = 4,
    per_source: int = PER_SOURCE,
    patience: float = PATIENCE,
    progress: Progress = lambda done, total: None,
    on_fault: Callable[[Fault], None] = lambda fault: None,
) -> FetchStats:
    """Fetches the policy of an already trusted `manifest` into the folder `dest` from the base URLs
    `sources`, policy 0 from `base_model` as far as that has it. A signed manifest is written next
    to the files. `on_fault` is called once per fault, at the end, even if the fetch fails.

    Safe if a second process does the same. Raises UnavailableError if the sources or the disk fail
    (verified chunks are kept and the next call resumes), UntrustedError if the manifest contradicts
    itself or `dest` holds another policy, and MalformedError.
    """
    signed = manifest if isinstance(manifest, SignedManifest) else None
    policy = check_manifest(signed.manifest if signed else manifest)  # type: ignore[arg-type]
    stats = FetchStats(policy.version, policy_bytes=total_size(policy))
    begun = time.monotonic()
    make_folder(dest.parent)
    with _locked(dest):
        if dest.exists():
            _require_same(dest, policy)
            stats.route = "present"
            return stats
        partial = dest.parent / f".partial-{dest.name}-{policy.digest()[2:18]}"
        files = partial / "files"
        make_folder(files)
        book = book or SourceBook()
        pace = Pace(parallel, per_source, patience)
        plan = plan_route(policy, bases, chain, book.speed(sources, parallel))
        try:
            _Arriving(policy, sources, partial, files, stats, book, pace, progress, base_model).run(
                plan, chain or {}
            )
        finally:
            for fault in stats.faults:
                on_fault(fault)
        if signed is not None:
            replace_file(files / MANIFEST_NAME, signed_bytes(signed), durable=False)
        appear(files, dest)
        remove_folder(partial)
    stats.seconds = time.monotonic() - begun
    return stats


@dataclass(frozen=True)
class _Arriving:
    policy: Manifest
    sources: Sequence[str]
    partial: Path
    files: Path
    stats: FetchStats
    book: SourceBook
    pace: Pace
    progress: Progress
    base_model: BaseModelSource | None = None

    def run(self, plan: Plan, chain: Mapping[int, Manifest]) -> None:
        """Follows the plan. If it fails, fetches the whole policy, or else an older one and
        deltas."""
        if plan.hops and plan.start is not None and self._fits(plan):
            try:
                self._by_deltas(plan.start, plan, min(self.pace.patience, DELTA_PATIENCE))
                return
            except DiskError:  # the delta is not at fault, and the whole needs as much room
                raise
            except (UntrustedError, MalformedError, UnavailableError) as error:
                base = plan.start.folder.name
                self.stats.faults.append(Fault(f"delta from {base}", "delta", str(error)))
        elif self._from_base_model(chain):
            return
        try:
            self.stats.route, self.stats.hops = "whole", ()
            self._whole(self.policy, self.files)
        except GoneError:
            self._from_anchor(chain)

    def _from_base_model(self, chain: Mapping[int, Manifest]) -> bool:
        """Makes a later policy from the base model of `base_model` and the deltas since, if these
        have fewer bytes than the whole; False if that is not possible."""
        first = chain.get(0)
        if self.base_model is None or first is None or self.policy.version == 0:
            return False
        folder = self.partial / "version-0"
        plan = plan_route(self.policy, [Base(folder, first)], chain)
        if plan.start is None or not self._fits(plan):
            return False
        make_folder(folder)
        try:
            if self._bring(first, folder) * MOST_MISSING <= total_size(first):
                self._get(file_items(first), folder, self.pace.patience)
                self._by_deltas(plan.start, plan, min(self.pace.patience, DELTA_PATIENCE))
                return True
        except DiskError:
            raise
        except (UntrustedError, MalformedError, UnavailableError) as error:
            self.stats.faults.append(Fault("deltas from the base model", "delta", str(error)))
        shutil.rmtree(folder, ignore_errors=True)
        return False

    def _bring(self, policy: Manifest, folder: Path) -> int:
        """Takes what it can of policy 0 from `base_model`; returns how many bytes are missing."""
        assert self.base_model is not None
        require_space(folder, total_size(policy) - _on_disk(folder))
        brought = bring(
            self.base_model, file_items(policy), folder, public_only=self.book.public_only
        )
        name = self.base_model.name
        self.stats.by_source[name] = brought.bytes
        self.stats.bytes_received += brought.bytes
        self.stats.bytes_written += brought.bytes
        self.stats.chunks += brought.chunks
        self.stats.kept -= brought.chunks  # `_get` will find them
        return brought.missing

    def _from_anchor(self, chain: Mapping[int, Manifest]) -> None:
        """Fetches an older policy whole and the deltas from it, because no source has this one
        whole. Tries one anchor after the other; raises UnavailableError if no chain is left."""
        tried: list[int] = []
        while True:
            plan = plan_from_anchor(self.policy, chain, tried)
            if plan is None or plan.anchor is None:
                raise UnavailableError(
                    f"no source has policy {self.policy.version} whole, and no chain of deltas "
                    f"leads to it from a policy that is whole (tried: {tried})"
                )
            tried.append(plan.anchor.version)
            folder = self.partial / f"version-{plan.anchor.version}"
            make_folder(folder)
            try:
                self._whole(plan.anchor, folder)
            except GoneError:
                continue
            self._by_deltas(Base(folder, plan.anchor), plan, self.pace.patience)
            return

    def _whole(self, policy: Manifest, folder: Path) -> None:
        require_space(folder, total_size(policy) - _on_disk(folder))
        if self.base_model is not None and policy.version == 0:
            self._bring(policy, folder)
        self._get(file_items(policy), folder, self.pace.patience)

    def _needs(self, plan: Plan) -> int:
        return plan.cost + min(2, len(plan.hops)) * total_size(self.policy)

    def _fits(self, plan: Plan) -> bool:
        """Whether the disk has room for the deltas, which need more than a whole download."""
        return shutil.disk_usage(self.files).free >= self._needs(plan)

    def _by_deltas(self, start: Base, plan: Plan, patience: float) -> None:
        self.stats.route = "delta"
        self.stats.hops = tuple(hop.target.version for hop in plan.hops)
        require_space(self.files, self._needs(plan))
        folder, manifest = start.folder, start.manifest
        for number, hop in enumerate(plan.hops):
            name = f"delta-{hop.entry.base}"
            item = next(item for item in delta_items(hop.target) if item.name == name)
            into = self.partial / f"deltas-{hop.target.version}"
            make_folder(into)
            self._get([item], into, patience)
            last = number == len(plan.hops) - 1
            target = self.files if last else self.partial / f"version-{hop.target.version}"
            make_folder(target)
            begun = time.monotonic()
            written = deltas.apply(folder, manifest, into / name, hop.target, target)
            self.book.applied(written, time.monotonic() - begun)
            self.stats.bytes_written += written
            shutil.rmtree(into)
            if folder.parent == self.partial:
                shutil.rmtree(folder)
            folder, manifest = target, hop.target

    def _get(self, items: Sequence[Item], folder: Path, patience: float) -> None:
        pace = replace(self.pace, patience=patience)
        hooks = Hooks(progress=self.progress)
        fetcher = ChunkFetcher(items, folder, self.sources, self.book, pace, hooks)
        try:
            fetcher.run()
        finally:
            self.stats.add(fetcher.stats)


def _on_disk(folder: Path) -> int:
    """Bytes that the files in `folder` take."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def _require_same(dest: Path, policy: Manifest) -> None:
    """Raises UntrustedError if the manifest in `dest` differs from `policy`."""
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
    """Locks one destination folder across processes; a second caller waits. Raises DiskError."""
    path = dest.parent / f".lock-{dest.name}"
    with disk_errors():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def look_up(
    sources: list[str], trust: Trust, version: int | None, have: int | None
) -> tuple[SignedManifest, list[Manifest]]:
    """The wanted signed manifest and all others that hold, from the first server that has it."""
    failures: list[str] = []
    for url in sources:
        link = Link(url)
        try:
            offered = []
            for signed in read_index(link)[0]:
                trust.check(signed)
                offered.append(signed)
            if version is None:
                if not offered:
                    raise UserError(f"{url} serves no version yet")
                wanted = layout.newest_first(offered)[0]
                newest = wanted.manifest.version
                if have is not None and newest < have:
                    raise UntrustedError(
                        f"it offers version {newest} as the newest, and {have} is here already: "
                        "it is behind, or replays old ones"
                    )
            else:
                path = layout.address_of(version, MANIFEST_NAME)
                wanted = parse_signed(link.read_small(path, layout.MAX_INDEX_BYTES))
                trust.check(wanted)
                if wanted.manifest.version != version:
                    raise UntrustedError(f"it gave another version than {version}")
            return wanted, [signed.manifest for signed in offered]
        except PrimeError as error:
            failures.append(f"{url}: {error}")
            if url == sources[-1]:
                raise type(error)("; ".join(failures)) from error
        finally:
            link.close()
    raise UserError("no server was named")


def read_index(
    link: Link, known: tuple[list[SignedManifest], str | None] | None = None
) -> tuple[list[SignedManifest], str | None]:
    """A server's index and its entity tag; `known`, without a body, if it is still that."""
    address = f"/{layout.POLICIES}/{layout.INDEX_NAME}"
    found = link.read_changed(address, layout.MAX_INDEX_BYTES, known[1] if known else None)
    if found is None:
        assert known is not None
        return known
    return layout.parse_index(found[0]), found[1]
