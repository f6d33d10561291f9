"""The uploader: delivers journalled files, oldest first, until each has its receipt. After
a failure it goes on with the next file.

    spool entry → upload URL → PUT → POST submission → receipt stored → file removed

If orchestrator or store are unreachable, or an answer is not our protocol's (a proxy's 404, an
unknown field), delivery is retried forever with growing pauses. Only a problem document of the
orchestrator is a final refusal: its reason is stored and the file removed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from prime_core import tracing
from prime_core.errors import (
    MalformedError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UnavailableError,
)
from prime_core.logs import FileFields, fields
from prime_core.messages import ReceiptAnswer, UploadAnswer, UploadRequest
from prime_node.api import NodeApi
from prime_node.spool import Entry, Spool
from prime_node.watched import WatchedThread

log = logging.getLogger("prime.node.uploader")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
FINAL_REFUSALS = frozenset({"malformed", "refused", "not-found", "conflict"})
"""Kinds of problem documents after which the same file would be refused again."""


class Uploader:
    """One background thread for one Spool. `make_api` is called in that thread, `on_settled` after
    each delivery."""

    def __init__(
        self,
        spool: Spool,
        make_api: Callable[[], NodeApi],
        *,
        rng: random.Random,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_settled = on_settled
        self._spool = spool
        self._make_api = make_api
        self._rng = rng
        self._stop = threading.Event()
        self.thread = WatchedThread("uploader", self._run)

    def start(self) -> None:
        self.thread.start()

    def stop(self, grace: float) -> int:
        """Stops after the current delivery (waiting at most `grace` s); returns how many files
        still wait. The next start delivers them."""
        self._stop.set()
        with self._spool.changed:
            self._spool.changed.notify_all()
        self.thread.join(grace)
        return len(self._spool.waiting())

    def drain(self, timeout: float, now: Callable[[], float]) -> None:
        """Waits until all files are delivered, at most `timeout` seconds."""
        end = now() + timeout
        with self._spool.changed:
            while self._spool.waiting() and (left := end - now()) > 0:
                self._spool.changed.wait(left)

    def _run(self) -> None:
        api = self._make_api()
        pause, failures = FIRST_PAUSE, 0
        try:
            while not self._stop.is_set():
                try:
                    with self._spool.changed:
                        waiting = self._spool.waiting()
                        if not waiting and not self._stop.is_set():
                            self._spool.changed.wait(30.0)
                    if not waiting:
                        continue
                    deliver(waiting[failures % len(waiting)], self._spool, api)
                    pause, failures = FIRST_PAUSE, 0
                    self._on_settled()
                except PrimeError as error:
                    log.warning("a finished file waits to be delivered: %s", error)
                    self._stop.wait(pause * (0.5 + self._rng.random()))
                    pause, failures = min(LONGEST_PAUSE, pause * 2), failures + 1
        finally:
            api.close()


def deliver(entry: Entry, spool: Spool, api: NodeApi) -> ReceiptAnswer | None:
    """Makes one delivery, which may be repeated. Returns the receipt, or None if the orchestrator
    refused for good.

    Raises any other PrimeError (unreachable, store failure, a session or receipt that does not
    verify); the delivery is then retried.
    """
    claim, began = entry.body.submission, time.time()
    try:
        target = api.upload_target(
            claim.lease_digest, UploadRequest(sha256=claim.sha256, size=claim.size)
        )
        if not target.exists:
            if not entry.path.exists():
                _give_up(entry, spool, f"{entry.path} has vanished from the spool")
                return None
            _put(api, target, entry)
        receipt = api.submit(entry.body)
    except PrimeError as error:
        if error.problem not in FINAL_REFUSALS:
            raise
        _give_up(entry, spool, str(error))
        return None
    spool.settle(claim.lease_digest, receipt)
    log.info("file %s (%d bytes) handed in", claim.sha256[:10], claim.size,
             extra=fields(kind="file", status="delivered", **_about(entry)))  # fmt: skip
    tracing.record(claim.lease_digest, "upload", began, time.time(), size=claim.size)
    return receipt


def _give_up(entry: Entry, spool: Spool, reason: str) -> None:
    log.error("the file for lease %s was refused: %s", entry.lease_digest[:10], reason,
              extra=fields(kind="file", status="refused", reason=reason, **_about(entry)),
    )  # fmt: skip
    spool.settle(entry.lease_digest, None, reason)


def _about(entry: Entry) -> FileFields:
    claim = entry.body.submission
    return FileFields(node=claim.node, lease=claim.lease_digest, step=claim.step)


def _put(api: NodeApi, target: UploadAnswer, entry: Entry) -> None:
    try:
        api.upload(target, entry.path)
    except (PolicyError, MalformedError, NotFoundError) as error:
        # A refused signed URL is a problem of the store or a clock, not a final refusal.
        raise UnavailableError(f"the store did not take the file: {error}") from error
    except OSError as error:
        raise UnavailableError(f"{entry.path} cannot be read: {error.strerror}") from error
