"""One file, one finding: the checks, cheapest first.

    read            size, schema, bounds                     → void
    submission      digest, size, rows, lease                → void
    engine          the lease's policy                       → abstained if it is not here
    rows            order, prompts, targets, termination     → void, or rejected: wrong data
    proofs          decode strictly; no sketch occurs twice  → void, or rejected
    two humps       too many claimed improbabilities         → rejected
    rewards         every row graded again                   → rejected
    replay          drawn rows: sampling, states, log-probs  → rejected, or shadow if uncalibrated

What refutes itself (a file that contradicts its own words, or does not parse) is *void*: no honest
program gains by it, and it earns nothing. *Rejected* needs evidence that holds against the signed
claim: data that the seed does not give, rewards that the grader does not give, statistics beyond
honest drift. Nothing here reads a clock or draws randomness, so an auditor gets the same finding.
An exception that escapes is the validator's own trouble: its caller abstains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.core import encoding, seeds
from protocol.core.errors import MalformedError, PolicyError, UnavailableError
from protocol.core.ids import ZERO_DIGEST, Digest, Units
from protocol.core.rollout import PROOF_WINDOW, Submission
from protocol.core.run import MICRO, RunDefinition
from protocol.core.task import SignedLease
from protocol.core.verdict import Outcome, Reason, VerdictRow, VerdictTable
from protocol.engine.base import Engine
from protocol.environments.base import Environment, Grade, decode_output
from protocol.proofs import activations, sampling, sketch
from protocol.proofs.thresholds import NO_REFERENCE, SIGNIFICANCE, Calibration, Limits, shipped
from protocol.verification import replay
from protocol.verification.build import PlannedRow, plan_rows
from protocol.verification.engines import EngineProvider
from protocol.verification.rollout_file import (
    FileError,
    FileRow,
    RolloutFile,
    read_rollout_file,
)

_NO_UNITS = Units(0)
EXPLAINED_BY_WEIGHTS = frozenset({Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING})
"""Lies that other weights alone may explain: small changes of them tip single tokens first."""


@dataclass(frozen=True)
class Finding:
    """What a file turned out to be.

    `rows_drawn` are the rows replayed; `row_statistics` those of each; `table` and `units` are set
    for accepted files only; `setup` is what made a file that was replayed ("plain/1 float32 cpu").
    Statistics are named in proofs.thresholds; beside them `tokens`, `equal`, `tail_probability`
    (replay.combine) and `compute_share`, the replay's cost.
    """

    reason: Reason
    detail: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    rows_drawn: tuple[int, ...] = ()
    row_statistics: tuple[replay.RowStatistics, ...] = ()
    table: tuple[VerdictRow, ...] = ()
    units: Units = _NO_UNITS
    setup: str = ""

    def shares(self) -> dict[str, float]:
        """Each judged statistic of the file as a share of its limit; empty without a replay."""
        limits = {name: self.thresholds.get(f"file.{name}", 0.0) for name in self.statistics}
        return {name: self.statistics[name] / limit for name, limit in limits.items() if limit > 0}

    @property
    def outcome(self) -> Outcome:
        return self.reason.outcome

    def decimal_statistics(self) -> dict[str, str]:
        """Statistics as decimal text, for Evidence."""
        return {name: f"{value:.9g}" for name, value in self.statistics.items()}

    def decimal_thresholds(self) -> dict[str, str]:
        """Limits as decimal text, for Evidence."""
        return {name: f"{value:.9g}" for name, value in self.thresholds.items()}

    def verdict_table(
        self, submission_digest: Digest, sha256: Digest, policy_version: int, step: int
    ) -> VerdictTable:
        """The table object of an accepted file."""
        return VerdictTable(
            submission_digest=submission_digest,
            sha256=sha256,
            policy_version=policy_version,
            step=step,
            rows=self.table,
        )


class _RulingError(Exception):
    """Ends the flow with a reason; never leaves this module."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def verify_file(
    data: bytes,
    signed: SignedLease,
    lease_digest: Digest,
    run: RunDefinition,
    environment: Environment,
    engines: EngineProvider,
    *,
    draw_secret: Digest,
    submission_digest: Digest,
    submission: Submission | None = None,
    calibration: Calibration | None = None,
    draw_count: int | None = None,
) -> Finding:
    """Judges the bytes of a rollout file against its lease.

    The lease's signature and deadline are the caller's to check. `draw_secret` (core.draws
    .file_secret; any fresh digest in a pre-flight) and `submission_digest` draw the rows to replay.
    `calibration` is the object that run.calibration names; None takes the shipped one.
    `draw_count`: how many rows to replay, if that is more than the run's share.
    Raises PolicyError if `run` is not the lease's run.
    """
    if signed.lease.run_digest != run.digest():
        raise PolicyError("the lease belongs to another run definition")
    try:
        file = _read(data, lease_digest)
        if submission is not None:
            _check_submission(data, file, signed, lease_digest, submission)
        engine = _engine(engines, signed)
        plan = plan_rows(signed.lease, lease_digest, run, environment, engine.tokenizer)
        _check_rows(file.rows, plan, signed, run, engine)
        _check_proofs(file.rows, engine)
        _check_humps(file.rows, engine)
        table = _grade(file.rows, plan, environment, engine)
    except _RulingError as ruling:
        return Finding(ruling.reason, ruling.detail)
    count = max(least_drawn(run, len(file.rows)), draw_count or 0)
    numbers = seeds.drawn_rows(draw_secret, submission_digest, len(file.rows), count)
    return _judge_replay(
        file, numbers, plan, table, signed, lease_digest, run, engine, engines, calibration
    )


