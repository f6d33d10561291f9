"""Verifies one rollout file. Checks run in this order, cheapest first:

    read            size, schema, bounds                     → void
    submission      digest, size, rows, lease                → void
    freshness       the lease's policy, for its batch        → void
    engine          the lease's policy                       → abstained if not available
    rows            prompts, targets, endings                → void, or rejected: wrong data
    proofs          strict decoding; no repeated sketch      → void, or rejected
    improbable      one token is too improbable, or too many → rejected
    replies         the environment's turns are recomputed   → rejected, or void
    rewards         every row is regraded                    → rejected
    repeats         a row that another file also has         → every row is replayed
    replay          drawn rows: sampling, states, log-probs  → rejected; void if uncalibrated
    proof pass      drawn rows, bit for bit, in exact leases → rejected, or void

If a tool or a grader has a time limit (Environment.tools_may_give_up, may_give_up), replies or
rewards are checked last and only for files that the replay accepts. Fabricated answers designed to
keep tools and graders busy would be free to make; answers that pass the replay cost a generation.

A file that does not parse or contradicts itself is *void*: it earns nothing, and there is nothing
to gain from it. *Rejected* requires evidence against the signed claim: data that differs from what
the seed dictates, rewards that differ from the grader's, statistics beyond honest drift. The checks
use no clock and no randomness, so an auditor gets the same finding. An uncaught exception is a
problem of the validator: the caller abstains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prime_core import encoding, seeds
from prime_core.errors import MalformedError, PolicyError, UnavailableError
from prime_core.ids import ZERO_DIGEST, Digest, Units
from prime_core.rollout import EXACT_BYTES, Submission
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_core.verdict import Outcome, Reason, VerdictRow, VerdictTable
from prime_engine.base import Engine
from prime_envs.base import Environment
from prime_verify import repeats, replay
from prime_verify.build import PlannedRow, plan_rows, sketch_keys
from prime_verify.checks import (
    RulingError,
    check_improbable_tokens,
    check_proofs,
    check_replies,
    check_rewards,
    check_rows,
)
from prime_verify.engines import EngineProvider
from prime_verify.proofs import activations, exact
from prime_verify.proofs.thresholds import STATISTICS, Calibration, Limits, shipped
from prime_verify.repeats import Seen
from prime_verify.rollout_file import (
    FileError,
    FileMetadata,
    RolloutFile,
    read_rollout_file,
)

_NO_UNITS = Units(0)
EXPLAINED_BY_WEIGHTS = frozenset({Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING})
"""Reasons that different weights alone could explain: small weight changes first flip single
tokens."""


@dataclass(frozen=True)
class Finding:
    """The result of verifying a file.

    `rows_drawn` are the replayed rows, `row_statistics` their statistics. `table` and `units` are
    set for accepted files only. `setup` is the file's set-up if it was replayed ("plain/1 float32
    cpu"). `repeated` are rows also seen in other files (None: not checked); `marks` of an accepted
    file's rows are to be stored (repeats.py). `whole`: every row was replayed. `chance` of a
    rejected file is an upper bound on the probability that an honest file looks like this; 0 where
    chance plays no part (seed, grader or strict decoding); None if not rejected. Statistics are
    named in proofs.thresholds, plus `tokens`, `equal`, `tail_probability` (replay.combine) and
    `compute_share`, the cost of the replay.
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
    repeated: tuple[int, ...] | None = None
    marks: Mapping[str, bool] = field(default_factory=dict)
    whole: bool = False
    chance: float | None = None

    def shares(self) -> dict[str, float]:
        """Each judged statistic of the file as a fraction of its limit; empty without a replay."""
        limits = {name: self.thresholds.get(f"file.{name}", 0.0) for name in self.statistics}
        return {name: self.statistics[name] / limit for name, limit in limits.items() if limit > 0}

    @property
    def outcome(self) -> Outcome:
        return self.reason.outcome

    def decimal_chance(self) -> str:
        """`chance` as decimal text, for Evidence."""
        return "" if self.chance is None else f"{self.chance:.3g}"

    def decimal_statistics(self) -> dict[str, str]:
        """Statistics as decimal text, for Evidence."""
        return {name: f"{value:.9g}" for name, value in self.statistics.items()}

    def decimal_row_statistics(self) -> dict[str, tuple[str, ...]]:
        """Statistic → its value in each drawn row, as decimal text, for Evidence."""
        names = self.row_statistics[0].values if self.row_statistics else ()
        return {
            name: tuple(f"{row.values[name]:.6g}" for row in self.row_statistics) for name in names
        }

    def decimal_thresholds(self) -> dict[str, str]:
        """Limits as decimal text, for Evidence."""
        return {name: f"{value:.9g}" for name, value in self.thresholds.items()}

    def verdict_table(
        self,
        submission_digest: Digest,
        sha256: Digest,
        policy_version: int,
        step: int,
        draw_secret: Digest = ZERO_DIGEST,
    ) -> VerdictTable:
        """The table object that an opinion names; `draw_secret` selected the rows."""
        return VerdictTable(
            submission_digest=submission_digest,
            sha256=sha256,
            policy_version=policy_version,
            step=step,
            rows=self.table,
            draw_secret=draw_secret,
            rows_drawn=self.rows_drawn,
            row_statistics=self.decimal_row_statistics(),
            statistics=self.decimal_statistics(),
            shares={name: f"{value:.9g}" for name, value in self.shares().items()},
            setup=self.setup,
            repeated_rows=None if self.repeated is None else len(self.repeated),
            marks=dict(self.marks),
        )


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
    seen: Seen | None = None,
    rewards_first: bool = False,
) -> Finding:
    """Judges the bytes of a rollout file against its lease.

    The caller checks the lease's signature and deadline. `draw_secret` (core.draws.rows_secret; any
    digest in a pre-flight) and `submission_digest` select the rows to replay. `calibration` is the
    object that run.calibration names; None uses the shipped one. `draw_count`: rows to replay, if
    more than the run's share. `seen`: looks up rows of other files; a file that repeats any is
    replayed completely. `rewards_first`: grade before the replay in any environment, for audits of
    a tampered reward. Raises PolicyError if `run` is not the lease's run.
    """
    if signed.lease.run_digest != run.digest():
        raise PolicyError("the lease belongs to another run definition")
    try:
        file = _read(data, lease_digest, run)
        if submission is not None:
            _check_submission(data, file, signed, lease_digest, submission)
        _check_class(file, signed)
        _check_freshness(signed, run)
        engine = _engine(engines, signed)
        plan = plan_rows(
            signed.lease, lease_digest, run, environment, engine.tokenizer, signed.problems()
        )
        check_rows(file.rows, plan, signed, run, engine)
        check_proofs(file.rows, engine)
        check_improbable_tokens(file.rows, engine)
        if not environment.tools_may_give_up:
            check_replies(file.rows, plan, run, engine, environment, lease_digest)
        table = None
        if rewards_first or not environment.may_give_up:
            table = check_rewards(file.rows, plan, environment, engine)
    except RulingError as ruling:
        return Finding(ruling.reason, ruling.detail, chance=ruling.chance)
    except MemoryError as error:
        return Finding(Reason.OUT_OF_RESOURCES, f"the file's checks ran out of memory: {error}")
    repeated = None if seen is None else repeats.repeated(file.rows, seen)
    count = max(run.least_drawn(len(file.rows)), draw_count or 0)
    if repeated:
        count = len(file.rows)
    numbers = seeds.drawn_rows(draw_secret, submission_digest, len(file.rows), count)
    finding = _judge_replay(
        file, numbers, plan, signed, lease_digest, run, engine, engines, calibration
    )
    finding = replace(finding, repeated=repeated)
    if finding.outcome is not Outcome.ACCEPTED:
        return finding
    try:
        if environment.tools_may_give_up:
            check_replies(file.rows, plan, run, engine, environment, lease_digest)
        if table is None:
            table = check_rewards(file.rows, plan, environment, engine)
    except RulingError as ruling:
        return Finding(  # the same finding as if these were checked first
            ruling.reason, ruling.detail, repeated=repeated, chance=ruling.chance
        )
    return replace(
        finding,
        table=table,
        units=Units(sum(row.output_tokens for row in table)),
        marks=repeats.marks(file.rows),
        whole=len(numbers) == len(file.rows),
    )


