"""The runs that this node works for: the pool's definition and its later revisions.

    heartbeat, lease answer ──► a new digest
    thread "revisions"      ──► its definition, by digest ──► the owner's limits, this machine
                                ──► image and dataset, while work under the old run continues
                                ──► taken: its leases are requested; or declined, with a reason

A node that declines a revision finishes its work, gets no lease of it, and ends without penalty.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from prime_chain.amounts import prime
from prime_core.errors import PolicyError, PrimeError, UserError
from prime_core.ids import Digest
from prime_core.node import Hardware
from prime_core.run import RunDefinition
from prime_node.config import Settings
from prime_node.watched import WatchedThread

log = logging.getLogger("prime.node")
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


def check_limits(settings: Settings, run: RunDefinition, hardware: Hardware) -> None:
    """Raises PolicyError if the owner's limits or this machine decline a run."""
    if run.price_per_unit < settings.min_price:
        raise PolicyError(
            f"the run pays {prime(run.price_per_unit)} a token, less than --min-price "
            f"({prime(settings.min_price)})"
        )
    image = run.task.image
    allowed = settings.images
    if allowed and not {image, image.partition("@")[0]} & set(allowed):
        raise PolicyError(f"the run's image {image} is not among those that --image allows")
    run.requirements.require(hardware)


class Revisions:
    """Thread-safe.

    Args: `run`: the run that is already taken; `fetch` returns a definition by its digest; `check`
    raises PolicyError or UserError for a run that this node declines; `prepare` provides what the
    run's task needs, and raises UnavailableError to be called again.
    """

    def __init__(
        self,
        run: RunDefinition,
        *,
        fetch: Callable[[Digest], RunDefinition],
        check: Callable[[RunDefinition], None],
        prepare: Callable[[RunDefinition], None],
    ) -> None:
        self.first = run
        """The run of the task that starts first."""
        self._fetch = fetch
        self._check = check
        self._prepare = prepare
        self._lock = threading.Lock()
        self._taken = {run.digest(): run}
        self._declined: dict[Digest, str] = {}
        self._known = {run.digest()}
        self._waiting: queue.SimpleQueue[Digest | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.thread = WatchedThread("revisions", self._work)

    def start(self) -> None:
        self.thread.start()

    def stop(self, timeout: float) -> None:
        """Stops the thread; its current work is finished or dropped."""
        self._stop.set()
        self._waiting.put(None)
        if self.thread.is_alive():
            self.thread.join(timeout)

    def received(self, digest: Digest) -> None:
        """Handles a run's digest; returns immediately."""
        with self._lock:
            if digest in self._known:
                return
            self._known.add(digest)
        self._waiting.put(digest)

    def taken(self) -> tuple[Digest, ...]:
        """Returns the runs whose leases this node requests, newest last."""
        with self._lock:
            return tuple(self._taken)[-64:]

    def get(self, digest: Digest) -> RunDefinition | None:
        """Returns a taken run; None for any other."""
        with self._lock:
            return self._taken.get(digest)

    def why_declined(self, digest: Digest) -> str:
        """Returns why this node declines a run; empty if it does not."""
        with self._lock:
            return self._declined.get(digest, "")

    def _work(self) -> None:
        pause = FIRST_PAUSE
        while (digest := self._waiting.get()) is not None and not self._stop.is_set():
            try:
                self._take(digest)
                pause = FIRST_PAUSE
            except (PolicyError, UserError) as error:
                self._decline(digest, str(error))
            except PrimeError as error:
                log.warning("run %s is not ready: %s; again in %.0f s", digest, error, pause)
                self._waiting.put(digest)  # behind the others, which may be what corrects it
                self._stop.wait(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)

    def _take(self, digest: Digest) -> None:
        run = self._fetch(digest)
        self._check(run)
        self._prepare(run)
        with self._lock:
            self._taken[digest] = run
        log.info("run revision %s is taken on: image %s", digest, run.task.image)

    def _decline(self, digest: Digest, why: str) -> None:
        with self._lock:
            self._declined[digest] = why
        log.warning(
            "this node declines run revision %s: %s. It finishes what it has and asks for no lease "
            "of it", digest, why,
        )  # fmt: skip
