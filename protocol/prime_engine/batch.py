"""Rows that are generated together although several callers asked for them.

    caller A ── add ──► RowSet ─╮
    caller B ── add ──► RowSet ─┴─► one batch: each `step` adds a token to every row

A row of B takes the place of a row of A that has ended, so that the batch stays full while the last
long rows of A go on (continuous batching). An engine that does so is a `BatchEngine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prime_engine.base import Engine, Generation, GenerationRequest, StateSink

BATCH_ROWS = 64
"""Rows that an engine generates together by default."""


@dataclass(eq=False)
class RowSet:
    """The rows of one call of `BatchEngine.add`.

    `results` has one Generation per request, in order, once `left` is 0. `steps` is the engine's
    own record of the rows in progress.
    """

    requests: Sequence[GenerationRequest]
    temperature: float
    sink: StateSink | None = None
    results: list[Generation] = field(default_factory=list)
    left: int = 0
    steps: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = len(self.requests)

    @property
    def done(self) -> bool:
        return self.left == 0


class BatchEngine(Engine, Protocol):
    """An engine whose rows may come from several callers. Only one thread may use it."""

    @property
    def batch_rows(self) -> int:
        """How many rows it generates together."""
        ...

    def add(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> RowSet:
        """Queues rows; they join the batch as it has room. With a `sink`, states go there. Raises
        MalformedError on a request that cannot be run."""
        ...

    def step(self) -> None:
        """Generates one token of every row of the batch (of each new row, its first)."""
        ...

    def cancel(self, rows: RowSet) -> None:
        """Drops the unfinished rows of a RowSet."""
        ...


def finish(engine: BatchEngine, rows: RowSet) -> list[Generation]:
    """Steps `engine` until all of `rows` have ended; returns their results. Cancels them if a step
    fails."""
    try:
        while not rows.done:
            engine.step()
    except BaseException:
        engine.cancel(rows)
        raise
    return rows.results
