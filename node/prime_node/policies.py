"""Keeps the node's policies up to date in one background thread, which fetches what the last
heartbeat announced or what a lease needs.

    heartbeat: newest version, relays ──► its manifest ──► PolicyFolder.ensure ──► on_arrival

Besides the wanted version's manifest, a node asks for those that a chain of deltas from a policy on
disk passes. Once a version was not delivered it asks for the list of the newest until one is: no
source may have the wanted version whole, but an older one and the deltas since. The manifests of a
large model take hundreds of kB each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from prime_broadcast.folder import Arrived, PolicyFolder
from prime_broadcast.plans import between
from prime_broadcast.sources import Fault
from prime_core.checkpoint import SignedManifest
from prime_core.errors import NotFoundError, PrimeError, UnavailableError
from prime_core.ids import Digest
from prime_core.logs import fields
from prime_node import policy_log
from prime_node.api import NodeApi
from prime_node.watched import WatchedThread

log = logging.getLogger("prime.node.policies")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
MOST_REPORTED, LONGEST_URL = 16, 512
"""Limits of a heartbeat's fields."""
CATCH_UP = 5
"""A node at most this many versions behind fetches each of them, in order."""


class PolicyKeeper:
    """One background thread for one PolicyFolder; `make_api` is called in that thread.

    The `keep` newest versions stay on disk, and those that open leases name.
    """

    def __init__(
        self,
        folder: PolicyFolder,
        make_api: Callable[[], NodeApi],
        *,
        keep: int,
        on_arrival: Callable[[], None],
        pinned: Callable[[], Collection[int]],
    ) -> None:
        self._folder = folder
        self._make_api = make_api
        self._keep = keep
        self._on_arrival = on_arrival
        self._pinned = pinned
        self._changed = threading.Condition()
        self._wanted: set[int] = set()
        self._relays: tuple[str, ...] = ()
        self._digests: dict[int, Digest] = {}
        self._bad_sources: set[str] = set()
        self._stopping = False
        self._failed: int | None = None
        self._undelivered = False
        self.thread = WatchedThread("policies", self._run)
        for version in folder.versions():
            self._note(version)

    def start(self) -> None:
        self.thread.start()

    def stop(self, grace: float) -> None:
        """Stops after the current fetch, waiting at most `grace` s (a killed fetch resumes)."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.thread.join(grace)

    # -- called by the lease broker and the agent ----------------------------------------------

    def newest(self) -> int | None:
        """Returns the newest verified version on disk."""
        with self._changed:
            return max(self._digests, default=None)

    def digest(self, version: int) -> Digest | None:
        """Returns the policy digest of a verified version on disk, or None."""
        with self._changed:
            return self._digests.get(version)

    def want(self, version: int) -> None:
        """Requests a version; returns immediately."""
        with self._changed:
            if version not in self._digests and version not in self._wanted:
                self._wanted.add(version)
                self._changed.notify_all()

    def note_answer(self, latest: int | None, relays: tuple[str, ...]) -> None:
        """Handles the versions and relays of a heartbeat's answer. Requests for versions
        newer than `latest` are dropped: an earlier answer was wrong, and they would block lower
        versions."""
        with self._changed:
            self._relays = relays
            if latest is not None:
                self._wanted = {wanted for wanted in self._wanted if wanted <= latest}
        if latest is not None:
            self.want(latest)

    def bad_sources(self) -> tuple[str, ...]:
        """Returns sources of wrong chunks not reported to the orchestrator yet, at most 16."""
        with self._changed:
            return tuple(sorted(self._bad_sources)[:MOST_REPORTED])

    def mark_reported(self, bad_sources: Collection[str]) -> None:
        """Marks sources as reported to the orchestrator."""
        with self._changed:
            self._bad_sources -= set(bad_sources)

    def _note_fault(self, fault: Fault) -> None:
        with self._changed:
            if len(fault.url) <= LONGEST_URL:
                self._bad_sources.add(fault.url)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        api = self._make_api()
        pause = FIRST_PAUSE
        try:
            while (version := self._next()) is not None:
                try:
                    self._fetch(version, api)
                    pause = FIRST_PAUSE
                except PrimeError as error:
                    log.warning("policy %d does not arrive: %s", version, error)
                    self._failed = version
                    with self._changed:
                        if not self._stopping:
                            self._changed.wait(pause)
                    pause = min(LONGEST_PAUSE, pause * 2)
        finally:
            api.close()

    def _next(self) -> int | None:
        """Waits for the next version to fetch and returns it; None once stopped.

        A node slightly behind fetches every version in order: each is a small delta to the previous
        one, and a lease may still name it. A node far behind, or whose next version does not
        arrive, fetches the newest.
        """
        with self._changed:
            while not self._stopping and not self._wanted:
                self._changed.wait()
            if self._stopping:
                return None
            newest, asked = max(self._digests, default=None), max(self._wanted)
            if newest is not None and newest < asked <= newest + CATCH_UP:
                return newest + 1 if newest + 1 != self._failed else asked
            return asked

    def _fetch(self, version: int, api: NodeApi) -> None:
        with self._changed:
            relays = self._relays
        try:
            wanted = api.policy(version)
        except NotFoundError as error:
            raise UnavailableError("the orchestrator does not list it (yet)") from error
        if not relays:
            raise UnavailableError("no relay is known yet")
        started = time.monotonic()
        log.info("policy %d is fetched from %d relay(s)", version, len(relays))
        try:
            arrived = self._bring(version, wanted, relays, self._others(wanted, api))
            self._record(arrived, time.monotonic() - started)
        except OSError as error:
            raise UnavailableError(f"the disk refuses it: {error}") from error
        self._note(version)
        log.info(
            "policy %d is here (%s, %d bytes received, %.1f s)",
            version,
            arrived.stats.route,
            arrived.stats.bytes_received,
            time.monotonic() - started,
            extra=fields(kind="policy", status="fetched", policy=version),
        )
        self._on_arrival()
        try:
            self._prune()
        except OSError as error:
            raise UnavailableError(f"old policies cannot be removed: {error}") from error

    def _bring(
        self,
        version: int,
        wanted: SignedManifest,
        relays: Sequence[str],
        others: Sequence[SignedManifest],
    ) -> Arrived:
        """Brings a version to the disk and remembers whether the relays delivered it."""
        try:
            arrived = self._folder.ensure(
                version, wanted, relays, others=others, on_fault=self._note_fault
            )
        except UnavailableError:
            self._undelivered = True
            raise
        self._undelivered = False
        return arrived

    def _others(self, wanted: SignedManifest, api: NodeApi) -> Sequence[SignedManifest]:
        """Returns the further manifests by which `wanted` may be reached."""
        if self._undelivered:
            return api.policies().policies
        here = self._folder.versions()
        passed = between(wanted.manifest, here, base_model=self._folder.has_base_model)
        return [api.policy(version) for version in passed]

    def _note(self, version: int) -> None:
        digest = self._folder.manifest(version).manifest.digest()
        with self._changed:
            self._digests[version] = digest
            self._wanted = {wanted for wanted in self._wanted if wanted > version}

    def _record(self, arrived: Arrived, seconds: float) -> None:
        manifest = self._folder.manifest(arrived.stats.version).manifest
        policy_log.record(self._folder.root.parent, manifest, arrived.stats, seconds)

    def _prune(self) -> None:
        gone = self._folder.prune(self._keep, self._pinned())
        with self._changed:
            for version in gone:
                self._digests.pop(version, None)
