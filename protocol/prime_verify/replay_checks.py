"""Checks of drawn rows, which are drawn after submission.

    replay       the rows are replayed and measured                   → void if there are no limits
    statistics   what was measured, against the limits of its setup  → rejected; void if its card
                 was not calibrated, abstained if the validator's was not
    proof pass   in exact leases: the rows' proof passes, bit by bit  → rejected, or void

The first one measures all that the other two judge, so that each of them states all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from prime_core import seeds
from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.verdict import Outcome, Reason
from prime_engine.base import Dtype, Engine
from prime_engine.exact import NumericClass
from prime_verify import repeats, replay
from prime_verify.build import sketch_keys
from prime_verify.case import Case, Measured
from prime_verify.engines import EngineProvider
from prime_verify.finding import Finding, RulingError
from prime_verify.proofs import exact
from prime_verify.proofs.thresholds import (
    LEAST_TOKENS,
    STATISTICS,
    Calibration,
    Limits,
    SetupLimits,
    shipped,
    shipped_as,
)
from prime_verify.rollout_file import FileMetadata, RolloutFile

EXPLAINED_BY_WEIGHTS = frozenset({Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING})
"""Reasons that different weights alone could explain: small weight changes first flip single
tokens."""


def check_replay(case: Case) -> None:
    """Draws rows and measures them; sets `case.measured`, and all of `case.finding` that the replay
    finds. A file with a row that another file has is replayed completely, and so is one of a card
    without limits of its own.

    Raises RulingError: MALFORMED; UNCALIBRATED; UNKNOWN_SETUP, VALIDATOR_CRASHED, OUT_OF_RESOURCES.
    """
    file, made, engine = case.file, case.file.metadata, case.engine
    if case.seen is not None:
        case.finding = replace(case.finding, repeated=repeats.repeated(file.rows, case.seen))
    judged_by = _limits_for(case)
    numbers = _drawn(case, whole=judged_by.uncalibrated)
    case.finding = replace(
        case.finding,
        detail=f"{len(numbers)} of {len(file.rows)} rows replayed",
        rows_drawn=tuple(numbers),
    )
    calibration, setup = judged_by.calibration, judged_by.setup
    run, claimed = case.run, replay.ClaimedRows(case.lease_digest, case.plan, file.rows)

    def replayed(by: Engine) -> replay.Replayed:  # without `case`, which keeps what it measures
        same_dtype = by if setup is None else by.in_dtype(made.dtype)
        return replay.Replayed(by, run, claimed, numbers, same_dtype)

    with _failing("replay", numbers):
        replays = replayed(engine)
        found = tuple(replays.measure())
        limits = None
        if setup is not None:
            limits = setup.limits(replays.reference(), replay.few_tokens(found))
    statistics = replay.combine(found)
    statistics["compute_share"] = _compute_share(file, numbers, engine)
    case.finding = replace(
        case.finding, statistics=statistics, row_statistics=found, setup=_named(made)
    )
    if calibration is None or limits is None:
        raise _no_limits(case, calibration)
    case.finding = replace(case.finding, thresholds=limits.named())
    case.measured = Measured(
        found, limits, lambda by: replayed(by).measure(), outside=judged_by.outside
    )
    result = None
    with _failing("the proof pass", numbers), _of_class(case, numbers) as proving:
        if proving is not None:
            numeric = proving.numeric_class()
            result = _compare_exactly(case, numbers, proving)
    if result is None:
        return
    case.finding = replace(case.finding, statistics=statistics | result.statistics())
    case.measured = replace(
        case.measured,
        exact=result,
        numeric_class=f"class {numeric.key}: {numeric.words}",
        proven_to=calibration.proven_to(numeric.key),
    )


def check_statistics(case: Case) -> None:
    """Compares what the replay measured with the limits.

    Raises RulingError with the reason of replay.accuse, or WRONG_POLICY; UNCALIBRATED or
    UNKNOWN_SETUP where the limits accuse no one.
    """
    measured = case.measured
    accusation = replay.accuse(measured.rows, measured.limits)
    if accusation is None:
        return
    if measured.outside is not None:
        ruling = None if measured.exact is None else measured.exact.ruling(measured.proven_to)
        if ruling is not None and ruling[0].outcome is Outcome.REJECTED:
            return  # a proven exact class accuses by its bits: the next check does
        detail = f"outside the widest limits, {accusation.reason.name}: {accusation.detail}"
        raise _unmeasured(case, measured.outside, detail)
    if accusation.reason in EXPLAINED_BY_WEIGHTS:
        accusation = _explained_by_earlier(
            accusation, case.signed.policy_version, case.engines, measured.measure, measured.limits
        )
    raise RulingError(accusation.reason, accusation.detail, accusation.chance, case.finding)


def check_proof_pass(case: Case) -> None:
    """Judges how the proof passes of the drawn rows differ from those of this machine.

    Raises RulingError: WRONG_PROOF_PASS, TAMPERED_LOGPROBS, UNPROVEN_MISMATCH.
    """
    measured = case.measured
    ruling = None if measured.exact is None else measured.exact.ruling(measured.proven_to)
    if ruling is not None:
        reason, detail = ruling
        detail = f"{detail} ({measured.numeric_class})"
        raise RulingError(reason, detail, measured=case.finding)


@contextmanager
def _failing(what: str, numbers: Sequence[int]) -> Iterator[None]:
    """Rules on a replay that gives no numbers. Raises RulingError: MALFORMED, VALIDATOR_CRASHED,
    OUT_OF_RESOURCES."""
    try:
        yield
    except MalformedError as error:
        drawn = Finding(Reason.NONE, "", rows_drawn=tuple(numbers))
        raise RulingError(Reason.MALFORMED, str(error), measured=drawn) from error
    except replay.NoNumbersError as error:
        raise RulingError(Reason.VALIDATOR_CRASHED, str(error)) from error
    except MemoryError as error:
        raise RulingError(Reason.OUT_OF_RESOURCES, f"{what} ran out of memory: {error}") from error


def _drawn(case: Case, *, whole: bool) -> list[int]:
    """Numbers of the rows to replay: all if `whole`, or if one of them is repeated. In a file of
    another dtype than the replay's they have LEAST_TOKENS tokens at least."""
    file = case.file
    rows = len(file.rows)
    count = max(case.run.least_drawn(rows), case.draw_count or 0)
    if whole or case.finding.repeated:
        count = rows
    least = LEAST_TOKENS if file.metadata.dtype != case.engine.dtype else 0
    lengths = [len(row.places) for row in file.rows]
    return draw(case.draw_secret, case.submission_digest, lengths, count, least)


