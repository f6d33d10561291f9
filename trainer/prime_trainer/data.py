"""Fetches and verifies the next sealed batch; nothing in it is trusted.

    wait until /v1/batches/{step} is sealed
      → manager's signature, pool, run, step
        → each file and verdict table: size and SHA-256, both of the same submission
          → rows of the batch's groups; every reward from the verdict table, none from the file
            → fresh enough, complete groups, differing rewards in every group, no row twice

A failure here is the orchestrator's fault, not ours: the trainer stops and reports the failed
check. The node that made a row is not recorded, because the trainer does not need it.

Rank 0 sends the other ranks the batch, why one is skipped, or a stop. The message cannot contain
code, and data that does not match its header is an error:

    header's length (8 bytes) │ header (JSON) │ tokens (int32) │ log-probabilities (float32)

The header has each row's fields and its numbers of prompt and output tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from prime_core import encoding
from prime_core.batch import BatchFile, BatchManifest, SignedBatch
from prime_core.errors import FatalError, MalformedError, PolicyError, UntrustedError
from prime_core.ids import Address, Digest, Step
from prime_core.rollout import MAX_FILE_BYTES, Ending, Rollout
from prime_core.run import RunDefinition
from prime_core.signing import Domain
from prime_core.verdict import MAX_TABLE_BYTES, VerdictTable
from prime_trainer.advantages import UNCOMPARED
from prime_verify.rollout_file import load_rollouts

GroupKey = tuple[Digest, int]
"""Unique identifier of a group: its file's SHA-256 and its number in the file."""
Fetch = Callable[[Digest, int], bytes]
"""(sha256, limit) → the object's bytes, with the digest checked."""


@dataclass(frozen=True)
class BatchRules:
    """The rules that a batch is checked against. `vocabulary`: token ids are below this."""

    run: RunDefinition
    pool: int
    manager: Address
    domain: Domain
    """EIP-712 domain of the Work contract, under which the manager signs batches."""
    vocabulary: int
    newest: Callable[[], int] = lambda: 0
    """The newest policy's version, up to which numbers of batches may be left out."""


@dataclass(frozen=True)
class BadBatch:
    """A batch to skip, and why."""

    step: Step
    why: str


@dataclass(frozen=True)
class TrainingBatch:
    """A verified batch: groups in manifest order, each of `samples_per_group` rollouts by sample
    number.

    The files that it takes groups from contain `seen` groups, `alike` of which have equal rewards.
    Rows that could not be graded have none.
    """

    step: Step
    digest: Digest
    groups: tuple[tuple[Rollout, ...], ...]
    keys: tuple[GroupKey, ...]
    seen: int = 0
    alike: int = 0
    submissions: tuple[Digest, ...] = ()
    """Submissions of its files."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rows, group by group."""
        return [row for group in self.groups for row in group]

    def require_new(self, trained: Collection[GroupKey]) -> None:
        """Raises UntrustedError if a group of this batch is among those `trained` before."""
        again = set(self.keys) & set(trained)
        if again:
            sha256, number = min(again)
            raise UntrustedError(
                f"batch {self.step} holds group {number} of {sha256}, trained before"
            )


def verify_statement(signed: SignedBatch, step: int, rules: BatchRules) -> BatchManifest:
    """Returns the manifest if it is well formed and signed by the manager for this pool, run and
    step, or a later step that does not exceed the newest policy's version (docs/adr/0014).

    Raises UntrustedError (signature, wrong pool, run or step) or MalformedError (unsorted or
    repeated files or groups, more groups than the run's batch).
    """
    manifest = require_asked(signed, step, rules)
    if manifest.run_digest != rules.run.digest():
        raise UntrustedError(f"batch {step} belongs to another run: {manifest.run_digest}")
    names = [file.sha256 for file in manifest.files]
    if names != sorted(set(names)):
        raise MalformedError(f"the files of batch {step} are not sorted and distinct")
    for file in manifest.files:
        if not file.groups or list(file.groups) != sorted(set(file.groups)):
            raise MalformedError(f"the groups taken of file {file.sha256} are not sorted, distinct")
    groups = sum(len(file.groups) for file in manifest.files)
    if groups > rules.run.groups_per_batch:  # checked before fetching, to bound memory
        raise MalformedError(
            f"batch {step} names {groups} groups, and the run takes {rules.run.groups_per_batch}"
        )
    return manifest


