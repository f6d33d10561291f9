"""The agent's side of a lease: requests it from the orchestrator, gives it to the worker, takes the
file back. HTTP is in bridge.py and delivery in uploader.py.

As many leases are open at once as orchestrator and owner allow, one by default. An unfulfilled
lease is returned to its node before any other, so dropping one gains nothing. A lease counts until
its file is delivered: the worker may already wait here, and gets its next lease once a place is
free.

A worker makes the same file again for the same lease. If its files are rejected, the lease is not
offered indefinitely but left to expire. A worker incompatible with this agent, which submits files
in another way, gets no more leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from prime_core import tracing
from prime_core.errors import ConflictError, MalformedError, PrimeError, UnavailableError
from prime_core.gateway import GatewayCall, GatewayRequest
from prime_core.ids import Digest
from prime_core.logs import fields
from prime_core.messages import MOST_SLOTS, ClassAnswer, ClassRequest
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
    Pauses,
    file_name,
)
from prime_node.revisions import Revisions
from prime_node.spool import Spool, TaskUploads
from prime_node.unpaid import UnpaidWork, tokens_in

log = logging.getLogger("prime.node.lease_broker")
SUBMIT_WAIT_SECONDS = 20.0
PAUSED = "the orchestrator gives no work now"
ALL_TAKEN = "%d leases are open, as many as this node may hold"
SHORTEST_PAUSE, SLOWEST_ASKING, LONGEST_PAUSE = 0.3, 2.0, 10.0
"""Seconds between lease requests. The pause grows from the first to the second value, or is what
the orchestrator asks for if that is longer (at most a minute). The third applies while this node
cannot take a lease and sends no request."""
WAITING_SECONDS = 60.0
"""While unpaid work stops this node, it asks this often whether an open lease of its own waits at
the orchestrator. It knows its leases, but for those that it gave back or lost in a crash."""
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
    """How this node reaches its pool, and how it signs. Requests to the gateway have a client of
    their own, with a shorter time limit. `domain` is that of statements about work."""

    api: NodeApi
    gateway: NodeApi
    signer: Signer
    domain: Domain


@dataclass
class Held:
    """One open lease. `sent`: the worker began to send a file for it. `said`: a warning that its
    file has to wait was logged. `calling` is held during each call of the gateway; `silence`: total
    seconds of unanswered calls."""

    signed: SignedLease
    sent: bool = False
    said: bool = False
    silence: float = 0.0
    calling: threading.Lock = field(default_factory=threading.Lock)


class OpenLeases:
    """The leases that the worker has, by digest, and the condition on which requests for the next
    one wait.

    Thread-safe. The LeaseBroker changes it; the PolicyKeeper keeps the leases' policies on disk.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._held: dict[Digest, Held] = {}

    def nudge(self) -> None:
        """Wakes waiting requests because their condition may have changed (a policy arrived)."""
        with self.changed:
            self.changed.notify_all()

    def all(self) -> dict[Digest, Held]:
        """Returns the open leases, in the order in which they were given."""
        with self.changed:
            return dict(self._held)

    def add(self, digest: Digest, signed: SignedLease, keep: Collection[Digest] = ()) -> None:
        """Opens a lease and closes all others except those in `keep`. The orchestrator returns open
        leases first, so a lease that it passed over has ended."""
        with self.changed:
            before = self._held.get(digest)
            self._held = {one: held for one, held in self._held.items() if one in keep}
            self._held[digest] = Held(signed, silence=before.silence if before else 0.0)

    def remove(self, digest: Digest) -> None:
        """Closes a lease: its file is journalled, or it is given back."""
        with self.changed:
            self._held.pop(digest, None)
            self.changed.notify_all()

    def versions(self) -> frozenset[int]:
        """Returns the policy versions that the leases need on disk."""
        return frozenset(held.signed.policy_version for held in self.all().values())


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
        open_leases: OpenLeases,
        *,
        now: Callable[[], float],
        most_slots: int = 0,
    ) -> None:
        """`most_slots`: the owner's limit of leases open at once; 0: that of the orchestrator."""
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
        self._wishes = 0
        self._api_lock = threading.Lock()
        self._open = open_leases
        self._gate = open_leases.changed
        self._working = False
        self._evaluates = False
        self._closed = False
        self._most_slots = min(most_slots or MOST_SLOTS, MOST_SLOTS)
        self._slots = 1
        self._none_waits_until = 0.0
        """No open lease of this node waits at the orchestrator until then (Unix seconds)."""
        self._failures: dict[Digest, int] = {}
        """Number of rejected files by lease, for the latest leases that have any."""
        self.trouble = ""
        """Why the task can get no lease at all; empty if it can."""
        self._speeds: deque[int] = deque(maxlen=MOST_SLOTS)
        """Tokens per second in each of the latest files, newest last."""
        self.pauses: Pauses | None = None
        """The worker's latest; None if it said nothing."""
        self.tokens_per_second = 0
        """The sum of the speeds of as many latest files as leases were open at once."""

    # -- called by the agent --------------------------------------------------------------------

    def set_working(self, working: bool, *, evaluates: bool = False, slots: int = 1) -> None:
        """Starts or stops giving out new leases (the heartbeat's directive). `evaluates`: an
        evaluation goes on, so that leases may be of it. `slots`: how many leases may be open."""
        with self._gate:
            self._working, self._evaluates = working, evaluates
            self._slots = min(slots, self._most_slots)
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
        delivered = {entry.lease_digest for entry in self._spool.waiting()}
        return tuple(sorted(delivered | self._open.all().keys()))

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

        A lease that is open here and not among the worker's comes before any other: its worker was
        restarted. A newer wish ends an older one, which is of such a worker.
        """
        with self._gate:
            self._wishes += 1
            number = self._wishes
            self._gate.notify_all()
        if self.trouble:
            self.give_back_open(self.trouble)
        offer = self._wait_for_lease(self._now() + wish.wait_seconds, number, wish.holds)
        return offer.model_copy(update={"slots": self._slots})

    def _wait_for_lease(self, end: float, number: int, holds: Collection[Digest]) -> LeaseOffer:
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
                offer = self._ask(newest, holds)
                if offer.lease is not None:
                    return offer
                reason = offer.reason
                asked = max(SHORTEST_PAUSE, offer.retry_after_ms / 1000)
                pause = max(asked, min(pause * 1.5, SLOWEST_ASKING))
            left = end - self._now()
            if left <= 0:
                return LeaseOffer(lease=None, reason=reason)
            with self._gate:
                if not self._closed and number == self._wishes:
                    self._gate.wait(min(left, pause))  # OpenLease.nudge and set_working end it

    def _ask(self, newest: int, holds: Collection[Digest]) -> LeaseOffer:
        """Asks the orchestrator once for a worker that works on the leases `holds`."""
        slots, opened = self._slots, self._open.all()
        busy = {one for one in opened if one in holds}
        working = bool(busy)
        try:
            if slots > 1:
                busy |= {entry.lease_digest for entry in self._spool.waiting()}
            if len(busy) >= slots:
                return LeaseOffer(lease=None, retry_after_ms=1000, reason=ALL_TAKEN % len(busy))
            with self._api_lock:
                if opened.keys() <= busy and (why := self._unpaid(busy)):
                    return LeaseOffer(lease=None, retry_after_ms=5000, reason=why[:512])
                named = sorted(busy) if slots > 1 else ()
                answer = self._api.lease(
                    newest, self._revisions.taken(), evaluates=self._evaluates, holds=named
                )
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
        digest = answer.lease.lease.digest(self._domain)
        if why_not := self._objection(answer.lease, digest, working=working):
            return LeaseOffer(lease=None, retry_after_ms=1000, reason=why_not)
        if digest in busy:
            return LeaseOffer(lease=None, retry_after_ms=1000, reason="the lease is worked on")
        self._open.add(digest, answer.lease, keep=busy)
        lease = answer.lease.lease
        about = fields(
            kind="lease", status="taken", lease=digest, node=lease.node, step=lease.step,
            policy=answer.lease.policy_version,
        )  # fmt: skip
        log.info("lease %s of step %d is taken", digest[:10], lease.step, extra=about)
        return LeaseOffer(lease=answer.lease, domain=self._domain)

    def _unpaid(self, busy: Collection[Digest]) -> str:
        """Returns why no new lease is taken because of unpaid work; empty if one may be, or if an
        open lease of this node outside `busy` waits at the orchestrator."""
        why = self.unpaid.why_not() if self.unpaid is not None else ""
        if not why or 0 < self._none_waits_until - self._now() <= WAITING_SECONDS:
            return why
        waits = any(
            one.status == "open" and one.deadline > self._now() and one.digest not in busy
            for one in self._api.leases(self._signer.address)
        )
        self._none_waits_until = 0.0 if waits else self._now() + WAITING_SECONDS
        return "" if waits else why

    def _objection(self, signed: SignedLease, digest: Digest, *, working: bool) -> str:
        """Returns why this lease cannot be started now; empty if it can. `working`: the worker has
        others."""
        lease = signed.lease
        handed_in = self._spool.find(digest)
        if handed_in is not None:
            if handed_in.state == "refused":
                return f"the open lease's file was refused ({handed_in.reason}); it runs out"
            return "the file for the open lease is on its way"
        if self._failures.get(digest, 0) >= MOST_FAILURES:
            return "the task's files for the open lease could not be taken; it runs out"
        if lease.run_digest != self._run.digest():
            return self._other_run(lease.run_digest, working=working)
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

    def _other_run(self, digest: Digest, *, working: bool) -> str:
        """Handles a lease of a different run than the task's; returns why it cannot be started
        now."""
        wanted = self._revisions.get(digest)
        if wanted is not None and working:
            return f"the lease is of run {digest}: the leases of the run before it come first"
        self._wanted = wanted
        if self._wanted is not None:
            return f"the lease is of run {digest}: its task takes this one's place"
        self._revisions.received(digest)
        declined = self._revisions.why_declined(digest)
        return declined or f"run {digest} of the lease is being prepared"

    def receive(self, name: str, size: int, read: Callable[[int], bytes]) -> None:
        """Receives the bytes of a finished file, before `submit` submits it. While several leases
        are open, the file's name says of which one it is. Raises what `TaskUploads.receive` does,
        and ConflictError if no such lease is open."""
        opened = self._open.all()
        if not opened:
            raise ConflictError("no lease is open: no file is taken")
        named = [one for one in opened if len(opened) == 1 or file_name(one) == name]
        if not named:
            raise ConflictError("no open lease has a file of this name: it is refused")
        digest, held = named[0], opened[named[0]]
        held.sent = True
        with self._recording_problems(digest, held):
            others = {file_name(one) for one in opened if one != digest}
            self._task_uploads.receive(name, size, read, keep=others)

    def submit(self, hand_in: HandIn) -> HandInAnswer:
        """Journals a received file, signs its submission, and waits a while for the receipt. Raises
        MalformedError (bad name, size), ConflictError (not an open lease)."""
        held = self._held(hand_in.lease_digest)
        signed = held.signed
        with self._recording_problems(hand_in.lease_digest, held):
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
        with self._recording_problems(hand_in.lease_digest, held):
            made = tokens_in(file.path, hand_in.tokens)
            worth = 0 if signed.lease.shadow else self._run.unjudged_worth(made)
            self._spool.add(digest, body, signed, worth=worth)
        at_once = len(self._open.all())
        self._open.remove(hand_in.lease_digest)
        (self._task_uploads.folder / hand_in.file).unlink(missing_ok=True)
        ended = time.time()
        began = ended - hand_in.milliseconds / 1000
        tracing.record(hand_in.lease_digest, "generate", began, ended, tokens=hand_in.tokens)
        if hand_in.milliseconds:
            self._speeds.append(speed(hand_in))
            self.tokens_per_second = min(MOST_SPEED, sum(list(self._speeds)[-at_once:]))
        return self._await_receipt(hand_in.lease_digest, digest)

    def _held(self, lease_digest: Digest) -> Held:
        """Returns an open lease. Raises ConflictError if it is not open."""
        held = self._open.all().get(lease_digest)
        if held is None:
            raise ConflictError("this lease is not open")
        return held

    @contextmanager
    def _recording_problems(self, lease: Digest, held: Held) -> Iterator[None]:
        """Records why a lease's file is not accepted: problems of this machine are logged once,
        faults of the worker are counted."""
        try:
            yield
        except UnavailableError as error:
            if not held.said:
                held.said = True
                log.warning("the task's file for lease %s has to wait: %s", lease[:10], error)
            raise
        except MalformedError as error:
            times = self._failures.pop(lease, 0) + 1
            self._failures = dict([*self._failures.items(), (lease, times)][-MOST_SLOTS:])
            log.error("the task's file for lease %s is not taken: %s", lease[:10], error)
            if not held.sent and not self.trouble:
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

    def call(self, call: GatewayCall, lease_digest: Digest | None = None) -> CallAnswer:
        """Sends a call of an open lease (None: of the only one) to the pool's gateway, signed by
        this node, and checks the gateway's signature. Without a valid answer, says why. A gateway
        that was silent too long in this lease is asked no more, so that the lease's file is made in
        time. Raises ConflictError if that lease is not open or its run has no gateway."""
        opened, conversation = self._open.all(), self._run.conversation
        if not opened or conversation is None or conversation.gateway is None:
            raise ConflictError("no lease with a gateway is open: no call is made")
        if lease_digest is None and len(opened) > 1:
            raise ConflictError("several leases are open, and the call names none of them")
        lease_digest = lease_digest or next(iter(opened))
        held, gateway = self._held(lease_digest), conversation.gateway
        empty = call.statement(lease_digest, "")
        request = GatewayRequest(
            lease=held.signed, call=call, signature=self._signer.sign(empty, self._domain)
        )
        with held.calling:
            if held.silence > self._run.lease_seconds / SILENCE_SHARE:
                reason = "the gateway was silent too long in this lease"
                return CallAnswer(answer=None, reason=reason)
            began = self._now()
            try:
                answer = self._gateway_api.call(gateway, request)
                answer.require(call, lease_digest, gateway.key)
            except PrimeError as error:
                held.silence += self._now() - began
                log.warning(
                    "the gateway at %s gave no answer to %s (group %d, sample %d, turn %d): %s",
                    gateway.url, call.tool, *call.place, error,
                )  # fmt: skip
                return CallAnswer(answer=None, reason=str(error)[:512])
        return CallAnswer(answer=answer)

    def abandon(self, body: Abandon) -> None:
        """Gives an open lease back; the orchestrator will offer it to this node again."""
        self._held(body.lease_digest)
        self._give_back(body.lease_digest, body.reason or "no reason")

    def give_back_open(self, reason: str) -> None:
        """Gives back the leases that an ended worker still held, if any."""
        for lease_digest in self._open.all():
            self._give_back(lease_digest, reason)

    def _give_back(self, lease_digest: Digest, reason: str) -> None:
        self._open.remove(lease_digest)
        self._none_waits_until = 0.0
        about = fields(
            kind="lease", status="returned", lease=lease_digest, node=self._signer.address,
            reason=reason,
        )  # fmt: skip
        log.warning("lease %s given back: %s", lease_digest[:10], reason, extra=about)
        try:
            with self._api_lock:
                self._api.abandon(lease_digest)
        except PrimeError as error:
            log.warning("the orchestrator did not take it back (%s); it expires by itself", error)


def speed(hand_in: HandIn) -> int:
    """Returns the tokens per second that the worker claims, at most MOST_SPEED: a number that the
    orchestrator refuses would stop all heartbeats of the agent."""
    return min(MOST_SPEED, hand_in.tokens * 1000 // hand_in.milliseconds)
