"""Marks of accepted files' rows (prime_verify.repeats), to detect repeated rows.

Each mark records whether its file claims that the answer is too improbable to be drawn twice. Two
files share a row if they share a mark for which at least one of them makes this claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_all_new, one_of

KEPT_SECONDS = 7 * 86400.0
"""How long marks are kept."""
_AT_ONCE = 500
_marks = schema.row_marks.c


def remember(
    connection: Connection, submission: Digest, marks: Mapping[str, bool], *, now: float
) -> None:
    """Writes an accepted file's marks."""
    remember_all(connection, {submission: marks}, now=now)


def remember_all(
    connection: Connection, files: Mapping[Digest, Mapping[str, bool]], *, now: float
) -> None:
    """Writes the marks of accepted files."""
    rows = [
        {"mark": mark, "improbable": improbable, "submission_digest": submission, "at": now}
        for submission, marks in files.items()
        for mark, improbable in sorted(marks.items())
    ]
    insert_all_new(connection, schema.row_marks, rows)


def seen_by(
    connection: Connection, files: Mapping[Digest, Mapping[str, bool]]
) -> dict[Digest, frozenset[str]]:
    """Returns `seen` for each of the files."""
    mine = one_of(connection, _marks.submission_digest, files)
    own = sa.select(_marks.submission_digest).where(mine)
    marked = set(connection.execute(own.distinct()).scalars())
    stored = _stored(connection, {name: files[name] for name in files if name not in marked})
    return {
        name: seen(connection, marks, but=name)
        if name in marked
        else frozenset(mark for mark, rare in marks.items() if mark in stored[rare])
        for name, marks in files.items()
    }


def _stored(
    connection: Connection, files: Mapping[Digest, Mapping[str, bool]]
) -> dict[bool, set[str]]:
    """Returns the marks that files without marks in the store share with files that have some, by
    whether the former claim them improbable."""
    stored = {}
    for claim in (True, False):
        names = {m for marks in files.values() for m, rare in marks.items() if rare is claim}
        found = _common(connection, dict.fromkeys(sorted(names), claim), None, _marks.mark)
        stored[claim] = {row.mark for row in found}
    return stored


def unshared(
    connection: Connection, files: Mapping[Digest, Mapping[str, bool]]
) -> frozenset[Digest]:
    """Returns those of `files`, none of which has marks in the store, that share no row with a file
    in the store nor with one before them in `files`."""
    stored = _stored(connection, files)
    before: dict[str, bool] = {}
    free = set()
    for digest, marks in files.items():
        shares = any(
            mark in stored[rare] or (mark in before and (rare or before[mark]))
            for mark, rare in marks.items()
        )
        if not shares:
            free.add(digest)
        for mark, rare in marks.items():
            before[mark] = before.get(mark, False) or rare
    return frozenset(free)


def seen(connection: Connection, marks: Mapping[str, bool], *, but: Digest) -> frozenset[str]:
    """Returns the `marks` that `but` shares with another submission."""
    return frozenset(row.mark for row in _common(connection, marks, but, _marks.mark))


def holders(connection: Connection, marks: Mapping[str, bool], *, but: Digest) -> list[Digest]:
    """Returns the other submissions that share any of `marks` with `but`, sorted."""
    found = _common(connection, marks, but, _marks.submission_digest)
    return sorted({Digest(row.submission_digest) for row in found})


def forget_file(connection: Connection, submission: Digest) -> None:
    """Deletes the marks of a file that is no longer accepted."""
    connection.execute(sa.delete(schema.row_marks).where(_marks.submission_digest == submission))


def forget(connection: Connection, now: float) -> None:
    """Deletes marks older than KEPT_SECONDS."""
    connection.execute(sa.delete(schema.row_marks).where(_marks.at < now - KEPT_SECONDS))


def _common(
    connection: Connection,
    marks: Mapping[str, bool],
    but: Digest | None,
    column: sa.ColumnElement[str],
) -> Iterator[sa.Row[str]]:
    """Yields `column` for marks shared with submissions other than `but`. A foreseeable answer has
    very many holders. So for marks not claimed improbable, only holders that claim it are queried,
    and DISTINCT returns each value once per query rather than once per holder."""
    for claim in (True, False):
        names = [mark for mark, improbable in marks.items() if improbable is claim]
        for start in range(0, len(names), _AT_ONCE):
            some = one_of(connection, _marks.mark, names[start : start + _AT_ONCE])
            query = sa.select(column).distinct().where(some)
            if but is not None:
                query = query.where(_marks.submission_digest != but)
            if not claim:
                query = query.where(_marks.improbable == sa.true())
            yield from connection.execute(query)
