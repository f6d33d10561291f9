"""Finished rollout files on their way to the orchestrator: journalled first, then delivered.

    the task ──PUT over the bridge──► TaskUploads ──submit──► Spool ──uploader.py──► receipt

    spooled → receipted            the receipt is stored, the file removed
            ↘ refused              the orchestrator's final answer (late, void, not ours)

TaskUploads is a folder that only the agent can write, so a task shares no writable folder with this
machine: it holds at most one file of each open lease and one being received, each of
MAX_FILE_BYTES at most. Spool
journals the file with the signed submission before anything is sent. Repeating a delivery is
harmless: upload and submission are idempotent by digest. Only one agent opens a journal at a time
(the data folder's lock). Reading it requires no writes, so a full disk blocks neither the heartbeat
nor the receipts of files submitted before.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prime_core.errors import ConflictError, MalformedError, UnavailableError
from prime_core.ids import Address, Digest, digest
from prime_core.messages import FileEnding, ReceiptAnswer
from prime_core.rollout import MAX_FILE_BYTES, SignedSubmission
from prime_core.task import SignedLease

EntryState = Literal["spooled", "receipted", "refused"]
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
KEPT_RECEIPTS = 10_000
CLOCK_SECONDS = 900
"""Seconds by which this machine's clock may be ahead of the manager's, which dates receipts."""

PIECE_BYTES = 1 << 20
_RECEIVING = ".receiving"
"""Cannot clash with a FILE_NAME, which never begins with a dot."""

_RECEIVED_AT = "json_extract(receipt, '$.receipt.received_at')"
_EARNING = (
    "FROM entries WHERE state = 'receipted' AND worth != '0' "
    "AND submission_digest NOT IN (SELECT submission_digest FROM endings)"
)
"""The files that are paid, or are to be paid if they are accepted."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  lease_digest TEXT PRIMARY KEY,
  submission_digest TEXT NOT NULL,
  body TEXT NOT NULL,          -- JSON of SignedSubmission
  state TEXT NOT NULL,
  receipt TEXT,                -- JSON of ReceiptAnswer
  reason TEXT NOT NULL DEFAULT '',
  created_at REAL NOT NULL,
  lease TEXT NOT NULL,         -- JSON of SignedLease
  worth TEXT NOT NULL          -- pay of its generated tokens in wei
);
CREATE TABLE IF NOT EXISTS endings (
  submission_digest TEXT PRIMARY KEY,
  judged_at INTEGER NOT NULL,
  body TEXT NOT NULL           -- JSON of FileEnding
);
CREATE TABLE IF NOT EXISTS deleted (
  node TEXT PRIMARY KEY,
  worth TEXT NOT NULL          -- of entries that were deleted, in wei, as worth_before counts them
);
"""


@dataclass(frozen=True)
class Entry:
    """One file in the journal. With lease and receipt a node can root its leaf itself."""

    lease_digest: Digest
    submission_digest: Digest
    body: SignedSubmission
    state: EntryState
    receipt: ReceiptAnswer | None
    reason: str
    path: Path
    lease: SignedLease


@dataclass(frozen=True)
class SpooledFile:
    """A copy that only the agent can write. Size in bytes."""

    path: Path
    sha256: Digest
    size: int


class Spool:
    """The journal and its folder. Thread-safe within one process.

    Pass `sweep` False in commands that read it while an agent runs.
    """

    def __init__(self, folder: Path, *, now: Callable[[], float], sweep: bool = True) -> None:
        self._folder = folder
        self._now = now
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._database = folder / "journal.sqlite"
        self.changed = threading.Condition()
        """Notified whenever an entry is added or settled."""
        with self._journal() as db:
            db.executescript(_SCHEMA)
        if sweep:
            self._sweep()

    @contextmanager
    def _journal(self) -> Iterator[sqlite3.Connection]:
        """Opens the journal. Raises UnavailableError if the disk is full or refuses (SQLite's
        OperationalError). A damaged journal is a defect and crashes."""
        try:
            with closing(sqlite3.connect(self._database, timeout=30, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous=FULL")
                yield db
        except sqlite3.OperationalError as error:
            raise UnavailableError(f"the journal {self._database} is refused: {error}") from error

    def _sweep(self) -> None:
        """Removes copies that were never journalled, and deletes the oldest receipts."""
        kept = {entry.path.name for entry in self.waiting()}
        for file in self._folder.glob("*.parquet*"):
            if file.name not in kept:
                file.unlink()
        newest = "(SELECT lease_digest FROM entries ORDER BY created_at DESC LIMIT ?)"
        old = f"lease_digest NOT IN {newest}"
        query = f"SELECT json_extract(body, '$.node'), worth {_EARNING} AND {old}"
        with self._journal() as db:
            db.execute("BEGIN IMMEDIATE")
            worth: dict[str, int] = {}
            for node, one in db.execute(query, (KEPT_RECEIPTS,)):
                worth[node] = worth.get(node, 0) + int(one)
            for node, more in worth.items():
                total = more + self._deleted(db, node)
                db.execute("INSERT OR REPLACE INTO deleted VALUES (?, ?)", (node, str(total)))
            db.execute(
                "DELETE FROM entries WHERE state != 'spooled' AND lease_digest NOT IN "
                "(SELECT lease_digest FROM entries ORDER BY created_at DESC LIMIT ?)",
                (KEPT_RECEIPTS,),
            )
            db.execute(
                "DELETE FROM endings WHERE submission_digest NOT IN "
                "(SELECT submission_digest FROM entries)"
            )
            db.execute("COMMIT")

    @staticmethod
    def _deleted(db: sqlite3.Connection, node: str) -> int:
        row = db.execute("SELECT worth FROM deleted WHERE node = ?", (node,)).fetchone()
        return 0 if row is None else int(row[0])

    def take_in(self, source_folder: Path, name: str) -> SpooledFile:
        """Copies `name` from a folder that the task can write, hashing it on the way.

        Raises MalformedError unless it is a plain file directly in that folder, not empty, and at
        most MAX_FILE_BYTES large; UnavailableError if the disk is full.
        """
        if not FILE_NAME.match(name):
            raise MalformedError(f"not a plain file name: {name[:80]!r}")
        hasher, size = hashlib.sha256(), 0
        partial = self._folder / f"incoming-{threading.get_ident()}.parquet.part"
        try:
            source = os.open(source_folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise MalformedError(f"the spool holds no readable file {name!r}") from error
        try:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise MalformedError(f"{name!r} is not a plain file")
            with partial.open("wb") as copy:
                while block := os.read(source, 1 << 20):
                    size += len(block)
                    if size > MAX_FILE_BYTES:
                        raise MalformedError(
                            f"{name!r} is larger than a rollout file may be ({MAX_FILE_BYTES} B)"
                        )
                    hasher.update(block)
                    copy.write(block)
                copy.flush()
                os.fsync(copy.fileno())
            if size == 0:
                raise MalformedError(f"{name!r} is empty")
            sha256 = digest(hasher.digest())
            final = self._path(sha256)
            partial.replace(final)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UnavailableError(f"cannot keep the file {name!r}: {error.strerror}") from error
        except MalformedError:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(source)
        return SpooledFile(final, sha256, size)

    def _path(self, sha256: Digest) -> Path:
        return self._folder / f"{sha256[2:]}.parquet"

    def add(
        self,
        submission_digest: Digest,
        body: SignedSubmission,
        lease: SignedLease,
        *,
        worth: int = 0,
    ) -> Entry:
        """Writes the entry; it then survives any crash. `worth`: what an accepted file earns, in
        wei.

        Repeating it with the same file returns the existing entry. Raises ConflictError if the
        lease already has another file, UnavailableError if the disk refuses; the copy is then
        removed as well.
        """
        lease_digest = body.submission.lease_digest
        with self.changed:
            known = self.find(lease_digest)
            if known is not None:
                if known.body.submission.sha256 != body.submission.sha256:
                    raise ConflictError("another file was already handed in for this lease")
                return known
            try:
                with self._journal() as db:
                    db.execute(
                        "INSERT INTO entries (lease_digest, submission_digest, body, lease, worth, "
                        "state, created_at) VALUES (?, ?, ?, ?, ?, 'spooled', ?)",
                        (
                            lease_digest,
                            submission_digest,
                            body.model_dump_json(),
                            lease.model_dump_json(),
                            str(worth),
                            self._now(),
                        ),
                    )
            except UnavailableError:
                self._drop_copy(self._path(body.submission.sha256))
                raise
            self.changed.notify_all()
        entry = self.find(lease_digest)
        assert entry is not None
        return entry

    def _drop_copy(self, path: Path) -> None:
        """Removes a copy that could not be journalled, to free space for the next attempt."""
        with suppress(UnavailableError, OSError):
            if all(entry.path != path for entry in self.waiting()):
                path.unlink(missing_ok=True)

    def settle(self, lease_digest: Digest, receipt: ReceiptAnswer | None, reason: str = "") -> None:
        """Stores the receipt, or the reason of a final refusal, then removes the file.

        Raises UnavailableError if the disk refuses; repeating it is harmless.
        """
        entry = self.find(lease_digest)
        assert entry is not None, "only journalled entries are settled"
        state: EntryState = "receipted" if receipt is not None else "refused"
        body = receipt.model_dump_json() if receipt is not None else None
        with self.changed:
            with self._journal() as db:
                db.execute(
                    "UPDATE entries SET state = ?, receipt = ?, reason = ? WHERE lease_digest = ?",
                    (state, body, reason[:2048], lease_digest),
                )
            self.changed.notify_all()
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:  # settled anyway: the next start removes the file
            raise UnavailableError(f"{entry.path} cannot be removed: {error.strerror}") from error

    def find(self, lease_digest: Digest) -> Entry | None:
        """Returns the entry of a lease, or None if no file was submitted for it."""
        rows = self._select("WHERE lease_digest = ?", (lease_digest,))
        return rows[0] if rows else None

    def waiting(self) -> list[Entry]:
        """Returns entries that are not settled yet, oldest first."""
        return self._select("WHERE state = 'spooled' ORDER BY created_at, lease_digest", ())

    def receipted(self) -> list[Entry]:
        """Returns entries whose receipt is stored, oldest first."""
        return self._select("WHERE state = 'receipted' ORDER BY created_at, lease_digest", ())

    def worth_since(self, since: int) -> int:
        """Returns the worth in wei of the files whose receipt is dated `since` (Unix seconds) or
        later, without those that ended rejected or void. Files that were journalled later than that
        count even if their receipt is dated earlier."""
        query = f"SELECT worth {_EARNING} AND ({_RECEIVED_AT} >= ? OR created_at > ?)"
        with self._journal() as db:
            found = db.execute(query, (since, since + CLOCK_SECONDS))
            return sum(int(worth) for (worth,) in found)

    def worth_before(self, until: int, node: Address) -> int:
        """Returns the worth in wei of the files of `node` whose receipt is dated before `until`
        (Unix seconds), without those that ended rejected or void. Deleted entries are included."""
        query = (
            f"SELECT worth {_EARNING} AND json_extract(body, '$.node') = ? AND {_RECEIVED_AT} < ?"
        )
        with self._journal() as db:
            kept = sum(int(worth) for (worth,) in db.execute(query, (node, until)))
            return kept + self._deleted(db, node)

    def note(self, ending: FileEnding) -> bool:
        """Stores how one of our files ended; returns False if that is known already or the file is
        not ours."""
        with self._journal() as db:
            done = db.execute(
                "INSERT OR IGNORE INTO endings SELECT submission_digest, ?, ? FROM entries "
                "WHERE submission_digest = ?",
                (ending.judged_at, ending.model_dump_json(), ending.submission_digest),
            )
            return done.rowcount == 1

    def endings(self, limit: int) -> list[FileEnding]:
        """Returns the newest files that were not accepted, newest first."""
        with self._journal() as db:
            rows = db.execute(
                "SELECT body FROM endings ORDER BY judged_at DESC, submission_digest LIMIT ?",
                (limit,),
            ).fetchall()
        return [FileEnding.model_validate_json(body) for (body,) in rows]

    def counts(self) -> dict[str, int]:
        """Returns the number of entries by state, and of rejected and void files by status."""
        with self._journal() as db:
            found = dict(db.execute("SELECT state, count(*) FROM entries GROUP BY state"))
            ended = "SELECT json_extract(body, '$.status'), count(*) FROM endings GROUP BY 1"
            return found | dict(db.execute(ended))

    def _select(self, where: str, values: tuple[str, ...]) -> list[Entry]:
        query = (
            "SELECT lease_digest, submission_digest, body, state, receipt, reason, lease FROM "
            "entries "
        )
        with self._journal() as db:
            rows = db.execute(query + where, values).fetchall()
        entries = []
        for lease_digest, submission_digest, body, state, receipt, reason, lease in rows:
            signed = SignedSubmission.model_validate_json(body)
            answer = ReceiptAnswer.model_validate_json(receipt) if receipt else None
            path = self._path(signed.submission.sha256)
            given = SignedLease.model_validate_json(lease)
            entries.append(
                Entry(lease_digest, submission_digest, signed, state, answer, reason, path, given)
            )
        return entries


def waiting_in(folder: Path) -> int:
    """Returns the number of finished files in `folder` that are not delivered; its agent may be
    running."""
    if not (folder / "journal.sqlite").is_file():
        return 0
    return len(Spool(folder, now=time.time, sweep=False).waiting())


class TaskUploads:
    """The folder. Thread-safe within one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._receiving = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.empty()

    def empty(self, keep: Collection[str] = ()) -> None:
        """Removes all files except those named in `keep`; everything accepted is in the journal."""
        for left in self.folder.iterdir():
            if left.name not in keep:
                left.unlink()

    def receive(
        self, name: str, size: int, read: Callable[[int], bytes], keep: Collection[str] = ()
    ) -> None:
        """Stores exactly `size` bytes of `read` as `name`, and removes all files except those named
        in `keep`.

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
            self.empty(keep)
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
