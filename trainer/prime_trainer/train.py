"""The training loop of `trainer run`.

    rank 0, a thread                 every rank                            every rank, a thread
    ────────────────                 ──────────                            ────────────────────
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
                                     batch s + 1 …                         metrics line s (rank 0)
                                                                           write, hash and encode
                                                                           its part; rank 0 signs,
                                                                           serves, submits

Every `checkpoint_every` batches, the version is published only after its checkpoint is on disk. A
killed trainer goes on from the newest checkpoint. If that one's version is not published yet, it is
published now. If later versions are published, their batches are trained again, and each gets the
next free version: a published version is never made or replaced again (docs/adr/0014). Without a
crash, batch s trains policy s into s + 1. If the gradient is not finite or the batch is skipped,
the weights are published unchanged under the new number. At most one checkpoint and one publication
are in progress. Every wait has a name in the step's line: `seconds` is the loop's own time,
`background` the time of the two threads.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from prime_broadcast.sharded import Part
from prime_core import tracing
from prime_core.errors import (
    FatalError,
    MalformedError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import Step
from prime_core.logs import fields
from prime_core.messages import SubmissionInfo
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import StoppedError
from prime_trainer import checkpoint
from prime_trainer.checkpoint import Saving, TrainerState
from prime_trainer.data import (
    BadBatch,
    BatchRules,
    GroupKey,
    TrainingBatch,
    assemble,
    decode_message,
    encode_message,
    require_asked,
)
from prime_trainer.feed import PoolFacts, Prefetcher, fetcher, insist, wait_for_batch
from prime_trainer.learner import Learner, train_step
from prime_trainer.metrics import MetricsFile, Stopwatch, alarms_of
from prime_trainer.observe import Observers
from prime_trainer.publish import Publisher, Publishing, publish_state, take_part
from prime_trainer.samples import append_samples, sample_line, spread, tool_figures

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
SAMPLES = 8
"""Rollouts whose texts are written down every `texts_every` batches."""


class Trainer:
    """One trainer process of a run: the loop and its external dependencies. `publishing`: of the
    leading rank only."""

    def __init__(
        self,
        learner: Learner,
        facts: PoolFacts,
        client: OrchestratorClient,
        publishing: Publishing | None,
        stop: threading.Event,
        observers: Observers | None = None,
    ) -> None:
        self.learner, self.facts, self.client = learner, facts, client
        self.publishing, self.stop = publishing, stop
        self.world, self.data = learner.world, learner.settings.data
        self.metrics = MetricsFile(self.data / "metrics.jsonl")
        self.observers = observers or Observers.none()
        self.rules = BatchRules(
            run=facts.run,
            pool=facts.info.pool,
            manager=facts.info.manager,
            domain=facts.domain("work"),
            vocabulary=int(learner.policy.lm.config.vocab_size),
            newest=lambda: self.newest,
        )
        self.newest = 0
        """The newest version that was trained or published."""
        self.unsaved = 0
        """Batches since the last checkpoint."""
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
                if found is None:
                    log.info("stopped before batch %d", state.step)
                    break
                line = self.train(found, state, watch)
                state = self.keep(state, found, line, watch)
                watch = self.new_watch()  # waits from here on belong to the next step
                skipped = 0 if line["applied"] else skipped + 1
                if skipped >= MAX_SKIPPED_IN_A_ROW:
                    raise FatalError(f"{skipped} steps in a row changed no weight")
            self.end_kept(watch)
            if self.unsaved:
                self.begin_checkpoint(state).finish(
                    self.world.leads, self.learner.settings.checkpoints_kept
                )
            ended = True
        except StoppedError:
            log.info("stopped; what is not in a checkpoint is trained again at the next start")
            self.end_kept(watch)
        finally:
            if not ended:
                self.stop.set()  # ends the threads' waits
            if self.prefetcher is not None:
                self.prefetcher.close()
            self.keeper.shutdown(wait=True)
        return state

    @property
    def publisher(self) -> Publisher | None:
        """The leading rank's publisher."""
        return None if self.publishing is None else self.publishing.publisher

    @cached_property
    def tokenizer(self) -> Any:
        """The base model's tokenizer."""
        from transformers import AutoTokenizer

        folder = self.learner.settings.need("model")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def new_watch(self) -> Stopwatch:
        """A step's stopwatch, which reports to the observers what the loop waits for."""
        return Stopwatch(begins=self.observers.waiting)

    def resume(self) -> TrainerState:
        """The newest checkpoint's state, or the initial state of a new run."""
        digest = self.facts.run.digest()
        learner = self.learner
        found = checkpoint.load(self.data, digest, learner.policy, learner.optimizer, self.world)
        state = found or TrainerState(run_digest=digest)
        self.newest = max(state.version, self.newest_published())
        if self.world.leads:
            self.metrics.repair(state.metrics, self.newest)
        self.recent = state.recent_groups()
        if found:
            log.info("resumed before batch %d", state.step)
        if state.version < self.newest:
            log.warning(
                "policies %d to %d were published after the last checkpoint: their batches are "
                "trained again and make policies from %d on",
                state.version + 1,
                self.newest,
                self.newest + 1,
            )
        return state

    def newest_published(self) -> int:
        """The newest version that this trainer signed or the orchestrator knows, the same on every
        rank; 0 if there is none."""
        newest = self.facts.info.latest_version or 0
        if self.publisher is not None:
            newest = max(newest, self.publisher.published() or 0)
        return int(self.world.broadcast(str(newest).encode() if self.world.leads else None))

    def verified_batch(self, step: int, watch: Stopwatch) -> TrainingBatch | BadBatch:
        """Fetches and verifies the first batch from number `step` on, in the prefetcher's thread.
        Repeated groups are checked later, when the batch is taken. Only a batch that the manager
        signed, and whose objects came as signed, or that `skip_batch` names, is skipped: any other
        error is raised."""
        with watch.timed("sealed"):
            answer = wait_for_batch(self.client, step, self.stop)
        with watch.timed("fetch"):
            number = Step(require_asked(answer.batch, step, self.rules).step)
            if number == self.learner.settings.skip_batch:
                return BadBatch(number, "requested by --skip-batch")
            fetch = fetcher(self.client, answer.urls, self.stop)
            try:
                return assemble(answer.batch, step, self.rules, fetch)
            except (MalformedError, UntrustedError, PolicyError) as error:
                return self.bad(number, error)
            except UnavailableError as error:
                raise UnavailableError(
                    f"batch {number}: {error}; if the file is lost, ask the operator to restore "
                    f"it, or skip the batch with --skip-batch {number}"
                ) from error

    def bad(self, step: Step, error: PrimeError) -> BadBatch:
        """Returns the batch as one to skip; raises `error` if it ends the run."""
        if self.learner.settings.bad_batch == "stop":
            raise error
        return BadBatch(step, str(error))

    def next_batch(self, state: TrainerState, watch: Stopwatch) -> TrainingBatch | BadBatch | None:
        """Returns the next batch, the same on every rank, or the reason for skipping it; None on
        every rank on a stop request."""
        found: TrainingBatch | BadBatch | None = None
        with watch.timed("wait_batch"):
            if self.prefetcher is not None:
                try:
                    if self.stop.is_set():  # even if batches are ready
                        raise StoppedError
                    fetched = self.prefetcher.take(state.step)
                    self.observers.background(fetched.watch.seconds)
                    found = fetched.batch
                except StoppedError:
                    found = None
                if isinstance(found, TrainingBatch):
                    try:
                        found.require_new(self.recent)
                    except UntrustedError as error:
                        found = self.bad(found.step, error)
        with watch.timed("share"):
            if self.world.size > 1:
                message = self.world.broadcast(encode_message(found) if self.world.leads else None)
                found = found if self.world.leads else decode_message(message)
        return found

    def train(
        self, found: TrainingBatch | BadBatch, state: TrainerState, watch: Stopwatch
    ) -> dict[str, Any]:
        """Trains one batch and returns the step's line. A skipped batch changes nothing, and its
        line says why."""
        line: dict[str, Any]
        if isinstance(found, TrainingBatch):
            versions = state.version, self.newest + 1
            began = time.time()
            line = train_step(self.learner, found, watch, versions)
            if self.world.leads and tracing.on():
                self._trace(found, began, time.time())
            talk = self.learner.run.conversation
            if self.world.leads and talk is not None:
                line |= tool_figures(found.rollouts, talk, self.tokenizer)
            line["alarms"] = alarms_of(line, self.learner.settings)
        else:
            log.error("batch %d is skipped: %s", found.step, found.why,
                      extra=fields(kind="batch", status="skipped", step=found.step))  # fmt: skip
            line = {"step": found.step, "version": self.newest + 1, "applied": False}
            line |= {"skipped": found.why, "alarms": []}
        for alarm in line["alarms"]:
            log.warning("alarm at step %d: %s", state.step, alarm)
        return line

    def _trace(self, batch: TrainingBatch, began: float, ended: float) -> None:
        """Records the step in the traces of the leases whose files it trained on."""
        for submission in batch.submissions:
            try:
                info = self.client.get(f"/v1/submissions/{submission}", SubmissionInfo)
            except PrimeError as error:
                log.warning("the step is missing in traces: %s", error)
                return
            tracing.record(info.lease_digest, "train", began, ended, step=int(batch.step))

    def keep(
        self,
        state: TrainerState,
        found: TrainingBatch | BadBatch,
        line: dict[str, Any],
        watch: Stopwatch,
    ) -> TrainerState:
        """Passes weights, line and, if a checkpoint is due, the optimizer to the keeper thread.
        Then raises FatalError if an alarm is configured to end the run."""
        learner = self.learner
        self.wait_kept(watch)
        line |= {"time": time.time(), "background": self.observers.taken_background()}
        ends = bool(line["alarms"]) and learner.settings.alarm_action == "stop"
        training = learner.settings.training(
            {"batch": line["step"], "batch_digest": line.get("batch", ""), "before": state.version}
        )
        with watch.timed("snapshot"):
            part = self.take_part(training)
        line["seconds"] = dict(watch.seconds)
        self.observers.complete(line, self.world.size)
        groups = found.keys if isinstance(found, TrainingBatch) else ()
        after = state.after(groups, line, learner.run.max_staleness, training)
        self.newest = after.version
        self.unsaved += 1
        saving = None
        if ends or self.unsaved >= learner.settings.checkpoint_every:
            with watch.timed("snapshot"):
                saving = self.begin_checkpoint(after)
        self.recent = after.recent_groups()
        texts = self.texts(found, line["step"])
        self.kept = self.keeper.submit(self.keep_here, after, saving, part, line, texts)
        if ends:
            self.wait_kept(watch)
            raise FatalError(f"alarm at step {state.step}: {'; '.join(line['alarms'])}")
        return after

    def texts(self, found: TrainingBatch | BadBatch, step: int) -> list[dict[str, Any]]:
        """Texts of some of the batch's rollouts, every `texts_every` batches on rank 0."""
        every = self.learner.settings.texts_every
        if isinstance(found, BadBatch) or not every or step % every or not self.world.leads:
            return []
        return [
            sample_line(step, row, self.learner.run, self.tokenizer, row.parts, verdict="accepted")
            for row in spread(found.rollouts, SAMPLES)
        ]

    def take_part(self, training: str) -> Part:
        """This rank's part of the present weights; a collective operation."""
        learner = self.learner
        return take_part(learner.policy, self.world, learner.settings.need("model"), training)

    def begin_checkpoint(self, state: TrainerState) -> Saving:
        """Begins to write `state`; a collective operation."""
        self.unsaved = 0
        learner = self.learner
        return checkpoint.begin(self.data, state, learner.policy, learner.optimizer, self.world)

    def keep_here(
        self,
        state: TrainerState,
        saving: Saving | None,
        part: Part,
        line: dict[str, Any],
        texts: list[dict[str, Any]],
    ) -> Stopwatch:
        """The keeper's work on this rank, in order: checkpoint, metrics line, texts,
        publication."""
        watch = Stopwatch()
        if saving is not None:
            with watch.timed("checkpoint"):
                saving.finish(self.world.leads, self.learner.settings.checkpoints_kept)
        if self.world.leads:
            self.metrics.append(line)
            self.observers.step(line)
        if texts:
            append_samples(self.data, texts)
            self.observers.texts(line["step"], texts)
        self.publish(part, state, watch)
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

    def end_kept(self, watch: Stopwatch) -> None:
        """Finishes the work in progress, or leaves it for the restart on a stop request."""
        try:
            self.wait_kept(watch)
        except StoppedError:
            log.info("the last policy is published at the next start")

    def publish_first(self, state: TrainerState, watch: Stopwatch) -> None:
        """Publishes the checkpoint's policy at a restart, and the base model at the first start. If
        later versions were signed, only makes sure that the orchestrator has the newest."""
        part = None
        if 0 < state.version == self.newest:
            with watch.timed("snapshot"):
                part = self.take_part(state.training)

        def publish_now() -> Stopwatch:
            mine = Stopwatch()
            publisher = self.publisher
            if state.version == self.newest:
                self.publish(part, state, mine)
            elif publisher is not None and publisher.published() == self.newest:
                self.retry(lambda: publisher.hand_in(self.newest))
            return mine

        self.kept = self.keeper.submit(publish_now)
        self.wait_kept(watch)

    def publish(self, part: Part | None, state: TrainerState, watch: Stopwatch) -> None:
        """Publishes the ranks' parts as version `state.version`, with the configuration that made
        them; version 0 is the unmodified base model, which has no parts."""
        if self.world.leads and self.publishing is None:
            return
        version = state.version
        with watch.timed("publish"):
            publish_state(
                self.publisher, part, self.facts, self.learner.settings, self.world, version,
                state.training, self.retry,
            )  # fmt: skip
            if self.publishing is not None:
                self.publishing.origin.announce()
                self.publishing.origin.wait_taken(version)
        if self.world.leads:
            log.info("policy %d is published", version,
                     extra=fields(kind="policy", status="published", policy=version))  # fmt: skip

    def retry(self, action: Any) -> Any:
        """Repeats `action` until the orchestrator accepts it; raises StoppedError on a stop
        request."""
        return insist(action, self.stop, "publishing")