def least_drawn(run: RunDefinition, rows: int) -> int:
    """How many of a file's rows the run has replayed at least."""
    return max(1, -(-run.replay_rows_micro * rows // MICRO))


def _read(data: bytes, lease_digest: Digest) -> RolloutFile:
    try:
        file = read_rollout_file(data)
    except FileError as error:
        raise _RulingError(error.reason, str(error)) from error
    if file.metadata.lease != lease_digest:
        raise _RulingError(Reason.WRONG_LEASE, "the file was made for another lease")
    return file


def _check_submission(
    data: bytes,
    file: RolloutFile,
    signed: SignedLease,
    lease_digest: Digest,
    submission: Submission,
) -> None:
    if submission.size != len(data) or submission.sha256 != encoding.sha256(data):
        raise _RulingError(Reason.WRONG_SIZE_OR_DIGEST, "the bytes are not those submitted")
    lease = signed.lease
    if (submission.pool, submission.lease_digest, submission.step, submission.policy_digest) != (
        lease.pool,
        lease_digest,
        lease.step,
        lease.policy_digest,
    ):
        raise _RulingError(Reason.WRONG_LEASE, "the submission names another lease, step or policy")
    if submission.rows != len(file.rows):
        raise _RulingError(Reason.WRONG_ROWS, f"{len(file.rows)} rows, {submission.rows} submitted")


def _engine(engines: EngineProvider, signed: SignedLease) -> Engine:
    try:
        return engines.engine(signed.policy_version, signed.lease.policy_digest)
    except UnavailableError as error:
        raise _RulingError(Reason.POLICY_MISSING, str(error)) from error


def _check_rows(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    signed: SignedLease,
    run: RunDefinition,
    engine: Engine,
) -> None:
    """Structure of every row first (void), then what the seed dictates (rejected)."""
    if [(row.group, row.sample) for row in rows] != [(row.group, row.sample) for row in plan]:
        raise _RulingError(
            Reason.WRONG_ROWS, "the rows are not the lease's groups and samples in order"
        )
    for number, row in enumerate(rows):
        if row.policy_version != signed.policy_version:
            raise _RulingError(Reason.WRONG_ROWS, f"row {number} names policy {row.policy_version}")
        if max(row.output_tokens) >= engine.vocabulary:
            raise _RulingError(Reason.MALFORMED, f"row {number} has a token outside the vocabulary")
        _check_ending(number, row, run, engine.end_tokens)
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):
        if row.target_length != due.target_length:
            raise _RulingError(
                Reason.WRONG_TARGETS,
                f"row {number} has target {row.target_length}, the seed gives {due.target_length}",
            )
        if row.problem_id != due.problem.problem_id or row.prompt_tokens != due.prompt_tokens:
            raise _RulingError(
                Reason.WRONG_PROMPTS, f"row {number} is not problem {due.problem.problem_id!r}"
            )


def _check_ending(
    number: int, row: FileRow, run: RunDefinition, end_tokens: frozenset[int]
) -> None:
    """A row ends at its first end token, or at the length limit without one."""
    tokens = row.output_tokens
    if len(tokens) > run.max_output_tokens:
        raise _RulingError(Reason.WRONG_ROWS, f"row {number} is longer than the run allows")
    if not end_tokens.isdisjoint(tokens[:-1]):
        raise _RulingError(Reason.WRONG_ROWS, f"row {number} goes on after an end token")
    ended = tokens[-1] in end_tokens
    if ended != (row.finish_reason == "end"):
        raise _RulingError(Reason.WRONG_ROWS, f"row {number} misstates how it ended")
    if not ended and len(tokens) < run.max_output_tokens:
        raise _RulingError(Reason.WRONG_ROWS, f"row {number} stops before its end")


def _check_proofs(rows: Sequence[FileRow], engine: Engine) -> None:
    """Lengths (void), then contents that no honest program writes (rejected)."""
    unpacked = []
    sketches: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        windows = activations.windows_of(len(row.output_tokens))
        try:
            unpacked.append(activations.unpack(row.proofs, windows))
            bits = sketch.decode(row.sketch, windows)
        except MalformedError as error:
            raise _RulingError(Reason.MALFORMED, f"row {number}: {error}") from error
        for window in bits:
            if sketches.setdefault(window.tobytes(), number) != number and window.any():
                raise _RulingError(
                    Reason.COPIED_ROWS,
                    f"row {number} repeats a sketch of row {sketches[window.tobytes()]}; their "
                    "keys differ",
                )
    for number, (row, proofs) in enumerate(zip(rows, unpacked, strict=True)):
        for window, proof in enumerate(proofs):
            tokens = min(PROOF_WINDOW, len(row.output_tokens) - window * PROOF_WINDOW)
            elements = tokens * engine.hidden_size
            if len(proof) != activations.proof_bytes(elements):
                raise _RulingError(
                    Reason.MALFORMED, f"row {number} has a proof of the wrong length"
                )
            try:
                activations.decode(proof, elements)
            except MalformedError as error:
                raise _RulingError(Reason.FORGED_PROOF, f"row {number}: {error}") from error


def _check_humps(rows: Sequence[FileRow], engine: Engine) -> None:
    counts = [sampling.improbable_tokens(row.logprobs, engine.vocabulary) for row in rows]
    observed = sum(count for count, _ in counts)
    expected = sum(bound for _, bound in counts)
    chance = sampling.poisson_tail(observed, expected)
    if chance < SIGNIFICANCE:
        raise _RulingError(
            Reason.TWO_HUMPED,
            f"{observed} tokens of nearly no probability; honest sampling draws at most "
            f"{expected:.2g} on average (chance {chance:.2g})",
        )


def _grade(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    environment: Environment,
    engine: Engine,
) -> tuple[VerdictRow, ...]:
    """Recomputes every reward. A grade that a limit of time decided accuses nobody, nor does one
    that comes out otherwise the second time."""
    table = []
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):
        text = decode_output(engine.tokenizer, row.output_tokens)

        def graded(due: PlannedRow = due, row: FileRow = row, text: str = text) -> Grade:
            return environment.grade(due.problem, due.target_length, text, len(row.output_tokens))

        grade = graded()
        if grade.refutes(row.reward) and graded().refutes(row.reward):
            raise _RulingError(
                Reason.TAMPERED_REWARD,
                f"row {number} claims reward {row.reward:.6f}, the grader gives "
                f"{grade.reward_micro / MICRO:.6f} ({grade.reason})",
            )
        table.append(
            VerdictRow(
                problem_id=row.problem_id,
                group=row.group,
                sample=row.sample,
                reward_micro=grade.reward_micro,
                prompt_tokens=len(row.prompt_tokens),
                output_tokens=len(row.output_tokens),
            )
        )
    return tuple(table)


