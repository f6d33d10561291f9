"""Reads what lies on disk again, slowly and for ever, and says which version has rotted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from prime_broadcast.files import open_regular, read_at
from prime_broadcast.layout import Item
from prime_core.errors import PrimeError
from prime_core.ids import to_bytes

RATE = 8e6
"""Bytes a second that are read again: a hundredth of a disk, a few thousandths of a core."""
IDLE = 1.0
"""Seconds between looks while there is nothing to read."""

Shelf = Callable[[], Sequence[tuple[int, Path, Sequence[Item]]]]
"""The complete versions now: number, folder, items."""


def first_rotten(folder: Path, items: Iterable[Item], pause: Callable[[int], bool]) -> str | None:
    """Which chunk does not hash any more, in words; None if all do. `pause(bytes)` is called before
    each chunk and ends the reading by returning True."""
    for item in items:
        try:
            with open_regular(folder / item.name) as fd:
                for index, digest in enumerate(item.chunks):
                    offset, length = item.span(index)
                    if pause(length):
                        return None
                    if blake3(read_at(fd, offset, length)).digest() != to_bytes(digest):
                        return f"chunk {index} of {item.address} has rotted on disk"
        except (PrimeError, OSError) as error:
            return f"{item.address} cannot be read any more: {error}"
    return None


class Scrubber:
    """One thread over a shelf. `on_rot(version, why)` is called in it."""

    def __init__(
        self, shelf: Shelf, on_rot: Callable[[int, str], None], *, rate: float = RATE
    ) -> None:
        self._shelf = shelf
        self._on_rot = on_rot
        self._rate = rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ends at the next chunk."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            versions = self._shelf()
            for version, folder, items in versions:
                why = first_rotten(folder, items, self._pause)
                if why is not None and any(
                    (v, f) == (version, folder) for v, f, _ in self._shelf()
                ):  # else it was dropped meanwhile
                    self._on_rot(version, why)
                if self._stop.is_set():
                    return
            if not any(item.size for _, _, items in versions for item in items):
                self._stop.wait(IDLE)

    def _pause(self, count: int) -> bool:
        return self._stop.wait(count / self._rate)
