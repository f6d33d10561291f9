"""The checks of a rollout file, in order, and those that need no replay.

To add a check, write a function that raises RulingError and add its line to CHECKS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from prime_core import encoding
from prime_core.errors import MalformedError, UnavailableError
from prime_core.proof_form import PROOF_WINDOW
from prime_core.rollout import EXACT_BYTES, model_ranges
from prime_core.run import MICRO, RunDefinition
from prime_core.task import SignedLease
from prime_core.verdict import (
    LARGEST_PART,
    LONGEST_PART_NAME,
    MAX_PARTS,
    Outcome,
    Reason,
    VerdictRow,
)
from prime_engine.base import Engine
from prime_envs.base import UNASKED, Environment, Grade
from prime_verify.build import PlannedRow, plan_rows
from prime_verify.case import Case
from prime_verify.finding import RulingError
from prime_verify.proofs import activations, sampling, sketch
from prime_verify.proofs.tails import LEAST_CHANCE
from prime_verify.proofs.thresholds import SIGNIFICANCE
from prime_verify.replay_checks import check_proof_pass, check_replay, check_statistics
from prime_verify.replies import check_replies
from prime_verify.rollout_file import FileError, FileRow, read_rollout_file


def _never(case: Case) -> bool:
    return False


@dataclass(frozen=True)
class Check:
    """One check of a rollout file.

    `run` raises RulingError with one of `reasons` unless the file passes; every check may also run
    out of memory (OUT_OF_RESOURCES). Where `last` is true, the check comes after all others.
    """

    name: str
    reasons: tuple[Reason, ...]
    run: Callable[[Case], None]
    last: Callable[[Case], bool] = _never

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of its reasons, each once, in the order of `reasons`."""
        return tuple(dict.fromkeys(reason.outcome for reason in self.reasons))


def _read(case: Case) -> None:
    """Parses the file and sets `case.file`."""
    try:
        case.file = read_rollout_file(case.data)
    except FileError as error:
        raise RulingError(error.reason, str(error)) from error
    if case.file.metadata.lease != case.lease_digest:
        raise RulingError(Reason.WRONG_LEASE, "the file was made for another lease")
    due = case.run.file_schema
    if case.file.metadata.schema_version != due:
        raise RulingError(Reason.WRONG_SCHEMA, f"files of this run have schema version {due}")


def _check_submission(case: Case) -> None:
    """Compares the submission, if there is one, with the file and its lease."""
    submission, lease, rows = case.submission, case.signed.lease, len(case.file.rows)
    if submission is None:
        return
    if submission.size != len(case.data) or submission.sha256 != encoding.sha256(case.data):
        raise RulingError(Reason.WRONG_SIZE_OR_DIGEST, "the bytes are not those submitted")
    if (submission.pool, submission.lease_digest, submission.step, submission.policy_digest) != (
        lease.pool,
        case.lease_digest,
        lease.step,
        lease.policy_digest,
    ):
        raise RulingError(Reason.WRONG_LEASE, "the submission names another lease, step or policy")
    if submission.valid_until != lease.deadline:  # it sets which validators and jurors count
        raise RulingError(
            Reason.WRONG_LEASE,
            f"the submission is valid until {submission.valid_until}, its lease until "
            f"{lease.deadline}",
        )
    if submission.rows != rows:
        raise RulingError(Reason.WRONG_ROWS, f"{rows} rows, {submission.rows} submitted")


def _check_class(case: Case) -> None:
    """The file is proved in the exact class of its lease, if that has one."""
    stated, due = case.file.metadata.numeric_class, case.signed.numeric_class() or ""
    if stated != due:
        raise RulingError(
            Reason.WRONG_CLASS,
            f"the lease asks for class {due or 'none'}, the file states {stated or 'none'}",
        )
    for number, row in enumerate(case.file.rows):
        size = EXACT_BYTES * activations.windows_of(len(row.places)) if stated else 0
        if len(row.digests) != size:
            raise RulingError(Reason.MALFORMED, f"row {number} has no digest for each window")


