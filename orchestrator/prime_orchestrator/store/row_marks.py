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
from prime_orchestrator.store.rows import insert_all_new

KEPT_SECONDS = 7 * 86400.0
"""How long marks are kept."""
_AT_ONCE = 500
_marks = schema.row_marks.c


def remember(
    connection: Connection, submission: Digest, marks: Mapping[str, bool], *, now: float
) -> None:
    """Writes an accepted file's marks."""
    rows = [
        {"mark": mark, "improbable": improbable, "submission_digest": submission, "at": now}
        for mark, improbable in sorted(marks.items())
    ]
    insert_all_new(connection, schema.row_marks, rows)


def seen(connection: Connection, marks: Mapping[str, bool], *, but: Digest) -> frozenset[str]:
    """Returns those of `marks` that `but` shares with another submission."""
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
    connection: Connection, marks: Mapping[str, bool], but: Digest, column: sa.ColumnElement[str]
) -> Iterator[sa.Row[str]]:
    """Yields `column` for marks shared with other submissions. A foreseeable answer has very many
    holders. So for marks not claimed improbable, only holders that claim it are queried, and
    DISTINCT returns each value once per query rather than once per holder."""
    for claim in (True, False):
        names = [mark for mark, improbable in marks.items() if improbable is claim]
        for start in range(0, len(names), _AT_ONCE):
            query = (
                sa.select(column)
                .distinct()
                .where(
                    _marks.mark.in_(names[start : start + _AT_ONCE]),
                    _marks.submission_digest != but,
                )
            )
            if not claim:
                query = query.where(_marks.improbable == sa.true())
            yield from connection.execute(query)
