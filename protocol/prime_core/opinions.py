"""Public checks of the published opinions on a submission."""

from __future__ import annotations

from collections.abc import Collection

from prime_core.deployment import Deployment
from prime_core.errors import UntrustedError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.rollout import SignedSubmission
from prime_core.task import SignedLease
from prime_core.verdict import Evidence, Opinion, Outcome, Reason, Verdict


def check_opinions(
    verdict: Verdict, submission: Digest, deployment: Deployment, validators: Collection[Address]
) -> None:
    """Raises UntrustedError or MalformedError unless every opinion of the verdict is on
    `submission` and signed by a different member of `validators` (all that the pool ever
    appointed), and those with the decided outcome share one law."""
    domain = deployment.domain_of(Opinion)
    authors = [signed.validator for signed in verdict.opinions]
    if len(set(authors)) < len(authors):
        raise UntrustedError("a validator has two opinions in one verdict")
    for signed in verdict.opinions:
        signed.check(domain)
        if signed.validator not in validators:
            raise UntrustedError(f"{signed.validator} was never a validator of the pool")
        if signed.opinion.submission != submission:
            raise UntrustedError("the opinion is on another submission")
    deciding = verdict.deciding.opinion
    for signed in verdict.opinions:
        said = signed.opinion
        if said.outcome == verdict.outcome and (said.law, said.pool) != (
            deciding.law,
            deciding.pool,
        ):
            raise UntrustedError("opinions under different laws do not count together")


def check_stated(
    evidence: Evidence,
    calibration: Digest,
    *,
    submission: SignedSubmission,
    lease: SignedLease,
    validator: Address,
    chain_id: int,
    run_digest: Digest,
) -> None:
    """Raises UntrustedError unless the evidence is a rejection by `validator` of this submission
    under this lease, run and calibration; ValueError if it names an unknown reason."""
    for name, said, due in (
        ("submission", evidence.submission, (submission,)),
        ("lease", evidence.lease, (lease,)),
        ("validator", evidence.validator, (validator,)),
        ("chain", evidence.chain_id, (chain_id,)),
        ("run", evidence.run_digest, (run_digest,)),
        ("calibration", evidence.calibration, (ZERO_DIGEST, calibration)),
        ("outcome", Reason(evidence.reason).outcome, (Outcome.REJECTED,)),
    ):
        if said not in due:
            raise UntrustedError(f"the evidence's {name} is another")
