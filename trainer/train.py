"""The training loop.

    rank 0                                         every rank
    ──────                                         ──────────
    wait for sealed batch s ── broadcast ────────► fetch files and tables, check every row (data)
                                                   advantages in each group     (advantages)
                                                   a weight for each token      (loss)
                                                   plan: rows, ranks, micro-batches (packing)
                                                   ┌ forward, −J, backward for each micro-batch
                                                   └ gradients summed over ranks in the last one
                                                   finite? clip, AdamW; else skip and say so
                                                   checkpoint s + 1             (checkpoint)
    metrics line s
    export, sign, serve, hand in policy s + 1      wait (publish)

Publication waits for the checkpoint, so a killed trainer publishes the same bytes again; the next
batch waits for the publication. Batch s trains policy s into s + 1, whatever happens: a step whose
gradient is not finite publishes the weights unchanged under the new number.

Left out, for now: prefetch and publication beside compute, several optimizer steps a batch.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from protocol.core.errors import FatalError
from protocol.core.messages import BatchAnswer
from protocol.transport.client import OrchestratorClient
from trainer import checkpoint
from trainer.checkpoint import TrainerState
from trainer.data import BatchRules, TrainingBatch, assemble
from trainer.feed import PoolFacts, StoppedError, fetcher, insist, wait_for_batch
from trainer.learner import Learner, train_step
from trainer.metrics import MetricsFile, Stopwatch
from trainer.parallel import full_state
from trainer.publish import Origin, Publisher, export, verify_loadable

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


class Trainer:
    """One trainer process of a run: the loop, and what it needs from outside."""

    def __init__(
        self,
        learner: Learner,
        facts: PoolFacts,
        client: OrchestratorClient,
        publisher: Publisher | None,
        origin: Origin | None,
        stop: threading.Event,
    ) -> None:
        self.learner, self.facts, self.client = learner, facts, client
        self.publisher, self.origin, self.stop = publisher, origin, stop
        self.world = learner.world
        self.data: Path = learner.settings.data
        self.metrics = MetricsFile(self.data / "metrics.jsonl")
        self.rules = BatchRules(
            run=facts.run,
            pool=facts.info.pool,
            manager=facts.info.manager,
            domain=facts.domain("work"),
            vocabulary=int(learner.policy.lm.config.vocab_size),
        )

    def run(self) -> TrainerState:
        """Trains batch after batch until `steps`, or told to stop (then it ends cleanly)."""
        state = self.resume()
        skipped = 0
        limit = self.learner.settings.steps
        watch = Stopwatch()
        try:
            self.publish(state.step, watch)
            while limit is None or state.step < limit:
                batch = self.next_batch(state, watch)
                line = train_step(self.learner, batch, watch)
                line = {**line, "time": time.time(), "seconds": watch.seconds}
                watch = Stopwatch()  # keeping and publishing are told in the next step's line
                state = self.keep(state, batch, line, watch)
                self.publish(state.step, watch)
                skipped = 0 if line["applied"] else skipped + 1
                if skipped >= MAX_SKIPPED_IN_A_ROW:
                    raise FatalError(f"{skipped} steps in a row had no finite gradient")
        except StoppedError:
            log.info("stopped after batch %d", state.step - 1)
        return state

    def resume(self) -> TrainerState:
        """The newest checkpoint's state, or that of a run not begun."""
        digest = self.facts.run.digest()
        learner = self.learner
        found = checkpoint.load(self.data, digest, learner.policy, learner.optimizer, self.world)
        state = found or TrainerState(run_digest=digest)
        if self.world.leads:
            self.metrics.repair(state.metrics)
        if found:
            log.info("resumed after batch %d", state.step - 1)
        return state

    def next_batch(self, state: TrainerState, watch: Stopwatch) -> TrainingBatch:
        """Batch `state.step`, the same on every rank. Raises StoppedError on every rank."""
        answer: BatchAnswer | None = None
        with watch.timed("wait_batch"):
            if self.world.leads:
                try:
                    answer = wait_for_batch(self.client, state.step, self.stop)
                except StoppedError:
                    answer = None
            answer = self.world.broadcast((answer,))[0]
        if answer is None:
            raise StoppedError
        with watch.timed("fetch"):
            fetch = fetcher(self.client, answer.urls, self.stop)
            return assemble(answer.batch, state.step, self.rules, fetch, state.recent_groups())

    def keep(
        self, state: TrainerState, batch: TrainingBatch, line: dict[str, Any], watch: Stopwatch
    ) -> TrainerState:
        """Checkpoints the step and writes its line. From here on the batch is trained."""
        learner = self.learner
        after = state.after(batch.keys, line, learner.run.max_staleness)
        with watch.timed("checkpoint"):
            checkpoint.save(self.data, after, learner.policy, learner.optimizer, self.world)
        if self.world.leads:
            self.metrics.append(line)
            log.info(
                "step %d: reward %.3f, loss %.4f, gradient norm %s, %d rows",
                *(line[name] for name in ("step", "reward", "loss", "gradient_norm", "rows")),
            )
        return after

    def publish(self, version: int, watch: Stopwatch) -> None:
        """Publishes the weights as they are now as `version`. Raises StoppedError on every rank."""
        with watch.timed("publish"):
            state = full_state(self.learner.policy)  # a collective: every rank takes part
            done = True
            if self.publisher is not None:
                try:
                    self.publish_here(self.publisher, state, version)
                except StoppedError:
                    done = False
            done = self.world.broadcast((done,))[0]
        if not done:
            raise StoppedError

    def publish_here(self, publisher: Publisher, state: dict[str, Tensor], version: int) -> None:
        """Rank 0's part: version 0 is the base model as it is, a later one is exported first."""
        folder = base = self.learner.settings.need("model")
        if version:
            folder = self.data / "export"
            export(state, base, folder)
            verify_loadable(folder)
        insist(lambda: publisher.publish(folder, version), self.stop, "publishing")
        shutil.rmtree(self.data / "export", ignore_errors=True)
        if self.origin is not None:
            self.origin.announce()
        log.info("policy %d is published", version)
