"""The worker's loop: leases → files → submissions, until stopped.

main thread   announce the exact class of the newest policy, if the pool wants it
              ask for a lease ──► start a job ──► ask for the next while the batch has room …
job threads   build the file ──► submit it

The agent says how many leases the worker may hold at once. The rows of all of them are generated in
one batch (prime_engine/shared.py); a job grades and submits while others generate.

After SIGTERM no lease is taken. A job that builds its file gives its lease back; one that submits
finishes. If the agent cannot store a file now (its disk is full), the job resends it until the
lease ends. The lease is given back then, or on SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from prime_core.errors import ConflictError, MalformedError, PrimeError, UnavailableError
from prime_core.ids import Digest
from prime_node.bridge_messages import (
    Abandon,
    HandIn,
    HandInAnswer,
    LeaseOffer,
    LeaseWish,
    Pauses,
)
from prime_node.worker.client import BridgeClient
from prime_node.worker.rollout_builder import Built, Job

log = logging.getLogger("prime.worker")
WAIT_SECONDS, SHORT_WAIT_SECONDS = 20, 2
"""Seconds that a request for a lease waits; the second while the worker has leases, so that it soon
notices if one of them failed."""
AGENT_PATIENCE = 15.0
"""Seconds without an answer from the agent after which the worker ends; a restarted agent starts
its own worker."""
SEND_AGAIN_SECONDS = 5.0


class StopAskedError(BaseException):
    """The worker was asked to stop. Raised inside `with` blocks on a StopFlag, and by its
    `sleep`."""


class StopFlag:
    """SIGTERM and SIGINT as a flag, or as StopAskedError inside `with` blocks on this object."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._may_interrupt = False

    @property
    def is_set(self) -> bool:
        return self._asked.is_set()

    def set(self) -> None:
        """Asks the worker to stop."""
        self._asked.set()

    def sleep(self, seconds: float) -> None:
        """For jobs: waits, and raises StopAskedError once the worker is asked to stop."""
        if self._asked.wait(seconds):
            raise StopAskedError

    def install(self) -> None:
        """Handles both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.set()
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


class Builder(Protocol):
    """Makes files (RolloutBuilder), several at a time."""

    def announce(self, bridge: BridgeClient) -> None:
        """Announces the exact class of this machine, if it can be measured now."""
        ...

    def build(self, job: Job) -> Built:
        """Makes the file of a lease. Raises UnavailableError if it cannot be made here, or after
        `stop`, and another PrimeError if no file can be made any more."""
        ...

    def has_room(self) -> bool:
        """Whether the batch can take the rows of another lease now."""
        ...

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until `condition` holds. It is asked again when rows end, and after `nudge`."""
        ...

    def nudge(self) -> None: ...

    def start(self) -> None:
        """Allows `build`. Called before any other method."""
        ...

    def stop(self) -> None:
        """Ends every `build`, and refuses further ones until `start`."""
        ...


class _Jobs:
    """The leases that are being fulfilled, each by a thread."""

    def __init__(self, builder: Builder, fulfil: Callable[[Job], None]) -> None:
        self._builder = builder
        self._fulfil = fulfil
        self._threads: dict[Digest, threading.Thread] = {}
        self.failure: BaseException | None = None
        """The first error of a job after which the worker must end."""
        self.unavailable = False
        """Whether a job gave its lease back since the loop last paused."""

    def held(self) -> tuple[Digest, ...]:
        return tuple(self._threads)

    def start(self, job: Job) -> None:
        thread = threading.Thread(
            target=self._run, args=(job,), name=f"job {job.lease_digest[:10]}"
        )
        self._threads[job.lease_digest] = thread
        thread.start()

    def _run(self, job: Job) -> None:
        try:
            self._fulfil(job)
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            del self._threads[job.lease_digest]
            self._builder.nudge()

    def join(self) -> None:
        for thread in list(self._threads.values()):
            thread.join()


def work(
    bridge: BridgeClient,
    builder: Builder,
    stop: StopFlag,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Fulfils leases until `stop` is set; `clock` is compared with leases' deadlines. Raises
    UnavailableError if the agent is gone, and what a job could not handle."""
    pause = sleep or stop.sleep

    def fulfil(job: Job) -> None:
        try:
            built = builder.build(job)
        except UnavailableError as error:
            asked = "the worker was asked to stop"
            _give_back(bridge, job, asked if stop.is_set else str(error))
            jobs.unavailable = True
            return
        except PrimeError as error:  # the worker ends
            _give_back(bridge, job, str(error))
            raise
        try:
            _hand_in(bridge, job, built, now=now, sleep=pause, clock=clock)
        finally:
            built.path.unlink(missing_ok=True)  # the outbox has room for few files

    jobs = _Jobs(builder, fulfil)
    slots = 1
    silent_since: float | None = None

    def may_ask() -> bool:
        held = len(jobs.held())
        return jobs.failure is not None or held == 0 or (held < slots and builder.has_room())

    builder.start()
    try:
        while not stop.is_set:
            with stop:
                room = builder.wait_for(may_ask, WAIT_SECONDS)
            if jobs.failure is not None:
                raise jobs.failure
            if stop.is_set or not room:
                continue
            try:
                with stop:
                    if jobs.unavailable:
                        jobs.unavailable = False
                        pause(1.0)
                    builder.announce(bridge)
                    offer = _ask(bridge, jobs.held())
            except UnavailableError:
                silent_since = silent_since if silent_since is not None else now()
                if now() - silent_since > AGENT_PATIENCE:
                    raise
                pause(1.0)
                continue
            silent_since, slots = None, offer.slots
            if offer.lease is not None and offer.domain is not None:
                digest = offer.lease.lease.digest(offer.domain)
                jobs.start(Job(offer.lease, digest, bridge.for_lease(digest)))
    except StopAskedError:
        pass
    finally:
        builder.stop()
        jobs.join()
    if jobs.failure is not None:
        raise jobs.failure


def _ask(bridge: BridgeClient, held: tuple[Digest, ...]) -> LeaseOffer:
    """Asks for a lease. An agent that allows one at a time is never sent `holds`, which an older
    one would refuse."""
    if held:
        return bridge.lease(LeaseWish(wait_seconds=SHORT_WAIT_SECONDS, holds=held))
    return bridge.lease(LeaseWish(wait_seconds=WAIT_SECONDS))


def _hand_in(
    bridge: BridgeClient,
    job: Job,
    built: Built,
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
            sleep(SEND_AGAIN_SECONDS if silent_since is None else 1.0)
        except StopAskedError:
            _give_back(bridge, job, f"the worker was asked to stop, its file not kept: {why}")
            return
    if answer.refused:
        log.error("the file for lease %s was refused: %s", job.lease_digest[:10], answer.refused)
    else:
        tokens, seconds = built.tokens, built.seconds
        state = "accepted for judging" if answer.receipt else "on its way"
        log.info(
            "lease %s: %d tokens in %.1f s, %s; the engine was idle for %.1f s since the file "
            "before, and policy %d took %.1f s to load",
            job.lease_digest[:10], tokens, seconds, state,
            built.idle_seconds, job.signed.policy_version, built.swap_seconds,
        )  # fmt: skip
    _report(bridge, job, built)


def _report(bridge: BridgeClient, job: Job, built: Built) -> None:
    pauses = Pauses(
        policy_version=job.signed.policy_version,
        swap_ms=int(1000 * built.swap_seconds),
        idle_ms=int(1000 * built.idle_seconds),
    )
    try:
        bridge.pauses(pauses)
    except PrimeError as error:
        log.info("the agent does not take how long the engine paused: %s", error)


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