def draw(
    secret: Digest, submission: Digest, lengths: Sequence[int], count: int, least: int
) -> list[int]:
    """Draws `count` of the rows with these lengths in tokens, and further ones until they have
    `least` tokens together or are all. More rows include those of a smaller count."""
    numbers = seeds.drawn_rows(secret, submission, len(lengths), count)
    while len(numbers) < len(lengths) and sum(lengths[number] for number in numbers) < least:
        numbers = seeds.drawn_rows(secret, submission, len(lengths), len(numbers) + 1)
    return numbers


@dataclass(frozen=True)
class _LimitsFor:
    """What a file is judged by. `calibration`: None if it does not apply to this validator.
    `setup`: None if it has no limits for the file. `uncalibrated`: whether the file's card has none
    of its own, which any validator finds in the file's metadata alone. `outside`: as in
    Measured."""

    calibration: Calibration | None
    setup: SetupLimits | None
    uncalibrated: bool = False
    outside: Reason | None = None


def _limits_for(case: Case) -> _LimitsFor:
    """Finds the run's limits for the file, as far as they apply to an engine like the
    validator's."""
    chosen = case.calibration or shipped_as(case.run.calibration) or shipped()
    engine, made = case.engine, case.file.metadata
    if case.run.calibration not in (ZERO_DIGEST, chosen.digest()):
        return _LimitsFor(None, None)
    of_device = chosen.measured if case.as_listed else chosen.setup
    setup = of_device(made.engine, made.dtype, made.device)
    uncalibrated = setup is None and case.run.task.gpus
    if uncalibrated:
        setup = chosen.widest(made.engine, made.dtype, made.device)
        uncalibrated = setup is not None
    replayed_by = engine.name, engine.dtype, engine.device
    if chosen.replayed_by(*replayed_by):
        outside = Reason.UNCALIBRATED if uncalibrated else None
        return _LimitsFor(chosen, setup, uncalibrated, outside)
    if case.on_any_card and chosen.replayed_widely_by(*replayed_by):
        outside = Reason.UNCALIBRATED if uncalibrated else Reason.UNKNOWN_SETUP
        return _LimitsFor(chosen, setup, uncalibrated, outside)
    return _LimitsFor(None, None, uncalibrated)


def _no_limits(case: Case, calibration: Calibration | None) -> RulingError:
    """UNKNOWN_SETUP without a calibration, else UNCALIBRATED, with what was measured."""
    reason = Reason.UNKNOWN_SETUP if calibration is None else Reason.UNCALIBRATED
    return _unmeasured(case, reason, "measured only")


