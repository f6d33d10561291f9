"""One engine for several threads: a thread of its own runs every operation.

    job A ── generate ─╮
    job B ── generate ─┼─► engine thread: [waiting operations] → one step of the batch → …
    job C ── proof pass╯

Threads block until their rows have ended. While one of them grades or writes a file, the engine
generates the rows of the others. The policy is replaced while no thread uses it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from prime_core.errors import FatalError, UnavailableError
from prime_core.ids import Digest
from prime_engine.base import (
    Engine,
    Generation,
    GenerationRequest,
    Replay,
    ReplayRequest,
    StateSink,
)
from prime_engine.batch import BatchEngine, RowSet
from prime_engine.exact import NumericClass, ProofPart

T = TypeVar("T")
STOPPED = "the engine was stopped"
STOP_SECONDS = 5.0
Load = Callable[[int, Digest], BatchEngine]
"""(policy version, policy digest) → the engine; it unloads the one before. Raises
UnavailableError."""


class _Task(Generic[T]):
    """An operation for the engine thread, and its result."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self.future: Future[T] = Future()

    def __call__(self) -> None:
        try:
            result = self._run()
        except BaseException as error:
            self.fail(error)
            return
        with suppress(InvalidStateError):  # it was failed meanwhile
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class EngineThread:
    """Runs one engine at a time, loaded by `load`. Thread-safe."""

    def __init__(self, load: Load, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._idle = 0.0
        self._idle_since: float | None = None
        self.swap_seconds = 0.0
        """How long the latest policy took to load. No token is generated meanwhile."""
        self._changed = threading.Condition()
        self._tasks: deque[_Task[Any]] = deque()
        self._begun: list[_Task[Any]] = []
        """Those that the engine's thread has taken."""
        self._rows: dict[RowSet, Future[list[Generation]]] = {}
        self._engine: BatchEngine | None = None
        self._in_memory: tuple[int, Digest] | None = None
        """The policy of `_engine`."""
        self._policy: tuple[int, Digest] | None = None
        """The policy that the users have, or had last."""
        self._waiting: deque[object] = deque()
        """Callers of `using`, in the order in which they get their policies."""
        self._users: set[SharedEngine] = set()
        self._stopped = False
        self._failure: BaseException = UnavailableError(STOPPED)
        """What callers get after `stop` or `fail`."""
        self._thread: threading.Thread | None = None

    @property
    def policy(self) -> tuple[int, Digest] | None:
        """The version and digest of the policy that is used, or was last; None before the first."""
        return self._policy

    @property
    def busy(self) -> bool:
        """Whether a policy is used or waited for."""
        return bool(self._users or self._waiting)

    @contextmanager
    def using(self, version: int, policy_digest: Digest) -> Iterator[SharedEngine]:
        """Loads a policy, once all users of another have left, and keeps it while the block runs.

        Raises UnavailableError if it cannot be loaded or the thread was stopped.
        """
        wanted, turn = (version, policy_digest), object()
        shared = SharedEngine(self)
        with self._changed:
            self._waiting.append(turn)
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or (self._waiting[0] is turn and (not self._users or self._policy == wanted))
                )
            )
            self._waiting.remove(turn)
            self._users.add(shared)
            self._policy = wanted
            self._changed.notify_all()
        try:
            shared.engine = self.run(lambda: self._loaded(version, policy_digest))
            yield shared
        finally:
            with self._changed:
                self._users.discard(shared)
                self._changed.notify_all()

    def _loaded(self, version: int, policy_digest: Digest) -> BatchEngine:
        known, began = self._in_memory == (version, policy_digest), self._clock()
        if not known:
            self._engine = self._in_memory = None  # `load` closes it
        self._engine = self._load(version, policy_digest)
        self._in_memory = (version, policy_digest)
        if not known:
            self.swap_seconds = self._clock() - began
        return self._engine

    def idle_seconds(self) -> float:
        """Returns the engine's total idle time since its first operation, in seconds."""
        with self._changed:
            now = 0.0 if self._idle_since is None else self._clock() - self._idle_since
            return self._idle + now

    def reload(self) -> None:
        """Has the next users wait until all present ones have left, also for the same policy. Then
        it asks `load` again, which may return another engine."""
        with self._changed:
            self._policy = self._in_memory = None

    def has_room(self) -> bool:
        """Whether the batch would take more rows now. False while a user has not yet added its
        first."""
        if self._waiting or any(not user.started for user in self._users):
            return False
        return self._engine is None or sum(one.left for one in list(self._rows)) < (
            self._engine.batch_rows
        )

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until `condition` holds, which is asked again whenever rows end or users change."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def nudge(self) -> None:
        """Has `wait_for` ask its condition again."""
        with self._changed:
            self._changed.notify_all()

    def run(self, operation: Callable[[], T]) -> T:
        """Runs an operation between two steps of the batch, in the engine's thread."""
        task = _Task(operation)
        with self._changed:
            if self._stopped:
                raise self._failure
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self._tasks.append(task)
            self._changed.notify_all()
        return task.future.result()

    def generate(
        self, requests: Sequence[GenerationRequest], temperature: float, sink: StateSink | None
    ) -> list[Generation]:
        """See Engine.generate."""
        made: Future[list[Generation]] = Future()

        def add() -> None:
            assert self._engine is not None
            rows = self._engine.add(requests, temperature, sink)
            if rows.done:
                made.set_result(rows.results)
            else:
                self._rows[rows] = made

        self.run(add)
        return made.result()

    def start(self) -> None:
        """Allows operations again after `stop`."""
        if self._stopped:
            if self._thread is not None:
                self._thread.join()
            self._thread, self._stopped = None, False
            self._failure = UnavailableError(STOPPED)

    def stop(self) -> None:
        """Ends the thread after the current operation; does not wait longer than STOP_SECONDS. All
        callers get UnavailableError."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                self.fail(self._failure)

    def fail(self, error: BaseException) -> None:
        """Ends all callers with `error`, also those of an operation that never returns, and refuses
        further ones until `start`."""
        with self._changed:
            self._stopped, self._failure = True, error
            begun = [*self._begun, *self._tasks]
            self._tasks.clear()
        for task in begun:
            task.fail(error)
        self._fail(error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle_since = self._clock()
                self._changed.wait_for(lambda: self._tasks or self._rows or self._stopped)
                self._idle += self._clock() - self._idle_since
                self._idle_since = None
                self._begun = list(self._tasks)
                self._tasks.clear()
                if self._stopped:
                    break
            for task in self._begun:
                task()
            self._begun = []
            if self._rows:
                self._step()
        for task in self._begun:
            task.fail(self._failure)
        self._fail(self._failure)

    def _step(self) -> None:
        assert self._engine is not None
        before = sum(rows.left for rows in self._rows)
        try:
            self._engine.step()
        except BaseException as error:
            started = list(self._rows)
            self._fail(error)
            for rows in started:
                # It is `error`, again. The last of them empties the batch, which takes no memory.
                with suppress(FatalError, MemoryError):
                    self._engine.cancel(rows)
            return
        for rows in [rows for rows in self._rows if rows.done]:
            self._rows.pop(rows).set_result(rows.results)
        if sum(rows.left for rows in self._rows) < before:
            self.nudge()

    def _fail(self, error: BaseException) -> None:
        waiting, self._rows = list(self._rows.values()), {}
        for made in waiting:
            with suppress(InvalidStateError):
                made.set_exception(error)
        self.nudge()


class SharedEngine:
    """What a user of EngineThread sees of the engine. Its methods are those of
    prime_engine.base.Engine; they run in the engine's thread and block until they are done."""

    engine: BatchEngine

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self.started = False
        """Whether it has added rows."""

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def dtype(self) -> str:
        return self.engine.dtype

    @property
    def device(self) -> str:
        return self.engine.device

    @property
    def vocabulary(self) -> int:
        return self.engine.vocabulary

    @property
    def hidden_size(self) -> int:
        return self.engine.hidden_size

    @property
    def positions(self) -> int:
        return self.engine.positions

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.engine.end_tokens

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> list[Generation]:
        self.started = True
        return self._thread.generate(requests, temperature, sink)

    def proof_pass(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], temperature: float
    ) -> Iterator[ProofPart]:
        """The batch goes on between two parts. The engines prefill the whole row before the first,
        and the batch waits for that."""
        parts = self.engine.proof_pass(prompt_tokens, output_tokens, temperature)
        while (part := self._thread.run(lambda: next(parts, None))) is not None:
            yield part

    def facts(self) -> Mapping[str, str]:
        return self._thread.run(self.engine.facts)

    def numeric_class(self) -> NumericClass:
        return self._thread.run(self.engine.numeric_class)

    def in_dtype(self, dtype: str) -> Engine:
        return self._thread.run(lambda: self.engine.in_dtype(dtype))

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        return self._thread.run(lambda: self.engine.replay(requests, temperature))

    def close(self) -> None:
        """Does nothing: the thread owns the engine."""
