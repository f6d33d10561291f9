"""Rollout files: the untrusted submission and the verified rows.

Defines the Parquet schema and all limits on a file.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from prime_core import encoding
from prime_core.errors import MalformedError
from prime_core.proof_form import FinishReason
from prime_core.signing import (
    U32,
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)

SCHEMA_VERSION = "1"
CONVERSATION_SCHEMA = "2"
"""Schema version of files whose run has a `conversation`."""
GATEWAY_SCHEMA = "3"
"""Schema version of files whose run has a `conversation.gateway`."""
MAX_FILE_BYTES = 64 << 20
MAX_ROWS = 4096
MAX_PROMPT_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 65_536

COLUMNS: dict[str, str] = {
    "problem_id": "string",
    "group": "int32",  # 0 … groups of the lease − 1
    "sample": "int32",  # 0 … samples per group − 1
    "prompt_tokens": "list<int32>",
    "output_tokens": "list<int32>",  # including the end token if the row ends with it
    "logprobs": "list<float32>",  # log softmax(logits / T) of each output token, before the noise
    "target_length": "int32",
    "finish_reason": "string",
    "policy_version": "int64",
    "reward": "float64",  # advisory: the node's own grading
    "proofs": "binary",  # TOPLOC proofs of the row's windows, each u16 length ‖ bytes, in order
    "sketch": "binary",  # bf16 little-endian [windows, SKETCH_DIMENSIONS]
}
"""Parquet columns in order, with their Arrow types. Rows are sorted by (group, sample)."""

SCHEMAS: dict[str, dict[str, str]] = {
    SCHEMA_VERSION: COLUMNS,
    # Lengths of the spans of output_tokens, alternating between model and environment, model first
    # and last; empty for a single-turn row. Log-probabilities of environment tokens are 0. Proofs,
    # sketches and pay cover only the model's tokens, as if they were contiguous.
    CONVERSATION_SCHEMA: {**COLUMNS, "spans": "list<int32>"},
    # Signed answers of the pool's gateway to the row's calls (prime_core.gateway.encode_answers).
    GATEWAY_SCHEMA: {**COLUMNS, "spans": "list<int32>", "gateway": "string"},
}
"""Columns of each supported schema version."""

EXACT_COLUMNS: dict[str, str] = {"digests": "binary"}
"""Further columns, after those of its schema version, of a file for a lease with an exact class:
EXACT_BYTES for each proof window (prime_verify.proofs.exact). Its metadata has the key
`numeric_class`, the digest of that class, and its log-probabilities are those of the proof pass."""
EXACT_BYTES = 16
"""Length of a window's digest in bytes."""

METADATA_KEYS = ("schema_version", "lease", "engine", "dtype", "device")
"""Parquet key-value metadata; `lease` is the lease digest, `engine` e.g. "plain/1"."""


def model_ranges(spans: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """(start, end) of each model span among `tokens` output tokens. See SCHEMAS for `spans`."""
    found = []
    at = 0
    for number, length in enumerate(spans or (tokens,)):
        if number % 2 == 0:
            found.append((at, at + length))
        at += length
    return found


def model_tokens(output_tokens: Sequence[int], spans: Sequence[int]) -> Sequence[int]:
    """The output tokens that the model generated, without the environment's."""
    if not spans:
        return output_tokens
    ranges = model_ranges(spans, len(output_tokens))
    return [token for start, end in ranges for token in output_tokens[start:end]]


class Submission(Statement):
    """The signed claim of `node` that file `sha256` fulfills a lease. Its digest is the Merkle
    leaf.

    Untrusted: `rows` and `size` (bytes) are checked against the file. `valid_until` is in Unix
    seconds.
    """

    CONTRACT: ClassVar[ContractName] = "work"
    pool: U256
    lease_digest: DigestField
    node: AddressField
    step: U64
    policy_digest: DigestField
    sha256: DigestField
    size: U64
    rows: U32
    valid_until: U64


class Receipt(Statement):
    """The manager's countersignature: the submission arrived at `received_at` (Unix seconds)."""

    CONTRACT: ClassVar[ContractName] = "work"
    submission_digest: DigestField
    received_at: U64


class SignedSubmission(Strict):
    """One leaf, as published in a root's leaves object."""

    submission: Submission
    node: AddressField
    signature: SignatureField


def encode_leaves(leaves: Sequence[SignedSubmission]) -> bytes:
    """Encodes the object that a work root commits to: canonical JSON of its submissions, in leaf
    order."""
    return encoding.canonical_json([leaf.model_dump(mode="json") for leaf in leaves])


def decode_leaves(data: bytes) -> list[SignedSubmission]:
    """Parses a leaves object. Raises MalformedError if it is malformed or not canonical."""
    value = encoding.parse_canonical_json(data)
    if not isinstance(value, list):
        raise MalformedError("a leaves object is a list")
    try:
        return [
            SignedSubmission.model_validate_json(encoding.canonical_json(item)) for item in value
        ]
    except ValueError as error:
        raise MalformedError("a leaf of the leaves object does not parse") from error


Ending = FinishReason | Literal["ungraded"]
"""How a verified row ended, or "ungraded" (prime_core.verdict.VerdictRow), which is not trained
on."""


@dataclass(frozen=True)
class Rollout:
    """One verified row, ready for training. Only prime_verify creates these from files.

    `logprobs` are in nats at temperature T; `reward` is recomputed by the validator. Tokens and
    log-probabilities are converted to 4-byte arrays (int32, float32), because a batch may hold tens
    of millions of tokens.
    """

    problem_id: str
    group: int
    sample: int
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    logprobs: Sequence[float]
    target_length: int
    finish_reason: Ending
    policy_version: int
    reward: float
    spans: tuple[int, ...] = ()
    """See SCHEMAS."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Components of the reward (prime_core.verdict.VerdictRow)."""

    @property
    def generated(self) -> int:
        """Number of output tokens that the model generated."""
        return sum(self.spans[::2]) if self.spans else len(self.output_tokens)

    def __post_init__(self) -> None:
        for name, kind in (("prompt_tokens", "i"), ("output_tokens", "i"), ("logprobs", "f")):
            given = getattr(self, name)
            if not isinstance(given, array) or given.typecode != kind:
                object.__setattr__(self, name, array(kind, given))