def _read(data: bytes, lease_digest: Digest, run: RunDefinition) -> RolloutFile:
    try:
        file = read_rollout_file(data)
    except FileError as error:
        raise RulingError(error.reason, str(error)) from error
    if file.metadata.lease != lease_digest:
        raise RulingError(Reason.WRONG_LEASE, "the file was made for another lease")
    due = run.file_schema
    if file.metadata.schema_version != due:
        raise RulingError(Reason.WRONG_SCHEMA, f"files of this run have schema version {due}")
    return file


def _check_submission(
    data: bytes,
    file: RolloutFile,
    signed: SignedLease,
    lease_digest: Digest,
    submission: Submission,
) -> None:
    if submission.size != len(data) or submission.sha256 != encoding.sha256(data):
        raise RulingError(Reason.WRONG_SIZE_OR_DIGEST, "the bytes are not those submitted")
    lease = signed.lease
    if (submission.pool, submission.lease_digest, submission.step, submission.policy_digest) != (
        lease.pool,
        lease_digest,
        lease.step,
        lease.policy_digest,
    ):
        raise RulingError(Reason.WRONG_LEASE, "the submission names another lease, step or policy")
    if submission.rows != len(file.rows):
        raise RulingError(Reason.WRONG_ROWS, f"{len(file.rows)} rows, {submission.rows} submitted")


