"""One rollout file to judge, and what its checks have established so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prime_core.ids import Digest
from prime_core.rollout import Submission
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_core.verdict import Reason, VerdictRow
from prime_engine.base import Engine
from prime_engine.exact import NumericClass
from prime_envs.base import Environment
from prime_verify.build import PlannedRow
from prime_verify.engines import EngineProvider
from prime_verify.finding import Finding
from prime_verify.proofs.exact import ExactResult
from prime_verify.proofs.thresholds import Calibration, Limits
from prime_verify.provers import Provers
from prime_verify.repeats import Seen
from prime_verify.replay import RowStatistics
from prime_verify.rollout_file import RolloutFile


@dataclass(frozen=True)
class Measured:
    """What the replay measured of the drawn rows; the last two checks judge it.

    `limits` are those of the file's setup. `outside` is the reason of a file beyond them where they
    accuse no one: UNCALIBRATED if the file's card was not measured, UNKNOWN_SETUP if the
    validator's was not; None where they accuse. `measure` replays the rows by another policy's
    engine.
    `exact` compares the proof passes: None if the file has none, or if this machine is not of its
    class. `numeric_class` describes that class; `proven_to`: see Calibration.proven_to.
    """

    rows: tuple[RowStatistics, ...]
    limits: Limits
    measure: Callable[[Engine], Sequence[RowStatistics]]
    outside: Reason | None = None
    exact: ExactResult | None = None
    numeric_class: str = ""
    proven_to: int = 0


@dataclass
class Case:
    """The bytes of a rollout file with what they are judged by: lease, run, environment, engines.

    The caller checks the lease's signature and deadline. `draw_secret` (core.draws.rows_secret; any
    digest in a pre-flight) and `submission_digest` select the rows to replay. `calibration` is the
    object that run.calibration names; None uses the shipped one. `draw_count`: rows to replay, if
    more than the run's share. `seen`: looks up rows of other files; a file that repeats any is
    replayed completely. `rewards_first`: grade before the replay in any environment, for audits of
    a tampered reward. `on_any_card`: judge on a card for which the calibration does not hold, too:
    it accepts within the file's limits and accuses no one beyond them. For validators; audits
    compare verdicts, for which such a card says too little. `provers`: engines that repeat proof
    passes which `engines` cannot repeat. `known_class` returns the exact class of a digest, or
    None: machines of other classes then need not load and measure a policy to find that out.
    `as_listed`: judge by the card's measured limits even if they accuse no one, as versions did
    before they took two signatures; for audits of a slash.

    The attributes below `as_listed` are results of checks, for the checks after them; to read
    one before its check has run raises AttributeError. `finding` is that of an accepted file, as
    far as it is known.
    """

    data: bytes
    signed: SignedLease
    lease_digest: Digest
    run: RunDefinition
    environment: Environment
    engines: EngineProvider
    draw_secret: Digest
    submission_digest: Digest
    submission: Submission | None = None
    calibration: Calibration | None = None
    draw_count: int | None = None
    seen: Seen | None = None
    rewards_first: bool = False
    on_any_card: bool = False
    provers: Provers | None = None
    known_class: Callable[[Digest], NumericClass | None] = lambda digest: None
    as_listed: bool = False
    file: RolloutFile = field(init=False)
    engine: Engine = field(init=False)
    plan: Sequence[PlannedRow] = field(init=False)
    measured: Measured = field(init=False)
    table: tuple[VerdictRow, ...] = field(init=False)
    finding: Finding = field(init=False, default=Finding(Reason.NONE, ""))
