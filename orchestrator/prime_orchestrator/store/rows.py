"""Helpers for the query files: typed rows, and inserts that tolerate existing rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, RowMapping, Table, bindparam
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")


def record(kind: type[T], row: RowMapping | None) -> T | None:
    """Converts `row` to a dataclass with the table's column names; None stays None."""
    return None if row is None else kind(**row)


def records(kind: type[T], rows: Sequence[RowMapping]) -> list[T]:
    """Converts all `rows` to dataclasses."""
    return [kind(**row) for row in rows]


def insert_new(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Inserts a row unless one with its key exists. Returns whether it was inserted."""
    statement = _insert(connection, table).values(**values).on_conflict_do_nothing()
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount == 1


def insert_all_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts those of `rows` whose keys do not exist, with one prepared statement."""
    if rows:
        statement = _insert(connection, table).on_conflict_do_nothing()
        connection.execute(statement, [dict(row) for row in rows])


def returning_new(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
) -> Sequence[Row[Any]]:
    """Inserts those of `rows` whose keys do not exist, and returns their primary keys."""
    if not rows:
        return ()
    statement = _insert(connection, table).on_conflict_do_nothing()
    return connection.execute(
        statement.returning(*table.primary_key.columns), [dict(row) for row in rows]
    ).all()


def upsert(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    """Inserts a row, or overwrites the given columns of the row with the same primary key."""
    keys = [column.name for column in table.primary_key.columns]
    statement = _insert(connection, table).values(**values)
    changed = {name: statement.excluded[name] for name in values if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))


def upsert_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Like `upsert`, for many rows with the same columns, with one prepared statement."""
    if not rows:
        return
    keys = [column.name for column in table.primary_key.columns]
    statement = _insert(connection, table)
    changed = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(
        statement.on_conflict_do_update(index_elements=keys, set_=changed),
        [dict(row) for row in rows],
    )


def add_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows, or adds their values to those of the row with the same primary key."""
    if not rows:
        return
    keys = [column.name for column in table.primary_key.columns]
    statement = _insert(connection, table)
    sums = {name: table.c[name] + statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(
        statement.on_conflict_do_update(index_elements=keys, set_=sums),
        [dict(row) for row in rows],
    )


def update_each(
    connection: Connection, table: Table, rows: Sequence[object], names: Sequence[str]
) -> None:
    """Writes the columns `names` of these rows, dataclasses with the table's column names, with one
    prepared statement."""
    if not rows:
        return
    (key,) = table.primary_key.columns
    statement = table.update().where(key == bindparam("of"))
    statement = statement.values({name: bindparam(f"new_{name}") for name in names})
    values = [
        {"of": getattr(row, key.name)} | {f"new_{name}": getattr(row, name) for name in names}
        for row in rows
    ]
    connection.execute(statement, values)


def _insert(connection: Connection, table: Table) -> Any:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)
