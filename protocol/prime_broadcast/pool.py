"""A pool's policies for a reader: named by its orchestrator, fetched over the broadcast, verified
on arrival."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.layout import ANCHOR_EVERY
from prime_core.checkpoint import SignedManifest
from prime_core.errors import MalformedError, NotFoundError, UnavailableError, UntrustedError
from prime_core.ids import Digest
from prime_core.messages import RelayInfo
from prime_core.transport.client import OrchestratorClient

log = logging.getLogger(__name__)
_RELAYS = TypeAdapter(list[RelayInfo])


class Names(Protocol):
    """Says which policies there are, and who serves them."""

    def policy(self, version: int) -> SignedManifest:
        """Raises NotFoundError if there is none."""
        ...

    def relays(self) -> list[str]:
        """The URLs of the relays that serve policies."""
        ...


class PoolNames:
    """An orchestrator's word; `Policies` checks it."""

    def __init__(self, client: OrchestratorClient) -> None:
        self._client = client

    def policy(self, version: int) -> SignedManifest:
        return self._client.get(f"/v1/policies/{version}", SignedManifest)

    def relays(self) -> list[str]:
        """Raises MalformedError if the orchestrator's answer does not parse."""
        raw = self._client.request("GET", "/v1/relays", b"", signed=False)
        try:
            return [relay.url for relay in _RELAYS.validate_json(raw)]
        except ValueError as error:
            raise MalformedError("the orchestrator's list of relays does not parse") from error


class Policies:
    """Policies in `folder`, from the pool's relays and `sources`. `keep`: how many of the newest
    stay on disk, with the one that was fetched last."""

    def __init__(
        self,
        folder: PolicyFolder,
        api: Names,
        *,
        sources: Sequence[str] = (),
        keep: int = 8,
        patience: float = 20.0,
    ) -> None:
        self.folder = folder
        self._api = api
        self._sources = tuple(sources)
        self._keep = keep
        self._patience = patience
        self._known: dict[int, SignedManifest] = {}

    def ensure(self, version: int, policy_digest: Digest) -> Path:
        """Returns the folder of policy `version`, whose manifest must have digest `policy_digest`.

        Raises UnavailableError if no source has it, UntrustedError if the policy published under
        that version is a different one or not the trainer's.
        """
        if version in self.folder.versions():
            present = self.folder.manifest(version).manifest.digest()
            if present != policy_digest:
                raise UntrustedError(f"policy {version} here is {present}, not {policy_digest}")
            return self.folder.path(version)
        signed = self._manifest(version)
        if signed is None:
            raise UnavailableError(f"policy {version} is not published yet")
        if self.folder.trust.check(signed).digest() != policy_digest:
            raise UntrustedError(f"policy {version} is published as another than the lease names")
        sources = list(dict.fromkeys([*self._sources, *self._api.relays()]))
        if not sources:
            raise UnavailableError(f"no relay serves policy {version}")
        newest = max((one for one in self.folder.versions() if one < version), default=-1)
        between = range(max(newest + 1, version - ANCHOR_EVERY), version)
        arrived = self.folder.ensure(
            version,
            signed,
            sources,
            others=[one for number in between if (one := self._manifest(number)) is not None],
            patience=self._patience,
        )
        stats = arrived.stats
        log.info("policy %d is here (%s, %d bytes)", version, stats.route, stats.bytes_received)
        self.folder.prune(self._keep, {version})
        self._known = {n: one for n, one in self._known.items() if n > version - ANCHOR_EVERY}
        return arrived.path

    def _manifest(self, version: int) -> SignedManifest | None:
        if version not in self._known:
            try:
                self._known[version] = self._api.policy(version)
            except NotFoundError:
                return None
        return self._known[version]
