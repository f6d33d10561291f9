"""What a validator found: outcome, reason, evidence, and the table of recomputed rows."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from pydantic import Field

from protocol.core.ids import ZERO_DIGEST
from protocol.core.rollout import SignedSubmission
from protocol.core.signing import (
    U8,
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)
from protocol.core.task import SignedLease


class Outcome(IntEnum):
    """The four endings, never mixed."""

    ACCEPTED = 1
    REJECTED = 2
    VOID = 3
    ABSTAINED = 4


class Reason(IntEnum):
    """Why. 1–49 reject (slashable), 50–79 void (no pay, no penalty), 80+ abstain."""

    NONE = 0
    # rejected: a lie that the evidence shows
    WRONG_PROMPTS = 1
    WRONG_TARGETS = 2
    WRONG_SAMPLING = 3
    WRONG_ACTIVATIONS = 4
    WRONG_SKETCH = 5
    FORGED_PROOF = 6
    EARLY_END = 7
    TAMPERED_REWARD = 8
    TAMPERED_LOGPROBS = 9
    COPIED_ROWS = 10
    TWO_HUMPED = 11
    WRONG_POLICY = 12
    # void: late, unreachable, malformed
    MALFORMED = 50
    WRONG_SCHEMA = 51
    OVERSIZED = 52
    WRONG_SIZE_OR_DIGEST = 53
    WRONG_LEASE = 54
    WRONG_ROWS = 55
    UNAVAILABLE = 56
    LATE = 57
    POLICY_TOO_OLD = 58
    UNROOTED = 59
    UNCALIBRATED = 60
    # abstained: the validator's own trouble
    VALIDATOR_CRASHED = 80
    POLICY_MISSING = 81
    UNKNOWN_SETUP = 82
    OUT_OF_RESOURCES = 83

    @property
    def outcome(self) -> Outcome:
        if self is Reason.NONE:
            return Outcome.ACCEPTED
        if self < 50:
            return Outcome.REJECTED
        return Outcome.VOID if self < 80 else Outcome.ABSTAINED

    @property
    def sentence(self) -> str:
        """What was found, why it ends so, and what its node can do: for people."""
        return SENTENCES[self]


_LIE = "the evidence is public: prime-node audit replay SUBMISSION shows it on any machine"
_FIX = "nothing is lost but this file's pay; update the worker, or tell the pool if it is current"
SENTENCES: dict[Reason, str] = {
    Reason.NONE: "nothing was found against it",
    Reason.WRONG_PROMPTS: f"its prompts are not those its lease's seed dictates; {_LIE}",
    Reason.WRONG_TARGETS: f"its target lengths are not those its lease's seed dictates; {_LIE}",
    Reason.WRONG_SAMPLING: f"its tokens were not drawn with its lease's noise; {_LIE}",
    Reason.WRONG_ACTIVATIONS: f"its activations are not those of the leased policy; {_LIE}",
    Reason.WRONG_SKETCH: f"its sketches are not of the leased policy's states; {_LIE}",
    Reason.FORGED_PROOF: f"its activation proofs are forged; {_LIE}",
    Reason.EARLY_END: f"its samples end where the policy would not have ended them; {_LIE}",
    Reason.TAMPERED_REWARD: f"its rewards are not what its answers earn; {_LIE}",
    Reason.TAMPERED_LOGPROBS: f"its log-probabilities are not the policy's; {_LIE}",
    Reason.COPIED_ROWS: f"it repeats rows that had noise of their own; {_LIE}",
    Reason.TWO_HUMPED: f"another model wrote what this policy only read; {_LIE}",
    Reason.WRONG_POLICY: f"it was made with another policy than the leased one; {_LIE}",
    Reason.MALFORMED: f"the file does not parse as a rollout file (truncated or damaged); {_FIX}",
    Reason.WRONG_SCHEMA: f"the file is of another schema than this pool's; {_FIX}",
    Reason.OVERSIZED: f"the file exceeds a limit of size, rows or tokens; {_FIX}",
    Reason.WRONG_SIZE_OR_DIGEST: f"the bytes are not those that were submitted; {_FIX}",
    Reason.WRONG_LEASE: f"the file names another lease than its submission; {_FIX}",
    Reason.WRONG_ROWS: f"the rows are not complete, in order and consistent; {_FIX}",
    Reason.UNAVAILABLE: "it could not be judged in time: the pool's fault, no penalty",
    Reason.LATE: "it came after its lease's deadline; take leases that this machine can finish",
    Reason.POLICY_TOO_OLD: "its lease's policy is older than the run allows for its batch: the "
    "pool's fault, no pay, no penalty; an up-to-date agent takes no such lease",
    Reason.UNROOTED: "it was not put on chain while anybody could still answer for it there: the "
    "pool's fault, no pay, no penalty; next time: prime-node work post",
    Reason.UNCALIBRATED: "no calibration covers its engine, dtype or device: it was measured only, "
    "no pay, no penalty; use a set-up that the run's calibration lists",
    Reason.VALIDATOR_CRASHED: "the validator failed; another takes it, nothing to do",
    Reason.POLICY_MISSING: "the validator lacked the policy; another takes it, nothing to do",
    Reason.UNKNOWN_SETUP: "the validator lacks a calibration of the run's for its engine; another "
    "takes it, nothing to do",
    Reason.OUT_OF_RESOURCES: "the validator ran out of resources; another takes it",
}
"""One sentence a reason (see Reason.sentence)."""


class Verdict(Statement):
    """Signed by the validator. `table` is the SHA-256 of the VerdictTable object (zero unless
    accepted), `evidence` that of the Evidence object (zero unless rejected). `units` = generated
    tokens of accepted rows, as the validator counted them."""

    CONTRACT: ClassVar[ContractName] = "slasher"
    pool: U256
    submission_digest: DigestField
    outcome: U8
    reason: U8
    units: U64
    table: DigestField
    evidence: DigestField
    judged_at: U64


class VerdictRow(Strict):
    """One row as the validator recomputed it. Reward in millionths, so that the object is exact."""

    problem_id: str = Field(max_length=256)
    group: int = Field(ge=0)
    sample: int = Field(ge=0)
    reward_micro: int
    prompt_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class VerdictTable(Strict):
    """Object named by its SHA-256: every row of one accepted file."""

    submission_digest: DigestField
    sha256: DigestField
    policy_version: int
    step: int
    rows: tuple[VerdictRow, ...]


class SignedVerdict(Strict):
    """A verdict with its validator's signature, as published."""

    verdict: Verdict
    validator: AddressField
    signature: SignatureField


