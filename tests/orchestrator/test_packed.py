"""Signed JSON that is kept forever is stored in about half the space and comes back exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from prime_core.ids import address
from prime_orchestrator.store import Store, schema
from prime_orchestrator.store.packed import pack, unpack

OLD = (
    '{"receipt":{"submission_digest":"0x' + 4 * "0123456789abcdef" + '","received_at":1800000000},'
    '"signature":"0x' + 65 * "ab" + '","node":"0x01DBf94133bFC3d7A1A5e4e8930Bc48DdAB7AEC7"}'
)
STORED = "1:qyaY4hmVXdM7V599j4vGyBEWBlCAntxWUwqQEg/j7Z+OxvsPX1+49MmLydxHem9tX3dcqRYA"
hexadecimal = st.sampled_from((20, 32, 65, 7)).flatmap(
    lambda size: st.binary(min_size=size, max_size=size).map(lambda raw: "0x" + raw.hex())
)
addresses = st.binary(min_size=20, max_size=20).map(address)
values = st.recursive(
    hexadecimal | addresses | st.text() | st.integers() | st.none(),
    lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner),
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), values) | st.text())
def test_what_is_packed_comes_back(value: dict[str, Any] | str) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), str(value)):
        assert unpack(pack(text)) == text


def test_text_with_a_mark_is_kept_as_it_is() -> None:
    for mark in "\x01\x02\x03":
        text = f"{{{mark}{'x' * 19}é{'0x' + 'ab' * 32}"  # a mark's bytes would end inside the é
        assert unpack(pack(text)) == pack(text) == text


def test_a_stored_value_stays_readable() -> None:
    assert unpack(STORED) == OLD


def test_a_column_takes_less_space_and_reads_what_older_programs_wrote(
    either_store: Store,
) -> None:
    table = schema.opinions
    row = {"submission_digest": "0x1", "validator": "a", "reason": 0, "at": 0.0}
    plain = sa.text(
        "INSERT INTO opinions (submission_digest, validator, reason, at, body)"
        " VALUES ('0x1', 'b', 0, 0, :body)"
    )
    with either_store.begin() as connection:
        connection.execute(sa.insert(table).values(**row, body=OLD))
        connection.execute(plain, {"body": OLD})
        query = sa.select(table.c.body, sa.func.length(table.c.body)).order_by(table.c.validator)
        (new, new_size), (old, old_size) = connection.execute(query).all()
    assert new == old == OLD
    assert new_size < 0.6 * old_size
