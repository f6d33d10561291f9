"""Files that the task submits, in a folder that only the agent can write: one file at a time.

    the task's own scratch ──PUT over the bridge──► inbox ──submit──► the outbox's journal

A task therefore shares no writable folder with this machine. However much it sends, the inbox holds
at most one file and one being received, each of MAX_FILE_BYTES at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from prime_core.errors import ConflictError, MalformedError, UnavailableError
from prime_core.rollout import MAX_FILE_BYTES
from prime_node.outbox import FILE_NAME

PIECE_BYTES = 1 << 20
_RECEIVING = ".receiving"
"""Cannot clash with a FILE_NAME, which never begins with a dot."""


class Inbox:
    """The folder. Thread-safe within one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._receiving = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.empty()

    def empty(self) -> None:
        """Removes all files; everything accepted is in the journal."""
        for left in self.folder.iterdir():
            left.unlink()

    def receive(self, name: str, size: int, read: Callable[[int], bytes]) -> None:
        """Stores exactly `size` bytes of `read` as `name`, replacing any earlier file.

        Raises MalformedError (name, size, too few bytes), ConflictError (another file is being
        received), UnavailableError if the disk refuses; nothing of it is then kept.
        """
        if not FILE_NAME.match(name):
            raise MalformedError(f"not a plain file name: {name[:80]!r}")
        if not 0 < size <= MAX_FILE_BYTES:
            raise MalformedError(f"a rollout file has 1 to {MAX_FILE_BYTES} bytes, not {size}")
        if not self._receiving.acquire(blocking=False):
            raise ConflictError("another file is being received; one is sent at a time")
        partial = self.folder / _RECEIVING
        try:
            self.empty()
            _copy(partial, size, read)
            partial.replace(self.folder / name)
        except OSError as error:
            raise UnavailableError(f"cannot keep the file {name!r}: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)
            self._receiving.release()


def _copy(target: Path, size: int, read: Callable[[int], bytes]) -> None:
    with target.open("wb") as file:
        left = size
        while left:
            piece = read(min(left, PIECE_BYTES))
            if not piece:
                raise MalformedError(f"the file ended {left} bytes too early")
            file.write(piece)
            left -= len(piece)
