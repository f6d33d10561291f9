"""Progress bars on stderr if it is a terminal; otherwise nothing is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from prime_broadcast.progress import watched_by


@contextmanager
def transfer_bar(name: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that updates the bar; it takes (bytes done, total bytes)."""
    with _bars(shown) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def work_bar(*, shown: bool) -> Iterator[None]:
    """Draws one bar for each part of the work inside: hashing, comparing, applying
    (progress.py)."""
    with _bars(shown) as bars, watched_by(_Parts(bars)):
        yield


class _Parts:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def part(self, name: str, total: int) -> None:
        self._task = self._bars.add_task(name, total=total)

    def went(self, count: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, count)


def _bars(shown: bool) -> Progress:
    terminal = console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=terminal,
        disable=not (shown and terminal.is_terminal),
    )


def console() -> Console:
    """Returns the console on which bars are drawn."""
    return Console(stderr=True)
