"""Rollout files for researchers: verdicts, rewards, texts, and the fate of each group.

    list    rows of the store                                  → FileFacts
    show    a file's bytes, its verdict table, a tokenizer     → Sample
    export  every accepted file, one at a time, in one view    → Parquet
    grade   the accepted files of an evaluation                → GradedEvaluation

Rewards come from the verdict table, as the trainer gets them; the node's own rewards are claims.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from prime_broadcast.manifest import hash_file
from prime_core.errors import FatalError, MalformedError, NotFoundError, UserError
from prime_core.folders import make_folder
from prime_core.ids import Address, Digest
from prime_core.revisions import RunHistory
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.run import MICRO, RunDefinition
from prime_core.storage.base import ObjectStore, digest_key
from prime_core.task import SignedLease, SubmissionStatus
from prime_core.verdict import Evidence, Reason, VerdictRow, VerdictTable
from prime_envs.base import Environment, Grade, texts_of
from prime_envs.registry import environment_for
from prime_envs.samples import openai_messages
from prime_envs.shares import Interval, interval, pass_at_k, share
from prime_orchestrator.context import read_object
from prime_orchestrator.manager import revisions, uploads
from prime_orchestrator.store import (
    Connection,
    Store,
    archive,
    batches,
    evaluations,
    groups,
    leases,
    meta,
    opinions,
    policies,
)
from prime_orchestrator.store import submissions as files
from prime_orchestrator.store.archive import ArchivedFile
from prime_orchestrator.store.groups import GroupRow
from prime_orchestrator.store.submissions import SubmissionRow, Wanted
from prime_verify.build import PlannedRow, plan_rows
from prime_verify.rollout_file import (
    FileError,
    FileRow,
    RolloutFile,
    load_rollouts,
    read_rollout_file,
)

ROW_GROUP_BYTES = 32 << 20
"""Size at which an export writes its buffered rows as a row group."""
_AT_ONCE = 100
_TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    }
)  # fmt: skip
GroupState = Literal["trained", "sealed", "waiting", "dropped", "held out"]


@dataclass(frozen=True)
class GroupFacts:
    """One group of an accepted file. `reward`: the mean of its graded rows; None if all are
    `ungraded`. `batch`: the step that took it (state "sealed" until a trainer has trained that
    batch). `why`: why it waits or was dropped."""

    group: int
    rows: int
    ungraded: int
    reward: float | None
    state: GroupState
    batch: int | None
    staleness: int
    """Number of policies between the one that made the group and the one that its batch trains. For
    a group without a batch, the next batch counts."""
    why: str


@dataclass(frozen=True)
class FileFacts:
    """One rollout file. Times in Unix seconds. `reward` is the mean of its rows that were graded
    (None: there are none, or it is not accepted). `staleness` refers to the batch that took its
    groups, else to the step it was leased for."""

    id: Digest
    node: Address
    received_at: float
    step: int
    policy: int
    staleness: int
    environment: str
    rows: int
    reward: float | None
    verdict: SubmissionStatus
    reason: str
    why: str
    shadow: bool
    groups: tuple[GroupFacts, ...]


@dataclass(frozen=True)
class Sample:
    """One row of a file. `reward` by the verdict table (None: not accepted, or not graded),
    `claimed` the node's; `prompt` is None and `turns` empty without a tokenizer; `turns` are the
    texts of the model and the environment in turn, `spans` their lengths
    (prime_core.rollout.SCHEMAS); `parts` by the verdict table (prime_core.verdict.VerdictRow), or
    of a row that was graded again, which has a `reason`, too."""

    row: int
    group: int
    sample: int
    problem: str
    target: int
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    finish: str
    claimed: float
    reward: float | None
    prompt: str | None = None
    turns: Sequence[str] = ()
    spans: Sequence[int] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


def runs_of(connection: Connection) -> RunHistory:
    """Returns the pool's run and its final revisions. Raises UserError if the database lacks the
    run."""
    found = meta.get(connection, meta.RUN)
    if found is None:
        raise UserError(
            "the database does not hold the pool's run definition",
            hint="start orchestrator serve once: it writes it there",
        )
    return revisions.history_of(connection, RunDefinition.parse(found.encode()))


def newest(
    connection: Connection,
    objects: ObjectStore,
    wanted: Wanted,
    limit: int,
    *,
    before: SubmissionRow | None = None,
) -> tuple[list[SubmissionRow], list[ArchivedFile]]:
    """Returns at most `limit` submissions, newest first, and the files of those that are archived;
    only submissions older than `before` if given. Reads the pages of the archive, newest first,
    until no other can hold one of them."""

    def place(row: SubmissionRow) -> tuple[float, Digest]:
        return row.received_at, row.digest

    found = files.newest(connection, wanted, limit, before=before)
    archived: dict[Digest, ArchivedFile] = {}
    pages = archive.pages(connection, wanted.since)
    for page in sorted(pages, key=lambda page: page.last_received, reverse=True):
        if len(found) == limit and page.last_received < found[-1].received_at:
            break
        if before is not None and page.first_received > before.received_at:
            continue
        older = [
            one
            for one in archive.of_page(objects, page, wanted)
            if before is None or place(one.submission) < place(before)
        ]
        archived |= {one.submission.digest: one for one in older}
        found += [one.submission for one in older]
        found = sorted(found, key=place, reverse=True)[:limit]
    return found, [archived[row.digest] for row in found if row.digest in archived]


def facts(
    connection: Connection, rows: Sequence[SubmissionRow], archived: Sequence[ArchivedFile] = ()
) -> list[FileFacts]:
    """Returns the facts of these submissions, in order. `archived`: the files of those that are
    archived. Raises UserError as `runs_of`."""
    runs, next_step = runs_of(connection), batches.next_step(connection)
    names = [row.digest for row in rows]
    known, planted = groups.of(connection, names), opinions.planted_among(connection, names)
    known |= {one.submission.digest: list(one.groups) for one in archived}
    planted |= {one.submission.digest for one in archived if one.planted}
    run, trained_below = runs.at(next_step), batches.trained_below(connection)
    return [
        _file_facts(
            row,
            runs.at(row.step).environment.name,
            [
                _group_facts(group, run, next_step, trained_below, planted=row.digest in planted)
                for group in known.get(row.digest, ())
            ],
        )
        for row in rows
    ]


def _group_facts(
    group: GroupRow, run: RunDefinition, next_step: int, trained_below: int, *, planted: bool
) -> GroupFacts:
    step = next_step if group.batch_step is None else group.batch_step
    graded = group.rows - group.ungraded
    state: GroupState = "dropped"
    if group.batch_step == groups.HELD_OUT:
        state, step, why = "held out", group.policy_version, "an evaluation's problem"
    elif group.batch_step is not None:
        state, why = "trained" if step < trained_below else "sealed", ""
    elif not graded:
        why = "not graded: the environment raised"
    elif not group.informative:
        why = "equal rewards: every advantage is zero"
    elif planted:
        why = "planted: a file of the manager's own"
    elif not run.fresh(next_step, group.policy_version):
        why = f"stale: the run takes policies at most {run.max_staleness} old"
    else:
        state, why = "waiting", f"for batch {next_step} or a later one"
    return GroupFacts(
        group=group.group_no,
        rows=group.rows,
        ungraded=group.ungraded,
        reward=group.reward_micro_sum / graded / MICRO if graded else None,
        state=state,
        batch=group.batch_step if state in ("trained", "sealed") else None,
        staleness=step - group.policy_version,
        why=why,
    )


def _file_facts(row: SubmissionRow, environment: str, found: Sequence[GroupFacts]) -> FileFacts:
    rewards = [(group.reward, group.rows - group.ungraded) for group in found]
    graded = sum(rows for _, rows in rewards)
    judged = row.status != "submitted"
    taken = [group.staleness for group in found if group.batch is not None]
    return FileFacts(
        id=row.digest,
        node=row.node,
        received_at=row.received_at,
        step=row.step,
        policy=row.policy_version,
        staleness=max(taken, default=row.step - row.policy_version),
        environment=environment,
        rows=row.signed().submission.rows,
        reward=sum(reward * rows for reward, rows in rewards if reward is not None) / graded
        if graded
        else None,
        verdict=row.status,
        reason=Reason(row.reason).name.lower() if judged else "",
        why=Reason(row.reason).sentence if judged else "no verdict yet",
        shadow=row.shadow,
        groups=tuple(found),
    )


def find(
    connection: Connection, name: str, objects: ObjectStore
) -> tuple[SubmissionRow, ArchivedFile | None]:
    """Returns the submission whose digest begins with `name`, and its file if it is archived.
    Raises NotFoundError if there is none, UserError if there are several or `name` is not the
    beginning of a digest."""
    digits = name.lower().removeprefix("0x")
    if not 4 <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
        raise UserError(
            f"{name!r} is not an id of a rollout file",
            hint="give 4 or more of the digits that orchestrator rollouts list shows",
        )
    found = files.beginning(connection, f"0x{digits}", 2)
    older = archive.beginning(connection, f"0x{digits}", 2)
    if not found and not older:
        raise NotFoundError(f"no rollout file of this pool has an id that begins with 0x{digits}")
    if len(found) + len(older) > 1:
        raise UserError(f"several ids begin with 0x{digits}", hint="give more of its digits")
    if found:
        return found[0], None
    archived = archive.find(connection, objects, older[0])
    assert archived is not None
    return archived.submission, archived


def lease_of(
    connection: Connection, row: SubmissionRow, archived: ArchivedFile | None = None
) -> SignedLease:
    """Returns the lease of a submission; `archived`: its file if it is archived."""
    if archived is not None:
        return archived.lease.signed()
    found = leases.get(connection, row.lease_digest)
    if found is None:
        raise FatalError(f"submission {row.digest} names a lease that the store does not hold")
    return found.signed()


def accusation(objects: ObjectStore, row: SubmissionRow) -> str:
    """Returns the detail text of the evidence against a rejected file; empty if there is none."""
    if row.evidence is None:
        return ""
    return Evidence.model_validate_json(read_object(objects, row.evidence)).detail


def why_gone(objects: ObjectStore, archived: ArchivedFile | None) -> str:
    """Returns why an archived file is not in the store any more; empty if it is, or should be."""
    if archived is None or archived.kept_days is None:
        return ""
    if objects.exists(digest_key(archived.submission.sha256)):
        return ""
    return archive.why_gone(archived.kept_days)


def read_file(
    objects: ObjectStore, row: SubmissionRow, deadline: int
) -> tuple[RolloutFile, list[VerdictRow | None]]:
    """Returns a submission's file, and its rows in the verdict table (None: not accepted).

    Args: `deadline` of its lease. Raises NotFoundError if the file or table is missing from the
    store, UntrustedError if the bytes differ, FileError if the file does not parse, MalformedError
    if the table does not match it.
    """
    data = uploads.read(objects, deadline, row.sha256, MAX_FILE_BYTES)
    file = read_rollout_file(data)
    if row.verdict_table is None or row.status != "accepted":
        return file, [None] * len(file.rows)
    table = VerdictTable.model_validate_json(read_object(objects, row.verdict_table))
    load_rollouts(data, table)
    return file, [*table.rows]


def reward_of(one: VerdictRow | None) -> float | None:
    """The reward of a row in a verdict table; None if it is in none, or was not graded."""
    return None if one is None or one.ungraded else one.reward_micro / MICRO


def samples(
    file: RolloutFile, judged: Sequence[VerdictRow | None], numbers: Sequence[int], tokenizer: Any
) -> list[Sample]:
    """Returns the rows `numbers` of a file, with texts decoded by `tokenizer` unless it is None.
    Raises UserError if there is no such row."""
    found = []
    for number in numbers:
        if not 0 <= number < len(file.rows):
            raise UserError(
                f"the file has no row {number}", hint=f"it has 0 to {len(file.rows) - 1}"
            )
        row = file.rows[number]
        prompt, turns = _texts(row, tokenizer)
        found.append(
            Sample(
                row=number,
                group=row.group,
                sample=row.sample,
                problem=row.problem_id,
                target=row.target_length,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                finish=row.finish_reason,
                claimed=row.reward,
                reward=reward_of(one := judged[number]),
                prompt=prompt,
                turns=turns,
                spans=row.spans,
                parts={} if one is None else one.parts,
            )
        )
    return found


def _texts(row: FileRow, tokenizer: Any) -> tuple[str | None, tuple[str, ...]]:
    """The prompt, and the texts of the model and the environment in turn; None and none without a
    tokenizer."""
    if tokenizer is None:
        return None, ()
    prompt: str = tokenizer.decode(list(row.prompt_tokens))
    return prompt, tuple(texts_of(tokenizer, row.output_tokens, row.spans))


def grades(
    found: Sequence[Sample], row: SubmissionRow, lease: SignedLease, run: RunDefinition,
    environment: Environment, tokenizer: Any,
) -> list[Grade | None]:  # fmt: skip
    """Grades the samples again; None where the prompt differs from the one the lease prescribes."""
    plan: dict[tuple[int, int], PlannedRow] = {
        (one.group, one.sample): one
        for one in plan_rows(
            lease.lease, row.lease_digest, run, environment, tokenizer, lease.opening
        )
    }
    result: list[Grade | None] = []
    for one in found:
        asked = plan.get((one.group, one.sample))
        if asked is None or asked.prompt_tokens != tuple(one.prompt_tokens):
            result.append(None)
            continue
        result.append(
            environment.grade_output(
                asked.problem, asked.target_length, one.output_tokens, tokenizer, one.spans
            )
        )
    return result


@dataclass(frozen=True)
class GradedEvaluation:
    """Results of an evaluation's accepted answers. `samples`: the largest number of answers to one
    problem. `pass_1` and `pass_k`: probability that one answer, or at least one of `samples`, is
    fully correct. `ungraded`: rows whose prompt is not the one that their lease prescribes, or on
    which the environment raised."""

    reward: Interval
    pass_1: Interval
    pass_k: Interval
    samples: int
    ungraded: int


def grade_evaluation(
    store: Store,
    objects: ObjectStore,
    number: int,
    model: Path,
    *,
    begins: Callable[[int], None],
    went: Callable[[int], None],
) -> GradedEvaluation:
    """Grades the accepted answers of evaluation `number` again, with the tokenizer of `model`.

    Calls `begins` with the number of files, and `went` after each. Raises NotFoundError if there is
    no such evaluation, UserError if no file of it is accepted yet, the errors of `read_file`, and
    those of the run's environment.
    """
    with store.read() as connection:
        row = evaluations.get(connection, number)
        if row is None:
            raise NotFoundError(f"there is no evaluation {number}")
        found = [
            (one, lease_of(connection, one)) for one in evaluations.accepted(connection, number)
        ]
        for digest in evaluations.archived(connection, number):
            kept = archive.find(connection, objects, digest)
            if kept is None:
                raise FatalError(f"file {digest} of evaluation {number} is in no archive page")
            if why := why_gone(objects, kept):
                raise NotFoundError(f"evaluation {number} lacks a file: {why}")
            found.append((kept.submission, kept.lease.signed()))
        found.sort(key=lambda one: (one[1].heldout or 0, one[0].digest))
        runs, tokenizer = runs_of(connection), load_tokenizer(connection, model)
    if not found:
        raise UserError(
            f"no answer to evaluation {number} is accepted yet",
            hint="see its progress with: orchestrator evaluations list",
        )
    run = runs.of_lease(found[0][1].lease)
    answered: dict[int, list[Grade]] = {}
    ungraded = 0
    begins(len(found))
    environment = environment_for(run)
    try:
        for one, lease in found:
            file, judged = read_file(objects, one, lease.lease.deadline)
            asked = samples(file, judged, range(len(file.rows)), tokenizer)
            again = grades(asked, one, lease, run, environment, tokenizer)
            for sample, grade in zip(asked, again, strict=True):
                problem = (lease.heldout or 0) + sample.group
                if problem >= row.problems:
                    continue
                if grade is None or grade.ungraded:
                    ungraded += 1
                else:
                    answered.setdefault(problem, []).append(grade)
            went(1)
    finally:
        environment.close()
    passed = [
        (len(one), sum(grade.parts["task_micro"] >= MICRO for grade in one))
        for one in answered.values()
    ]
    return GradedEvaluation(
        reward=interval([fmean(grade.score for grade in one) for one in answered.values()]),
        pass_1=share([pass_at_k(count, right, 1) for count, right in passed]),
        pass_k=share([pass_at_k(count, right, count) for count, right in passed]),
        samples=max(count for count, _ in passed),
        ungraded=ungraded,
    )


def load_tokenizer(connection: Connection, folder: Path) -> Any:
    """Loads the tokenizer from a model folder after checking that its files are those of policy 0.
    Raises UserError if they differ or there is no tokenizer."""
    policy = policies.get(connection, 0)
    manifest = None if policy is None else policy.signed().manifest
    for entry in () if manifest is None else manifest.files:
        if manifest is None or entry.name not in _TOKENIZER_FILES:
            continue
        path = folder / entry.name
        if not path.is_file() or hash_file(path, manifest.chunk_size)[1] != entry.digest:
            raise UserError(
                f"{path} is not the file of that name in policy 0",
                hint="name the folder of the run's base model by --model",
            )
    from transformers import AutoTokenizer  # slow import, optional extra

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no tokenizer: {str(error).splitlines()[0]}",
            hint="name a Hugging Face model folder by --model",
        ) from error


# ── export ───────────────────────────────────────────────────────────────────────────────────────

_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
_PART = pa.struct([("name", pa.string()), ("value", pa.int64())])
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
    ]
)
COLUMNS = pa.schema(
    [
        ("file", pa.string()),
        ("node", pa.string()),
        ("received_at", pa.timestamp("ms", tz="UTC")),
        ("environment", pa.string()),
        ("environment_digest", pa.string()),
        ("verdict", pa.string()),
        ("reason", pa.string()),
        ("step", pa.int64()),
        ("policy_version", pa.int64()),
        ("batch_step", pa.int64()),
        ("staleness", pa.int64()),
        ("group_state", pa.string()),
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("problem_id", pa.string()),
        ("target_length", pa.int32()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("output_tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("claimed_reward", pa.float64()),
        ("reward_parts", pa.list_(_PART)),
        ("reward_reason", pa.string()),
        ("prompt", pa.string()),
        ("output", pa.string()),
        ("spans", pa.list_(pa.int32())),
        ("messages", pa.list_(_MESSAGE)),
    ]
)
"""Columns of an export, described in docs/tutorial.md."""


@dataclass(frozen=True)
class Exported:
    """Result of an export. `unreadable`: files without an accepting verdict that do not parse;
    `removed`: files that the store does not hold any more (docs/retention.md)."""

    files: int
    rows: int
    unreadable: int
    removed: int


def export(
    store: Store,
    objects: ObjectStore,
    out: Path,
    wanted: Wanted,
    *,
    tokenizer: Any = None,
    grade: bool = False,
    begins: Callable[[int], None] = lambda _total: None,
    went: Callable[[int], None] = lambda _files: None,
) -> Exported:
    """Writes the rows of all `wanted` files to the Parquet file `out`, which appears once it is
    complete. Reads one view of the store, one file at a time, archived ones first. Accepted files
    of evaluations are left out: their problems are held out. So are files that were removed.

    Args: `grade` says to grade each row again, with `tokenizer`; `begins` is called with the
    largest possible number of files, `went` after each. Raises UserError if `out` exists or cannot
    be written; NotFoundError, UntrustedError or MalformedError if an accepted file is missing from
    the store or damaged; with `grade`, the errors of the run's environment.
    """
    make_folder(out.parent)
    if out.exists():
        raise UserError(f"{out} exists already", hint="name another file by --out")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with store.read() as connection, _Reader(objects, tokenizer, grade) as reader:
            place, runs = meta.get(connection, meta.SERVES), runs_of(connection)
            about = {"pool": place or "", "run": str(runs.first.digest())}
            with pq.ParquetWriter(part, COLUMNS.with_metadata(about), compression="zstd") as writer:
                older = sum(page.files for page in archive.pages(connection, wanted.since))
                begins(older + files.count(connection, wanted))
                done = _write(connection, wanted, writer, runs, reader, went)
        part.replace(out)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}", hint="name another by --out"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return done


class _Reader:
    """What reads an export's files: the store of objects, a tokenizer or None, and, with `grade`,
    the runs' environments. A context, which closes them."""

    def __init__(self, objects: ObjectStore, tokenizer: Any, grade: bool) -> None:
        self.objects, self.tokenizer, self._grade = objects, tokenizer, grade
        self._environments: dict[Digest, Environment] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for environment in self._environments.values():
            environment.close()

    def grades(
        self, file: RolloutFile, row: SubmissionRow, lease: SignedLease, run: RunDefinition
    ) -> list[Grade | None]:
        """The grades of a file's rows; None for each if none are wanted."""
        if not self._grade:
            return [None] * len(file.rows)
        environment = self._environments.get(run.digest())
        if environment is None:
            environment = self._environments[run.digest()] = environment_for(run)
        nothing = [None] * len(file.rows)
        asked = samples(file, nothing, range(len(file.rows)), self.tokenizer)
        return grades(asked, row, lease, run, environment, self.tokenizer)


