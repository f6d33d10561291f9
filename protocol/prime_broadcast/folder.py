"""A folder of policies, a node's or a validator's: `<root>/<version>/`, verified, there at once.

A version's folder holds the checkpoint's files and `manifest.json` (the trainer's signed manifest).
It appears by one rename after every byte was verified and is never changed, so any number of
readers (containers mount the root read-only) need no lock: a folder that is there is whole.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_broadcast.base_model import BaseModelSource
from prime_broadcast.chunks import PATIENCE
from prime_broadcast.client import Base, FetchStats, fetch
from prime_broadcast.durable import settle
from prime_broadcast.files import remove_folder
from prime_broadcast.layout import complete_in
from prime_broadcast.manifest import MANIFEST_NAME, History, Trust, read_signed, verify_folder
from prime_broadcast.sources import BAN, Fault, SourceBook
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.errors import MalformedError, PolicyError, PrimeError, UntrustedError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrived:
    """A policy that is on disk and verified, and how it came."""

    path: Path
    stats: FetchStats


class PolicyFolder:
    """Policies under `root`, taken only if `trust`'s trainer signed them and their files have at
    most `most_bytes` together. The source book lives as long as the folder's object, so sources
    that sent wrong data or were slow are remembered. Wrong data is logged. `base_model`: where
    policy 0 is taken from, as far as it is there."""

    def __init__(
        self,
        root: Path,
        trust: Trust,
        *,
        book: SourceBook | None = None,
        most_bytes: int | None = None,
        base_model: BaseModelSource | None = None,
    ) -> None:
        self.root = root
        self._base_model = base_model
        self.has_base_model = base_model is not None
        self._most_bytes = most_bytes
        self.trust = trust
        self._book = book or SourceBook()
        self._history = History()
        """What was verified here, pruned versions too."""
        self._judging = threading.Lock()
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        settle(root)

    def versions(self) -> list[int]:
        """Versions on disk, ascending."""
        return complete_in(self.root)

    def latest(self) -> int | None:
        """The newest version on disk."""
        return max(self.versions(), default=None)

    def path(self, version: int) -> Path:
        """Where a version lies, or will."""
        return self.root / str(version)

    def manifest(self, version: int) -> SignedManifest:
        """The signed manifest of a version on disk. Raises UnavailableError if it is not there."""
        return read_signed(self.path(version) / MANIFEST_NAME)

    def ensure(
        self,
        version: int,
        manifest: SignedManifest,
        sources: Sequence[str],
        *,
        others: Iterable[SignedManifest] = (),
        patience: float = PATIENCE,
        on_fault: Callable[[Fault], None] = lambda fault: None,
    ) -> Arrived:
        """Brings `version` here, unless it is, by the cheapest of a whole download and deltas from
        the versions on disk. `others` are further signed manifests (of the versions between) that
        a chain of deltas may pass; those that do not hold are left out. `on_fault` gets each fault
        of a source that sent false data.

        Safe to call from several threads and processes, and again after a kill. Raises
        UntrustedError (wrong signature, another manifest for a version that was verified here, or
        a step that runs backwards between it and one of those), PolicyError (it is larger than
        `most_bytes`), UnavailableError (no source delivers, or the disk is full; what was verified
        is kept).
        """
        policy = self.trust.check(manifest)
        if policy.version != version:
            raise UntrustedError(f"the manifest is of policy {policy.version}, not {version}")
        size = sum(file.size for file in policy.files)
        if self._most_bytes is not None and size > self._most_bytes:
            raise PolicyError(
                f"policy {version} has {size / 2**30:.1f} GiB, more than the "
                f"{self._most_bytes / 2**30:g} GiB that are taken here"
            )
        self._judge(policy)

        def note(fault: Fault) -> None:
            if fault.bad_data:
                _log_bad_data(fault)
                on_fault(fault)

        stats = fetch(
            manifest,
            sources,
            self.path(version),
            bases=self._bases(),
            chain=self._chain(others),
            book=self._book,
            base_model=self._base_model,
            patience=patience,
            on_fault=note,
        )
        with self._judging:
            self._history.admit(policy)
        return Arrived(self.path(version), stats)

    def verify(self, version: int) -> None:
        """Reads every byte of a version again. Raises UntrustedError naming what differs; the
        folder should then be removed with `discard` and fetched again."""
        verify_folder(self.path(version), self.trust.check(self.manifest(version)))

    def discard(self, version: int) -> None:
        """Removes a version at once; files that are open stay readable."""
        remove_folder(self.path(version))

    def prune(self, keep: int, pinned: Collection[int] = ()) -> list[int]:
        """Removes all but the newest `keep` versions and the `pinned` ones, and what killed
        fetches of removed versions left; returns the versions that went."""
        present = self.versions()
        gone = [v for v in present[: max(0, len(present) - keep)] if v not in set(pinned)]
        for version in gone:
            remove_folder(self.path(version))
        oldest = min(self.versions(), default=0)
        for path in self.root.glob(".partial-*-*"):
            number = path.name.split("-")[1]
            if number.isdigit() and int(number) < oldest and int(number) not in set(pinned):
                shutil.rmtree(path, ignore_errors=True)
        return gone

    def _judge(self, policy: Manifest) -> None:
        """Raises UntrustedError if `policy` contradicts what was verified here, by this
        object or by another program that fetched versions into this folder."""
        with self._judging:
            for version in self.versions():
                if self._history.knows(version):
                    continue
                try:
                    self._history.admit(self.trust.check(self.manifest(version)))
                except PrimeError:  # pruned, damaged or a stranger's: no evidence
                    continue
            self._history.judge(policy)

    def _bases(self) -> list[Base]:
        found = []
        for version in self.versions():
            try:
                found.append(Base(self.path(version), self.manifest(version).manifest))
            except PrimeError:  # pruned meanwhile, or damaged: then it is not a base
                continue
        return found

    def _chain(self, others: Iterable[SignedManifest]) -> dict[int, Manifest]:
        chain: dict[int, Manifest] = {}
        for signed in others:
            try:
                chain[signed.manifest.version] = self.trust.check(signed)
            except (UntrustedError, MalformedError):
                continue
        return chain


def _log_bad_data(fault: Fault) -> None:
    log.warning(
        "%s sent false data: %s; another source is used, this one not for %.0f s",
        fault.url,
        fault.reason,
        BAN,
    )


def on_disk(dest: Path, trust: Trust) -> dict[int, Base]:
    """Returns the whole versions in `dest`, by number. Raises UntrustedError for one that `trust`
    does not cover."""
    if dest.is_dir():
        settle(dest)
    return {
        number: Base(
            dest / str(number), trust.check(read_signed(dest / str(number) / MANIFEST_NAME))
        )
        for number in complete_in(dest)
    }
