"""How far long work has come, told to whoever watches this thread: a bar on a terminal, or nobody.

Work says `part(name, bytes in all)` as it begins one, and `went(bytes)` as it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Watcher(Protocol):
    """Hears of parts of work, one after the other, and of bytes done in the present one."""

    def part(self, name: str, total: int) -> None: ...

    def went(self, count: int) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Whoever works within hears nothing of it; `watcher` does."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def part(name: str, total: int) -> None:
    """A part of `total` bytes begins."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.part(name, total)


def went(count: int) -> None:
    """So many more bytes of it are done."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.went(count)
