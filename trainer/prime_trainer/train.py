"""The training loop of `trainer run`.

    rank 0, a thread                 every rank                            rank 0, a thread
    ────────────────                 ──────────                            ────────────────
    wait for batch s + 1             take batch s            (prefetch)
    fetch by signed URLs               └ shared with every rank
    check every row  (data)          advantages in each group (advantages)
    hold it, and wait                a weight for each token (loss)
                                     plan: ranks, rows, micro-batches (packing)
                                     ┌ forward, −J, backward for each micro-batch
                                     └ gradients summed over ranks in the last one
                                     finite? clip, AdamW; else skip and say so
                                     alarms                  (alarms)
                                     wait until s − 1 is saved and published
                                     copy weights and optimizer to CPU ──► write checkpoint s + 1
                                     batch s + 1 …                         metrics line s
                                                                           export, load it once,
                                                                           sign, serve, submit

A version is published only from a checkpoint on disk, so that a killed trainer publishes the same
bytes again. At most one checkpoint and one publication are in progress. Batch s always trains
policy s into s + 1: if the gradient is not finite or the batch is skipped, the weights are
published unchanged under the new number. Every wait has a name in the step's line: `seconds` is
the loop's own time, `background` the time of the two threads.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from prime_core.errors import FatalError, MalformedError, PolicyError, UntrustedError
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import StoppedError
from prime_trainer import checkpoint
from prime_trainer.alarms import alarms_of
from prime_trainer.checkpoint import Saving, TrainerState
from prime_trainer.data import BatchRules, GroupKey, TrainingBatch, assemble
from prime_trainer.feed import PoolFacts, fetcher, insist, wait_for_batch
from prime_trainer.learner import Learner, train_step
from prime_trainer.metrics import MetricsFile, Stopwatch
from prime_trainer.observe import Observers
from prime_trainer.parallel import published_state
from prime_trainer.prefetch import Prefetcher
from prime_trainer.publish import Origin, Publisher, publish_state
from prime_trainer.wire import BadBatch, decode, encode

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


class Trainer:
    """One trainer process of a run: the loop and its external dependencies."""

    def __init__(
        self,
        learner: Learner,
        facts: PoolFacts,
        client: OrchestratorClient,
        publisher: Publisher | None,
        origin: Origin | None,
        stop: threading.Event,
        observers: Observers | None = None,
    ) -> None:
        self.learner, self.facts, self.client = learner, facts, client
        self.publisher, self.origin, self.stop = publisher, origin, stop
        self.world, self.data = learner.world, learner.settings.data
        self.metrics = MetricsFile(self.data / "metrics.jsonl")
        self.observers = observers or Observers.none()
        self.rules = BatchRules(
            run=facts.run,
            pool=facts.info.pool,
            manager=facts.info.manager,
            domain=facts.domain("work"),
            vocabulary=int(learner.policy.lm.config.vocab_size),
        )
        self.recent: set[GroupKey] = set()
        self.keeper = ThreadPoolExecutor(1, thread_name_prefix="keeper")
        self.kept: Future[Stopwatch] | None = None
        self.prefetcher: Prefetcher | None = None

    def run(self) -> TrainerState:
        """Trains batch after batch until `steps`, or until a stop request, on which it ends
        cleanly."""
        limit = self.learner.settings.steps
        state = self.resume()
        if self.world.leads:
            self.prefetcher = Prefetcher(self.verified_batch, limit)
        skipped, ended = 0, False
        watch = self.new_watch()
        try:
            self.publish_first(state, watch)
            while limit is None or state.step < limit:
                found = self.next_batch(state, watch)
                line = self.train(found, state, watch)
                state = self.keep(state, found, line, watch)
                watch = self.new_watch()  # waits from here on belong to the next step
                skipped = 0 if line["applied"] else skipped + 1
                if skipped >= MAX_SKIPPED_IN_A_ROW:
                    raise FatalError(f"{skipped} steps in a row changed no weight")
            self.wait_kept(watch)
            ended = True
        except StoppedError:
            log.info("stopped after batch %d", state.step - 1)
            self.end_kept()
        finally:
            if not ended:
                self.stop.set()  # ends the threads' waits
            if self.prefetcher is not None:
                self.prefetcher.close()
            self.keeper.shutdown(wait=True)
        return state

    def new_watch(self) -> Stopwatch:
        """A step's stopwatch, which reports to the observers what the loop waits for."""
        return Stopwatch(begins=self.observers.waiting)

    def resume(self) -> TrainerState:
        """The newest checkpoint's state, or the initial state of a new run."""
        digest = self.facts.run.digest()
        learner = self.learner
        found = checkpoint.load(self.data, digest, learner.policy, learner.optimizer, self.world)
        state = found or TrainerState(run_digest=digest)
        if self.world.leads:
            self.metrics.repair(state.metrics)
        self.recent = state.recent_groups()
        if found:
            log.info("resumed after batch %d", state.step - 1)
        return state

    def verified_batch(self, step: int, watch: Stopwatch) -> TrainingBatch:
        """Fetches and verifies a batch, in the prefetcher's thread. Repeated groups are checked
        later, when the batch is taken."""
        with watch.timed("sealed"):
            answer = wait_for_batch(self.client, step, self.stop)
        with watch.timed("fetch"):
            fetch = fetcher(self.client, answer.urls, self.stop)
            return assemble(answer.batch, step, self.rules, fetch)

    def next_batch(self, state: TrainerState, watch: Stopwatch) -> TrainingBatch | BadBatch:
        """Returns batch `state.step`, the same on every rank, or the reason for skipping it. Raises
        StoppedError on every rank."""
        found: TrainingBatch | BadBatch | None = None
        with watch.timed("wait_batch"):
            if self.prefetcher is not None:
                try:
                    if self.stop.is_set():  # even if batches are ready
                        raise StoppedError
                    fetched = self.prefetcher.take(state.step)
                    fetched.batch.require_new(self.recent)
                    self.observers.background(fetched.watch.seconds)
                    found = fetched.batch
                except StoppedError:
                    found = None
                except (MalformedError, UntrustedError, PolicyError) as error:
                    if self.learner.settings.bad_batch == "stop":
                        raise
                    found = error
        with watch.timed("share"):
            if self.world.size > 1:
                told = self.world.broadcast(encode(found) if self.world.leads else None)
                found = found if self.world.leads else decode(told)
        if found is None:
            raise StoppedError
        return found

    def train(
        self, found: TrainingBatch | BadBatch, state: TrainerState, watch: Stopwatch
    ) -> dict[str, Any]:
        """Trains one batch and returns the step's line. A skipped batch changes nothing, and its
        line says why."""
        line: dict[str, Any]
        if isinstance(found, TrainingBatch):
            line = train_step(self.learner, found, watch)
            line["alarms"] = alarms_of(line, self.learner.settings)
        else:
            log.error("batch %d is skipped: %s", state.step, found)
            line = {"step": state.step, "version": state.step + 1, "applied": False}
            line |= {"skipped": str(found), "alarms": []}
        for alarm in line["alarms"]:
            log.warning("alarm at step %d: %s", state.step, alarm)
        return line

    def keep(
        self,
        state: TrainerState,
        found: TrainingBatch | BadBatch,
        line: dict[str, Any],
        watch: Stopwatch,
    ) -> TrainerState:
        """Passes weights, optimizer and line to the keeper thread; the batch counts as trained
        once its checkpoint is written. Then raises FatalError if an alarm is configured to end
        the run."""
        learner = self.learner
        self.wait_kept(watch)
        line |= {"time": time.time(), "background": self.observers.taken_background()}
        with watch.timed("snapshot"):
            weights = published_state(learner.policy, self.world)
        line["seconds"] = dict(watch.seconds)
        self.observers.complete(line, self.world.size)
        groups = found.keys if isinstance(found, TrainingBatch) else ()
        training = learner.settings.training()
        after = state.after(groups, line, learner.run.max_staleness, training)
        with watch.timed("snapshot"):
            saving = checkpoint.begin(
                self.data, after, learner.policy, learner.optimizer, self.world
            )
        self.recent = after.recent_groups()
        self.kept = self.keeper.submit(self.keep_here, saving, weights, line)
        if line["alarms"] and learner.settings.alarm_action == "stop":
            self.wait_kept(watch)
            raise FatalError(f"alarm at step {state.step}: {'; '.join(line['alarms'])}")
        return after

    def keep_here(
        self, saving: Saving, weights: dict[str, Tensor], line: dict[str, Any]
    ) -> Stopwatch:
        """The keeper's work on this rank, in order: checkpoint, metrics line, publication."""
        watch = Stopwatch()
        with watch.timed("checkpoint"):
            saving.finish(self.world.leads)
        if self.world.leads:
            self.metrics.append(line)
            self.observers.step(line)
        self.publish(weights, saving.state, watch)
        return watch

    def wait_kept(self, watch: Stopwatch) -> None:
        """Waits until the previous batch is saved and published. Raises its error, and StoppedError
        on every rank if rank 0 was stopped during it."""
        if self.kept is None:
            return
        pending, self.kept = self.kept, None
        with watch.timed("wait_kept"):
            done = True
            try:
                self.observers.background(pending.result().seconds)
            except StoppedError:
                done = False
            done = self.world.broadcast(b"done" if done else b"stopped") == b"done"
        if not done:
            raise StoppedError

    def end_kept(self) -> None:
        """On a stop request: finishes the work in progress, or leaves it for the restart."""
        try:
            self.wait_kept(Stopwatch())
        except StoppedError:
            log.info("the last policy is published at the next start")

    def publish_first(self, state: TrainerState, watch: Stopwatch) -> None:
        """Publishes the newest trained policy (again) at a restart, and the base model at the first
        start."""
        with watch.timed("snapshot"):
            weights = published_state(self.learner.policy, self.world)

        def publish_now() -> Stopwatch:
            mine = Stopwatch()
            self.publish(weights, state, mine)
            return mine

        self.kept = self.keeper.submit(publish_now)
        self.wait_kept(watch)

    def publish(self, weights: dict[str, Tensor], state: TrainerState, watch: Stopwatch) -> None:
        """On rank 0, publishes `weights` as version `state.step`, with the configuration that made
        it; version 0 is the unmodified base model."""
        if self.publisher is None:
            return
        version = state.step
        publisher, base = self.publisher, self.learner.settings.need("model")
        with watch.timed("publish"):
            publish_state(publisher, weights, version, base, self.data, state.training, self.retry)
            if self.origin is not None:
                self.origin.announce()
                self.origin.wait_taken(version)
        log.info("policy %d is published", version)

    def retry(self, action: Any) -> Any:
        """Repeats `action` until the orchestrator accepts it; raises StoppedError on a stop
        request."""
        return insist(action, self.stop, "publishing")
