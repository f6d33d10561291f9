"""The validator's folder of policies: each the one that the trainer signed, verified on arrival."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.presence import RELAY_SECONDS
from orchestrator.store import policies
from orchestrator.store.engine import Store
from protocol.broadcast.access import Passes
from protocol.broadcast.client import Base, fetch
from protocol.broadcast.durable import settle
from protocol.broadcast.files import remove_folder
from protocol.broadcast.manifest import MANIFEST_NAME, Trust, read_signed
from protocol.broadcast.sources import SourceBook
from protocol.core.checkpoint import Manifest
from protocol.core.errors import PrimeError, UnavailableError, UntrustedError
from protocol.core.ids import Digest

log = logging.getLogger(__name__)

CHAIN_OF_DELTAS = 4
"""Versions before the wanted one whose deltas may be taken on the way."""


class PolicyStore:
    """Policies under `root`/<version>/, fetched from relays that the store knows and `sources`.

    `keep`: how many versions stay on disk, the newest; `passes` sign the requests to relays.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        trust: Trust,
        *,
        sources: Sequence[str] = (),
        keep: int = 8,
        patience: float = 20.0,
        passes: Passes | None = None,
        now: Callable[[], float],
    ) -> None:
        self.root = root
        self._store = store
        self._trust = trust
        self._sources = tuple(sources)
        self._keep = keep
        self._patience = patience
        self._now = now
        self._book = SourceBook(passes=passes)
        root.mkdir(parents=True, exist_ok=True)
        settle(root)

    def ensure(self, version: int, policy_digest: Digest) -> Path:
        """The folder of policy `version`, whose manifest's digest is `policy_digest`.

        Raises UnavailableError if no source has it, UntrustedError if what is published under
        that version is another policy or not the trainer's.
        """
        folder = self.root / str(version)
        if folder.is_dir():
            present = read_signed(folder / MANIFEST_NAME).manifest.digest()
            if present != policy_digest:
                raise UntrustedError(f"policy {version} here is {present}, not {policy_digest}")
            return folder
        with self._store.read() as connection:
            row = policies.get(connection, version)
            between = [
                policies.get(connection, number)
                for number in range(max(0, version - CHAIN_OF_DELTAS), version)
            ]
            relays = policies.relays(connection, since=self._now() - RELAY_SECONDS)
        if row is None:
            raise UnavailableError(f"policy {version} is not published yet")
        signed = row.signed()
        if self._trust.check(signed).digest() != policy_digest:
            raise UntrustedError(f"policy {version} is published as another than the lease names")
        sources = list(dict.fromkeys([*self._sources, *(relay.url for relay in relays)]))
        if not sources:
            raise UnavailableError(f"nobody serves policy {version}: no relay is announced")
        stats = fetch(
            signed,
            sources,
            folder,
            bases=self._bases(),
            chain={r.version: self._trust.check(r.signed()) for r in between if r is not None},
            book=self._book,
            patience=self._patience,
        )
        log.info("policy %d is here (%s, %d bytes)", version, stats.route, stats.bytes_received)
        self._prune()
        return folder

    def versions(self) -> list[int]:
        """Versions on disk, ascending."""
        names = (path.name for path in self.root.iterdir())
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version on disk."""
        return read_signed(self.root / str(version) / MANIFEST_NAME).manifest

    def _bases(self) -> list[Base]:
        found = []
        for version in self.versions():
            try:
                found.append(Base(self.root / str(version), self.manifest(version)))
            except PrimeError:  # damaged: then it is no base
                continue
        return found

    def _prune(self) -> None:
        for version in self.versions()[: -self._keep]:
            remove_folder(self.root / str(version))