def _check_freshness(case: Case) -> None:
    """Uses the lease only, so that policies published after it do not cost a node its pay
    (docs/adr/0006)."""
    step, version = case.signed.lease.step, case.signed.policy_version
    if not case.run.fresh(step, version):
        raise RulingError(
            Reason.POLICY_TOO_OLD,
            f"policy {version} is more than {case.run.max_staleness} older than batch {step}",
        )


def _load_engine(case: Case) -> None:
    """Sets `case.engine`, which has the lease's policy."""
    signed = case.signed
    try:
        case.engine = case.engines.engine(signed.policy_version, signed.lease.policy_digest)
    except UnavailableError as error:
        raise RulingError(Reason.POLICY_MISSING, str(error)) from error


def _check_planned_rows(case: Case) -> None:
    """Sets `case.plan`, and compares the file's rows with it."""
    case.plan = plan_rows(
        case.signed.lease,
        case.lease_digest,
        case.run,
        case.environment,
        case.engine.tokenizer,
        case.signed.opening,
    )
    check_rows(case.file.rows, case.plan, case.signed, case.run, case.engine)


def check_rows(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    signed: SignedLease,
    run: RunDefinition,
    engine: Engine,
) -> None:
    """Checks the structure of every row (void), then the data that the seed dictates (rejected).
    Where the code of a plugin raised on one machine only, so that a problem was not asked there, no
    one is accused.

    Raises RulingError: WRONG_ROWS, MALFORMED; VALIDATOR_CRASHED; WRONG_TARGETS, WRONG_PROMPTS.
    """
    if [(row.group, row.sample) for row in rows] != [(row.group, row.sample) for row in plan]:
        raise RulingError(
            Reason.WRONG_ROWS, "the rows are not the lease's groups and samples in order"
        )
    for number, row in enumerate(rows):
        if row.policy_version != signed.policy_version:
            raise RulingError(Reason.WRONG_ROWS, f"row {number} names policy {row.policy_version}")
        if max(row.output_tokens) >= engine.vocabulary:
            raise RulingError(Reason.MALFORMED, f"row {number} has a token outside the vocabulary")
        _check_ending(number, row, run, engine.end_tokens)
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):
        if row.target_length != due.target_length:
            raise RulingError(
                Reason.WRONG_TARGETS,
                f"row {number} has target {row.target_length}, not the lease's {due.target_length}",
            )
        if row.problem_id != due.problem.problem_id or row.prompt_tokens != due.prompt_tokens:
            if due.problem.unasked:
                raise RulingError(Reason.VALIDATOR_CRASHED, f"row {number}: {due.problem.unasked}")
            if row.problem_id.rpartition("/")[2] == UNASKED:
                raise RulingError(
                    Reason.WRONG_ROWS,
                    f"row {number} leaves its problem out as one that cannot be asked, but it can",
                )
            raise RulingError(
                Reason.WRONG_PROMPTS,
                f"row {number} was not asked problem {due.problem.problem_id!r} in the run's words",
            )


def _check_ending(
    number: int, row: FileRow, run: RunDefinition, end_tokens: frozenset[int]
) -> None:
    """Checks that each model span ends at its first end token; the last one may instead end at the
    length limit.

    Raises RulingError: WRONG_ROWS.
    """
    tokens = row.output_tokens
    turns = 1 if run.conversation is None else run.conversation.turns
    if len(tokens) > run.max_output_tokens or len(row.spans) > 2 * turns - 1:
        raise RulingError(Reason.WRONG_ROWS, f"row {number} is longer than the run allows")
    for start, end in model_ranges(row.spans, len(tokens)):
        if not end_tokens.isdisjoint(tokens[start : end - 1]):
            raise RulingError(Reason.WRONG_ROWS, f"row {number} continues after an end token")
        if end < len(tokens) and tokens[end - 1] not in end_tokens:
            raise RulingError(Reason.WRONG_ROWS, f"row {number} has a turn that does not end")
    ended = tokens[-1] in end_tokens
    if ended < (row.finish_reason != "length") or (
        run.conversation is None and ended != (row.finish_reason == "end")
    ):
        raise RulingError(Reason.WRONG_ROWS, f"row {number} misstates how it ended")
    if not ended and len(tokens) < run.max_output_tokens:
        raise RulingError(Reason.WRONG_ROWS, f"row {number} stops before its end")


