"""The heartbeat: the agent's only control loop. Its answer decides what happens next.

join        the owner's part and the challenge (join.py)
work        the task runs; the lease broker gives leases
wait        the lease broker gives no leases
stop        the agent ends and logs why
prove_cards_by  no lease is taken; once the open ones are delivered, the task ends, so that nothing
            else runs on the cards, and they are proven again
no answer   work goes on; the heartbeat is retried with growing pauses
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from prime_core.errors import PolicyError, PrimeError, UnavailableError, UserError
from prime_core.logs import fields
from prime_core.messages import FileEnding, Heartbeat, HeartbeatAnswer
from prime_core.run import RunDefinition
from prime_core.verdict import Reason
from prime_node.api import NodeApi
from prime_node.config import RuntimeName
from prime_node.join import Join
from prime_node.lease_broker import LeaseBroker
from prime_node.policies import PolicyKeeper
from prime_node.revisions import Revisions
from prime_node.runtime.base import WorkerOptions
from prime_node.spool import Spool
from prime_node.state import AgentStatus, DataFolder
from prime_node.task import TaskKeeper
from prime_node.watched import WatchedThread

log = logging.getLogger("prime.node")
TICK_SECONDS = 1.0
ENDINGS_SHOWN = 3
LONGEST_SILENCE = 15.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
FIRST_PROOF_PAUSE, LONGEST_PROOF_PAUSE = 60.0, 900.0
REPLACE_SECONDS = 20.0
"""Time a task gets to end before the task of a later run starts."""
FINAL_ERRORS = (UserError, PolicyError)
"""Errors that retrying cannot fix."""


@dataclass(frozen=True)
class Parts:
    """What the heartbeat controls. `options` are those of a run's task. `threads` are required for
    the work."""

    broker: LeaseBroker
    keeper: PolicyKeeper
    spool: Spool
    join: Join
    task: TaskKeeper
    revisions: Revisions
    options: Callable[[RunDefinition], WorkerOptions]
    threads: Sequence[WatchedThread] = ()


class HeartbeatLoop:
    """Sends heartbeats, follows the answers, manages the task. Runs in the main thread.

    Raises FatalError once one of the parts' threads has died.
    """

    def __init__(
        self,
        api: NodeApi,
        parts: Parts,
        *,
        data: DataFolder,
        runtime: RuntimeName,
        now: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        self._threads = parts.threads
        self._data = data
        self._instance = data.instance()
        self._runtime = runtime
        self._version = version("prime-open")
        self._now = now
        self._stop = stop
        self._started_at = int(now())
        self._api = api
        self._beat_seconds = parts.revisions.first.heartbeat_seconds
        self._broker = parts.broker
        self._keeper = parts.keeper
        self._spool = parts.spool
        self._join = parts.join
        self._task = parts.task
        self._revisions = parts.revisions
        self._options = parts.options
        self._directive = ""
        self._silent_since: float | None = None
        self._heard_at = 0
        self._heartbeat_ms = 0
        self._next_beat = 0.0
        self._join_pause = 1.0
        self._next_task_check = 0.0
        self._task_pause = FIRST_PAUSE
        self._member = False
        self._proves = False
        """The latest answer asks for a proof of the cards."""
        self._drained = False
        """All leases were delivered and the task was stopped for it."""
        self._next_proof = 0.0
        self._proof_pause = FIRST_PROOF_PAUSE

    def run(self) -> int:
        while not self._stop.is_set():
            for thread in self._threads:
                thread.check()
            if time.monotonic() >= self._next_beat:
                status = self._beat()
                if status is not None:
                    return status
            if self._broker.declined and not self._broker.open_leases():
                raise PolicyError(
                    f"this node declines the pool's run: {self._broker.declined}. All of its work "
                    "is delivered; change the limit, or give the seat up with: prime-node leave"
                )
            if self._member and not self._drained:
                self._manage_task()
            self._stop.wait(max(0.05, min(TICK_SECONDS, self._next_beat - time.monotonic())))
        log.warning("asked to stop: open leases are finished or given back")
        return 0

    def _manage_task(self) -> None:
        """Manages the task; an engine that does not answer is retried with growing pauses."""
        if time.monotonic() < self._next_task_check:
            return
        try:
            if (run := self._broker.wanted_run()) is not None:
                log.info("the task of run %s replaces the current one", run.digest())
                self._task.replace(run.task, self._options(run), REPLACE_SECONDS)
                self._broker.use_run(run)
            self._task.keep_running()
            self._task_pause = FIRST_PAUSE
        except UnavailableError as error:
            log.warning(
                "the task cannot be managed: %s; trying again in %.0f s", error, self._task_pause
            )
            self._next_task_check = time.monotonic() + self._task_pause
            self._task_pause = min(LONGEST_PAUSE, self._task_pause * 2)

    def _beat(self) -> int | None:
        """Sends one heartbeat and follows its answer; returns an exit status if the agent must
        end."""
        self._next_beat = time.monotonic() + self._beat_seconds
        try:
            body = self._body()
            asked_at = time.monotonic()
            answer = self._for_this_agent(self._api.heartbeat(body))
            self._heartbeat_ms = round(1000 * (time.monotonic() - asked_at))
        except FINAL_ERRORS:
            raise
        except PrimeError as error:
            self._proves = False  # an older orchestrator in this one's place would refuse it
            self._note_silence(error)
            return None
        if self._silent_since is not None:
            log.warning("the orchestrator answers again")
            self._silent_since = None
        self._keeper.note_answer(answer.latest_version, answer.relays)
        self._keeper.mark_reported(body.lied)
        self._take_endings(answer)
        if answer.run_digest is not None:
            self._revisions.received(answer.run_digest)
        status = self._follow(answer)
        try:
            self._write_status(answer)
        except UnavailableError as error:
            log.warning("`prime-node status` is not up to date: %s", error)
        return status

    def _take_endings(self, answer: HeartbeatAnswer) -> None:
        """Logs each file that was not accepted once, with the reason; `status` shows the newest."""
        try:
            for ending in answer.endings:
                if self._spool.note(ending):
                    about = fields(
                        kind="verdict", status=ending.status, submission=ending.submission_digest,
                        lease=ending.lease_digest, reason=_name(ending.reason),
                    )  # fmt: skip
                    log.warning("the file %s", _sentence(ending), extra=about)
        except UnavailableError as error:
            log.warning("the verdicts cannot be stored: %s", error)
            return  # not stored: they are sent again
        self._heard_at = answer.server_time

    def _body(self) -> Heartbeat:
        try:
            leases = self._broker.open_leases()[:64]
        except UnavailableError as error:  # informational: send the heartbeat without them
            log.warning("cannot read the spool, so this heartbeat names no open lease: %s", error)
            leases = ()
        return Heartbeat(
            policy_version=self._keeper.newest(),
            leases=leases,
            tokens_per_second=self._broker.tokens_per_second,
            runtime=self._runtime,
            version=self._version,
            heard_at=self._heard_at,
            lied=self._keeper.bad_sources(),
            instance=self._instance,
            proves=self._proves,
        )

    def _note_silence(self, error: PrimeError) -> None:
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            log.warning(
                "the orchestrator does not answer: %s; work continues, the next heartbeat is tried",
                error,
            )
        silence = time.monotonic() - self._silent_since
        self._next_beat += min(LONGEST_SILENCE, silence)

    def _for_this_agent(self, answer: HeartbeatAnswer) -> HeartbeatAnswer:
        """Adapts the answer to how this agent was started: a paid agent whose node is in shadow
        must join. Raises PolicyError if a shadow agent's node has a seat."""
        if self._api.shadow and answer.status in ("active", "silent", "admitted"):
            raise PolicyError(
                "this node has a seat, and --shadow would put its stake at risk: leave the pool "
                "first (prime-node leave), or use another --wallet"
            )
        if not self._api.shadow and answer.status == "shadow":
            return answer.model_copy(update={"directive": "join", "reason": "it worked in shadow"})
        return answer

    def _follow(self, answer: HeartbeatAnswer) -> int | None:
        if answer.directive != self._directive:
            log.info(
                "directive %s %s", answer.directive, f"({answer.reason})" * bool(answer.reason)
            )
            self._directive = answer.directive
        self._member |= answer.directive == "work"
        if answer.prove_cards_by is None and not self._join.measuring:
            self._proves = self._drained = False
            self._next_proof, self._proof_pause = 0.0, FIRST_PROOF_PAUSE
        self._broker.set_working(
            answer.directive == "work" and not self._drained,
            evaluates=answer.evaluates,
            slots=answer.lease_slots,
        )
        if answer.directive == "stop":
            if answer.another_machine:
                raise PolicyError(answer.reason)
            if answer.status == "ejected":
                raise PolicyError(f"the orchestrator says stop: {answer.reason}")
            log.warning("the orchestrator says stop: %s", answer.reason)
            return 0
        if answer.directive == "join":
            self._try_to_join()
        elif answer.prove_cards_by is not None:
            self._prove_again()
        elif answer.measure:
            self._join.measure()
        return None

    def _prove_again(self) -> None:
        """Acknowledges the request in the next heartbeat; the orchestrator then gives no new lease.
        Proves the cards once all leases are delivered and the task has ended."""
        if not self._proves:
            log.info("the pool asks for a new proof of the cards; open leases are delivered first")
            self._proves, self._next_beat = True, time.monotonic()
            return
        if self._join.measuring or time.monotonic() < self._next_proof:
            return
        try:
            if self._broker.open_leases():
                return
        except UnavailableError as error:
            log.warning("cannot read the spool, so the proof of the cards waits: %s", error)
            return
        self._drained = True
        self._broker.set_working(False)
        try:
            self._task.stop(REPLACE_SECONDS)
        except UnavailableError as error:
            log.warning("the task does not end, so the proof of the cards waits: %s", error)
            return
        self._next_proof = time.monotonic() + self._proof_pause
        self._proof_pause = min(LONGEST_PROOF_PAUSE, 2 * self._proof_pause)
        self._join.measure()

    def _try_to_join(self) -> None:
        try:
            self._join.step()
            self._join_pause = 1.0
            self._next_beat = time.monotonic() + min(1.0, self._beat_seconds)
        except FINAL_ERRORS:
            raise
        except PrimeError as error:
            log.warning("joining: %s; trying again in %.0f s", error, self._join_pause)
            self._next_beat = time.monotonic() + self._join_pause
            self._join_pause = min(60.0, self._join_pause * 2)

    def _write_status(self, answer: HeartbeatAnswer) -> None:
        signer, unpaid = self._api.client.signer, self._broker.unpaid
        owed = unpaid.owed() if unpaid is not None else None
        pauses = self._broker.pauses
        why_idle = unpaid.why_not() if unpaid is not None else ""
        assert signer is not None, "a node's client signs"
        self._data.write_status(
            AgentStatus(
                node=signer.address,
                pool=self._api.client.pool().pool,
                pid=os.getpid(),
                started_at=self._started_at,
                heard_at=int(self._now()),
                heartbeat_ms=self._heartbeat_ms,
                directive=answer.directive,
                reason=answer.reason or self._broker.trouble or why_idle,
                node_status=answer.status,
                policy_version=self._keeper.newest(),
                latest_version=answer.latest_version,
                files=self._spool.counts(),
                not_accepted=tuple(_sentence(e) for e in self._spool.endings(ENDINGS_SHOWN)),
                tokens_per_second=self._broker.tokens_per_second,
                swap_seconds=None if pauses is None else pauses.swap_ms / 1000,
                idle_seconds=None if pauses is None else pauses.idle_ms / 1000,
                task=self._task.description if self._member else "not started",
                unpaid=str(owed) if owed is not None else None,
            )
        )


def _sentence(ending: FileEnding) -> str:
    """Returns which file ended, how and why."""
    reason = _name(ending.reason)
    return f"{ending.submission_digest} is {ending.status} ({reason}): {ending.detail}"


def _name(reason: int) -> str:
    """Returns a reason's name; its number if a newer orchestrator gives it."""
    return Reason(reason).name if reason in set(Reason) else f"{reason}"
