"""Makes one file for one lease: engine for its policy, prompts and noise from its seed, proofs,
Parquet.

`RolloutBuilder` is the honest worker. The development setting `worker_command` can start another
program with its own subclass that overrides `make`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prime_core.errors import FatalError, NotFoundError, UnavailableError, UserError
from prime_core.gateway import Answers
from prime_core.ids import Digest
from prime_core.messages import ClassRequest
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_engine.base import Engine
from prime_engine.batch import BATCH_ROWS, BatchEngine
from prime_engine.exact import RANKS
from prime_engine.shared import EngineThread
from prime_engine.sizing import MEMORY_SHARE, Cards
from prime_envs.registry import environment_for
from prime_node.bridge_messages import file_name
from prime_node.worker.client import BridgeClient
from prime_verify.build import build_rollout_file
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.rollout_file import read_rollout_file

log = logging.getLogger("prime.worker")
SHORTEST_CLASS_PAUSE, LONGEST_CLASS_PAUSE = 15.0, 960.0
"""Seconds before a worker asks again whether its exact class with one policy is wanted: doubled
each time it is not, so that nodes of a pool without exact classes ask seldom."""
MOST_SHORTAGES = 4
"""Shortages of memory in a row that end the worker: 64, 16, 4 and 1 rows did not fit."""
SMALLER = (
    "A lower generation_batch or max_length needs less memory; with vLLM, a lower memory_share "
    "leaves more to the rest, and a higher one gives it more cache (docs/nodes.md)"
)


@dataclass(frozen=True)
class Options:
    """The worker's command line. `throttle` N (development) makes it N times slower."""

    socket: Path
    policies: Path
    outbox: Path
    threads: int = 1
    generation_batch: int = 0
    tensor_parallel: int = 0
    memory_share: float = 0.0
    max_length: int = 0
    throttle: float = 1.0
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "plain"


@dataclass(frozen=True)
class Job:
    """One lease to fulfil. `answers`: where calls of the gateway's tools are answered."""

    signed: SignedLease
    lease_digest: Digest
    answers: Answers | None = None


@dataclass(frozen=True)
class Built:
    """A finished file in the outbox, its number of tokens and the seconds it took. `idle_seconds`:
    for how long the engine had no work since the file before; `swap_seconds`: how long its policy
    took to load."""

    path: Path
    tokens: int
    seconds: float
    idle_seconds: float = 0.0
    swap_seconds: float = 0.0


def engine_sizes(options: Options) -> dict[str, Any]:
    """Returns the engine's arguments for the sizes that the owner set; what is 0 it chooses."""
    sizes: dict[str, Any] = {}
    if options.generation_batch:
        sizes["batch_rows"] = options.generation_batch
    if options.engine == "vllm":
        share = options.memory_share or MEMORY_SHARE
        sizes["cards"] = Cards(options.tensor_parallel, share, options.max_length)
    return sizes


