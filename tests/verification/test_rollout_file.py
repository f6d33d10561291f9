"""Rollout files: what is written is read; everything else ends in one reason and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import made_up_row

from prime_core import encoding
from prime_core.errors import MalformedError
from prime_core.ids import ZERO_DIGEST
from prime_core.rollout import COLUMNS, MAX_OUTPUT_TOKENS
from prime_core.verdict import Outcome, Reason, VerdictRow, VerdictTable
from prime_verify import pages, rollout_file
from prime_verify.rollout_file import (
    FileError,
    FileMetadata,
    FileRow,
    arrow_schema,
    load_rollouts,
    read_rollout_file,
    write_rollout_file,
)

METADATA = FileMetadata(ZERO_DIGEST, "plain/1", "float32", "cpu")
PAIRS = METADATA.pairs


ROWS = [made_up_row(i, 3 + i) for i in range(12)]
FILE = write_rollout_file(ROWS, METADATA)


def _table(rows: list[FileRow] = ROWS) -> pa.Table:
    schema = arrow_schema()
    columns = [pa.array([getattr(r, f.name) for r in rows], type=f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _write(table: pa.Table, pairs: dict[str, str] | None = None, **options: Any) -> bytes:
    settings = {
        "compression": "zstd", "use_dictionary": False, "store_schema": False,
        "data_page_version": "1.0", **options,
    }  # fmt: skip
    row_group_size = settings.pop("row_group_size", None)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **settings) as writer:
        writer.add_key_value_metadata(PAIRS if pairs is None else pairs)
        writer.write_table(table, row_group_size=row_group_size)
    return sink.getvalue().to_pybytes()


def _reason(data: bytes) -> Reason:
    with pytest.raises(FileError) as caught:
        read_rollout_file(data)
    assert caught.value.reason.outcome is Outcome.VOID
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_what_is_written_is_read() -> None:
    file = read_rollout_file(FILE)
    assert file.metadata == METADATA
    for row, found in zip(ROWS, file.rows, strict=True):
        assert np.array_equal(row.logprobs, found.logprobs)
        assert replace(row, logprobs=found.logprobs) == found


def test_writing_is_deterministic() -> None:
    assert write_rollout_file(ROWS, METADATA) == FILE


def test_the_schema_is_the_one_in_core() -> None:
    assert arrow_schema().names == list(COLUMNS)
    assert pq.read_schema(pa.BufferReader(FILE)).equals(arrow_schema(), check_metadata=False)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"\x00" * 100, FILE[4:], FILE[:-4]])
def test_what_is_no_parquet_file_is_malformed(data: bytes) -> None:
    assert _reason(data) is Reason.MALFORMED


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_is_malformed(share: float) -> None:
    assert _reason(FILE[: int(len(FILE) * share)]) is Reason.MALFORMED


def test_an_oversized_file_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_file, "MAX_FILE_BYTES", 100)
    assert _reason(FILE) is Reason.OVERSIZED


def _retyped(name: str, type_: pa.DataType) -> pa.Table:
    table = _table()
    number = table.schema.get_field_index(name)
    return table.set_column(number, pa.field(name, type_), table.column(name).cast(type_))


OTHER_SCHEMAS: dict[str, Callable[[], bytes]] = {
    "column missing": lambda: _write(_table().drop_columns(["sketch"])),
    "column added": lambda: _write(_table().append_column("extra", pa.array([1] * 12))),
    "columns in another order": lambda: _write(_table().select(list(COLUMNS)[::-1])),
    "wider tokens": lambda: _write(
        _retyped("output_tokens", pa.list_(pa.field("element", pa.int64())))
    ),
    "double log-probabilities": lambda: _write(
        _retyped("logprobs", pa.list_(pa.field("element", pa.float64())))
    ),
    "text as bytes": lambda: _write(_retyped("problem_id", pa.binary())),
    "nested lists": lambda: _write(
        _table().set_column(
            3,
            pa.field("prompt_tokens", pa.list_(pa.list_(pa.int32()))),
            pa.array([[[1], [2]]] * 12, type=pa.list_(pa.list_(pa.int32()))),
        )
    ),
    "structs": lambda: _write(
        _table().set_column(0, "problem_id", pa.array([{"a": {"b": "c"}}] * 12))
    ),
    "no rows": lambda: _write(_table().slice(0, 0)),
    "two row groups": lambda: _write(_table(), row_group_size=5),
    "snappy": lambda: _write(_table(), compression="snappy"),
    "not compressed": lambda: _write(_table(), compression="none"),
    "dictionary": lambda: _write(_table(), use_dictionary=True),
    "another version": lambda: _write(_table(), {**PAIRS, "schema_version": "2"}),
    "no metadata": lambda: _write(_table(), {}),
    "a key missing": lambda: _write(_table(), {k: v for k, v in PAIRS.items() if k != "dtype"}),
    "a key added": lambda: _write(_table(), {**PAIRS, "more": "1"}),
}


@pytest.mark.parametrize("name", OTHER_SCHEMAS)
def test_a_file_of_another_schema_is_void(name: str) -> None:
    assert _reason(OTHER_SCHEMAS[name]()) is Reason.WRONG_SCHEMA


@pytest.mark.parametrize(
    "options", [{"data_page_version": "2.0"}, {"column_encoding": {"reward": "BYTE_STREAM_SPLIT"}}]
)
def test_pages_of_another_form_are_malformed(options: dict[str, Any]) -> None:
    assert _reason(_write(_table(), **options)) is Reason.MALFORMED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": np.array([-1, np.nan, -1], dtype=np.float32)}, Reason.MALFORMED),
        ({"logprobs": np.array([-1, -np.inf, -1], dtype=np.float32)}, Reason.MALFORMED),
        ({"logprobs": np.array([-1, 0.5, -1], dtype=np.float32)}, Reason.MALFORMED),
        ({"logprobs": np.array([-1, -1], dtype=np.float32)}, Reason.MALFORMED),
        ({"reward": float("nan")}, Reason.MALFORMED),
        ({"reward": float("inf")}, Reason.MALFORMED),
        ({"output_tokens": ()}, Reason.MALFORMED),
        ({"prompt_tokens": ()}, Reason.MALFORMED),
        ({"output_tokens": (1, -2, 3)}, Reason.MALFORMED),
        ({"prompt_tokens": (-1,)}, Reason.MALFORMED),
        ({"finish_reason": "tired"}, Reason.MALFORMED),
        ({"group": -1}, Reason.MALFORMED),
        ({"policy_version": -1}, Reason.MALFORMED),
        ({"problem_id": "x" * 1000}, Reason.OVERSIZED),
    ],
)
def test_values_out_of_bounds_end_in_one_reason(change: dict[str, Any], reason: Reason) -> None:
    assert _reason(write_rollout_file([replace(made_up_row(0, 3), **change)], METADATA)) is reason


@pytest.mark.parametrize("name", ["problem_id", "reward", "output_tokens", "proofs"])
def test_nulls_are_malformed(name: str) -> None:
    table = _table()
    number = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    values[3] = None
    table = table.set_column(number, table.schema.field(name), pa.array(values, table[name].type))
    assert _reason(_write(table)) is Reason.MALFORMED


def test_nulls_within_lists_are_malformed() -> None:
    table = _table()
    values = table.column("output_tokens").to_pylist()
    values[0][0] = None
    table = table.set_column(4, table.schema.field(4), pa.array(values, table.schema.field(4).type))
    assert _reason(_write(table)) is Reason.MALFORMED


def test_text_that_is_not_utf8_is_malformed() -> None:
    table = _table().set_column(
        0, pa.field("problem_id", pa.string()), pa.array([b"\xff\xfe"] * 12).view(pa.string())
    )
    assert _reason(_write(table)) is Reason.MALFORMED


def test_too_many_rows_tokens_or_values_are_oversized(monkeypatch: pytest.MonkeyPatch) -> None:
    long = write_rollout_file([made_up_row(0, MAX_OUTPUT_TOKENS + 1)], METADATA)
    assert _reason(long) is Reason.OVERSIZED
    with monkeypatch.context() as patch:
        patch.setattr(rollout_file, "MAX_ROWS", 11)
        assert _reason(FILE) is Reason.OVERSIZED
    monkeypatch.setattr(rollout_file, "MAX_VALUES", 50)
    assert _reason(FILE) is Reason.OVERSIZED


def test_a_compression_bomb_is_refused_before_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = write_rollout_file([replace(made_up_row(0), proofs=bytes(40 << 20))], METADATA)
    assert len(bomb) < 1 << 16
    monkeypatch.setattr(rollout_file, "MAX_FILE_BYTES", 1 << 20)

    def explode(*_: Any, **__: Any) -> None:
        raise AssertionError("a page was decoded")

    monkeypatch.setattr(pq.ParquetFile, "read", explode)
    assert _reason(bomb) is Reason.MALFORMED


def test_overlong_metadata_is_oversized() -> None:
    assert _reason(_write(_table(), {**PAIRS, "engine": "x" * 5000})) is Reason.OVERSIZED
    assert _reason(_write(_table(), {**PAIRS, "engine": "x" * 500})) is Reason.OVERSIZED


def test_page_sizes_and_counts_must_add_up() -> None:
    chunk = pq.ParquetFile(pa.BufferReader(FILE)).metadata.row_group(0).column(4)
    where = {"start": chunk.data_page_offset, "length": chunk.total_compressed_size}
    unpacked = pages.require_plain_pages(FILE, **where, values=chunk.num_values, budget=1 << 20)
    assert 0 < unpacked < chunk.total_uncompressed_size
    for change in (
        {"values": chunk.num_values + 1},
        {"values": chunk.num_values - 1},
        {"budget": unpacked - 1},
        {"length": chunk.total_compressed_size - 1},
        {"start": len(FILE)},
        {"start": -5},
    ):
        arguments = {**where, "values": chunk.num_values, "budget": 1 << 20, **change}
        with pytest.raises(MalformedError):
            pages.require_plain_pages(FILE, **arguments)


@given(st.binary(max_size=400))
def test_any_bytes_as_page_headers_end_in_one_error(data: bytes) -> None:
    with pytest.raises(MalformedError):
        pages.require_plain_pages(data, start=0, length=len(data), values=1 << 20, budget=1 << 20)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_damage_is_read_as_something_or_refused_with_a_reason(data: st.DataObject) -> None:
    damaged = bytearray(FILE)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(FILE) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FileError):
        read_rollout_file(bytes(damaged))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_any_footer_is_refused_with_a_reason(footer: bytes) -> None:
    data = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert _reason(data) is Reason.MALFORMED


def _verdict_table(rows: list[FileRow]) -> VerdictTable:
    return VerdictTable(
        submission_digest=ZERO_DIGEST,
        sha256=encoding.sha256(FILE),
        policy_version=3,
        step=0,
        rows=tuple(
            VerdictRow(
                problem_id=row.problem_id,
                group=row.group,
                sample=row.sample,
                reward_micro=700_000,
                prompt_tokens=len(row.prompt_tokens),
                output_tokens=len(row.output_tokens),
            )
            for row in rows
        ),
    )


def test_rollouts_take_their_reward_from_the_verdict_table() -> None:
    rollouts = load_rollouts(FILE, _verdict_table(ROWS))
    assert [r.reward for r in rollouts] == [0.7] * 12
    assert [tuple(r.output_tokens) for r in rollouts] == [r.output_tokens for r in ROWS]


def test_an_auditor_compares_all_of_a_row_but_its_parts() -> None:
    table = _verdict_table(ROWS)
    found = tuple(row.model_copy(update={"parts": {"turns": 2}}) for row in table.rows)
    assert table.holds(found)
    for other in ({"reward_micro": 1}, {"limited": True}):
        assert not table.holds((*found[:-1], found[-1].model_copy(update=other)))


def test_a_table_of_another_file_is_refused() -> None:
    for rows in (ROWS[:-1], [*ROWS[:-1], replace(ROWS[-1], sample=9)]):
        with pytest.raises(MalformedError):
            load_rollouts(FILE, _verdict_table(rows))


def test_a_codec_that_pyarrow_would_abort_on_is_void() -> None:
    """pyarrow 26 ends the process when asked for the name of an unknown codec."""
    footer_at = len(FILE) - 8 - int.from_bytes(FILE[-8:-4], "little")
    hits = 0
    for at in range(footer_at, len(FILE) - 8):
        if FILE[at : at + 2] == b"\x15\x0c":  # field by delta 1, zigzag 6: zstd
            damaged = FILE[: at + 1] + b"\x7f" + FILE[at + 2 :]
            hits += _reason(damaged) is Reason.WRONG_SCHEMA
    assert hits == len(COLUMNS)
