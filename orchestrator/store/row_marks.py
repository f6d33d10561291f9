"""Marks of accepted files' rows (protocol.verification.repeats), to see which come again."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.store import schema
from orchestrator.store.rows import insert_new
from protocol.core.ids import Digest

KEPT_SECONDS = 7 * 86400.0
"""How long a row is remembered."""
_AT_ONCE = 500
_marks = schema.row_marks.c


def remember(
    connection: Connection, submission: Digest, marks: Sequence[str], *, now: float
) -> None:
    """Writes an accepted file's marks; those known already stay with their first file."""
    for mark in marks:
        values = {"mark": mark, "submission_digest": submission, "at": now}
        insert_new(connection, schema.row_marks, values)


def seen(connection: Connection, marks: Sequence[str], *, but: Digest) -> frozenset[str]:
    """Those of `marks` that belong to another submission than `but`."""
    found: set[str] = set()
    for start in range(0, len(marks), _AT_ONCE):
        query = sa.select(_marks.mark).where(
            _marks.mark.in_(marks[start : start + _AT_ONCE]), _marks.submission_digest != but
        )
        found.update(connection.execute(query).scalars())
    return frozenset(found)


def forget(connection: Connection, now: float) -> None:
    """Drops what is older than KEPT_SECONDS."""
    connection.execute(sa.delete(schema.row_marks).where(_marks.at < now - KEPT_SECONDS))