class RolloutBuilder:
    """Keeps one policy loaded and makes rollout files with it, several at a time (worker.loop).

    Raises PolicyError if the environment installed here is not the one the run pins, UserError if
    it is to use cards that torch does not see.
    """

    concurrent = True
    """Whether several threads may call `make`."""

    def __init__(
        self,
        run: RunDefinition,
        options: Options,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        _require_device(options.device)
        self.run = run
        self.options = options
        self.environment = environment_for(run)
        self.engines = FolderEngines(options.policies, self._load, keep=1)
        self._rows = self._loaded_rows = options.generation_batch or BATCH_ROWS
        self._idle_before = 0.0
        self._shortages = 0
        """How often memory was short since the last finished file."""
        self._counting = threading.Lock()
        self._thread = EngineThread(self._batch_engine, clock=clock)
        self._stopped = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._clock = clock
        self._sleep = sleep or self._wait
        self._class_of: int | None = None
        """The policy version of the last question to the pool about an exact class."""
        self._ask_class_at = -math.inf
        self._class_pause = SHORTEST_CLASS_PAUSE

    def has_room(self) -> bool:
        """See worker.loop.Builder."""
        return self.concurrent and self._thread.has_room()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """See worker.loop.Builder."""
        return self._thread.wait_for(condition, seconds)

    def nudge(self) -> None:
        """See worker.loop.Builder."""
        self._thread.nudge()

    def _load(self, folder: Path) -> Engine:
        options = self.options
        sizes = engine_sizes(options) | {"batch_rows": self._rows}
        if options.engine == "vllm":
            sizes["on_lost"] = self._thread.fail
        return load_engine(
            folder,
            engine=options.engine,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            **sizes,
        )

    def _batch_engine(self, version: int, digest: Digest) -> BatchEngine:
        if self._loaded_rows != self._rows:
            self.engines.close()
            self._loaded_rows = self._rows
        return cast(BatchEngine, self.engines.engine(version, digest))  # load_engine made it

    def start(self) -> None:
        """See worker.loop.Builder."""
        self._stopped.clear()
        self._thread.start()

    def stop(self) -> None:
        """See worker.loop.Builder."""
        self._stopped.set()
        self._thread.stop()

    def announce(self, bridge: BridgeClient) -> None:
        """Announces the exact class of this machine with the newest policy, once for each policy.
        Measures it only if the pool wants classes of this machine's facts, and only while no lease
        of another policy is worked on. Raises UnavailableError if the agent does not answer."""
        newest = self.engines.newest()
        now = self._clock()
        if newest is None or (newest[0] == self._class_of and now < self._ask_class_at):
            return
        if self._thread.busy and self._thread.policy != newest:
            return
        version, digest = newest
        again = now + self._class_pause
        with contextlib.ExitStack() as stack:
            try:
                engine = stack.enter_context(self._thread.using(version, digest))
            except (UnavailableError, MemoryError) as error:  # a lease will say so, too
                log.warning("policy %d: no exact class: %s", version, error)
                self._class_of, self._ask_class_at = version, again
                return
            again = self._announce(bridge, engine, version, digest, again)
        self._class_of, self._ask_class_at = version, again

    def _announce(
        self, bridge: BridgeClient, engine: Engine, version: int, digest: Digest, again: float
    ) -> float:
        """Returns when to ask the pool next: `again`, or never."""
        try:
            facts = dict(engine.facts())
        except UnavailableError:  # it has no class; the pool may know one of an earlier worker
            facts, again = {"engine": engine.name}, math.inf
        question = ClassRequest(policy_version=version, policy_digest=digest, facts=facts)
        wanted = False
        try:
            if bridge.exact_class(question).wanted and (found := _measured(engine)) is not None:
                known = question.model_copy(update={"fingerprint": found})
                wanted = bridge.exact_class(known).wanted
        except NotFoundError:  # an older agent
            again = math.inf
        if wanted:
            self._class_pause = SHORTEST_CLASS_PAUSE
            return math.inf
        self._class_pause = min(LONGEST_CLASS_PAUSE, 2 * self._class_pause)
        return again

    def make(self, job: Job, engine: Engine) -> bytes:
        """Returns the rollout file of a lease, made with `engine`. Raises UnavailableError if the
        agent is gone."""
        return build_rollout_file(
            job.signed, job.lease_digest, self.run, engine, self.environment, answers=job.answers
        )

    def count(self, content: bytes) -> int:
        """Tokens that the model generated in a file that was made."""
        return sum(len(row.places) for row in read_rollout_file(content).rows)

    def build(self, job: Job) -> Built:
        """Makes the file and puts it into the outbox atomically. A throttled worker makes one file
        at a time. Waiting for the policy is not throttled, because a slower machine is mainly
        slower in generation. Raises UnavailableError if the policy is missing, as `make` and
        `put_file` do, and after `stop`. If memory is short, raises it as well, and fewer rows are
        generated at once from then on; UserError if that does not help."""
        rows = self._rows
        try:
            built = self._build(job)
        except MemoryError as error:
            why = str(error) or "of this machine"
        else:
            self._shortages = 0
            return built
        raise self._short_of_memory(rows, why)

    def _short_of_memory(self, rows: int, why: str) -> UnavailableError | UserError:
        """Reduces the rows, once for all leases of a batch of `rows`. Returns the error."""
        with self._counting:
            if rows == self._rows:
                self._thread.reload()
                self._shortages += 1
                self._rows = max(1, rows // 4)
            said = f"the engine ran out of memory with {rows} rows at once ({why})"
            if self._shortages < MOST_SHORTAGES:
                log.warning("%s: from now on it generates %d. %s", said, self._rows, SMALLER)
                return UnavailableError(f"{said}; the next try generates fewer")
            return UserError(f"{said}, {self._shortages} times without a file. {SMALLER}")

    def _build(self, job: Job) -> Built:
        slow = self.options.throttle > 1.0
        with self._one_at_a_time if slow else contextlib.nullcontext():
            version, policy = job.signed.policy_version, job.signed.lease.policy_digest
            with self._thread.using(version, policy) as engine:
                started = self._clock()
                content = self.make(job, engine)
                tokens = self.count(content)
                seconds = self._clock() - started
            if slow:
                self._sleep(seconds * (self.options.throttle - 1.0))
                seconds *= self.options.throttle
        name = file_name(job.lease_digest)
        put_file(self.options.outbox, name, content)
        with self._counting:
            idle = self._thread.idle_seconds()
            since, self._idle_before = idle - self._idle_before, idle
        path, swap = self.options.outbox / name, self._thread.swap_seconds
        return Built(path, tokens, seconds, idle_seconds=since, swap_seconds=swap)

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise UnavailableError("the worker was stopped")


def _require_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        raise UserError(
            f"this task is to generate on {device}, and its torch {torch.__version__}, built for "
            f"{built}, sees no card: see prime-node doctor, or work without cards: --gpus none"
        )


def _measured(engine: Engine) -> Digest | None:
    """Returns the fingerprint of the engine's exact class; None if it has no class. Raises
    FatalError if memory is short and the engine has several ranks: the others may wait in a
    collective for this one."""
    try:
        found = engine.numeric_class()
    except (UnavailableError, MemoryError) as error:  # it may not repeat its own bits
        if isinstance(error, MemoryError) and engine.facts().get(RANKS, "1") != "1":
            raise FatalError(f"a rank of the engine has no memory left: {error}") from error
        log.warning("no exact class is announced: %s", error)
        return None
    log.info("exact class %s", found.digest())
    return found.fingerprint


def put_file(folder: Path, name: str, content: bytes) -> None:
    """Writes the file atomically. Raises UnavailableError if the disk refuses."""
    partial_file = folder / f".{name}.part"
    try:
        partial_file.write_bytes(content)
        partial_file.replace(folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial_file.unlink(missing_ok=True)  # a partial file would keep the disk full
        raise UnavailableError(f"the file {name} cannot be written: {error}") from error
