"""Progress of long work, reported to the watcher of this thread, if it has one (a progress bar).

The work calls `part(name, bytes in all)` when it begins a part, and `went(bytes)` as it proceeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class ProgressWatcher(Protocol):
    """Receives the parts of the work in order, and the bytes done in the current one."""

    def part(self, name: str, total: int) -> None: ...

    def went(self, count: int) -> None: ...


_watcher: ContextVar[ProgressWatcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: ProgressWatcher) -> Iterator[None]:
    """Within this context, `watcher` receives the progress of this thread's work."""
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
    """`count` more bytes of the current part are done."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.went(count)