def _judge_replay(
    file: RolloutFile,
    numbers: list[int],
    plan: Sequence[PlannedRow],
    table: tuple[VerdictRow, ...],
    signed: SignedLease,
    lease_digest: Digest,
    run: RunDefinition,
    engine: Engine,
    engines: EngineProvider,
    calibration: Calibration | None,
) -> Finding:
    def replayed(by: Engine) -> replay.Replayed:
        return replay.Replayed(by, run, lease_digest, numbers, plan, file.rows)

    drawn = tuple(numbers)
    try:
        replays = replayed(engine)
        found = tuple(replays.measure())
        limits = _limits(file, run, engine, replays, calibration)
    except MalformedError as error:
        return Finding(Reason.MALFORMED, str(error), rows_drawn=drawn)
    except MemoryError as error:
        return Finding(Reason.OUT_OF_RESOURCES, f"replay ran out of memory: {error}")
    statistics = replay.combine(found)
    statistics["compute_share"] = _compute_share(file, numbers, engine)
    if limits is None:
        made = file.metadata
        return Finding(
            Reason.UNKNOWN_SETUP,
            f"no calibration for {made.engine}, {made.dtype} on {made.device}: measured only",
            statistics=statistics,
            rows_drawn=drawn,
            row_statistics=found,
        )
    accusation = replay.accuse(found, limits)
    if accusation is not None and accusation.reason in EXPLAINED_BY_WEIGHTS:
        accusation = _explained_by_earlier(
            accusation, signed, engines, lambda by: replayed(by).measure(), limits
        )
    return Finding(
        accusation.reason if accusation else Reason.NONE,
        accusation.detail if accusation else f"{len(drawn)} of {len(file.rows)} rows replayed",
        statistics=statistics,
        thresholds=limits.named(),
        rows_drawn=drawn,
        row_statistics=found,
        table=() if accusation else table,
        units=Units(0 if accusation else sum(row.output_tokens for row in table)),
        setup=" ".join((file.metadata.engine, file.metadata.dtype, file.metadata.device)),
    )


