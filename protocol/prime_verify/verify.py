"""Verifies one rollout file by the checks of checks.CHECKS, cheapest first.

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

from dataclasses import replace

from prime_core.errors import PolicyError
from prime_core.ids import Units
from prime_core.verdict import Reason
from prime_verify import repeats
from prime_verify.case import Case
from prime_verify.checks import ordered
from prime_verify.finding import Finding, RulingError


def verify_file(case: Case) -> Finding:
    """Judges a rollout file: the finding of the first check that it does not pass, or its
    acceptance. Raises PolicyError if `case.run` is not the lease's run."""
    if case.signed.lease.run_digest != case.run.digest():
        raise PolicyError("the lease belongs to another run definition")
    for check in ordered(case):
        try:
            check.run(case)
        except RulingError as ruling:
            found = ruling.finding
        except MemoryError as error:
            detail = f"the file's checks ran out of memory: {error}"
            found = Finding(Reason.OUT_OF_RESOURCES, detail)
        else:
            continue
        return replace(found, check=check.name, repeated=case.finding.repeated)
    rows = case.file.rows
    return replace(
        case.finding,
        table=case.table,
        units=Units(sum(row.output_tokens for row in case.table)),
        marks=repeats.marks(rows),
        whole=len(case.finding.rows_drawn) == len(rows),
    )