def _unmeasured(case: Case, reason: Reason, found: str) -> RulingError:
    """The ruling on a file that cannot be accused: UNKNOWN_SETUP if the validator's setup was not
    calibrated, UNCALIBRATED if the file's was not. It states `found` and what was measured."""
    made, engine, statistics = case.file.metadata, case.engine, case.finding.statistics
    measured = ", ".join(f"{name} {statistics[name]:.3g}" for name in STATISTICS)
    lacking = f"{made.engine}, {made.dtype} on {made.device}"
    if reason is Reason.UNKNOWN_SETUP:
        lacking = f"replays by {engine.name}, {engine.dtype} on {engine.device}"
    return RulingError(
        reason, f"no calibration for {lacking}: {found}: {measured}", measured=case.finding
    )


def _compute_share(file: RolloutFile, numbers: Sequence[int], engine: Engine) -> float:
    """Compute of the replay divided by the compute of making the file: tokens through the model,
    counted twice if another dtype's drift is measured too. Work per token is nearly equal in both
    cases, although a prefill runs many times faster."""
    tokens = [len(row.prompt_tokens) + len(row.output_tokens) for row in file.rows]
    passes = 1 if file.metadata.dtype == engine.dtype else 2
    return passes * sum(tokens[number] for number in numbers) / sum(tokens)


def _named(made: FileMetadata) -> str:
    """The setup of a file, by which sums over files are compared. Log-probabilities of a proof
    pass are closer to a replay than those of decoding, so files of exact classes are compared among
    themselves."""
    parts = (made.engine, made.dtype, made.device)
    return " ".join(parts + (("exact",) if made.numeric_class else ()))


@contextmanager
def _of_class(case: Case, numbers: Sequence[int]) -> Iterator[Engine | None]:
    """The engine that repeats the proof pass of the file's rows `numbers`, while the block runs;
    None if the file has none, or if this machine is not of its class with this policy: then
    statistics alone judge it. So they do if `provers` hold no rows of this length, or run out of
    memory, which ends the block without an error. A false statement of the file's engine or dtype
    does not prevent the comparison."""
    made, lease, engine = case.file.metadata, case.signed, case.engine
    named = made.numeric_class
    if not named:
        yield None
        return
    found, known = None, case.known_class(Digest(named))
    for dtype in dict.fromkeys((made.dtype, engine.dtype, *get_args(Dtype))):
        if known is not None and (known.engine, known.dtype) != (engine.name, dtype):
            continue
        try:
            found = found or _equal(named, partial(engine.in_dtype, dtype), known)
        except MemoryError:
            if dtype == made.dtype:  # in which the replay measured, too
                raise
    if found is not None or case.provers is None:
        yield found
        return
    longest = max(
        len(case.plan[number].prompt_tokens) + len(case.file.rows[number].output_tokens)
        for number in numbers
    )
    policy = lease.policy_version, lease.lease.policy_digest
    with case.provers.of_class(named, *policy, made.dtype, longest, known) as prover:
        yield prover


def _equal(
    numeric_class: str, load: Callable[[], Engine], known: NumericClass | None
) -> Engine | None:
    """The loaded engine if its class, which may be `known`, has this digest."""
    try:
        found = load()
        if known is not None and dict(found.facts()) != dict(known.facts):
            return None  # without measuring it
        return found if found.numeric_class().digest() == numeric_class else None
    except (UnavailableError, UserError):
        return None


def _compare_exactly(case: Case, numbers: Sequence[int], engine: Engine) -> exact.ExactResult:
    """Repeats the proof pass of the drawn rows. Raises MalformedError, replay.NoNumbersError."""
    seed = seeds.lease_seed(case.lease_digest)
    rows = [case.file.rows[number] for number in numbers]
    own = []
    for number, row in zip(numbers, rows, strict=True):
        prompt, temperature = case.plan[number].prompt_tokens, case.run.temperature
        parts = engine.proof_pass(prompt, row.output_tokens, temperature)
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


def _explained_by_earlier(
    accusation: replay.Accusation,
    policy_version: int,
    engines: EngineProvider,
    measure: Callable[[Engine], Sequence[replay.RowStatistics]],
    limits: Limits,
) -> replay.Accusation:
    """Changes the accusation to WRONG_POLICY, with the version, if an earlier policy replays the
    rows without a finding."""
    for version, engine in engines.earlier(policy_version):
        try:
            explained = replay.accuse(measure(engine), limits) is None
        except (replay.NoNumbersError, MalformedError):
            continue  # this policy explains nothing: the accusation stands
        if explained:
            detail = f"made with policy {version}; {accusation.detail}"
            return replace(accusation, reason=Reason.WRONG_POLICY, detail=detail)
    return accusation
