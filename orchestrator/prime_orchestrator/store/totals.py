"""Permanent counters for rows that moved to the archive, by name and subject.

A reader adds a counter to what it counts in the tables. Each name belongs to the module that uses
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import add_all, one_of, upsert_all

_totals = schema.archive_totals.c


def of(connection: Connection, name: str, among: Collection[str] | None = None) -> dict[str, int]:
    """Returns the numbers of a name, by subject; `among`: only of these subjects."""
    query = sa.select(_totals.subject, _totals.value).where(_totals.name == name)
    if among is not None:
        query = query.where(one_of(connection, _totals.subject, among))
    return {subject: int(value) for subject, value in connection.execute(query)}


def get(connection: Connection, name: str, subject: str) -> int:
    """Returns one number, or 0."""
    query = sa.select(_totals.value).where(_totals.name == name, _totals.subject == subject)
    return int(connection.execute(query).scalar() or 0)


def add(connection: Connection, name: str, numbers: Mapping[str, int]) -> None:
    """Adds to the numbers of a name, by subject."""
    add_all(connection, schema.archive_totals, _rows(name, numbers))


def raise_to(connection: Connection, name: str, numbers: Mapping[str, int]) -> None:
    """Raises the stored numbers of a name to the given ones, by subject; lowers none. Callers must
    not run concurrently."""
    known = of(connection, name, numbers) if numbers else {}
    higher = {key: value for key, value in numbers.items() if value > known.get(key, -1)}
    upsert_all(connection, schema.archive_totals, _rows(name, higher))


def _rows(name: str, numbers: Mapping[str, int]) -> list[dict[str, object]]:
    return [
        {"name": name, "subject": subject, "value": value}
        for subject, value in sorted(numbers.items())
        if value
    ]