def _write(
    connection: Connection,
    wanted: Wanted,
    writer: pq.ParquetWriter,
    runs: RunHistory,
    reader: _Reader,
    went: Callable[[int], None],
) -> Exported:
    ready: list[pa.RecordBatch] = []
    count = rows = unreadable = removed = 0

    def flush() -> None:
        if ready:
            writer.write_table(pa.Table.from_batches(ready))
            ready.clear()

    for row, known, lease, gone in _wanted(connection, reader.objects, wanted):
        if any(group.state == "held out" for group in known.groups):
            went(1)
            continue
        if gone:
            removed += 1
            went(1)
            continue
        try:
            batch = _record_batch(reader, row, known, lease, runs)
        except FileError as error:
            if row.status == "accepted":
                raise MalformedError(f"rollout file {row.digest}: {error}") from error
            unreadable += 1
        except NotFoundError as error:
            raise NotFoundError(f"rollout file {row.digest}: {error}") from error
        else:
            ready.append(batch)
            count, rows = count + 1, rows + batch.num_rows
        if sum(batch.nbytes for batch in ready) >= ROW_GROUP_BYTES:
            flush()
        went(1)
    flush()
    return Exported(count, rows, unreadable, removed)


def _wanted(
    connection: Connection, objects: ObjectStore, wanted: Wanted
) -> Iterator[tuple[SubmissionRow, FileFacts, SignedLease, str]]:
    """Yields the submissions, each with its facts, its lease and `why_gone`."""
    for one in archive.every(connection, objects, wanted):
        (known,) = facts(connection, [one.submission], [one])
        yield one.submission, known, one.lease.signed(), why_gone(objects, one)
    for page in files.every(connection, wanted, _AT_ONCE):
        for row, known in zip(page, facts(connection, page), strict=True):
            yield row, known, lease_of(connection, row), ""


