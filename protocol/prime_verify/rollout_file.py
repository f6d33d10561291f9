"""Writing and strict, bounded reading of rollout files. See prime_core.rollout for the schema.

The reader checks, each step before anything larger is allocated: size → footer → rows, columns,
codec → page headers → pyarrow: types, values → bounds of each row. Every malformed input raises a
FileError with a reason; the only other exception is MemoryError, which says nothing about the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from prime_core.errors import MalformedError
from prime_core.gateway import MAX_ANSWERS_BYTES, GatewayAnswer, decode_answers, encode_answers
from prime_core.printing import printable
from prime_core.proof_form import PROOF_TOPK, PROOF_WINDOW, SKETCH_DIMENSIONS, FinishReason
from prime_core.rollout import (
    CONVERSATION_SCHEMA,
    EXACT_BYTES,
    EXACT_COLUMNS,
    GATEWAY_SCHEMA,
    MAX_FILE_BYTES,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_ROWS,
    METADATA_KEYS,
    SCHEMA_VERSION,
    SCHEMAS,
    Rollout,
    model_ranges,
    model_tokens,
)
from prime_core.run import MICRO
from prime_core.verdict import MAX_REWARD_MICRO, Reason, VerdictTable
from prime_verify.pages import (
    MAX_FOOTER,
    MAX_VALUES,
    ZSTD,
    Footer,
    read_footer,
    require_plain_pages,
)

MAX_METADATA_VALUE = 128
MAX_PROOF_BYTES = 2 + 2 + 2 * PROOF_TOPK
MAX_SKETCH_BYTES = 2 * SKETCH_DIMENSIONS
"""Per proof window, as packed."""
_SLACK = 128 << 10
"""Extra bytes per column, for levels and for slightly overlong values, which are reported later by
row."""
MAX_FINISH_REASON = 16
"""In bytes; the value itself is checked later."""
MAX_SPANS = 127
"""Spans of 64 turns, the maximum that prime_core.run.Conversation allows."""
MAX_PROBLEM_ID = 256
"""In characters, as prime_core.verdict.VerdictRow allows."""
_LISTS = {"list<int32>": pa.int32(), "list<float32>": pa.float32()}
_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    **{name: pa.list_(pa.field("element", item)) for name, item in _LISTS.items()},
}


class FileError(MalformedError):
    """The file cannot be judged; `reason` is the reason of its void verdict."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class FileMetadata:
    """The origin of a file. `lease` is the lease digest; the rest is the setup ("plain/1",
    "float32", "cpu")."""

    lease: str
    engine: str
    dtype: str
    device: str
    schema_version: str = SCHEMA_VERSION
    numeric_class: str = ""
    """Exact class of the lease, echoed; empty if it has none (prime_core.rollout.EXACT_COLUMNS)."""

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the file, in order, with their Arrow types."""
        return SCHEMAS[self.schema_version] | (EXACT_COLUMNS if self.numeric_class else {})

    @property
    def pairs(self) -> dict[str, str]:
        """The file's key-value metadata."""
        keys = METADATA_KEYS + (("numeric_class",) if self.numeric_class else ())
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class FileRow:
    """One row as stored in the file: T output tokens, `logprobs` float32 [T], `proofs` and `sketch`
    still packed, `reward` as graded by the node."""

    problem_id: str
    group: int
    sample: int
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    target_length: int
    finish_reason: FinishReason
    policy_version: int
    reward: float
    proofs: bytes
    sketch: bytes
    spans: tuple[int, ...] = ()
    """See prime_core.rollout.SCHEMAS."""
    gateway: tuple[GatewayAnswer, ...] = ()
    digests: bytes = b""
    """One digest for each proof window of the proof pass; empty without an exact class."""

    @property
    def model_tokens(self) -> tuple[int, ...]:
        """The output tokens without the environment's; these are sampled, proved and paid."""
        return tuple(model_tokens(self.output_tokens, self.spans))

    @property
    def places(self) -> NDArray[np.int64]:
        """Positions of `model_tokens` in the output tokens, int64 [M]."""
        ranges = model_ranges(self.spans, len(self.output_tokens))
        return np.concatenate([np.arange(start, end) for start, end in ranges])


@dataclass(frozen=True)
class RolloutFile:
    """A parsed file; its contents are still untrusted."""

    metadata: FileMetadata
    rows: tuple[FileRow, ...]


