"""A validator's claims on judging jobs: taken, kept alive while the judging lasts, never longer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.store import jobs
from orchestrator.store.engine import Store
from protocol.core.errors import UnavailableError
from protocol.core.ids import Address, Digest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """`claim_seconds`: how long a claim outlives a dead validator; `judge_seconds`: how long one
    file may take before its claim is no longer kept; `retry_seconds` after an abstention."""

    claim_seconds: float = 30.0
    judge_seconds: float = 900.0
    retry_seconds: float = 15.0
    max_abstentions: int = 20
    lone_seconds: float = 3600.0
    """After so long, an acceptance that was to be looked at twice stands alone."""


class Claims:
    """Of one process (`worker`) of one validator."""

    def __init__(
        self,
        store: Store,
        worker: str,
        validator: Address,
        *,
        seconds: float,
        judge_seconds: float,
        lone_seconds: float | None = None,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._worker = worker
        self._validator = validator
        self._seconds = seconds
        self._judge_seconds = judge_seconds
        self._lone_seconds = lone_seconds
        self._now = now

    def waiting(self) -> bool:
        """Whether there is a job; a look without the write lock, so that an idle validator disturbs
        nobody."""
        with self._store.read() as connection:
            return jobs.waiting(
                connection,
                self._worker,
                now=self._now(),
                validator=self._validator,
                lone_seconds=self._lone_seconds,
            )

    def take(self, most: int) -> list[Digest]:
        """Claims the next job, and up to `most` − 1 more of the same policy if nobody died over any
        of them."""
        with self._store.begin() as connection:
            found: list[Digest] = []
            beside: Digest | None = None
            while len(found) < most:
                job = jobs.claim(
                    connection,
                    self._worker,
                    now=self._now(),
                    seconds=self._seconds,
                    validator=self._validator,
                    lone_seconds=self._lone_seconds,
                    beside=beside,
                )
                if job is None:
                    break
                found.append(job.submission_digest)
                beside = job.submission_digest
                if job.attempts > 1:
                    break
            return found

    @contextmanager
    def keep(self, digest: Digest) -> Iterator[None]:
        """Extends the claim while the block runs, at most `judge_seconds`."""
        stop = threading.Event()
        keeper = threading.Thread(target=self._extend, args=(digest, stop), daemon=True)
        keeper.start()
        try:
            yield
        finally:
            stop.set()
            keeper.join()

    def _extend(self, digest: Digest, stop: threading.Event) -> None:
        ends = self._now() + self._judge_seconds
        while not stop.wait(self._seconds / 3) and self._now() < ends:
            try:
                with self._store.begin() as connection:
                    jobs.extend(
                        connection, digest, self._worker, now=self._now(), seconds=self._seconds
                    )
            except UnavailableError as error:
                log.warning("the claim on %s was not renewed: %s", digest, error)