def check_proofs(rows: Sequence[FileRow], engine: Engine) -> None:
    """Checks lengths (void), then contents that no honest program writes (rejected).

    Raises RulingError: MALFORMED; COPIED_ROWS, FORGED_PROOF.
    """
    unpacked = []
    sketches: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        windows = activations.windows_of(len(row.places))
        try:
            unpacked.append(activations.unpack(row.proofs, windows))
            bits = sketch.decode(row.sketch, windows)
        except MalformedError as error:
            raise RulingError(Reason.MALFORMED, f"row {number}: {error}") from error
        for window in bits:
            if sketches.setdefault(window.tobytes(), number) != number and window.any():
                raise RulingError(
                    Reason.COPIED_ROWS,
                    f"row {number} repeats a sketch of row {sketches[window.tobytes()]}; their "
                    "keys differ",
                )
    for number, (row, proofs) in enumerate(zip(rows, unpacked, strict=True)):
        for window, proof in enumerate(proofs):
            tokens = min(PROOF_WINDOW, len(row.places) - window * PROOF_WINDOW)
            elements = tokens * engine.hidden_size
            if len(proof) != activations.proof_bytes(elements):
                raise RulingError(Reason.MALFORMED, f"row {number} has a proof of the wrong length")
            try:
                activations.decode(proof, elements)
            except MalformedError as error:
                raise RulingError(Reason.FORGED_PROOF, f"row {number}: {error}") from error


NOISE_SPAN = 26.1
"""Difference between the largest and smallest noise of proofs/sampling.py, 22.9 and −3.1."""
SPARE = 10.0


def least_logprob(vocabulary: int) -> float:
    """Lower bound on the log-probability of any sampled token, for every model: the most probable
    token has at least 1/vocabulary, noise lifts another token above it by at most NOISE_SPAN, and
    SPARE allows for rounding."""
    return -(math.log(vocabulary) + NOISE_SPAN + SPARE)


def check_improbable_tokens(rows: Sequence[FileRow], engine: Engine) -> None:
    """Checks the claimed log-probabilities alone: none below what noise can draw (its ratio in
    training would be infinite), and not too many small ones.

    Raises RulingError: IMPROBABLE_TOKENS.
    """
    least = least_logprob(engine.vocabulary)
    for number, row in enumerate(rows):
        if float(row.logprobs.min()) < least:
            raise RulingError(
                Reason.IMPROBABLE_TOKENS,
                f"row {number} claims a log-probability of {float(row.logprobs.min()):.4g}; no "
                f"noise draws a token below {least:.1f}, for any model",
            )
    counts = [
        sampling.improbable_tokens(row.logprobs[row.places], engine.vocabulary) for row in rows
    ]
    observed = sum(count for count, _ in counts)
    expected = sum(bound for _, bound in counts)
    chance = max(LEAST_CHANCE, sampling.poisson_tail(observed, expected))
    if chance < SIGNIFICANCE:
        raise RulingError(
            Reason.IMPROBABLE_TOKENS,
            f"{observed} tokens of nearly no probability; honest sampling draws at most "
            f"{expected:.2g} on average (chance {chance:.2g})",
            chance,
        )


