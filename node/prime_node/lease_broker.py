"""The agent's side of a lease: requests it from the orchestrator, gives it to the worker, takes the
file back. HTTP is in bridge.py and delivery in uploader.py.

One lease is open at a time. The protocol requires it: an unfulfilled lease is returned to its node
before any other, so dropping one gains nothing. While a file is being delivered, the worker may
already wait here; it gets its next lease once the receipt is stored.

A worker makes the same file again for the same lease. If its files are rejected, the lease is not
offered indefinitely but left to expire. A worker incompatible with this agent, which submits files
in another way, gets no more leases.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from prime_core.errors import ConflictError, MalformedError, PrimeError, UnavailableError
from prime_core.gateway import GatewayCall, GatewayRequest
from prime_core.ids import Digest
from prime_core.messages import ClassAnswer, ClassRequest
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import RunDefinition
from prime_core.signing import Domain, Signer
from prime_core.task import SignedLease
from prime_node.api import NodeApi
from prime_node.bridge_messages import (
    Abandon,
    CallAnswer,
    HandIn,
    HandInAnswer,
    LeaseOffer,
    LeaseWish,
)
from prime_node.revisions import Revisions
from prime_node.spool import Spool, TaskUploads
from prime_node.unpaid import UnpaidWork

log = logging.getLogger("prime.node.lease_broker")
SUBMIT_WAIT_SECONDS = 20.0
PAUSED = "the orchestrator gives no work now"
SHORTEST_PAUSE, SLOWEST_ASKING, LONGEST_PAUSE = 0.3, 2.0, 10.0
"""Seconds between lease requests. The orchestrator sets the minimum; we slow down to 2 s."""
CLOCK_SECONDS = 30.0
"""Tolerance for the manager's clock being ahead of ours when a lease's length is checked."""
MOST_FAILURES = 2
"""Files of one lease that may be rejected before it is no longer offered; one may be truncated."""
SILENCE_SHARE = 10
"""One part in so many of a lease's time may pass in calls that the gateway does not answer."""
MOST_SPEED = 2**31 - 1
"""Highest speed that a heartbeat may state."""
UNFIT = (
    "the task's image does not fit this agent: it handed a file in that it had not sent over the "
    "bridge. No lease is taken for it. Another prime-node may fit it, or the pool's operator pins "
    "another image (docs/worker-images.md)"
)


class PoliciesOnDisk(Protocol):
    """The policies on disk, as the lease broker uses them."""

    def newest(self) -> int | None:
        """Returns the newest verified version, or None."""
        ...

    def digest(self, version: int) -> Digest | None:
        """Returns the policy digest of a verified version on disk, or None."""
        ...

    def want(self, version: int) -> None:
        """Requests that a version be fetched; returns immediately."""
        ...


@dataclass(frozen=True)
class Connections:
    """How this node reaches its pool, and how it signs. Requests to the gateway have a connection
    of their own, with a shorter time limit. `domain` is that of statements about work."""

    api: NodeApi
    gateway: NodeApi
    signer: Signer
    domain: Domain