def arrow_schema(columns: Mapping[str, str] = SCHEMAS[SCHEMA_VERSION]) -> pa.Schema:
    """The exact Arrow schema of these columns, without key-value metadata."""
    return pa.schema([pa.field(name, _TYPES[kind]) for name, kind in columns.items()])


def write_rollout_file(rows: Sequence[FileRow], metadata: FileMetadata) -> bytes:
    """Encodes `rows` in their order as Parquet bytes (zstd, plain encoding, one row group)."""
    schema = arrow_schema(metadata.columns)
    columns = [
        pa.array([_value(row, field.name) for row in rows], type=field.type) for field in schema
    ]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        data_page_version="1.0",
        store_schema=False,
    ) as writer:
        writer.add_key_value_metadata(metadata.pairs)
        writer.write_table(
            pa.Table.from_arrays(columns, schema=schema),
            row_group_size=max(1, len(rows)),
        )
    return cast(bytes, sink.getvalue().to_pybytes())


def _value(row: FileRow, name: str) -> object:
    return encode_answers(row.gateway) if name == "gateway" else getattr(row, name)


def read_rollout_file(data: bytes) -> RolloutFile:
    """Parses a file within the limits of core/rollout.py. Raises FileError, or MemoryError if this
    machine has too little memory; nothing else."""
    if len(data) > MAX_FILE_BYTES:
        raise FileError(Reason.OVERSIZED, f"{len(data)} bytes exceed {MAX_FILE_BYTES}")
    try:
        footer = read_footer(data)
        metadata = _metadata(footer)
        _require_shape(footer, data, metadata.columns)
        source = pq.ParquetFile(
            pa.BufferReader(data),
            thrift_string_size_limit=MAX_FOOTER,
            thrift_container_size_limit=MAX_FOOTER,
        )
        schema = arrow_schema(metadata.columns)
        if not source.schema_arrow.equals(schema, check_metadata=False):
            raise FileError(Reason.WRONG_SCHEMA, "the columns are not those of the schema")
        table = source.read(use_threads=False)
        table.validate(full=True)
        return RolloutFile(metadata, _rows(table, metadata))
    except (FileError, MemoryError):  # not the file's fault; pyarrow's is also an ArrowException
        raise
    except MalformedError as error:
        raise FileError(Reason.MALFORMED, str(error)) from error
    except (pa.ArrowException, ValueError, OSError, KeyError) as error:
        text = printable(str(error)[:200]) or type(error).__name__
        raise FileError(Reason.MALFORMED, f"not a readable Parquet file: {text}") from error


def _metadata(footer: Footer) -> FileMetadata:
    pairs = dict(footer.pairs)
    if "ARROW:schema" in pairs:  # it would control how pyarrow reads the columns
        raise FileError(Reason.WRONG_SCHEMA, "the file stores an Arrow schema (store_schema=False)")
    if any(len(value) > MAX_METADATA_VALUE for value in pairs.values()):
        raise FileError(Reason.OVERSIZED, f"a metadata value exceeds {MAX_METADATA_VALUE} letters")
    if not all(value.isprintable() for value in pairs.values()):
        raise FileError(Reason.MALFORMED, "a metadata value holds what cannot be printed")
    if pairs.get("schema_version") not in SCHEMAS:
        found = pairs.get("schema_version", "none")[:32]
        known = " or ".join(map(repr, SCHEMAS))
        raise FileError(Reason.WRONG_SCHEMA, f"schema version {found!r}, not {known}")
    if set(pairs) - {"numeric_class"} != set(METADATA_KEYS) or pairs.get("numeric_class") == "":
        raise FileError(Reason.WRONG_SCHEMA, f"the metadata keys are not {METADATA_KEYS}")
    return FileMetadata(**pairs)


def _require_shape(footer: Footer, data: bytes, columns: Mapping[str, str]) -> None:
    """Checks everything that can be known before pyarrow reads the file."""
    if footer.rows > MAX_ROWS:
        raise FileError(Reason.OVERSIZED, f"{footer.rows} rows exceed {MAX_ROWS}")
    if footer.rows < 1 or footer.groups != 1:
        raise FileError(Reason.WRONG_SCHEMA, "a file has at least one row, in one row group")
    if len(footer.columns) != len(columns):
        raise FileError(Reason.WRONG_SCHEMA, "the columns are not those of the schema")
    if any(column.codec != ZSTD for column in footer.columns):
        raise FileError(Reason.WRONG_SCHEMA, "a column is not compressed by zstd")
    if any(column.dictionary or column.elsewhere for column in footer.columns):
        raise FileError(Reason.WRONG_SCHEMA, "a column is dictionary-encoded or lies elsewhere")
    if any(column.values < 0 for column in footer.columns):
        raise FileError(Reason.MALFORMED, "a column has a negative number of values")
    if sum(column.values for column in footer.columns) > MAX_VALUES:
        raise FileError(Reason.OVERSIZED, f"more than {MAX_VALUES} values")
    budget = MAX_FILE_BYTES * 2
    for column, most in zip(footer.columns, _most_bytes(footer, columns), strict=True):
        unpacked = require_plain_pages(
            data, start=column.start, length=column.length, values=column.values, budget=budget
        )
        if unpacked > most:
            raise FileError(Reason.OVERSIZED, "a column unpacks to more than its rows may hold")
        budget -= unpacked


