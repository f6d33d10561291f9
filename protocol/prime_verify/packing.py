"""Rows of several files in one prefill: files judged side by side meet where they replay.

    file 1  cheap checks ──► replay ┐                 ┌─► its replays ──► finding
    file 2  cheap checks ──► replay ┼─► one prefill ──┤
    file 3  cheap checks ──► ended  ┘                 └─► …

Each file is judged by code that knows nothing of this (verify.py), in a thread of its own, against
an engine whose `replay` waits until every file that is still being judged has asked for a replay or
has ended; the last to come runs what all ask for, in one call for each engine. Nothing else runs at
that moment, so an engine is used by one thread at a time. The engine itself bounds how many tokens
it takes at once. Rows do not depend on their batch beyond rounding (prime_engine/plain.py).
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
from prime_verify.engines import EngineProvider


@dataclass
class _Call:
    """One file's replay that waits. `found` or `error` is set before `done`."""

    engine: Engine
    requests: Sequence[ReplayRequest]
    temperature: float
    found: list[Replay] | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Packing:
    """Where `files` files meet. Each is judged with an `engines()` of its own, and says `ended()`
    when it is over, however it ended."""

    def __init__(self, engines: EngineProvider, files: int) -> None:
        self._engines = engines
        self._alive = files
        self._waiting: list[_Call] = []
        self._gate = threading.Lock()
        self._loading = threading.Lock()
        self.prefills: list[int] = []
        """Rows of each call that reached an engine, in order."""

    def engines(self) -> EngineProvider:
        """The engines for one of the files."""
        return _Engines(self)

    def ended(self) -> None:
        """One file asks for nothing more."""
        with self._gate:
            self._alive -= 1
            calls = self._due()
        self._run(calls)

    def replay(
        self, engine: Engine, requests: Sequence[ReplayRequest], temperature: float
    ) -> list[Replay]:
        """`engine.replay`, together with what the other files ask for."""
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
        """All that waits, once nobody else is coming. Under the gate."""
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
        """One prefill for the group; each by itself if that fails, so that a file that does not
        fit the model fails alone."""
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
        except Exception as error:  # every one of them has to end: it is raised in each thread
            for call in group:
                call.error = error
            return
        for call in group:
            call.found, found = found[: len(call.requests)], found[len(call.requests) :]

    def load(self, version: int, policy_digest: Digest) -> Engine:
        with self._loading:
            return self._engines.engine(version, policy_digest)

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        """The provider's earlier policies, one loaded at a time."""
        found = self._engines.earlier(version)
        while True:
            with self._loading:
                one = next(found, None)
            if one is None:
                return
            yield one

    def twin(self, engine: Engine, dtype: str) -> Engine:
        with self._loading:
            return engine.twin(dtype)


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
    """An engine as one file sees it: `replay` goes through the packing, the rest to the engine."""

    def __init__(self, engine: Engine, packing: Packing) -> None:
        self._engine = engine
        self._packing = packing

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        return self._packing.replay(self._engine, requests, temperature)

    def twin(self, dtype: str) -> Engine:
        found = self._packing.twin(self._engine, dtype)
        return self if found is self._engine else _Packed(found, self._packing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