class OpenLease:
    """The lease that the worker has, and the condition on which requests for the next one wait.

    Thread-safe. The LeaseBroker sets the lease; the PolicyKeeper keeps its policy on disk.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.signed: SignedLease | None = None

    def nudge(self) -> None:
        """Wakes waiting requests because their condition may have changed (a policy arrived)."""
        with self.changed:
            self.changed.notify_all()

    def versions(self) -> frozenset[int]:
        """Returns the policy versions that the lease needs on disk."""
        signed = self.signed
        return frozenset() if signed is None else frozenset({signed.policy_version})


@dataclass(frozen=True)
class Deliveries:
    """How the worker's files reach the pool: `uploads` receives them, and `spool` keeps them until
    the pool has them. `unpaid` limits the work that is not paid yet (None without a chain)."""

    uploads: TaskUploads
    spool: Spool
    unpaid: UnpaidWork | None = None


class LeaseBroker:
    """Thread-safe; requests to the orchestrator are made one at a time."""

    def __init__(
        self,
        connections: Connections,
        revisions: Revisions,
        policies: PoliciesOnDisk,
        deliveries: Deliveries,
        open_lease: OpenLease,
        *,
        now: Callable[[], float],
    ) -> None:
        self._api = connections.api
        self._gateway_api = connections.gateway
        self._signer = connections.signer
        self._domain = connections.domain
        self._run = revisions.first
        self._revisions = revisions
        self._wanted: RunDefinition | None = None
        """The run of a lease that waits for its task to replace the current one."""
        self.declined = ""
        """Why no more leases come: this node declines the run of the pool's leases."""
        self._policies = policies
        self._spool = deliveries.spool
        self._task_uploads = deliveries.uploads
        self._now = now
        self.unpaid = deliveries.unpaid
        self._left_open = True
        """Whether the orchestrator may hold an open lease of this node that is not open here: of an
        earlier agent, or given back."""
        self._wishes = 0
        self._api_lock = threading.Lock()
        self._gateway_lock = threading.Lock()
        self._open = open_lease
        self._gate = open_lease.changed
        self._working = False
        self._evaluates = False
        self._closed = False
        self._sent = False
        """Whether the worker began to send a file for the open lease."""
        self._failures: tuple[str, int] = ("", 0)
        """A lease, and how many of its files were rejected."""
        self._silence: tuple[str, float] = ("", 0.0)
        """A lease, and the seconds that passed in its unanswered calls."""
        self._said = ""
        """The last lease whose waiting file was logged."""
        self.trouble = ""
        """Why the task can get no lease at all; empty if it can."""
        self.tokens_per_second = 0

    # -- called by the agent --------------------------------------------------------------------

    def set_working(self, working: bool, *, evaluates: bool = False) -> None:
        """Starts or stops giving out new leases (the heartbeat's directive). `evaluates`: an
        evaluation goes on, so that leases may be of it."""
        with self._gate:
            self._working, self._evaluates = working, evaluates
            self._gate.notify_all()

    def close(self) -> None:
        """Stops issuing leases; waiting requests are answered immediately."""
        with self._gate:
            self._closed = True
            self._gate.notify_all()

    def wanted_run(self) -> RunDefinition | None:
        """Returns the run whose task must replace the current one; None if there is none."""
        return self._wanted

    def use_run(self, run: RunDefinition) -> None:
        """Switches to the task of `run`, which makes all further requests."""
        with self._gate:
            self._run, self._wanted = run, None
            self._wishes += 1  # requests still waiting are from the old task
            self._gate.notify_all()

    def open_leases(self) -> tuple[Digest, ...]:
        """Returns the digests of the leases being worked on or delivered."""
        held = {entry.lease_digest for entry in self._spool.waiting()}
        if (signed := self._open.signed) is not None:
            held.add(signed.lease.digest(self._domain))
        return tuple(sorted(held))

    # -- called for the worker ------------------------------------------------------------------

    def run_definition(self) -> bytes:
        """Returns the bytes of the run whose task should run now."""
        return self._run.raw()

    def exact_class(self, request: ClassRequest) -> ClassAnswer:
        """Passes the worker's exact class on to the orchestrator. Not wanted while the node may
        not work, or if the orchestrator refuses, does not answer, or knows no such classes."""
        if not self._working or self.trouble:
            return ClassAnswer(wanted=False)
        try:
            with self._api_lock:
                return self._api.exact_class(request)
        except PrimeError as error:
            log.info("the exact class of policy %d: %s", request.policy_version, error)
            return ClassAnswer(wanted=False)

    def lease(self, wish: LeaseWish) -> LeaseOffer:
        """Returns a lease whose policy is on disk, or none once the wish's time is over.

        A newer wish ends an older one: it comes from a worker that replaced the earlier one.
        """
        with self._gate:
            self._wishes += 1
            number = self._wishes
            self._gate.notify_all()
        if self.trouble:
            self.give_back_open(self.trouble)
        return self._wait_for_lease(self._now() + wish.wait_seconds, number)

    def _wait_for_lease(self, end: float, number: int) -> LeaseOffer:
        pause = 0.0
        while True:
            if number != self._wishes:
                return LeaseOffer(lease=None, reason="a newer request took this one's place")
            newest = self._policies.newest()
            if self._closed:
                return LeaseOffer(lease=None, reason="the agent is stopping")
            if self.trouble or not self._working or newest is None:
                pause = LONGEST_PAUSE
                idle = PAUSED if newest is not None else "no policy has arrived yet"
                reason = self.trouble or idle
            else:
                offer = self._ask(newest)
                if offer.lease is not None:
                    return offer
                reason = offer.reason
                asked = max(SHORTEST_PAUSE, offer.retry_after_ms / 1000)
                pause = min(LONGEST_PAUSE, max(asked, min(pause * 1.5, SLOWEST_ASKING)))
            left = end - self._now()
            if left <= 0:
                return LeaseOffer(lease=None, reason=reason)
            with self._gate:
                if not self._closed and number == self._wishes:
                    self._gate.wait(min(left, pause))  # OpenLease.nudge and set_working end it

    def _ask(self, newest: int) -> LeaseOffer:
        try:
            with self._api_lock:
                if self._open.signed is None and (why := self._unpaid()):
                    return LeaseOffer(lease=None, retry_after_ms=5000, reason=why[:512])
                answer = self._api.lease(newest, self._revisions.taken(), evaluates=self._evaluates)
        except PrimeError as error:
            log.warning("no lease: %s", error)
            return LeaseOffer(lease=None, retry_after_ms=5000, reason=str(error)[:512])
        if answer.lease is None:
            if answer.run_digest is not None:
                self._revisions.received(answer.run_digest)
                self.declined = self._revisions.why_declined(answer.run_digest)
            return LeaseOffer(
                lease=None,
                retry_after_ms=min(max(answer.retry_after_ms, 0), 60_000),
                reason=answer.reason[:512],
            )
        if why_not := self._objection(answer.lease):
            return LeaseOffer(lease=None, retry_after_ms=1000, reason=why_not)
        self._open.signed, self._sent, self._left_open = answer.lease, False, False
        return LeaseOffer(lease=answer.lease, domain=self._domain)

    def _unpaid(self) -> str:
        """Returns why no new lease is taken because of unpaid work; empty if one may be, or if an
        open lease of this node waits at the orchestrator."""
        why = self.unpaid.why_not() if self.unpaid is not None else ""
        if not why or not self._left_open:
            return why
        held = self._api.leases(self._signer.address)
        waits = any(one.status == "open" and one.deadline > self._now() for one in held)
        return "" if waits else why

    def _objection(self, signed: SignedLease) -> str:
        """Returns why this lease cannot be started now; empty if it can."""
        lease = signed.lease
        handed_in = self._spool.find(lease.digest(self._domain))
        if handed_in is not None:
            if handed_in.state == "refused":
                return f"the open lease's file was refused ({handed_in.reason}); it runs out"
            return "the file for the open lease is on its way"
        failed, times = self._failures
        if failed == lease.digest(self._domain) and times >= MOST_FAILURES:
            return "the task's files for the open lease could not be taken; it runs out"
        if lease.run_digest != self._run.digest():
            return self._other_run(lease.run_digest)
        if not signed.opens():
            return "the lease's salt names no draws: its file could be judged by a chosen draw"
        if not self._run.fresh(lease.step, signed.policy_version):
            return (
                f"the lease's policy {signed.policy_version} is too old for batch {lease.step}: "
                "its file would be void"
            )
        if (signed.heldout or 0) >= max(1, self._run.environment.heldout_size):
            return f"the lease asks held-out problem {signed.heldout}, which the run does not have"
        if lease.deadline <= self._now():
            return "the open lease has run out; it expires by itself"
        if lease.deadline > self._now() + self._run.lease_seconds + CLOCK_SECONDS:
            return "the lease is longer than the pool's: validators appointed later could judge it"
        on_disk = self._policies.digest(signed.policy_version)
        if on_disk is None:
            self._policies.want(signed.policy_version)
            return f"policy {signed.policy_version} is being fetched"
        if on_disk != lease.policy_digest:
            return f"policy {signed.policy_version} on disk is not the one that the lease names"
        return ""

    def _other_run(self, digest: Digest) -> str:
        """Handles a lease of a different run than the task's; returns why it cannot be started
        now."""
        self._wanted = self._revisions.get(digest)
        if self._wanted is not None:
            return f"the lease is of run {digest}: its task takes this one's place"
        self._revisions.received(digest)
        declined = self._revisions.why_declined(digest)
        return declined or f"run {digest} of the lease is being prepared"

    def receive(self, name: str, size: int, read: Callable[[int], bytes]) -> None:
        """Receives the bytes of a finished file, before `submit` submits it. Raises what
        `TaskUploads.receive` does, and ConflictError if no lease is open."""
        signed = self._open.signed
        if signed is None:
            raise ConflictError("no lease is open: no file is taken")
        self._sent = True
        with self._noting(signed):
            self._task_uploads.receive(name, size, read)

    def submit(self, hand_in: HandIn) -> HandInAnswer:
        """Journals a received file, signs its submission, and waits a while for the receipt. Raises
        MalformedError (bad name, size), ConflictError (not the open lease)."""
        signed = self._open.signed
        if signed is None or signed.lease.digest(self._domain) != hand_in.lease_digest:
            raise ConflictError("this lease is not the one that is open")
        with self._noting(signed):
            file = self._spool.take_in(self._task_uploads.folder, hand_in.file)
        submission = Submission(
            pool=signed.lease.pool,
            lease_digest=hand_in.lease_digest,
            node=self._signer.address,
            step=signed.lease.step,
            policy_digest=signed.lease.policy_digest,
            sha256=file.sha256,
            size=file.size,
            rows=self._run.rows_per_lease,
            valid_until=signed.lease.deadline,
        )
        digest = submission.digest(self._domain)
        body = SignedSubmission(
            submission=submission,
            node=self._signer.address,
            signature=self._signer.sign(submission, self._domain),
        )
        with self._noting(signed):
            worth = 0 if signed.lease.shadow else self._run.unjudged_worth(hand_in.tokens)
            self._spool.add(digest, body, signed, worth=worth)
        self._open.signed = None
        (self._task_uploads.folder / hand_in.file).unlink(missing_ok=True)
        if hand_in.milliseconds:
            self.tokens_per_second = speed(hand_in)
        return self._await_receipt(hand_in.lease_digest, digest)

    @contextmanager
    def _noting(self, signed: SignedLease) -> Iterator[None]:
        """Records why a lease's file is not accepted: problems of this machine are logged once,
        faults of the worker are counted."""
        lease = signed.lease.digest(self._domain)
        try:
            yield
        except UnavailableError as error:
            if self._said != lease:
                self._said = lease
                log.warning("the task's file for lease %s has to wait: %s", lease[:10], error)
            raise
        except MalformedError as error:
            failed, times = self._failures
            self._failures = (lease, times + 1 if failed == lease else 1)
            log.error("the task's file for lease %s is not taken: %s", lease[:10], error)
            if not self._sent and not self.trouble:
                self.trouble = UNFIT
                log.error("%s", UNFIT)
            raise

    def _await_receipt(self, lease_digest: Digest, digest: Digest) -> HandInAnswer:
        end = self._now() + SUBMIT_WAIT_SECONDS
        with self._spool.changed:
            while True:
                entry = self._spool.find(lease_digest)
                assert entry is not None, "it was journalled above"
                left = end - self._now()
                if entry.state != "spooled" or left <= 0 or self._closed:
                    return HandInAnswer(
                        submission_digest=digest, receipt=entry.receipt, refused=entry.reason
                    )
                self._spool.changed.wait(min(left, 1.0))

    def call(self, call: GatewayCall) -> CallAnswer:
        """Sends a call of the open lease to the pool's gateway, signed by this node, and checks the
        gateway's signature. Without a valid answer, says why. A gateway that was silent too long in
        this lease is asked no more, so that the lease's file is made in time. Raises ConflictError
        if no lease is open or its run has no gateway."""
        signed, conversation = self._open.signed, self._run.conversation
        if signed is None or conversation is None or conversation.gateway is None:
            raise ConflictError("no lease with a gateway is open: no call is made")
        lease_digest, gateway = signed.lease.digest(self._domain), conversation.gateway
        empty = call.statement(lease_digest, "")
        request = GatewayRequest(
            lease=signed, call=call, signature=self._signer.sign(empty, self._domain)
        )
        with self._gateway_lock:
            silent_in, silence = self._silence
            if silent_in != lease_digest:
                silence = 0.0
            if silence > self._run.lease_seconds / SILENCE_SHARE:
                reason = "the gateway was silent too long in this lease"
                return CallAnswer(answer=None, reason=reason)
            began = self._now()
            try:
                answer = self._gateway_api.call(gateway, request)
                answer.require(call, lease_digest, gateway.key)
            except PrimeError as error:
                self._silence = lease_digest, silence + self._now() - began
                log.warning("the gateway at %s gave no answer: %s", gateway.url, error)
                return CallAnswer(answer=None, reason=str(error)[:512])
        return CallAnswer(answer=answer)

    def abandon(self, body: Abandon) -> None:
        """Gives the open lease back; the orchestrator will offer it to this node again."""
        signed = self._open.signed
        if signed is None or signed.lease.digest(self._domain) != body.lease_digest:
            raise ConflictError("this lease is not the one that is open")
        self._give_back(body.lease_digest, body.reason or "no reason")

    def give_back_open(self, reason: str) -> None:
        """Gives back the lease that an ended worker still held, if any."""
        if (signed := self._open.signed) is not None:
            self._give_back(signed.lease.digest(self._domain), reason)

    def _give_back(self, lease_digest: Digest, reason: str) -> None:
        self._open.signed, self._left_open = None, True
        log.warning("lease %s given back: %s", lease_digest[:10], reason)
        try:
            with self._api_lock:
                self._api.abandon(lease_digest)
        except (UnavailableError, ConflictError) as error:
            log.warning("the orchestrator did not take it back (%s); it runs out by itself", error)


def speed(hand_in: HandIn) -> int:
    """Returns the tokens per second that the worker claims, at most MOST_SPEED: a number that the
    orchestrator refuses would stop all heartbeats of the agent."""
    return min(MOST_SPEED, hand_in.tokens * 1000 // hand_in.milliseconds)
