"""The worker's loop: lease → file → submit, until stopped.

announce the exact class of the newest policy, if the pool wants it
ask for a lease ──► build the file ──► submit it ──► …
       │                  │                 │
    SIGTERM:           SIGTERM:             SIGTERM while submitting:
    end at once        give the lease back  finish, then end

If the agent cannot store a file now (its disk is full), the worker resends it until the lease ends.
The lease is given back then, or on SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType

from prime_core.errors import ConflictError, MalformedError, UnavailableError
from prime_node.bridge_messages import Abandon, HandIn, HandInAnswer, LeaseWish
from prime_node.worker.client import BridgeClient
from prime_node.worker.rollout_builder import Built, Job, RolloutBuilder

log = logging.getLogger("prime.worker")
WAIT_SECONDS = 20
AGENT_PATIENCE = 15.0
"""Seconds without an answer from the agent after which the worker ends; a restarted agent starts
its own worker."""
SEND_AGAIN_SECONDS = 5.0


class StopAskedError(BaseException):
    """Raised in the main thread by SIGTERM where stopping at once is harmless."""


class StopFlag:
    """SIGTERM and SIGINT as a flag, or as StopAskedError inside `with` blocks on this object."""

    def __init__(self) -> None:
        self.is_set = False
        self._may_interrupt = False

    def install(self) -> None:
        """Handles both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise StopAskedError

    def __enter__(self) -> StopFlag:
        if self.is_set:
            raise StopAskedError
        self._may_interrupt = True
        return self

    def __exit__(self, *_: object) -> None:
        self._may_interrupt = False


def work(
    bridge: BridgeClient,
    builder: RolloutBuilder,
    stop: StopFlag,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> None:
    """Fulfils leases until `stop` is set; `clock` is compared with leases' deadlines. Raises
    UnavailableError if the agent is gone."""
    silent_since: float | None = None
    while not stop.is_set:
        job: Job | None = None
        try:
            with stop:
                builder.announce(bridge)
                job = _next_job(bridge)
                silent_since = None
                if job is None:
                    continue
                built = builder.build(job)
        except StopAskedError:
            if job is not None:
                _give_back(bridge, job, "the worker was asked to stop")
            return
        except UnavailableError as error:
            if job is not None:
                _give_back(bridge, job, str(error))
            silent_since = silent_since if silent_since is not None else now()
            if now() - silent_since > AGENT_PATIENCE:
                raise
            sleep(1.0)
            continue
        try:
            _hand_in(bridge, job, built, stop, now=now, sleep=sleep, clock=clock)
        finally:
            built.path.unlink(missing_ok=True)  # the outbox has room for few files


def _next_job(bridge: BridgeClient) -> Job | None:
    offer = bridge.lease(LeaseWish(wait_seconds=WAIT_SECONDS))
    if offer.lease is None or offer.domain is None:
        return None
    return Job(offer.lease, offer.lease.lease.digest(offer.domain))


def _hand_in(
    bridge: BridgeClient,
    job: Job,
    built: Built,
    stop: StopFlag,
    *,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    """Submits a file, repeatedly while the agent cannot store it; gives the lease back if it ends
    first. Raises UnavailableError if the agent is gone."""
    deadline, why = job.signed.lease.deadline, ""
    silent_since: float | None = None
    while True:
        try:
            answer = _send(bridge, job, built)
            break
        except (ConflictError, MalformedError) as error:
            log.error("the agent did not take %s: %s", built.path.name, error)
            return
        except UnavailableError as error:
            if not error.problem:  # no answer
                silent_since = silent_since if silent_since is not None else now()
                if now() - silent_since > AGENT_PATIENCE:
                    raise
            else:
                silent_since = None
            if not why:
                log.warning(
                    "the agent cannot keep the file for lease %s now: %s; it is sent again until "
                    "the lease runs out",
                    job.lease_digest[:10],
                    error,
                )
            why = str(error)
        if clock() >= deadline:
            _give_back(bridge, job, f"it ran out before its file could be kept: {why}")
            return
        try:
            with stop:
                sleep(SEND_AGAIN_SECONDS if silent_since is None else 1.0)
        except StopAskedError:
            _give_back(bridge, job, f"the worker was asked to stop, its file not kept: {why}")
            return
    if answer.refused:
        log.error("the file for lease %s was refused: %s", job.lease_digest[:10], answer.refused)
    else:
        tokens, seconds = built.tokens, built.seconds
        state = "accepted for judging" if answer.receipt else "on its way"
        log.info("lease %s: %d tokens in %.1f s, %s", job.lease_digest[:10], tokens, seconds, state)


def _send(bridge: BridgeClient, job: Job, built: Built) -> HandInAnswer:
    bridge.send_file(built.path)
    return bridge.submit(
        HandIn(
            lease_digest=job.lease_digest,
            file=built.path.name,
            tokens=built.tokens,
            milliseconds=int(built.seconds * 1000),
        )
    )


def _give_back(bridge: BridgeClient, job: Job, reason: str) -> None:
    try:
        bridge.abandon(Abandon(lease_digest=job.lease_digest, reason=reason[:512]))
    except (UnavailableError, ConflictError) as error:
        log.warning("lease %s could not be given back: %s", job.lease_digest[:10], error)
