"""Requests of several threads in one: those made at about the same time go together, and so do
those made while another is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_core.errors import MalformedError
from prime_core.transport.problems import from_problem
from prime_core.validator_messages import (
    EntryAnswer,
    GivenOpinion,
    RowsRequest,
    SealRequest,
    TogetherAnswer,
    TogetherRequest,
)

MOST_BYTES = 1 << 20
"""Most bytes of entries in one request, of which the orchestrator takes encoding.MAX_JSON_BYTES."""
GATHER_SECONDS = 0.01
"""A request waits this long for entries of other threads, whose files are judged together."""
Entry = RowsRequest | SealRequest | GivenOpinion


@dataclass
class _Waiting:
    """An entry, its size in bytes, and its answer or what sending it raised."""

    entry: Entry
    size: int
    answer: EntryAnswer | None = None
    error: BaseException | None = None


@dataclass
class Together:
    """Sends entries with `post`, at most `most` and MOST_BYTES a request. Thread-safe."""

    post: Callable[[TogetherRequest], TogetherAnswer]
    most: int
    _waiting: list[_Waiting] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, entry: Entry) -> EntryAnswer:
        """Returns the answer to one entry. Raises the orchestrator's refusal of this entry, or the
        error of the whole request."""
        mine = _Waiting(entry, len(entry.model_dump_json()))
        with self._guard:
            self._waiting.append(mine)
        while mine.answer is None and mine.error is None:
            with self._turn:
                if mine.answer is None and mine.error is None:
                    time.sleep(GATHER_SECONDS)
                    self._send(self._next())
        if mine.error is not None:
            raise mine.error
        assert mine.answer is not None
        if mine.answer.problem:
            raise from_problem(mine.answer.status, mine.answer.problem.encode())
        return mine.answer

    def _next(self) -> list[_Waiting]:
        """Takes the entries of the next request, at least one, in their order."""
        with self._guard:
            count, size = 1, self._waiting[0].size
            for one in self._waiting[1 : self.most]:
                size += one.size
                if size > MOST_BYTES:
                    break
                count += 1
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _send(self, some: list[_Waiting]) -> None:
        rows = [one for one in some if isinstance(one.entry, RowsRequest)]
        seals = [one for one in some if isinstance(one.entry, SealRequest)]
        given = [one for one in some if isinstance(one.entry, GivenOpinion)]
        try:
            found = self.post(
                TogetherRequest(
                    rows=tuple(one.entry for one in rows),  # type: ignore[misc]
                    seals=tuple(one.entry for one in seals),  # type: ignore[misc]
                    opinions=tuple(one.entry for one in given),  # type: ignore[misc]
                )
            )
            answers = (*found.rows, *found.seals, *found.opinions)
            numbers = (len(found.rows), len(found.seals), len(found.opinions))
            if numbers != (len(rows), len(seals), len(given)):
                raise MalformedError("the orchestrator answered another number of entries")
        except BaseException as error:
            for one in some:
                one.error = error
            return
        for one, answer in zip((*rows, *seals, *given), answers, strict=True):
            one.answer = answer
