"""Starts the other ranks of a vLLM engine that spans several cards, as child processes.

    this process, rank 0 ── rows, steps (pipe) ──► ranks 1 … N-1: the same rows, the same steps
              ╰──────────── vLLM's collectives, each rank holds its part of each layer ──╯

Each rank schedules and samples by itself (vLLM's "external_launcher"), so rank 0 captures states in
its own process, as with one card. If a rank ends, every other rank ends too: a collective with a
missing rank may wait forever. Rank 0 first says so to `on_lost`, and has END_SECONDS left.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prime_core.errors import FatalError, PrimeError, UnavailableError
from prime_engine.base import Discard, GenerationRequest
from prime_engine.batch import RowSet
from prime_engine.sizing import Cards

log = logging.getLogger("prime.engine.ranks")
LOAD_SECONDS = 1800.0
END_SECONDS = 10.0
NOTICE_SECONDS = 5.0
"""Time in which the end of a rank is noticed here, after a collective or a pipe has failed."""


def set_rank(rank: int, size: int, port: int) -> None:
    """Sets the environment from which vLLM and torch.distributed read a process's rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


@dataclass(frozen=True)
class _Added:
    requests: tuple[GenerationRequest, ...]
    temperature: float


@dataclass(frozen=True)
class _Cancelled:
    """`at`: where the rows are among those in progress."""

    at: int


@dataclass(frozen=True)
class _Proved:
    """`row`: tokens; see VllmEngine.prove."""

    row: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class _Replaced:
    folder: Path


class Ranks:
    """The other ranks of an engine on `cards`; sets this process's environment to rank 0.

    `load` (picklable) loads a rank's engine (a BatchEngine) on the `cards` that it is given, with
    that `rank`. `on_lost` is called, in a thread, when a rank ended by itself.
    """

    def __init__(
        self, load: Callable[..., Any], cards: Cards, on_lost: Callable[[FatalError], None]
    ) -> None:
        size = cards.tensor_parallel
        self._on_lost = on_lost
        self._lost = threading.Event()
        self._error = FatalError("a rank of the engine ended while in use")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._children: list[BaseProcess] = []
        self._sets: list[RowSet] = []
        """The rows in progress. Every rank has them in the same order, because all do the same."""
        self._ending = threading.Event()
        for rank in range(1, size):
            here, there = context.Pipe()
            child = context.Process(
                target=_serve, args=(there, load, replace(cards, rank=rank), port), daemon=True
            )
            child.start()
            there.close()
            self._pipes.append(here)
            self._children.append(child)
        set_rank(0, size, port)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        (ended, *_) = wait([child.sentinel for child in self._children])
        if self._ending.is_set():
            return
        at = next(n for n, child in enumerate(self._children) if child.sentinel == ended)
        self._children[at].join()
        why = _last_words(self._pipes[at]) or f"status {self._children[at].exitcode}"
        self._error = FatalError(f"rank {at + 1} of the engine ended while in use: {why}")
        self._lost.set()
        log.error("%s", self._error)
        self._on_lost(self._error)
        if not self._ending.wait(END_SECONDS):
            os._exit(self._error.exit_code)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raises what `on_lost` gets if the block fails because a rank has ended."""
        try:
            yield
        except Exception:
            if self._lost.wait(NOTICE_SECONDS):
                raise self._error from None
            raise

    def require_loaded(self) -> None:
        """Waits for every rank to load its part. Raises UnavailableError with a rank's reason,
        FatalError if one ended."""
        for rank, pipe in enumerate(self._pipes, start=1):
            if not pipe.poll(LOAD_SECONDS):
                raise UnavailableError(f"rank {rank} did not load within {LOAD_SECONDS:.0f} s")
            with self.together():
                problem = pipe.recv()
            if problem:
                raise UnavailableError(f"rank {rank}: {problem}")

    def add(self, rows: RowSet) -> None:
        """Has every rank add the same rows; returns at once."""
        self._sets.append(rows)
        self._send(_Added(tuple(rows.requests), rows.temperature))

    def replace_policy(self, folder: Path) -> None:
        """Has every rank load another policy in place; returns at once. See `require_loaded`."""
        self._send(_Replaced(folder))

    def prove(self, row: tuple[int, ...], temperature: float) -> None:
        """Has every rank run its part of a row's proof pass; returns at once."""
        self._send(_Proved(row, temperature))

    def cancel(self, rows: RowSet) -> None:
        """Has every rank drop these rows; returns at once."""
        self._send(_Cancelled(self._sets.index(rows)))

    def step(self) -> None:
        """Has every rank step its engine; returns at once."""
        self._sets = [rows for rows in self._sets if not rows.done]
        self._send(None)

    def _send(self, message: _Added | _Cancelled | _Proved | _Replaced | None) -> None:
        with self.together():
            for pipe in self._pipes:
                pipe.send(message)

    def close(self) -> None:
        """Ends the ranks."""
        self._ending.set()
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(END_SECONDS)
            if child.is_alive():
                child.kill()
                child.join()


def _last_words(pipe: Connection) -> str:
    """What a rank that has ended said last, if it was not read yet."""
    try:
        return str(pipe.recv()) if pipe.poll() else ""
    except (EOFError, OSError):
        return ""


def _serve(pipe: Connection, load: Callable[..., Any], cards: Cards, port: int) -> None:
    """A child process: loads its part, then generates until rank 0 closes the pipe."""
    set_rank(cards.rank, cards.tensor_parallel, port)
    parent = mp.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(UnavailableError.exit_code)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        engine = load(cards=cards)
    except PrimeError as error:
        log.error("rank %d: %s", cards.rank, error)  # rank 0 may be waiting in a collective
        pipe.send(str(error))
        pipe.poll(END_SECONDS)  # until rank 0 has read it and closes
        return
    pipe.send("")
    try:
        _follow(pipe, engine)
    except (PrimeError, MemoryError) as error:
        log.error("rank %d: %s", cards.rank, error)
        pipe.send(str(error))
        os._exit(FatalError.exit_code)  # the engine may wait for the other ranks in its shutdown
    engine.close()


def _follow(pipe: Connection, engine: Any) -> None:
    """Does what rank 0 does, until it closes the pipe."""
    sets: list[RowSet] = []
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        if message is None:
            sets = [rows for rows in sets if not rows.done]
            engine.step()
        elif isinstance(message, _Added):
            sets.append(engine.add(message.requests, message.temperature, Discard()))
        elif isinstance(message, _Proved):
            engine.prove(message.row, message.temperature)
        elif isinstance(message, _Replaced):
            try:
                replaced = engine.replace_policy(message.folder)
                pipe.send("" if replaced else "it needs a new engine for this policy")
            except PrimeError as error:
                pipe.send(str(error))
        else:
            engine.cancel(sets[message.at])
