"""Helpers for the query files: typed rows, and inserts that tolerate existing rows.

On PostgreSQL, statements for many rows take one array for each column: their text does not depend
on the number of rows, so that it is prepared once, and they are one statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Row,
    RowMapping,
    Table,
    Text,
    any_,
    bindparam,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.types import TypeEngine, UserDefinedType

T = TypeVar("T")
S = TypeVar("S")


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
    if _is_postgresql(connection):
        return column == any_(_array(column, values))
    return column.in_(list(values))


def built_once(build: Callable[[bool], S]) -> Callable[[Connection], S]:
    """Decorates a function that builds a statement whose values are bound parameters, for
    PostgreSQL or not: building it, and SQLAlchemy's key of it, cost more than to execute it."""
    cached = cache(build)
    return lambda connection: cached(_is_postgresql(connection))


def one_of_bound(postgresql: bool, column: Column[Any], name: str) -> ColumnElement[bool]:
    """Returns `one_of` with a bound parameter, which takes a list."""
    if postgresql:
        return column == any_(bindparam(name, type_=_list_of(column)))
    return column.in_(bindparam(name, expanding=True))


def _is_postgresql(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def by_number(values: Iterable[T]) -> dict[int, list[T]]:
    """Returns the different values by how often they occur, in their order."""
    found: dict[int, list[T]] = {}
    for value, number in Counter(values).items():
        found.setdefault(number, []).append(value)
    return found


def insert_new(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Inserts a row unless one with its key exists. Returns whether it was inserted."""
    statement = _insert(connection, table).values(**values).on_conflict_do_nothing()
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount == 1


def insert_all_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts the `rows` whose keys do not exist, with one prepared statement."""
    if not rows:
        return
    if _is_postgresql(connection):
        names = tuple(rows[0])
        connection.execute(_insert_arrays(table, names), _columns(rows, names))
    else:
        statement = _insert(connection, table).on_conflict_do_nothing()
        connection.execute(statement, [dict(row) for row in rows])


def returning_new(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
) -> Sequence[Row[Any]]:
    """Inserts the `rows` whose keys do not exist, and returns their primary keys."""
    if not rows:
        return ()
    if _is_postgresql(connection):
        names = tuple(rows[0])
        statement = _insert_arrays(table, names, returning=True)
        return connection.execute(statement, _columns(rows, names)).all()
    statement = _insert(connection, table).on_conflict_do_nothing()
    return connection.execute(
        statement.returning(*table.primary_key.columns), [dict(row) for row in rows]
    ).all()


def upsert(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    """Inserts a row, or overwrites the given columns of the row with the same primary key."""
    keys = _keys(table)
    statement = _insert(connection, table).values(**values)
    changed = {name: statement.excluded[name] for name in values if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))


def upsert_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Like `upsert`, for many rows with the same columns and keys of their own, with one prepared
    statement."""
    _write_all(connection, table, rows, adds=False)


def add_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows with keys of their own, or adds their values to those of the row with the same
    primary key."""
    _write_all(connection, table, rows, adds=True)


def _write_all(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, adds: bool
) -> None:
    if not rows:
        return
    names = tuple(rows[0])
    if _is_postgresql(connection):
        connection.execute(_write_arrays(table, names, adds), _columns(rows, names))
    else:
        statement = _on_conflict(table, sqlite.insert(table), names, adds)
        connection.execute(statement, [dict(row) for row in rows])


def update_each(
    connection: Connection, table: Table, rows: Sequence[object], names: Sequence[str]
) -> None:
    """Writes the columns `names` of these rows, dataclasses with the table's column names, with one
    prepared statement."""
    if not rows:
        return
    keys = _keys(table)
    if _is_postgresql(connection):
        lists = {f"all_{name}": [getattr(row, name) for row in rows] for name in (*keys, *names)}
        connection.execute(_update_arrays(table, tuple(names)), lists)
        return
    statement = table.update().where(*(table.c[key] == bindparam(f"of_{key}") for key in keys))
    statement = statement.values({name: bindparam(f"new_{name}") for name in names})
    values = [
        {f"of_{key}": getattr(row, key) for key in keys}
        | {f"new_{name}": getattr(row, name) for name in names}
        for row in rows
    ]
    connection.execute(statement, values)


def _keys(table: Table) -> list[str]:
    return [column.name for column in table.primary_key.columns]


def _array(column: Column[Any], values: Iterable[Any]) -> ColumnElement[Any]:
    return bindparam(None, list(values), type_=_list_of(column))


class _Texts(UserDefinedType[Sequence[str]]):
    """A list of texts, which PostgreSQL gets as one text: psycopg takes 2 µs for each element of a
    list."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **_: Any) -> str:
        return "TEXT[]"

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], str]:
        return _array_text


def _array_text(texts: Sequence[str]) -> str:
    """PostgreSQL's text form of an array."""
    joined = "".join(texts)
    if '"' in joined or "\\" in joined:
        texts = [text.replace("\\", "\\\\").replace('"', '\\"') for text in texts]
    return '{"' + '","'.join(texts) + '"}' if texts else "{}"


def _list_of(column: Column[Any]) -> TypeEngine[Any]:
    return _Texts() if type(column.type) is Text else ARRAY(column.type)


def _all_of(column: Column[Any]) -> ColumnElement[Any]:
    return bindparam(f"all_{column.name}", type_=ARRAY(column.type))


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {f"all_{name}": [row[name] for row in rows] for name in names}


@cache
def _insert_arrays(table: Table, names: tuple[str, ...], *, returning: bool = False) -> Any:
    statement = _of_arrays(table, names).on_conflict_do_nothing()
    return statement.returning(*table.primary_key.columns) if returning else statement


@cache
def _write_arrays(table: Table, names: tuple[str, ...], adds: bool) -> Any:
    return _on_conflict(table, _of_arrays(table, names), names, adds)


def _of_arrays(table: Table, names: Sequence[str]) -> Any:
    arrays = (_all_of(table.c[name]) for name in names)
    return postgresql.insert(table).from_select(names, select(*map(func.unnest, arrays)))


def _on_conflict(table: Table, insert: Any, names: Sequence[str], adds: bool) -> Any:
    """Returns the `insert` that overwrites the columns `names` of existing rows, or adds to
    them."""
    keys, new = _keys(table), insert.excluded
    changed = {name: table.c[name] + new[name] if adds else new[name] for name in names}
    for key in keys:
        del changed[key]
    return insert.on_conflict_do_update(index_elements=keys, set_=changed)


@cache
def _update_arrays(table: Table, names: tuple[str, ...]) -> Any:
    keys = _keys(table)
    arrays = (_all_of(table.c[name]) for name in (*keys, *names))
    new = func.unnest(*arrays).table_valued(*keys, *names).render_derived("new")
    which = (table.c[key] == new.c[key] for key in keys)
    return table.update().where(*which).values({name: new.c[name] for name in names})


def _insert(connection: Connection, table: Table) -> Any:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)