def _compute_share(file: RolloutFile, numbers: Sequence[int], engine: Engine) -> float:
    """What the replay computed as a share of what making the file did: tokens through the model,
    twice where another dtype's drift is measured too. A token's work is nearly the same either way;
    a prefill's runs many times faster."""
    tokens = [len(row.prompt_tokens) + len(row.output_tokens) for row in file.rows]
    passes = 1 if file.metadata.dtype == engine.dtype else 2
    return passes * sum(tokens[number] for number in numbers) / sum(tokens)


def _limits(
    file: RolloutFile,
    run: RunDefinition,
    engine: Engine,
    replays: replay.Replayed,
    calibration: Calibration | None,
) -> Limits | None:
    """Limits for the set-up that the file names; None if it was never calibrated, or not for an
    engine like the validator's."""
    chosen = calibration or shipped()
    if run.calibration not in (ZERO_DIGEST, chosen.digest()):
        return None
    made = file.metadata
    setup = chosen.setup(made.engine, made.dtype, made.device)
    if setup is None or (chosen.replay_engine, chosen.replay_dtype) != (engine.name, engine.dtype):
        return None
    if made.dtype == engine.dtype:
        return setup.limits(NO_REFERENCE)
    return setup.limits(replays.reference(engine.twin(made.dtype)))


def _explained_by_earlier(
    accusation: replay.Accusation,
    signed: SignedLease,
    engines: EngineProvider,
    measure: Callable[[Engine], Sequence[replay.RowStatistics]],
    limits: Limits,
) -> replay.Accusation:
    """WRONG_POLICY, with its version, if an earlier policy replays the rows without fault."""
    for version, engine in engines.earlier(signed.policy_version):
        if replay.accuse(measure(engine), limits) is None:
            return replay.Accusation(
                Reason.WRONG_POLICY, f"made with policy {version}; {accusation.detail}"
            )
    return accusation
