#!/usr/bin/env python
"""Writes tests/vectors/malformed/: rollout files that must each end in one reason, and index.json.

Each was made by hand for one way to hurt a reader: bombs, wrong types, values out of bounds, counts
that lie, pages cut off, nested columns, proofs and sketches that no window has. The files are
committed; run this again when the schema changes.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from made_up import made_up_row

from prime_core.ids import ZERO_DIGEST
from prime_core.rollout import COLUMNS, MAX_OUTPUT_TOKENS
from prime_core.verdict import Reason
from prime_verify.rollout_file import (
    FileMetadata,
    FileRow,
    arrow_schema,
    write_rollout_file,
)

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "malformed"
METADATA = FileMetadata(ZERO_DIGEST, "plain/1", "float32", "cpu")
PAIRS = METADATA.pairs
MALFORMED, SCHEMA, OVERSIZED = Reason.MALFORMED, Reason.WRONG_SCHEMA, Reason.OVERSIZED


def honest_row(number: int, tokens: int = 5) -> FileRow:
    return replace(made_up_row(number, tokens), sketch=bytes(128))


ROWS = [honest_row(i, 3 + i) for i in range(4)]
HONEST = write_rollout_file(ROWS, METADATA)


def one(**change: Any) -> bytes:
    """A file of one row with these values."""
    return write_rollout_file([replace(honest_row(0, 3), **change)], METADATA)


def rows_of(rows: list[FileRow]) -> bytes:
    return write_rollout_file(rows, METADATA)


def table() -> pa.Table:
    columns = [
        pa.array([getattr(r, field.name) for r in ROWS], type=field.type)
        for field in arrow_schema()
    ]
    return pa.Table.from_arrays(columns, schema=arrow_schema())


def put(name: str, type_: pa.DataType, values: list[Any]) -> pa.Table:
    """The table with one column replaced."""
    at = table().schema.get_field_index(name)
    return table().set_column(at, pa.field(name, type_), pa.array(values, type=type_))


def write(content: pa.Table, pairs: dict[str, str] | None = None, **options: Any) -> bytes:
    form = {
        "compression": "zstd", "use_dictionary": False, "store_schema": False,
        "data_page_version": "1.0", "write_statistics": False, **options,
    }  # fmt: skip
    groups = form.pop("row_group_size", None)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, content.schema, **form) as writer:
        writer.add_key_value_metadata(PAIRS if pairs is None else pairs)
        writer.write_table(content, row_group_size=groups)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def footer(content: bytes) -> bytes:
    """A file that is nothing but this footer."""
    return b"PAR1" + content + struct.pack("<I", len(content)) + b"PAR1"


def damaged(at: int, value: bytes) -> bytes:
    return HONEST[:at] + value + HONEST[at + len(value) :]


def files() -> dict[str, tuple[Reason, bytes]]:
    """Name → (the reason it must end in, content)."""
    many = np.full(MAX_OUTPUT_TOKENS + 1, -1.0, dtype=np.float32)
    element = pa.field("element", pa.int32())
    nested = pa.list_(pa.list_(pa.list_(pa.int32())))
    size = struct.unpack("<I", HONEST[-8:-4])[0]
    nan, infinite = float("nan"), float("inf")
    return {
        # no Parquet at all, or cut off
        "empty": (MALFORMED, b""),
        "magic_only": (MALFORMED, b"PAR1"),
        "two_magics": (MALFORMED, b"PAR1PAR1"),
        "zeros": (MALFORMED, bytes(4096)),
        "text": (MALFORMED, b"problem_id,group,sample\n" * 40),
        "truncated_half": (MALFORMED, HONEST[: len(HONEST) // 2]),
        "truncated_last_byte": (MALFORMED, HONEST[:-1]),
        "truncated_first_byte": (MALFORMED, HONEST[1:]),
        "pages_cut_out": (MALFORMED, HONEST[:200] + HONEST[-8 - size :]),
        "footer_longer_than_file": (MALFORMED, HONEST[:-8] + struct.pack("<I", 1 << 30) + b"PAR1"),
        "footer_of_no_length": (MALFORMED, HONEST[:-8] + struct.pack("<I", 0) + b"PAR1"),
        "footer_negative_length": (MALFORMED, HONEST[:-8] + b"\xff\xff\xff\xff" + b"PAR1"),
        "footer_of_random_bytes": (MALFORMED, footer(np.random.default_rng(1).bytes(800))),
        "footer_nested_structs": (MALFORMED, footer(b"\x1c" * 60_000)),
        "footer_nested_lists": (MALFORMED, footer(b"\x19" + b"\x19" * 60_000)),
        "footer_huge_list": (MALFORMED, footer(b"\x29\xfc" + b"\xff" * 8 + b"\x7f")),
        "footer_huge_string": (MALFORMED, footer(b"\x68" + b"\xff" * 4 + b"\x07" + b"x" * 50)),
        "footer_endless_varint": (MALFORMED, footer(b"\x15" + b"\xff" * 5000)),
        "page_header_destroyed": (MALFORMED, damaged(4, b"\xff" * 24)),
        # bombs
        "bomb_one_page": (OVERSIZED, one(proofs=bytes(120 << 20))),
        "bomb_many_pages": (
            OVERSIZED,
            rows_of([replace(honest_row(i), proofs=bytes(16 << 20)) for i in range(6)]),
        ),
        "bomb_beyond_budget": (MALFORMED, one(sketch=bytes(140 << 20))),
        "proofs_of_more_windows": (OVERSIZED, one(proofs=bytes(261))),
        "sketch_of_more_windows": (OVERSIZED, one(sketch=bytes(129))),
        "bomb_problem_id": (OVERSIZED, one(problem_id="x" * (8 << 20))),
        "bomb_prompt": (OVERSIZED, one(prompt_tokens=np.zeros(1 << 20, dtype=np.int32))),
        "bomb_between_columns": (  # 8 million tokens next to 88 MiB of proofs that no window has
            OVERSIZED,
            rows_of(
                [
                    replace(
                        honest_row(i, 3),
                        prompt_tokens=np.full(1 << 15, 1000, dtype=np.int32),
                        proofs=bytes(22 << 20 if i < 4 else 0),
                    )
                    for i in range(252)
                ]
            ),
        ),
        "bomb_finish": (
            OVERSIZED,
            rows_of([replace(row, finish_reason="e" * (22 << 20)) for row in ROWS]),
        ),
        "arrow_schema": (SCHEMA, write(table(), store_schema=True)),
        "metadata_escapes": (
            MALFORMED,
            write_rollout_file(ROWS, replace(METADATA, device="cpu\x1b[2J\n accepted: NONE")),
        ),
        "bomb_output": (
            OVERSIZED,
            one(
                output_tokens=np.zeros(1 << 20, dtype=np.int32),
                logprobs=np.full(1 << 20, -1, dtype=np.float32),
            ),
        ),
        "too_many_values": (OVERSIZED, one(prompt_tokens=np.zeros(9 << 20, dtype=np.int32))),
        "too_many_rows": (OVERSIZED, rows_of([honest_row(i, 1) for i in range(5000)])),
        "too_many_tokens": (OVERSIZED, one(output_tokens=tuple(range(len(many))), logprobs=many)),
        "long_metadata": (OVERSIZED, write(table(), {**PAIRS, "engine": "x" * 5000})),
        # another schema
        "no_rows": (SCHEMA, write(table().slice(0, 0))),
        "two_row_groups": (SCHEMA, write(table(), row_group_size=2)),
        "column_missing": (SCHEMA, write(table().drop_columns(["sketch"]))),
        "column_added": (SCHEMA, write(table().append_column("more", pa.array([1] * 4)))),
        "column_twice": (SCHEMA, write(table().append_column("reward", pa.array([0.1] * 4)))),
        "columns_reversed": (SCHEMA, write(table().select(list(COLUMNS)[::-1]))),
        "tokens_of_64_bits": (
            SCHEMA,
            write(put("output_tokens", pa.list_(pa.field("element", pa.int64())), [[1]] * 4)),
        ),
        "tokens_as_text": (SCHEMA, write(put("output_tokens", pa.list_(pa.string()), [["a"]] * 4))),
        "nested_lists": (SCHEMA, write(put("prompt_tokens", nested, [[[[1]]]] * 4))),
        "nested_structs": (
            SCHEMA,
            write(
                put("problem_id", pa.struct([("a", pa.struct([("b", pa.int8())]))]),
                    [{"a": {"b": 1}}] * 4)
            ),
        ),
        "a_map": (SCHEMA, write(put("reward", pa.map_(pa.string(), pa.int8()), [[("a", 1)]] * 4))),
        "dictionary_pages": (SCHEMA, write(table(), use_dictionary=True)),
        "snappy": (SCHEMA, write(table(), compression="snappy")),
        "gzip": (SCHEMA, write(table(), compression="gzip")),
        "uncompressed": (SCHEMA, write(table(), compression="none")),
        "version_2": (SCHEMA, write(table(), {**PAIRS, "schema_version": "2"})),
        "no_metadata": (SCHEMA, write(table(), {})),
        "metadata_key_missing": (SCHEMA, write(table(), {"schema_version": "1"})),
        "metadata_key_added": (SCHEMA, write(table(), {**PAIRS, "more": "1"})),
        "pages_of_version_2": (MALFORMED, write(table(), data_page_version="2.0")),
        "byte_stream_split": (
            MALFORMED, write(table(), column_encoding={"reward": "BYTE_STREAM_SPLIT"})
        ),
        "delta_encoding": (
            MALFORMED, write(table(), column_encoding={"group": "DELTA_BINARY_PACKED"})
        ),
        # values
        "null_reward": (MALFORMED, write(put("reward", pa.float64(), [None, 0.1, 0.2, 0.3]))),
        "null_list": (
            MALFORMED, write(put("output_tokens", pa.list_(element), [None, [1], [1], [1]]))
        ),
        "null_in_list": (MALFORMED, write(put("output_tokens", pa.list_(element), [[None]] * 4))),
        "not_utf8": (
            MALFORMED,
            write(
                table().set_column(
                    0, pa.field("problem_id", pa.string()),
                    pa.array([b"\xff\xfe"] * 4).view(pa.string()),
                )
            ),
        ),
        "logprob_nan": (MALFORMED, one(logprobs=np.array([-1, nan, -1], dtype=np.float32))),
        "logprob_minus_infinity": (
            MALFORMED, one(logprobs=np.array([-1, -infinite, -1], dtype=np.float32))
        ),
        "logprob_above_zero": (MALFORMED, one(logprobs=np.array([-1, 9, -1], dtype=np.float32))),
        "logprob_missing": (MALFORMED, one(logprobs=np.array([-1, -1], dtype=np.float32))),
        "reward_nan": (MALFORMED, one(reward=nan)),
        "reward_infinite": (MALFORMED, one(reward=-infinite)),
        "no_output": (MALFORMED, one(output_tokens=(), logprobs=np.zeros(0, dtype=np.float32))),
        "no_prompt": (MALFORMED, one(prompt_tokens=())),
        "token_negative": (MALFORMED, one(output_tokens=(1, -(1 << 31), 3))),
        "group_negative": (MALFORMED, one(group=-1)),
        "policy_negative": (MALFORMED, one(policy_version=-(1 << 62))),
        "finish_unknown": (MALFORMED, one(finish_reason="tired")),
        "finish_long": (MALFORMED, one(finish_reason="e" * 100_000)),
    }  # fmt: skip


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.bin"):
        old.unlink()
    index = {}
    for name, (reason, content) in files().items():
        (FOLDER / f"{name}.bin").write_bytes(content)
        index[name] = reason.name
    (FOLDER / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    total = sum(path.stat().st_size for path in FOLDER.glob("*.bin"))
    print(f"{len(index)} files, {total} bytes")


if __name__ == "__main__":
    main()
