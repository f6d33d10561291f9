"""Watches an engine's disk while an image is pulled: what a layer unpacks to is known only then."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

log = logging.getLogger("prime.node.docker")
KEPT_FREE = 2 << 30
"""Bytes of the engine's disk that a pull leaves free."""
_POLL_SECONDS = 0.1


class DiskGuard:
    """Calls `end` once less than KEPT_FREE bytes are free on the disk of `folder`, then sets
    `full`. Watches from entry to exit; a folder that is not on this machine is not watched."""

    def __init__(self, folder: Path, end: Callable[[], None]) -> None:
        self.full = False
        self._folder = folder
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prime-disk", daemon=True)

    def __enter__(self) -> DiskGuard:
        if os.path.isdir(self._folder):  # noqa: PTH112 - False, too, for a parent that is closed
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                free = shutil.disk_usage(self._folder).free
            except OSError as error:
                log.warning("the engine's disk is not watched during the pull: %s", error)
                return
            if free < KEPT_FREE:
                self.full = True
                self._end()
                return
            if self._stop.wait(_POLL_SECONDS):
                return
