"""Batches the replays of several files into one prefill.

    file 1  cheap checks ──► replay ┐                 ┌─► its replays ──► finding
    file 2  cheap checks ──► replay ┼─► one prefill ──┤
    file 3  cheap checks ──► ended  ┘                 └─► …

Each file is judged in its own thread, by code that is unaware of the batching (verify.py). Its
engine's `replay` waits until every file still being judged has requested a replay or has ended. The
last one to arrive runs all requests, in one call per engine. Nothing else runs at that moment, so
an engine is used by one thread at a time. The engine limits how many tokens it processes at once.
Rows do not depend on their batch beyond rounding (prime_engine/plain.py).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_core.errors import MalformedError
from prime_core.ids import Digest
from prime_engine.base import Engine, Replay, ReplayRequest
from prime_engine.exact import NumericClass, ProofPart
from prime_verify.engines import EngineProvider


@dataclass
class _Call:
    """One file's pending replay. `found` or `error` is set before `done`."""

    engine: Engine
    requests: Sequence[ReplayRequest]
    temperature: float
    found: list[Replay] | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Packing:
    """The meeting point of `files` files. Each is judged with its own `engines()`, and must call
    `ended()` when it is finished, even after a failure."""

    def __init__(self, engines: EngineProvider, files: int) -> None:
        self._engines = engines
        self._alive = files
        self._waiting: list[_Call] = []
        self._gate = threading.Lock()
        self._loading = threading.Lock()
        self.proving = threading.Lock()
        self.prefills: list[int] = []
        """Number of rows of each call that reached an engine, in order."""

    def engines(self) -> EngineProvider:
        """Returns the engine provider for one of the files."""
        return _Engines(self)

    def ended(self) -> None:
        """Called when one file will request nothing more."""
        with self._gate:
            self._alive -= 1
            calls = self._due()
        self._run(calls)

    def replay(
        self, engine: Engine, requests: Sequence[ReplayRequest], temperature: float
    ) -> list[Replay]:
        """`engine.replay`, batched with the requests of the other files."""
        call = _Call(engine, requests, temperature)
        with self._gate:
            self._waiting.append(call)
            calls = self._due()
        self._run(calls)
        call.done.wait()
        if call.error is not None:
            raise call.error
        assert call.found is not None
        return call.found

    def _due(self) -> list[_Call]:
        """Returns all pending calls if no file can add another, else none. Call with the lock
        held."""
        if len(self._waiting) < self._alive:
            return []
        calls, self._waiting = self._waiting, []
        return calls

    def _run(self, calls: Sequence[_Call]) -> None:
        groups: dict[tuple[int, float], list[_Call]] = defaultdict(list)
        for call in calls:
            groups[id(call.engine), call.temperature].append(call)
        for group in groups.values():
            self._run_together(group)
        for call in calls:
            call.done.set()

    def _run_together(self, group: Sequence[_Call]) -> None:
        """Runs one prefill for the group. If it fails, runs each call separately, so that a file
        that does not fit the model fails alone."""
        requests = [request for call in group for request in call.requests]
        self.prefills.append(len(requests))
        try:
            found = group[0].engine.replay(requests, group[0].temperature)
        except (MalformedError, MemoryError, RuntimeError) as error:
            if len(group) == 1:
                group[0].error = error
                return
            for call in group:
                self._run_together([call])
            return
        except Exception as error:  # every thread must finish: the error is raised in each
            for call in group:
                call.error = error
            return
        for call in group:
            call.found, found = found[: len(call.requests)], found[len(call.requests) :]

    def load(self, version: int, policy_digest: Digest) -> Engine:
        with self._loading:
            return self._engines.engine(version, policy_digest)

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        """The provider's earlier policies, loaded one at a time."""
        found = self._engines.earlier(version)
        while True:
            with self._loading:
                one = next(found, None)
            if one is None:
                return
            yield one

    def in_dtype(self, engine: Engine, dtype: str) -> Engine:
        with self._loading:
            return engine.in_dtype(dtype)


class _Engines:
    """See EngineProvider."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        return _Packed(self._packing.load(version, policy_digest), self._packing)

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        for number, engine in self._packing.earlier(version):
            yield number, _Packed(engine, self._packing)


class _Packed:
    """An engine as one file sees it: `replay` goes through the packing, everything else to the
    engine."""

    def __init__(self, engine: Engine, packing: Packing) -> None:
        self._engine = engine
        self._packing = packing

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        return self._packing.replay(self._engine, requests, temperature)

    def proof_pass(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], temperature: float
    ) -> Iterator[ProofPart]:
        """One row is computed at a time, and held until it is complete."""
        with self._packing.proving:
            return iter(list(self._engine.proof_pass(prompt_tokens, output_tokens, temperature)))

    def numeric_class(self) -> NumericClass:
        with self._packing.proving:
            return self._engine.numeric_class()

    def in_dtype(self, dtype: str) -> Engine:
        found = self._packing.in_dtype(self._engine, dtype)
        return self if found is self._engine else _Packed(found, self._packing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
