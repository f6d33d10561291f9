"""The trainer's inputs from the orchestrator: the pool's facts, the run, sealed batches.

Waits are persistent and interruptible: an unavailable orchestrator is retried with growing pauses
until it answers or the trainer is stopped. The next batch is fetched while the current one trains:

    rank 0's thread:   wait for batch s ─► fetch by signed URLs ─► check every row ─► one slot
    the loop:          take batch s (waits only if it is not ready) ─► the slot is free

Exactly one batch is held ahead, so memory is bounded by two batches: 4 bytes per prompt token, 8
per generated one (`Rollout`), plus one file while it is read. Download errors are raised in the
loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prime_chain.contracts import Pools
from prime_chain.link import ChainSettings
from prime_core.deployment import Deployment
from prime_core.errors import (
    MalformedError,
    NotFoundError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import Address, Digest
from prime_core.messages import BatchAnswer, PoolInfo
from prime_core.run import RunDefinition
from prime_core.run_file import read_run
from prime_core.signing import Domain
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import StoppedError, until_answered
from prime_trainer.data import BadBatch, Fetch, TrainingBatch
from prime_trainer.metrics import Stopwatch

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
POLL_SECONDS = 0.5
"""Interval between requests for a batch that is not sealed yet."""
LONGEST_PAUSE = 15.0
FETCH_TRIES = 6
OUTAGE_SECONDS = 300.0
"""How long the trainer waits for an object store that does not answer."""
Produce = Callable[[int, Stopwatch], TrainingBatch | BadBatch]
"""(step, watch) → the verified batch, or which one to skip; raises why it is unusable, or
StoppedError when stopped."""


@dataclass(frozen=True)
class PoolFacts:
    """The pool's signers and its run."""

    info: PoolInfo
    run: RunDefinition

    def domain(self, contract: str) -> Domain:
        """EIP-712 domain of one of the pool's contracts."""
        return Domain(chain_id=self.info.chain_id, contract=getattr(self.info.contracts, contract))


def insist(
    action: Callable[[], Answer],
    stop: threading.Event,
    what: str,
    *,
    pause: float = 0.5,
    give_up: float | None = None,
) -> Answer:
    """Repeats `action` while it raises UnavailableError, for at most `give_up` seconds. Raises
    StoppedError on a stop request."""

    def tell(error: UnavailableError, wait: float) -> None:
        log.warning("%s: %s; trying again in %.1f s", what, error, wait)

    return until_answered(action, stop, tell, pause=pause, longest=LONGEST_PAUSE, give_up=give_up)


def pool_facts(client: OrchestratorClient, run_file: Path | None) -> PoolFacts:
    """Fetches the pool and its run, and checks the run's digest. Raises UserError if `run_file` is
    another run."""
    info = client.pool(refresh=True)
    if run_file is None:
        run = RunDefinition.parse(client.request("GET", "/v1/run", b"", signed=False))
    else:
        run = read_run(run_file)
    if run.digest() != info.run_digest:
        raise UserError(
            f"the run definition has digest {run.digest()}, but the pool trains {info.run_digest}",
            hint="name the pool's own run file by --run, or leave it out",
        )
    return PoolFacts(info, run)


def check_on_chain(facts: PoolFacts, settings: ChainSettings, deployment: Deployment) -> None:
    """Compares the orchestrator's facts with the chain: contracts, manager, trainer and run. Raises
    UntrustedError if they differ, UnavailableError if no endpoint answers."""
    info = facts.info
    if (info.chain_id, info.contracts) != (deployment.chain_id, deployment.contracts):
        raise UntrustedError("the orchestrator names other contracts than the deployment file")
    client = settings.open_chain(deployment.chain_id)
    try:
        pool = Pools(client, deployment).pool_of(info.pool)
    finally:
        client.close()
    stated = (info.manager, info.trainer, info.run_digest)
    if (pool.manager, pool.trainer, pool.run_digest) != stated:
        raise UntrustedError(
            f"the orchestrator's facts about pool {info.pool} are not those on chain"
        )