class Evidence(Strict):
    """Object named by its SHA-256: all that an auditor needs to reach the same verdict.

    `statistics` maps names to decimal text (floats are no part of canonical JSON).
    `rows_drawn` are the file's row numbers that were replayed; `draw_secret` the validator's epoch
    secret from which PRF(secret, submission digest) drew them.
    """

    version: int = 1
    chain_id: int
    submission: SignedSubmission
    lease: SignedLease
    reason: int
    detail: str = Field(max_length=2048)
    run_digest: DigestField
    validator: AddressField
    validator_version: str = Field(max_length=64)
    draw_secret: DigestField
    rows_drawn: tuple[int, ...]
    statistics: dict[str, str]
    thresholds: dict[str, str]
    calibration: DigestField = ZERO_DIGEST
    """Object whose limits these are (protocol.proofs.thresholds.Calibration); zero: none was used.
    """
    row_statistics: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Statistic → its value in each of `rows_drawn`, in their order."""
    chance: str = Field(
        default="",
        max_length=16,
        pattern=r"^(|0|1|0\.[0-9]{1,9}|[0-9](\.[0-9]{1,3})?e-[0-9]{2,3})$",
    )
    """At most so probable is it that an honest file looks like this; 0 where that is no matter of
    chance. Empty in evidence from before this was stated."""