def _check_class(file: RolloutFile, signed: SignedLease) -> None:
    """The file is proved in the exact class of its lease, if that has one."""
    if file.metadata.numeric_class != (signed.numeric_class() or ""):
        raise RulingError(
            Reason.WRONG_CLASS,
            f"the lease asks for class {signed.numeric_class() or 'none'}, the file states "
            f"{file.metadata.numeric_class or 'none'}",
        )
    for number, row in enumerate(file.rows):
        due = EXACT_BYTES * activations.windows_of(len(row.places))
        if len(row.digests) != (due if file.metadata.numeric_class else 0):
            raise RulingError(Reason.MALFORMED, f"row {number} has no digest for each window")


def _check_freshness(signed: SignedLease, run: RunDefinition) -> None:
    """Uses the lease only, so that policies published after it do not cost a node its pay
    (docs/adr/0006)."""
    step, version = signed.lease.step, signed.policy_version
    if not run.fresh(step, version):
        raise RulingError(
            Reason.POLICY_TOO_OLD,
            f"policy {version} is more than {run.max_staleness} older than batch {step}",
        )


def _engine(engines: EngineProvider, signed: SignedLease) -> Engine:
    try:
        return engines.engine(signed.policy_version, signed.lease.policy_digest)
    except UnavailableError as error:
        raise RulingError(Reason.POLICY_MISSING, str(error)) from error


def _judge_replay(
    file: RolloutFile,
    numbers: list[int],
    plan: Sequence[PlannedRow],
    signed: SignedLease,
    lease_digest: Digest,
    run: RunDefinition,
    engine: Engine,
    engines: EngineProvider,
    calibration: Calibration | None,
) -> Finding:
    calibrated = _calibration(run, engine, calibration)
    made = file.metadata
    setup = calibrated.setup(made.engine, made.dtype, made.device) if calibrated else None

    def replayed(by: Engine) -> replay.Replayed:
        same_dtype = by if setup is None else by.in_dtype(file.metadata.dtype)
        return replay.Replayed(by, run, lease_digest, numbers, plan, file.rows, same_dtype)

    drawn = tuple(numbers)
    try:
        replays = replayed(engine)
        found = tuple(replays.measure())
        limits = None if setup is None else setup.limits(replays.reference())
    except MalformedError as error:
        return Finding(Reason.MALFORMED, str(error), rows_drawn=drawn)
    except replay.NoNumbersError as error:
        return Finding(Reason.VALIDATOR_CRASHED, str(error))
    except MemoryError as error:
        return Finding(Reason.OUT_OF_RESOURCES, f"replay ran out of memory: {error}")
    statistics = replay.combine(found)
    statistics["compute_share"] = _compute_share(file, numbers, engine)
    if limits is None:
        measured = ", ".join(f"{name} {statistics[name]:.3g}" for name in STATISTICS)
        lacking = f"{made.engine}, {made.dtype} on {made.device}"
        if not calibrated:
            lacking = f"replays by {engine.name}, {engine.dtype} on {engine.device}"
        return Finding(
            Reason.UNCALIBRATED if calibrated else Reason.UNKNOWN_SETUP,
            f"no calibration for {lacking}: measured only: {measured}",
            statistics=statistics,
            rows_drawn=drawn,
            row_statistics=found,
            setup=_named(made),
        )
    result = None
    try:
        proving = _of_class(engine, made)
        if proving is not None:
            result = _compare_exactly(file, numbers, plan, lease_digest, run, proving)
    except MalformedError as error:
        return Finding(Reason.MALFORMED, str(error), rows_drawn=drawn)
    except replay.NoNumbersError as error:
        return Finding(Reason.VALIDATOR_CRASHED, str(error))
    except MemoryError as error:
        return Finding(Reason.OUT_OF_RESOURCES, f"the proof pass ran out of memory: {error}")
    accusation = replay.accuse(found, limits)
    reason, detail = Reason.NONE, f"{len(drawn)} of {len(file.rows)} rows replayed"
    if result is not None and proving is not None:
        statistics |= result.statistics()
        numeric = proving.numeric_class()
        ruling = result.ruling(0 if calibrated is None else calibrated.proven_to(numeric.key))
        if ruling is not None:
            reason, detail = ruling[0], f"{ruling[1]} (class {numeric.key}: {numeric.words})"
    if accusation is not None and accusation.reason in EXPLAINED_BY_WEIGHTS:
        accusation = _explained_by_earlier(
            accusation, signed, engines, lambda by: replayed(by).measure(), limits
        )
    chance = 0.0 if reason.outcome is Outcome.REJECTED else None
    return Finding(
        accusation.reason if accusation else reason,
        accusation.detail if accusation else detail,
        statistics=statistics,
        thresholds=limits.named(),
        rows_drawn=drawn,
        row_statistics=found,
        setup=_named(made),
        chance=accusation.chance if accusation else chance,
    )