def require_asked(signed: SignedBatch, step: int, rules: BatchRules) -> BatchManifest:
    """Returns the manifest. Raises UntrustedError unless the manager signed it for this pool, and
    for this step or a later one that does not exceed the newest policy's version."""
    manifest = signed.manifest
    signer = manifest.statement().recover(rules.domain, signed.signature)
    if signer != rules.manager:
        raise UntrustedError(f"batch {step} is signed by {signer}, not the manager {rules.manager}")
    if manifest.pool != rules.pool or not step <= manifest.step <= max(step, rules.newest()):
        raise UntrustedError(
            f"asked for batch {step} of pool {rules.pool}, "
            f"got batch {manifest.step} of pool {manifest.pool}"
        )
    return manifest


def assemble(
    signed: SignedBatch,
    step: int,
    rules: BatchRules,
    fetch: Fetch,
    trained: Collection[GroupKey] = (),
) -> TrainingBatch:
    """Fetches and checks everything in a batch; see the module's docstring. `step`: the number from
    which the batch was asked for.

    `trained`: groups of earlier batches, which must not be repeated. Raises UntrustedError,
    MalformedError or PolicyError (stale rows), UnavailableError if an object cannot be fetched.
    """
    manifest = verify_statement(signed, step, rules)
    step = manifest.step
    groups: list[tuple[Rollout, ...]] = []
    keys: list[GroupKey] = []
    seen = alike = 0
    for file in manifest.files:
        all_rows = _rows_of(file, step, rules, fetch)
        rewards: dict[int, set[float]] = {}
        for row in all_rows:
            values = rewards.setdefault(row.group, set())
            if row.finish_reason not in UNCOMPARED:
                values.add(row.reward)
        seen += len(rewards)
        alike += sum(len(values) < 2 for values in rewards.values())
        for number, rows in _groups_of(all_rows, file, rules):
            groups.append(rows)
            keys.append((file.sha256, number))
    total = sum(len(rows) for rows in groups)
    if total != manifest.rows:
        raise UntrustedError(f"batch {step} has {total} rows, its manifest says {manifest.rows}")
    versions = {row.policy_version for rows in groups for row in rows}
    if versions != set(manifest.policy_versions):
        raise UntrustedError(
            f"batch {step} has rows of policies {sorted(versions)}, not as it says"
        )
    batch = TrainingBatch(
        step=Step(step),
        digest=manifest.digest(),
        groups=tuple(groups),
        keys=tuple(keys),
        seen=seen,
        alike=alike,
        submissions=tuple(Digest(file.submission_digest) for file in manifest.files),
    )
    batch.require_new(trained)
    return batch


def _rows_of(file: BatchFile, step: int, rules: BatchRules, fetch: Fetch) -> list[Rollout]:
    """All rows of one file, with rewards from its verdict table; performs all checks of file and
    table."""
    run = rules.run
    age = step - file.policy_version
    if not 0 <= age <= run.max_staleness:
        raise PolicyError(
            f"file {file.sha256} is of policy {file.policy_version}: {age} old at step {step}, "
            f"and the run allows 0 to {run.max_staleness}"
        )
    if file.size > MAX_FILE_BYTES:
        raise MalformedError(f"file {file.sha256} is said to have {file.size} bytes")
    data = fetch(file.sha256, file.size)
    if len(data) != file.size or encoding.sha256(data) != file.sha256:
        raise UntrustedError(f"the download is not the file {file.sha256}")
    table = _table_of(file, fetch(file.table, MAX_TABLE_BYTES))
    try:
        return load_rollouts(data, table)
    except MalformedError as error:
        raise MalformedError(f"file {file.sha256}: {error}") from error


def _groups_of(
    rows: Sequence[Rollout], file: BatchFile, rules: BatchRules
) -> list[tuple[int, tuple[Rollout, ...]]]:
    """The groups taken from one file, by number; performs all checks of their rows."""
    result = []
    for number in file.groups:
        members = sorted((row for row in rows if row.group == number), key=lambda row: row.sample)
        for row in members:
            _require_row(row, file, rules)
        _require_whole(members, number, file, rules.run)
        result.append((number, tuple(members)))
    return result


def _table_of(file: BatchFile, raw: bytes) -> VerdictTable:
    if encoding.sha256(raw) != file.table:
        raise UntrustedError(f"the download is not the verdict table {file.table}")
    try:
        table = VerdictTable.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError(f"{file.table} is not a verdict table: {error}") from error
    expected = (file.submission_digest, file.sha256, file.policy_version)
    if (table.submission_digest, table.sha256, table.policy_version) != expected:
        raise UntrustedError(f"the verdict table {file.table} speaks of another submission")
    return table


def _require_row(row: Rollout, file: BatchFile, rules: BatchRules) -> None:
    """Checks what the file reader cannot: the file's policy, the run's limits, the vocabulary."""
    where = f"row ({row.group}, {row.sample}) of {file.sha256}"
    if row.policy_version != file.policy_version:
        raise UntrustedError(f"{where} claims policy {row.policy_version}, not the file's")
    if len(row.output_tokens) > rules.run.max_output_tokens:
        raise MalformedError(f"{where} has {len(row.output_tokens)} output tokens")
    if max(max(row.prompt_tokens), max(row.output_tokens)) >= rules.vocabulary:
        raise MalformedError(f"{where} has a token outside the vocabulary")


