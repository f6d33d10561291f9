"""Progress bar on a terminal: steps done, reward, ETA, and what the loop is waiting for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {
    "wait_batch": "waiting for a sealed batch",
    "share": "sharing the batch with every rank",
    "proximal": "scoring the batch by the present policy",
    "plan": "planning the batch",
    "collate": "computing the gradient",
    "statistics": "computing the gradient",
    "forward_backward": "computing the gradient",
    "optimizer": "stepping",
    "wait_kept": "waiting for the last checkpoint and publication",
    "snapshot": "copying the weights",
}


class Bar:
    """A rich progress bar; `total` None shows steps without an end."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[reward]}{task.fields[waits]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("train", total=total, reward="", waits="starting")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def say(self, name: str) -> None:
        """Shows what the loop waits for; `name` is its name in the step's line."""
        self._progress.update(self._task, waits=WORDS.get(name, name))

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a saved step. Uses the absolute step number, so that a resumed run continues from
        its step."""
        reward = f"reward {line['reward']:.3f} · " if "reward" in line else ""
        self._progress.update(self._task, completed=line["step"] + 1, reward=reward)