def check_rewards(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    environment: Environment,
    engine: Engine,
    *,
    detailed: bool = False,
) -> tuple[VerdictRow, ...]:
    """Recomputes every reward. A grade decided by a time limit, one that changes on the second
    try, in other processes, or a row that could not be graded accuses no one. `detailed`: the run's
    `detailed_tables`.

    Raises RulingError: TAMPERED_REWARD.
    """
    table = []
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):

        def graded(due: PlannedRow = due, row: FileRow = row) -> Grade:
            return environment.grade_output(
                due.problem, due.target_length, row.output_tokens, engine.tokenizer, row.spans
            )

        grade = graded()
        if grade.refutes(row.reward):
            environment.close()  # the second try has processes, and addresses, of its own
            if graded().refutes(row.reward):
                raise RulingError(
                    Reason.TAMPERED_REWARD,
                    f"row {number} claims reward {row.reward:.9g}, the grader gives "
                    f"{grade.reward_micro / MICRO:.6f} ({grade.reason})",
                )
        table.append(
            VerdictRow(
                problem_id=row.problem_id,
                group=row.group,
                sample=row.sample,
                reward_micro=grade.reward_micro,
                prompt_tokens=len(row.prompt_tokens),
                output_tokens=len(row.places),
                observation_tokens=len(row.output_tokens) - len(row.places),
                ungraded=grade.ungraded,
                limited=detailed and row.finish_reason == "tool_limit",
                parts=_parts_of(grade) if detailed else {},
            )
        )
    return tuple(table)


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""No table can hold one."""


def _parts_of(grade: Grade) -> dict[str, int]:
    """The first MAX_PARTS components of the reward that a table can hold: a plugin may give any."""
    fit = (
        (name, value)
        for name, value in grade.parts.items()
        if type(name) is str
        and 0 < len(name) <= LONGEST_PART_NAME
        and not _LONE_SURROGATE.search(name)
        and type(value) is int
        and abs(value) <= LARGEST_PART
    )
    return dict(islice(fit, MAX_PARTS))


def _check_replies(case: Case) -> None:
    check_replies(
        case.file.rows, case.plan, case.run, case.engine, case.environment, case.lease_digest
    )


def _check_rewards(case: Case) -> None:
    """Sets `case.table`."""
    case.table = check_rewards(
        case.file.rows, case.plan, case.environment, case.engine, detailed=case.run.detailed_tables
    )


CHECKS = (
    Check(
        "read",
        (Reason.MALFORMED, Reason.OVERSIZED, Reason.WRONG_SCHEMA, Reason.WRONG_LEASE),
        _read,
    ),
    Check(
        "submission",
        (Reason.WRONG_SIZE_OR_DIGEST, Reason.WRONG_LEASE, Reason.WRONG_ROWS),
        _check_submission,
    ),
    Check("class", (Reason.WRONG_CLASS, Reason.MALFORMED), _check_class),
    Check("freshness", (Reason.POLICY_TOO_OLD,), _check_freshness),
    Check("engine", (Reason.POLICY_MISSING,), _load_engine),
    Check(
        "rows",
        (
            Reason.WRONG_ROWS,
            Reason.MALFORMED,
            Reason.WRONG_TARGETS,
            Reason.WRONG_PROMPTS,
            Reason.VALIDATOR_CRASHED,
        ),
        _check_planned_rows,
    ),
    Check(
        "proofs",
        (Reason.MALFORMED, Reason.COPIED_ROWS, Reason.FORGED_PROOF),
        lambda case: check_proofs(case.file.rows, case.engine),
    ),
    Check(
        "improbable tokens",
        (Reason.IMPROBABLE_TOKENS,),
        lambda case: check_improbable_tokens(case.file.rows, case.engine),
    ),
    Check(
        "replies",
        (Reason.WRONG_OBSERVATION, Reason.WRONG_ROWS),
        _check_replies,
        last=lambda case: case.environment.tools_may_give_up,
    ),
    Check(
        "rewards",
        (Reason.TAMPERED_REWARD,),
        _check_rewards,
        last=lambda case: case.environment.may_give_up and not case.rewards_first,
    ),
    Check(
        "replay",
        (
            Reason.MALFORMED,
            Reason.UNCALIBRATED,
            Reason.UNKNOWN_SETUP,
            Reason.VALIDATOR_CRASHED,
        ),
        check_replay,
    ),
    Check(
        "statistics",
        (
            Reason.WRONG_SAMPLING,
            Reason.WRONG_ACTIVATIONS,
            Reason.WRONG_SKETCH,
            Reason.FORGED_PROOF,
            Reason.EARLY_END,
            Reason.TAMPERED_LOGPROBS,
            Reason.IMPROBABLE_TOKENS,
            Reason.WRONG_POLICY,
            Reason.UNCALIBRATED,
            Reason.UNKNOWN_SETUP,
        ),
        check_statistics,
    ),
    Check(
        "proof pass",
        (Reason.WRONG_PROOF_PASS, Reason.TAMPERED_LOGPROBS, Reason.UNPROVEN_MISMATCH),
        check_proof_pass,
    ),
)
"""Every check of a file, cheapest first. docs/verification.md has the same table."""


def ordered(case: Case) -> list[Check]:
    """CHECKS, with those that are last in this case at the end."""
    return sorted(CHECKS, key=lambda check: check.last(case))