def _require_whole(
    rows: Sequence[Rollout], number: int, file: BatchFile, run: RunDefinition
) -> None:
    """Raises UntrustedError unless these are all samples of one problem and their rewards
    differ."""
    where = f"group {number} of {file.sha256}"
    if [row.sample for row in rows] != list(range(run.samples_per_group)):
        raise UntrustedError(f"{where} has {len(rows)} of {run.samples_per_group} samples")
    asked = (rows[0].problem_id, rows[0].prompt_tokens)
    if any((row.problem_id, row.prompt_tokens) != asked for row in rows):
        raise UntrustedError(f"{where} mixes prompts")
    if len({row.reward for row in rows if row.finish_reason != "ungraded"}) < 2:
        raise UntrustedError(f"{where} has equal rewards: it carries no gradient, so no place here")


Message = TrainingBatch | BadBatch | None
"""A message of rank 0 to the other ranks; None means that the run stops."""


def encode_message(message: Message) -> bytes:
    """Encodes a message; `decode_message` restores it exactly."""
    if message is None:
        return _framed({"kind": "stop"}, b"")
    if isinstance(message, BadBatch):
        return _framed({"kind": "bad", "step": message.step, "why": message.why}, b"")
    rows = message.rollouts
    header = {
        "kind": "batch",
        "step": message.step,
        "digest": message.digest,
        "groups": [len(group) for group in message.groups],
        "keys": message.keys,
        "seen": message.seen,
        "alike": message.alike,
        "submissions": message.submissions,
        "rows": [
            [row.problem_id, row.group, row.sample, row.target_length, row.finish_reason,
             row.policy_version, row.reward, len(row.prompt_tokens), len(row.output_tokens),
             row.spans, row.parts]
            for row in rows
        ],
    }  # fmt: skip
    body = [
        array("i", part).tobytes()
        for row in rows
        for part in (row.prompt_tokens, row.output_tokens)
    ]
    body += [array("f", row.logprobs).tobytes() for row in rows]
    return _framed(header, b"".join(body))


def decode_message(data: bytes) -> Message:
    """Decodes a message of rank 0. Raises FatalError if it is malformed."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        kind = header["kind"]
        if kind == "stop":
            return None
        if kind == "bad":
            return BadBatch(Step(int(header["step"])), str(header["why"]))
        if kind != "batch":
            raise ValueError(f"{kind!r} is not a kind of message")
        return _batch(header, data[8 + size :])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FatalError(f"rank 0 sent a batch that cannot be read: {error}") from error


def _framed(header: dict[str, Any], body: bytes) -> bytes:
    words = json.dumps(header, allow_nan=False).encode()
    return len(words).to_bytes(8, "little") + words + body


def _batch(header: dict[str, Any], body: bytes) -> TrainingBatch:
    prompts = sum(int(row[7]) for row in header["rows"])
    outputs = sum(int(row[8]) for row in header["rows"])
    middle = 4 * (prompts + outputs)
    if len(body) != middle + 4 * outputs:
        raise ValueError(f"{len(body)} bytes of tokens for {prompts} + {outputs}")
    rows: list[Rollout] = []
    at, end = 0, middle
    for (
        name, group, sample, target, reason, version, reward, prompt, output, spans, parts
    ) in header["rows"]:  # fmt: skip
        cut, stop = at + 4 * prompt, at + 4 * (prompt + output)
        rows.append(
            Rollout(
                problem_id=name,
                group=group,
                sample=sample,
                prompt_tokens=array("i", body[at:cut]),
                output_tokens=array("i", body[cut:stop]),
                logprobs=array("f", body[end : end + 4 * output]),
                target_length=target,
                finish_reason=cast(Ending, reason),
                policy_version=version,
                reward=reward,
                spans=tuple(spans),
                parts=parts,
            )
        )
        at, end = stop, end + 4 * output
    if sum(header["groups"]) != len(rows):
        raise ValueError(f"groups of {sum(header['groups'])} rows, but {len(rows)} came")
    each = iter(rows)
    groups = tuple(tuple(next(each) for _ in range(size)) for size in header["groups"])
    keys = tuple((Digest(sha256), int(number)) for sha256, number in header["keys"])
    submissions = tuple(Digest(one) for one in header["submissions"])
    return TrainingBatch(
        Step(header["step"]), Digest(header["digest"]), groups, keys,
        int(header["seen"]), int(header["alike"]), submissions,
    )  # fmt: skip
