"""What is remembered of accepted files' rows, on SQLite and on PostgreSQL."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import command

from prime_core.encoding import sha256
from prime_orchestrator.store import Store, migrate, row_marks, schema

FIRST, SECOND, THIRD = (sha256(word) for word in (b"first", b"second", b"third"))
SURE, RARE = False, True


def test_two_files_share_a_row_if_either_says_that_it_cannot_be_drawn_twice(
    either_store: Store,
) -> None:
    with either_store.begin() as connection:
        row_marks.remember(connection, FIRST, {"aa": SURE, "bb": RARE, "cc": RARE}, now=1.0)
        row_marks.remember(connection, SECOND, {"aa": SURE, "cc": SURE}, now=2.0)
        assert row_marks.seen(connection, {"aa": SURE}, but=THIRD) == set()
        assert row_marks.seen(connection, {"aa": RARE}, but=THIRD) == {"aa"}
        assert row_marks.seen(connection, {"bb": SURE, "dd": RARE}, but=THIRD) == {"bb"}
        assert row_marks.holders(connection, {"aa": RARE}, but=THIRD) == sorted([FIRST, SECOND])
        assert row_marks.holders(connection, {"cc": SURE}, but=THIRD) == [FIRST]
        assert row_marks.holders(connection, {"aa": SURE}, but=THIRD) == []
        assert row_marks.holders(connection, {"bb": RARE}, but=FIRST) == [], "not its own"


def test_a_file_that_calls_a_foreseeable_answer_improbable_does_not_learn_who_else_gave_it(
    either_store: Store,
) -> None:
    reported: list[Any] = []

    class Counting:
        def __init__(self, connection: sa.Connection) -> None:
            self._connection, self.dialect = connection, connection.dialect

        def execute(self, query: Any) -> list[Any]:
            reported.extend(rows := list(self._connection.execute(query)))
            return rows

    with either_store.begin() as connection:
        for number in range(50):
            other = sha256(b"%d" % number)
            row_marks.remember(connection, other, {"aa": SURE, "bb": SURE}, now=1.0)
        counting: Any = Counting(connection)
        assert row_marks.seen(counting, {"aa": RARE, "bb": RARE}, but=FIRST) == {"aa", "bb"}
    assert len(reported) == 2


def test_marks_are_kept_a_week_or_until_their_file_is_withdrawn(either_store: Store) -> None:
    week = row_marks.KEPT_SECONDS
    with either_store.begin() as connection:
        row_marks.remember(connection, FIRST, {"aa": RARE, "bb": RARE}, now=0.0)
        row_marks.remember(connection, SECOND, {"bb": RARE, "cc": RARE}, now=1.0)
        row_marks.remember(connection, THIRD, {"cc": RARE}, now=1.0)
        row_marks.forget(connection, week + 0.5)
        every = {"aa": RARE, "bb": RARE, "cc": RARE}
        assert row_marks.seen(connection, every, but=sha256(b"x")) == {"bb", "cc"}
        row_marks.forget_file(connection, SECOND)
        assert row_marks.seen(connection, every, but=sha256(b"x")) == {"cc"}


def test_a_files_marks_are_written_by_one_statement_and_twice_without_harm(
    either_store: Store,
) -> None:
    many = {f"{number:032x}": number % 2 == 0 for number in range(4096)}
    statements: list[Any] = []

    def note(_c: Any, _cursor: Any, statement: str, _v: Any, _x: Any, _many: bool) -> None:
        statements.append(statement)

    sa.event.listen(either_store.engine, "before_cursor_execute", note)
    with either_store.begin() as connection:
        row_marks.remember(connection, FIRST, many, now=1.0)
        assert sum(word.startswith("INSERT") for word in statements) == 1
        row_marks.remember(connection, FIRST, many, now=2.0)
        row_marks.remember(connection, FIRST, {}, now=2.0)
        count = sa.select(sa.func.count()).select_from(schema.row_marks)
        assert connection.execute(count).scalar_one() == 4096
        assert row_marks.seen(connection, many, but=SECOND) == {
            m for m, rare in many.items() if rare
        }


def test_marks_of_before_stay_those_of_improbable_rows(empty_database: Store) -> None:
    with empty_database.begin() as connection:
        command.upgrade(migrate._config(connection), "0002")
        connection.execute(
            sa.text("INSERT INTO row_marks (mark, submission_digest, at) VALUES ('aa', :of, 5)"),
            {"of": FIRST},
        )
    empty_database.migrate()
    with empty_database.read() as connection:
        assert row_marks.holders(connection, {"aa": SURE}, but=SECOND) == [FIRST]