def _named(made: FileMetadata) -> str:
    """The set-up of a file, by which sums over files are compared. Log-probabilities of a proof
    pass are closer to a replay than those of decoding, so files of exact classes are compared among
    themselves."""
    parts = (made.engine, made.dtype, made.device)
    return " ".join(parts + (("exact",) if made.numeric_class else ()))


def _of_class(engine: Engine, made: FileMetadata) -> Engine | None:
    """The engine that repeats the file's proof pass; None if the file has none, or if this machine
    is not of its class with this policy: then statistics alone judge it."""
    if not made.numeric_class:
        return None
    try:
        found = engine.in_dtype(made.dtype)
        return found if found.numeric_class().digest() == made.numeric_class else None
    except UnavailableError:
        return None


def _compare_exactly(
    file: RolloutFile,
    numbers: Sequence[int],
    plan: Sequence[PlannedRow],
    lease_digest: Digest,
    run: RunDefinition,
    engine: Engine,
) -> exact.ExactResult:
    """Repeats the proof pass of the drawn rows. Raises MalformedError, replay.NoNumbersError."""
    seed = seeds.lease_seed(lease_digest)
    rows = [file.rows[number] for number in numbers]
    own = []
    for number, row in zip(numbers, rows, strict=True):
        parts = engine.proof_pass(plan[number].prompt_tokens, row.output_tokens, run.temperature)
        keys = sketch_keys(seed, row.group, row.sample, row.model_tokens)
        own.append(exact.commit(parts, row.places, keys))
    if not all(found.finite for found in own):
        raise replay.NoNumbersError("the proof pass's own probabilities are not numbers")
    return exact.compare(
        numbers,
        [len(row.output_tokens) for row in rows],
        [row.digests for row in rows],
        [row.logprobs[row.places] for row in rows],
        own,
    )


def _compute_share(file: RolloutFile, numbers: Sequence[int], engine: Engine) -> float:
    """Compute of the replay divided by the compute of making the file: tokens through the model,
    counted twice if another dtype's drift is measured too. Work per token is nearly equal in both
    cases, although a prefill runs many times faster."""
    tokens = [len(row.prompt_tokens) + len(row.output_tokens) for row in file.rows]
    passes = 1 if file.metadata.dtype == engine.dtype else 2
    return passes * sum(tokens[number] for number in numbers) / sum(tokens)


def _calibration(
    run: RunDefinition, engine: Engine, calibration: Calibration | None
) -> Calibration | None:
    """The run's calibration, if it is available and applies to an engine like the validator's; else
    None."""
    chosen = calibration or shipped()
    if run.calibration not in (ZERO_DIGEST, chosen.digest()):
        return None
    by_this_one = chosen.replayed_by(engine.name, engine.dtype, engine.device)
    return chosen if by_this_one else None


def _explained_by_earlier(
    accusation: replay.Accusation,
    signed: SignedLease,
    engines: EngineProvider,
    measure: Callable[[Engine], Sequence[replay.RowStatistics]],
    limits: Limits,
) -> replay.Accusation:
    """Changes the accusation to WRONG_POLICY, with the version, if an earlier policy replays the
    rows without a finding."""
    for version, engine in engines.earlier(signed.policy_version):
        try:
            explained = replay.accuse(measure(engine), limits) is None
        except (replay.NoNumbersError, MalformedError):
            continue  # this policy explains nothing: the accusation stands
        if explained:
            detail = f"made with policy {version}; {accusation.detail}"
            return replace(accusation, reason=Reason.WRONG_POLICY, detail=detail)
    return accusation
