"""The validator's folder of policies: each the one that the trainer signed, verified on arrival."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.presence import RELAY_SECONDS
from orchestrator.store import policies
from orchestrator.store.engine import Store
from protocol.broadcast.access import Passes
from protocol.broadcast.folder import PolicyFolder
from protocol.broadcast.layout import ANCHOR_EVERY
from protocol.broadcast.manifest import Trust
from protocol.broadcast.sources import SourceBook
from protocol.core.errors import UnavailableError, UntrustedError
from protocol.core.ids import Digest

log = logging.getLogger(__name__)

CHAIN_OF_DELTAS = ANCHOR_EVERY
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
        self.folder = PolicyFolder(root, trust, book=SourceBook(passes=passes))
        self._store = store
        self._trust = trust
        self._sources = tuple(sources)
        self._keep = keep
        self._patience = patience
        self._now = now

    @property
    def root(self) -> Path:
        """Where the versions lie."""
        return self.folder.root

    def ensure(self, version: int, policy_digest: Digest) -> Path:
        """The folder of policy `version`, whose manifest's digest is `policy_digest`.

        Raises UnavailableError if no source has it, UntrustedError if what is published under
        that version is another policy or not the trainer's.
        """
        if version in self.folder.versions():
            present = self.folder.manifest(version).manifest.digest()
            if present != policy_digest:
                raise UntrustedError(f"policy {version} here is {present}, not {policy_digest}")
            return self.folder.path(version)
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
        arrived = self.folder.ensure(
            version,
            signed,
            sources,
            others=[other.signed() for other in between if other is not None],
            patience=self._patience,
        )
        stats = arrived.stats
        log.info("policy %d is here (%s, %d bytes)", version, stats.route, stats.bytes_received)
        self.folder.prune(self._keep)
        return arrived.path