def _most_bytes(footer: Footer, columns: Mapping[str, str]) -> list[int]:
    """Maximum unpacked size of each column, in the schema's order. Proofs and sketches are bounded
    by the file's tokens, because a few bytes could otherwise unpack to the whole budget."""
    rows = footer.rows
    values = {name: column.values for name, column in zip(columns, footer.columns, strict=True)}
    windows = values["output_tokens"] // PROOF_WINDOW + rows
    texts = {
        "problem_id": 4 * MAX_PROBLEM_ID * rows,
        "finish_reason": MAX_FINISH_REASON * rows,
        "proofs": MAX_PROOF_BYTES * windows,
        "sketch": MAX_SKETCH_BYTES * windows,
        "gateway": MAX_ANSWERS_BYTES * rows,
        "digests": EXACT_BYTES * windows,
    }
    return [texts.get(name, 0) + 16 * values[name] + _SLACK for name in columns]


def _rows(table: pa.Table, metadata: FileMetadata) -> tuple[FileRow, ...]:
    columns = metadata.columns
    for name in table.column_names:
        column = table.column(name)
        if column.null_count or any(
            pa.types.is_list(part.type) and part.flatten().null_count for part in column.chunks
        ):
            raise FileError(Reason.MALFORMED, f"column {name!r} has nulls")
    _require_lengths(table)
    plain = {
        name: table.column(name).to_pylist() for name, kind in columns.items() if kind not in _LISTS
    }
    answers = _answers(plain.pop("gateway", None), table.num_rows)
    lists = {name: _lists(table.column(name)) for name, kind in columns.items() if kind in _LISTS}
    rows = tuple(
        FileRow(
            prompt_tokens=tuple(lists["prompt_tokens"][i].tolist()),
            output_tokens=tuple(lists["output_tokens"][i].tolist()),
            logprobs=lists["logprobs"][i],
            spans=tuple(lists["spans"][i].tolist()) if "spans" in lists else (),
            gateway=answers[i],
            **{name: values[i] for name, values in plain.items()},
        )
        for i in range(table.num_rows)
    )
    endings = {"end", "length"} | (
        {"tool_limit"}
        if metadata.schema_version in (CONVERSATION_SCHEMA, GATEWAY_SCHEMA)
        else set()
    )
    for number, row in enumerate(rows):
        _require_row(number, row)
        if row.finish_reason not in endings:
            raise FileError(Reason.MALFORMED, f"row {number} has an unknown finish reason")
    return rows


def _answers(texts: Sequence[str] | None, rows: int) -> list[tuple[GatewayAnswer, ...]]:
    """The gateway's answers of each row; none in files without that column."""
    if texts is None:
        return [()] * rows
    found = []
    for number, text in enumerate(texts):
        try:
            found.append(decode_answers(text))
        except MalformedError as error:
            raise FileError(Reason.MALFORMED, f"row {number}: {error}") from error
    return found


def _lists(column: pa.ChunkedArray) -> list[NDArray[Any]]:
    parts: list[NDArray[Any]] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy()
        offsets = chunk.offsets.to_numpy()
        parts += [values[a:b] for a, b in pairwise(offsets)]
    return parts


