"""What verification found: a file's finding, and the error that ends verification with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prime_core.ids import ZERO_DIGEST, Digest, Units
from prime_core.verdict import Outcome, Reason, VerdictRow, VerdictTable
from prime_verify.replay import RowStatistics

_NO_UNITS = Units(0)


@dataclass(frozen=True)
class Finding:
    """The result of verifying a file.

    `check` is the name of the check that the file did not pass (checks.CHECKS); empty if it passed
    all, or was not checked. `rows_drawn` are the replayed rows, `row_statistics` their statistics.
    `table` and `units` are set for accepted files only. `setup` is the file's setup if it was
    replayed ("plain/1 float32 cpu"). `repeated` are rows also seen in other files (None: not
    checked); `marks` of an accepted file's rows are to be stored (repeats.py). `whole` of an
    accepted file: every row was replayed. `chance` of a rejected file is an upper bound on the
    probability that an honest file looks like this; 0 where chance plays no part (seed, grader or
    strict decoding); None if not rejected. Statistics are named in proofs.thresholds, plus
    `tokens`, `equal`, `tail_probability` (replay.combine) and `compute_share`, the cost of the
    replay.
    """

    reason: Reason
    detail: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    rows_drawn: tuple[int, ...] = ()
    row_statistics: tuple[RowStatistics, ...] = ()
    table: tuple[VerdictRow, ...] = ()
    units: Units = _NO_UNITS
    setup: str = ""
    repeated: tuple[int, ...] | None = None
    marks: Mapping[str, bool] = field(default_factory=dict)
    whole: bool = False
    chance: float | None = None
    check: str = ""

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


class RulingError(Exception):
    """Ends verification with `finding`; never leaves verify_file.

    `chance` is as in Finding; it defaults to 0 for rejections, because few checks involve chance,
    and is dropped for other outcomes. `measured`: a finding whose statistics the new one states.
    """

    def __init__(
        self, reason: Reason, detail: str, chance: float = 0.0, measured: Finding | None = None
    ) -> None:
        super().__init__(detail)
        self.finding = replace(
            measured or Finding(reason, detail),
            reason=reason,
            detail=detail,
            chance=chance if reason.outcome is Outcome.REJECTED else None,
        )
