"""Compares published results with what this machine finds with the same code.

Devices round differently, so statistics are compared within a tolerance; reasons, drawn rows, units
and rewards must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prime_core.task import SignedLease
from prime_core.verdict import Evidence, Outcome, Reason, SignedOpinion, VerdictTable
from prime_verify.finding import Finding
from prime_verify.replay_checks import EXPLAINED_BY_WEIGHTS

RELATIVE_TOLERANCE = 0.1
ABSOLUTE_TOLERANCE = 0.02
"""Statistics closer than this count as equal, because devices round differently."""
ABSOLUTE_LOG_CHANCE, RELATIVE_LOG_CHANCE = 5.0, 0.25
"""The same for the logarithm of a chance, which changes as much as a statistic that is 10 % off
does in units of its tail: 1e-7 and 1e-10 count as equal, 1e-7 and 1e-14 do not."""

_SAME_LIE = EXPLAINED_BY_WEIGHTS | {Reason.WRONG_POLICY}
"""Reasons that count as one finding, *different weights*: device rounding may decide whether states
or samples exceed their limits first, and which earlier policies are available decides whether one
explains it. Rows, statistics and chance must still agree, so this never turns an honest file into a
rejected one."""

_EXACT = (Reason.WRONG_PROOF_PASS, Reason.TAMPERED_LOGPROBS)
"""What a proof pass that is repeated bit for bit can show. The lease says whether it has a class:
the evidence's statistics are the accuser's words."""

_OTHER_CLASS = (
    "the proof pass can be repeated only on a machine of its class, which this one is not"
)


def other_class(lease: SignedLease, finding: Finding) -> str:
    """Returns what a finding on a file of an exact lease lacks because this machine is not of its
    class; empty if it lacks nothing."""
    named = lease.numeric_class()
    if named is None or not finding.rows_drawn or "exact_rows" in finding.statistics:
        return ""
    return f"{_OTHER_CLASS}; GET /v1/classes/{named} of the pool says what it takes"


Result = Literal["match", "accepted", "mismatch", "cannot tell"]


@dataclass(frozen=True)
class Audit:
    """Result of an audit. `expected` is what was published, `found` what this machine finds."""

    result: Result
    detail: str
    expected: Reason | None = None
    found: Reason | None = None
    statistics: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name → (published, found here), as decimal text."""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "result": self.result,
            "detail": self.detail,
            "expected": self.expected.name if self.expected is not None else None,
            "found": self.found.name if self.found is not None else None,
            "statistics": {name: list(pair) for name, pair in self.statistics.items()},
            "notes": list(self.notes),
        }


def compare_slash(evidence: Evidence, finding: Finding, notes: tuple[str, ...]) -> Audit:
    """Compares a slash's evidence with this machine's finding on the same file and rows."""
    expected = Reason(evidence.reason)
    statistics = {
        name: (evidence.statistics[name], value)
        for name, value in finding.decimal_statistics().items()
        if name in evidence.statistics
    }

    def audit(result: Result, detail: str) -> Audit:
        return Audit(result, detail, expected, finding.reason, statistics, notes)

    if finding.outcome is Outcome.ABSTAINED:
        return audit("cannot tell", finding.detail)
    exactly = evidence.lease.numeric_class() is not None and expected in _EXACT
    if finding.reason is not expected and exactly and "exact_rows" not in finding.statistics:
        return audit("cannot tell", f"{_OTHER_CLASS}: {evidence.detail}")
    if finding.reason is not expected and not {finding.reason, expected} <= _SAME_LIE:
        return audit("mismatch", f"found here: {finding.reason.name}: {finding.detail}")
    if finding.rows_drawn != evidence.rows_drawn:
        return audit("mismatch", "the evidence names other rows than its secret draws")
    apart = [name for name, pair in statistics.items() if not close(*pair)]
    if evidence.chance:
        statistics["chance"] = (evidence.chance, finding.decimal_chance())
        if not as_sure(*statistics["chance"]):
            apart.append("chance")
    if apart:
        return audit("mismatch", f"statistics differ beyond rounding: {', '.join(apart)}")
    notes += _rows_apart(evidence, finding)
    return audit("match", finding.detail)


def _rows_apart(evidence: Evidence, finding: Finding) -> tuple[str, ...]:
    """A note that names rows whose own statistics differ. They do not change the result, because
    the file's statistics decide, but false row statistics should be visible."""
    found = finding.decimal_row_statistics()
    apart = {
        number
        for name, stated in evidence.row_statistics.items()
        for number, said, own in zip(finding.rows_drawn, stated, found.get(name, ()), strict=False)
        if not close(said, own)
    }
    lengths = {len(stated) for stated in evidence.row_statistics.values()}
    if lengths - {len(finding.rows_drawn)} or set(evidence.row_statistics) - set(found):
        return ("the evidence states statistics of other rows, or others than there are",)
    if not apart:
        return ()
    return (f"statistics of rows {', '.join(map(str, sorted(apart)))} differ beyond rounding",)


def compare_verdict(
    signed: SignedOpinion,
    table: VerdictTable | None,
    finding: Finding,
    lease: SignedLease,
    notes: tuple[str, ...] = (),
) -> Audit:
    """Compares the deciding opinion (and its table if it accepts) with this machine's finding.
    `notes` become the audit's."""
    expected = signed.reason

    def audit(result: Result, detail: str) -> Audit:
        return Audit(result, detail, expected, finding.reason, notes=notes)

    if finding.outcome is Outcome.ABSTAINED:
        return audit("cannot tell", finding.detail)
    if expected is Reason.UNPROVEN_MISMATCH and finding.outcome is Outcome.ACCEPTED:
        elsewhere = other_class(lease, finding)
        return audit("cannot tell", elsewhere or "other rows were drawn here")
    if finding.reason is not expected:
        return audit("mismatch", f"found here: {finding.reason.name}: {finding.detail}")
    if table is None:
        return audit("match", finding.detail)
    if table.units != finding.units:
        return audit("mismatch", f"{table.units} units were credited, {finding.units} counted")
    named = (table.submission_digest, table.policy_version, table.step)
    due = (signed.opinion.submission, lease.policy_version, lease.lease.step)
    if named != due or not table.holds(finding.table):
        return audit("mismatch", "the verdict table holds other rows or rewards")
    if elsewhere := other_class(lease, finding):
        notes += (elsewhere,)
    return audit("accepted", f"{finding.units} units; {finding.detail}")


def as_sure(published: str, found: str) -> bool:
    """Whether two chances of an honest file are equal up to rounding: in an exponential tail their
    logarithms differ as statistics do. Values outside (0, 1] (0: not a matter of chance) only match
    themselves."""
    try:
        a, b = float(published), float(found)
    except ValueError:
        return False
    if not (0 < a <= 1 and 0 < b <= 1):
        return a == b
    one, other = abs(math.log(a)), abs(math.log(b))
    return abs(one - other) <= ABSOLUTE_LOG_CHANCE + RELATIVE_LOG_CHANCE * max(one, other)


def close(published: str, found: str) -> bool:
    """Whether two statistics are equal up to rounding. `published` may be arbitrary text. An
    infinite margin (a token to which the policy gives probability 0) only matches another infinite
    one."""
    try:
        a, b = float(published), float(found)
    except ValueError:
        return False
    if not (math.isfinite(a) and math.isfinite(b)):
        return a == b
    return abs(a - b) <= ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * max(abs(a), abs(b))
