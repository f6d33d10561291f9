"""A validator's own folder: draw secrets, opinions until they are submitted, a juror's votes.

One SQLite file. Data is durable before anything that depends on it leaves the machine: a secret
before its commitment, an opinion before its seal, a vote before its commitment.
Several processes with the same key may share it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prime_core.errors import UnavailableError
from prime_core.folders import make_folder
from prime_core.ids import Digest
from prime_core.verdict import SignedOpinion

_TABLES = """
CREATE TABLE IF NOT EXISTS draws (
    epoch INTEGER PRIMARY KEY, secret TEXT NOT NULL,
    committed INTEGER NOT NULL DEFAULT 0, revealed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS opinions (
    submission TEXT PRIMARY KEY, body TEXT NOT NULL, verdict_table BLOB, evidence BLOB,
    given INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS votes (
    submission TEXT PRIMARY KEY, vote INTEGER NOT NULL, digest TEXT NOT NULL, salt TEXT NOT NULL,
    detail TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Sealed:
    """An opinion with the objects it names."""

    signed: SignedOpinion
    table: bytes
    evidence: bytes | None


@dataclass(frozen=True)
class Secret:
    """One epoch's draw secret, and whether it is committed and revealed."""

    epoch: int
    secret: Digest
    committed: bool
    revealed: bool


@dataclass(frozen=True)
class KeptVote:
    """A juror's vote on a submission (prime_chain's Vote), secret until it is revealed. `digest` is
    of its replay's result, `detail` says the result in words."""

    submission: Digest
    vote: int
    digest: Digest
    salt: Digest
    detail: str


class Folder:
    """The database in `path`. Thread-safe. Every method raises UnavailableError if the database
    cannot be read or written, for example because the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = make_folder(path)
        path.chmod(0o700)
        self._lock = threading.Lock()
        self._database = path / "validator.sqlite"
        with self._refused():
            self._db = sqlite3.connect(
                self._database, timeout=30, check_same_thread=False, isolation_level=None
            )
        for sql in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", *_TABLES.split(";")):
            self._run(sql)

    def close(self) -> None:
        self._db.close()

    def _run(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with self._refused(), self._lock:
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UnavailableError(f"{self._database} cannot be used: {error}") from error

    # -- draw secrets --------------------------------------------------------------------------

    def keep_secret(self, epoch: int, secret: Digest) -> Secret:
        """Stores an epoch's secret unless there is one; returns the stored one."""
        self._run("INSERT OR IGNORE INTO draws (epoch, secret) VALUES (?, ?)", epoch, secret)
        found = self.secret(epoch)
        assert found is not None
        return found

    def secret(self, epoch: int) -> Secret | None:
        """Returns the secret of an epoch, or None."""
        return next((one for one in self._secrets("WHERE epoch = ?", epoch)), None)

    def unrevealed(self) -> list[Secret]:
        """Returns secrets that are committed to and not revealed yet, oldest first."""
        return self._secrets("WHERE committed AND NOT revealed ORDER BY epoch")

    def mark_committed(self, epochs: list[int]) -> None:
        for epoch in epochs:
            self._run("UPDATE draws SET committed = 1 WHERE epoch = ?", epoch)

    def mark_revealed(self, epoch: int) -> None:
        self._run("UPDATE draws SET revealed = 1 WHERE epoch = ?", epoch)

    def _secrets(self, where: str, *values: object) -> list[Secret]:
        columns = "SELECT epoch, secret, committed, revealed FROM draws "
        rows = self._run(columns + where, *values)
        return [
            Secret(int(str(epoch)), Digest(str(secret)), bool(committed), bool(revealed))
            for epoch, secret, committed, revealed in rows
        ]

    # -- opinions ------------------------------------------------------------------------------

    def keep_opinion(self, sealed: Sealed) -> None:
        """Stores an opinion, replacing an earlier one on the same file."""
        self._run(
            "INSERT OR REPLACE INTO opinions (submission, body, verdict_table, evidence, given) "
            "VALUES (?, ?, ?, ?, 0)",
            *(sealed.signed.opinion.submission, sealed.signed.model_dump_json()),
            *(sealed.table, sealed.evidence),
        )

    def sealed(self, submission: Digest) -> Sealed | None:
        """Returns the opinion on a file that is still to be submitted, or None."""
        rows = self._run(
            "SELECT body, verdict_table, evidence FROM opinions WHERE submission = ? AND NOT given",
            submission,
        )
        for body, table, evidence in rows:
            assert isinstance(table, bytes)
            assert evidence is None or isinstance(evidence, bytes)
            return Sealed(SignedOpinion.model_validate_json(str(body)), table, evidence)
        return None

    def mark_given(self, submission: Digest) -> None:
        """Marks the opinion submitted and deletes its objects, which are now published."""
        self._run(
            "UPDATE opinions SET given = 1, verdict_table = NULL, evidence = NULL "
            "WHERE submission = ?",
            submission,
        )

    # -- a juror's votes -----------------------------------------------------------------------

    def keep_vote(self, vote: KeptVote) -> KeptVote:
        """Stores a vote unless there is one on the submission; returns the stored one."""
        self._run(
            "INSERT OR IGNORE INTO votes VALUES (?, ?, ?, ?, ?)",
            *(vote.submission, vote.vote, vote.digest, vote.salt, vote.detail),
        )
        found = self.vote(vote.submission)
        assert found is not None
        return found

    def vote(self, submission: Digest) -> KeptVote | None:
        """Returns the vote on a submission, or None."""
        rows = self._run("SELECT * FROM votes WHERE submission = ?", submission)
        for name, vote, digest, salt, detail in rows:
            return KeptVote(
                Digest(str(name)),
                int(str(vote)),
                Digest(str(digest)),
                Digest(str(salt)),
                str(detail),
            )
        return None

    def counts(self) -> dict[str, int]:
        """Returns the number of opinions, `given` and `sealed`."""
        rows = self._run("SELECT given, COUNT(*) FROM opinions GROUP BY given")
        found = {bool(given): int(str(number)) for given, number in rows}
        return {"given": found.get(True, 0), "sealed": found.get(False, 0)}