def _require_lengths(table: pa.Table) -> None:
    """Checks the lengths of each row's values before any become Python objects."""

    def lengths(name: str, of: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = of(table.column(name)).to_numpy().astype(np.int64)
        return found

    prompts = lengths("prompt_tokens", pc.list_value_length)
    tokens = lengths("output_tokens", pc.list_value_length)
    logprobs = lengths("logprobs", pc.list_value_length)
    proofs, sketches = (lengths(name, pc.binary_length) for name in ("proofs", "sketch"))
    names = lengths("problem_id", pc.utf8_length)
    endings = lengths("finish_reason", pc.binary_length)
    windows = -(-tokens // PROOF_WINDOW)
    if (
        "digests" in table.column_names
        and (lengths("digests", pc.binary_length) > windows * EXACT_BYTES).any()
    ):
        raise FileError(Reason.OVERSIZED, "a row has more digests than windows")
    many = (proofs > windows * MAX_PROOF_BYTES) | (sketches > windows * MAX_SKETCH_BYTES)
    if "spans" in table.column_names and (lengths("spans", pc.list_value_length) > MAX_SPANS).any():
        raise FileError(Reason.OVERSIZED, "a row has too many spans")
    if (
        "gateway" in table.column_names
        and (lengths("gateway", pc.binary_length) > MAX_ANSWERS_BYTES).any()
    ):
        raise FileError(Reason.OVERSIZED, "a row has too long answers of the gateway")
    for bad, reason, what in (
        (
            (prompts > MAX_PROMPT_TOKENS) | (tokens > MAX_OUTPUT_TOKENS),
            Reason.OVERSIZED,
            "too many tokens",
        ),
        (names > MAX_PROBLEM_ID, Reason.OVERSIZED, "a problem id that is too long"),
        ((prompts == 0) | (tokens == 0), Reason.MALFORMED, "no prompt or no output"),
        (many, Reason.OVERSIZED, "more proofs than windows"),
        (endings > MAX_FINISH_REASON, Reason.MALFORMED, "an unknown finish reason"),
        (logprobs != tokens, Reason.MALFORMED, "not one log-probability for each token"),
    ):
        if bad.any():
            raise FileError(reason, f"row {int(bad.argmax())} has {what}")


def _require_row(number: int, row: FileRow) -> None:
    """Checks one row's values against bounds that do not depend on the lease."""
    if min(row.output_tokens) < 0 or min(row.prompt_tokens) < 0:
        raise FileError(Reason.MALFORMED, f"row {number} has a negative token")
    if not np.isfinite(row.logprobs).all() or not np.isfinite(row.reward):
        raise FileError(Reason.MALFORMED, f"row {number} has a value that is not finite")
    if (row.logprobs > 1e-3).any():  # rounding may lift log 1 a little above 0
        raise FileError(Reason.MALFORMED, f"row {number} has a probability above one")
    if row.spans:
        _require_spans(number, row)
    if row.group < 0 or row.sample < 0 or row.target_length < 0 or row.policy_version < 0:
        raise FileError(Reason.MALFORMED, f"row {number} has a negative number")


def _require_spans(number: int, row: FileRow) -> None:
    whole = sum(row.spans) == len(row.output_tokens) and min(row.spans) > 0
    if not whole or len(row.spans) < 3 or len(row.spans) % 2 == 0:
        raise FileError(
            Reason.MALFORMED, f"row {number} has spans that are not those of its tokens"
        )
    others = np.delete(row.logprobs, row.places)
    if others.any():
        raise FileError(
            Reason.MALFORMED, f"row {number} has a log-probability for the environment's tokens"
        )


def load_rollouts(data: bytes, table: VerdictTable) -> list[Rollout]:
    """Returns the verified rows of an accepted file, for training: tokens and log-probabilities
    from the file, rewards from its verdict table.

    Raises FileError if the file does not parse, MalformedError if file and table do not belong
    together. The caller has checked both digests.
    """
    file = read_rollout_file(data)
    if len(file.rows) != len(table.rows):
        raise MalformedError(f"{len(file.rows)} rows in the file, {len(table.rows)} in its table")
    rollouts = []
    for row, found in zip(file.rows, table.rows, strict=True):
        if (row.problem_id, row.group, row.sample, len(row.places)) != (
            found.problem_id,
            found.group,
            found.sample,
            found.output_tokens,
        ):
            raise MalformedError(f"group {row.group}, sample {row.sample} differs from its table")
        if abs(found.reward_micro) > MAX_REWARD_MICRO:
            raise MalformedError(f"group {row.group}, sample {row.sample}: its reward is too large")
        rollouts.append(
            Rollout(
                problem_id=row.problem_id,
                group=row.group,
                sample=row.sample,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                logprobs=array("f", row.logprobs.tobytes()),
                target_length=row.target_length,
                finish_reason="ungraded" if found.ungraded else row.finish_reason,
                policy_version=row.policy_version,
                reward=found.reward_micro / MICRO,
                spans=row.spans,
                parts=found.parts,
            )
        )
    return rollouts
