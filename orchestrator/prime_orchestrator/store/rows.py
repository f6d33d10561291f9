"""Helpers for the query files: typed rows, and inserts that tolerate existing rows.

On PostgreSQL, statements for many rows take one array for each column: their text does not depend
on the number of rows, so that it is prepared once, and they are one statement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Row,
    RowMapping,
    Table,
    any_,
    bindparam,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")


def record(kind: type[T], row: RowMapping | None) -> T | None:
    """Converts `row` to a dataclass with the table's column names; None stays None."""
    return None if row is None else kind(**row)


def records(kind: type[T], rows: Sequence[RowMapping]) -> list[T]:
    """Converts all `rows` to dataclasses."""
    return [kind(**row) for row in rows]


def one_of(
    connection: Connection, column: Column[Any], values: Collection[Any]
) -> ColumnElement[bool]:
    """Returns the condition that `column` is one of the values."""
    if connection.dialect.name == "postgresql":
        return column == any_(_array(column, values))
    return column.in_(list(values))


def insert_new(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Inserts a row unless one with its key exists. Returns whether it was inserted."""
    statement = _insert(connection, table).values(**values).on_conflict_do_nothing()
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount == 1


def insert_all_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts those of `rows` whose keys do not exist, with one prepared statement."""
    if not rows:
        return
    statement = _insert(connection, table)
    if connection.dialect.name == "postgresql":
        connection.execute(statement.from_select(*_of_arrays(table, rows)).on_conflict_do_nothing())
    else:
        connection.execute(statement.on_conflict_do_nothing(), [dict(row) for row in rows])


def returning_new(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
) -> Sequence[Row[Any]]:
    """Inserts those of `rows` whose keys do not exist, and returns their primary keys."""
    if not rows:
        return ()
    statement, keys = _insert(connection, table), table.primary_key.columns
    if connection.dialect.name == "postgresql":
        statement = statement.from_select(*_of_arrays(table, rows)).on_conflict_do_nothing()
        return connection.execute(statement.returning(*keys)).all()
    statement = statement.on_conflict_do_nothing().returning(*keys)
    return connection.execute(statement, [dict(row) for row in rows]).all()


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
    if connection.dialect.name == "postgresql":
        arrays = [
            _array(table.c[name], [getattr(row, name) for row in rows])
            for name in (key.name, *names)
        ]
        new = func.unnest(*arrays).table_valued("of", *names).render_derived("new")
        changed = {name: new.c[name] for name in names}
        connection.execute(table.update().where(key == new.c.of).values(changed))
        return
    statement = table.update().where(key == bindparam("of"))
    statement = statement.values({name: bindparam(f"new_{name}") for name in names})
    values = [
        {"of": getattr(row, key.name)} | {f"new_{name}": getattr(row, name) for name in names}
        for row in rows
    ]
    connection.execute(statement, values)


def _array(column: Column[Any], values: Iterable[Any]) -> ColumnElement[Any]:
    return bindparam(None, list(values), type_=ARRAY(column.type))


def _of_arrays(table: Table, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], Any]:
    """Returns the columns of `rows`, which all have the same, and a query for the rows."""
    names = list(rows[0])
    arrays = (_array(table.c[name], (row[name] for row in rows)) for name in names)
    return names, select(*(func.unnest(array) for array in arrays))


def _insert(connection: Connection, table: Table) -> Any:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)