def _record_batch(
    reader: _Reader, row: SubmissionRow, known: FileFacts, lease: SignedLease, runs: RunHistory
) -> pa.RecordBatch:
    file, judged = read_file(reader.objects, row, lease.lease.deadline)
    tokenizer = reader.tokenizer
    run = None if tokenizer is None else runs.of_lease(lease.lease)
    graded: list[Grade | None] = [None] * len(file.rows)
    if run is not None:
        graded = reader.grades(file, row, lease, run)
    state = {group.group: group for group in known.groups}
    same = {
        "file": row.digest,
        "node": row.node,
        "received_at": datetime.fromtimestamp(row.received_at, UTC),
        "environment": known.environment,
        "environment_digest": runs.at(row.step).environment.digest,
        "verdict": row.status,
        "reason": known.reason,
        "step": row.step,
    }
    lines = []
    for one, found, grade in zip(file.rows, judged, graded, strict=True):
        group = state.get(one.group)
        prompt, turns = _texts(one, tokenizer)
        lines.append(
            same
            | {
                "policy_version": one.policy_version,
                "batch_step": None if group is None else group.batch,
                "staleness": known.staleness if group is None else group.staleness,
                "group_state": None if group is None else group.state,
                "group": one.group,
                "sample": one.sample,
                "problem_id": one.problem_id,
                "target_length": one.target_length,
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
                "logprobs": one.logprobs,
                "finish_reason": one.finish_reason,
                "reward": reward_of(found),
                "claimed_reward": one.reward,
                "reward_parts": _parts_of(found, grade),
                "reward_reason": None if grade is None else grade.reason,
                "prompt": prompt,
                "output": None if prompt is None else "".join(turns),
                "spans": one.spans,
                "messages": None
                if run is None
                else openai_messages(
                    run,
                    tokenizer,
                    one.target_length,
                    one.prompt_tokens,
                    one.output_tokens,
                    one.spans,
                ),
            }
        )
    return pa.RecordBatch.from_pylist(lines, schema=COLUMNS)


def _parts_of(judged: VerdictRow | None, grade: Grade | None) -> list[dict[str, Any]] | None:
    """Components of a row's reward: as graded again, else as the verdict table holds them."""
    if grade is None and (judged is None or not judged.parts):
        return None
    parts = grade.parts if grade is not None else judged.parts if judged is not None else {}
    return [{"name": name, "value": value} for name, value in parts.items()]