def require_trainer(facts: PoolFacts, account: Address) -> None:
    """Raises UserError unless `account` is the pool's trainer."""
    if account != facts.info.trainer:
        raise UserError(
            f"the wallet's account {account} is not the trainer of pool {facts.info.pool}, "
            f"which is {facts.info.trainer}",
            hint="name the trainer's keystore by --wallet",
        )


def wait_for_batch(client: OrchestratorClient, step: int, stop: threading.Event) -> BatchAnswer:
    """Returns the first batch numbered `step` or higher once it is sealed; an answer that another
    program gave counts as none. Raises StoppedError on an earlier stop request."""

    def ask() -> BatchAnswer:
        while True:
            try:
                return client.get(f"/v1/batches/{step}", BatchAnswer, signed=True)
            except NotFoundError as error:
                if stop.wait(POLL_SECONDS):
                    raise StoppedError from error
            except MalformedError as error:
                if error.problem:
                    raise
                raise UnavailableError(str(error)) from error

    return insist(ask, stop, f"waiting for batch {step}")


def fetcher(client: OrchestratorClient, urls: dict[str, str], stop: threading.Event) -> Fetch:
    """Returns a function that fetches objects by their signed URLs and checks digests. It repeats a
    request while the store does not answer, for OUTAGE_SECONDS, and FETCH_TRIES times if the store
    gives something else. It raises UnavailableError for every failure, also for bytes with another
    digest: they came from a proxy or a damaged copy and do not show that the batch is bad."""

    def fetch(sha256: Digest, limit: int) -> bytes:
        url = urls.get(sha256)
        if url is None:
            raise UnavailableError(f"the orchestrator gave no URL for {sha256}")
        began, refused, pause = time.monotonic(), 0, 0.25
        while True:
            try:
                return client.download(url, limit=limit, sha256=sha256)
            except PrimeError as error:
                refused += not isinstance(error, UnavailableError)
                if refused >= FETCH_TRIES or time.monotonic() - began >= OUTAGE_SECONDS:
                    raise UnavailableError(f"{sha256} cannot be fetched: {error}") from error
                log.warning("%s cannot be fetched yet: %s", sha256, error)
                if stop.wait(pause):
                    raise StoppedError from error
                pause = min(LONGEST_PAUSE, 2 * pause)

    return fetch


@dataclass(frozen=True)
class Fetched:
    """A batch, and the time its thread spent on it by name."""

    batch: TrainingBatch | BadBatch
    watch: Stopwatch


class Prefetcher:
    """Fetches one batch ahead, in a thread. Not thread-safe; `close` ends the thread.

    `limit`: batches from this step on are never requested.
    """

    def __init__(self, produce: Produce, limit: int | None) -> None:
        self._produce, self._limit = produce, limit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._slots: dict[int, Future[Fetched]] = {}

    def take(self, step: int) -> Fetched:
        """Returns the first batch from number `step` on; the thread then starts on the next. Raises
        what `produce` raised; taking the same step again retries."""
        future = self._slots.pop(step, None) or self._begin(step)
        fetched = future.result()
        self.ahead(fetched.batch.step + 1)
        return fetched

    def ahead(self, step: int) -> None:
        """Starts fetching the first batch from number `step` on, unless it is in progress or beyond
        the limit."""
        if step not in self._slots and (self._limit is None or step < self._limit):
            self._slots[step] = self._begin(step)

    def close(self) -> None:
        """Ends the thread. To close before the limit is reached, first set the event that stops
        `produce`."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, step: int) -> Future[Fetched]:
        return self._pool.submit(self._fetch, step)

    def _fetch(self, step: int) -> Fetched:
        watch = Stopwatch()
        return Fetched(self._produce(step, watch), watch)
