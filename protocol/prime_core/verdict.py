"""A validator's result: outcome, reason, evidence, and the table of recomputed rows."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_core import encoding
from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.rollout import SignedSubmission
from prime_core.signing import (
    U8,
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    Domain,
    SignatureField,
    Statement,
    Strict,
)
from prime_core.task import SignedLease


class Outcome(IntEnum):
    """The four possible outcomes of judging a file."""

    ACCEPTED = 1
    REJECTED = 2
    VOID = 3
    ABSTAINED = 4


class Reason(IntEnum):
    """Reason codes. 1–49 reject (slashable), 50–79 void (no pay, no penalty), 80+ abstain."""

    NONE = 0
    # rejected: an attack that the evidence proves
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
    IMPROBABLE_TOKENS = 11
    WRONG_POLICY = 12
    WRONG_OBSERVATION = 13
    WRONG_PROOF_PASS = 14
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
    WRONG_CLASS = 61
    UNPROVEN_MISMATCH = 62
    # abstained: a problem on the validator's side
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
        """User-facing sentence: what was found, why it leads to this outcome, and what the node can
        do."""
        return SENTENCES[self]


POOLS_FAULT = frozenset({Reason.UNAVAILABLE, Reason.POLICY_TOO_OLD, Reason.UNROOTED})
"""Reasons for which a file is void through no act of its node: `expired_unjudged` in pages."""
MANAGERS_OWN = frozenset({Reason.UNAVAILABLE, Reason.UNROOTED})
"""Reasons that only the manager can give. No opinion states them."""

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
    Reason.IMPROBABLE_TOKENS: f"another model wrote what this policy only read; {_LIE}",
    Reason.WRONG_POLICY: f"it was made with another policy than the leased one; {_LIE}",
    Reason.WRONG_OBSERVATION: f"the environment did not say what the file says it said; {_LIE}",
    Reason.WRONG_PROOF_PASS: "its proof pass is not that of the leased policy, bit for bit, on the "
    f"hardware class of its lease; {_LIE}",
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
    Reason.UNROOTED: "it was not put on chain while its stake was still liable: the "
    "pool's fault, no pay, no penalty; next time: prime-node work post",
    Reason.UNCALIBRATED: "no calibration covers its engine, dtype or device, and it is outside the "
    "widest limits or has none: no pay, no penalty; use a setup that the run's calibration lists",
    Reason.WRONG_CLASS: f"it is not proved in the exact class that its lease names; {_FIX}",
    Reason.UNPROVEN_MISMATCH: "its proof pass differs from the validator's, in too few rows or "
    "in a class not yet proven: no pay, no penalty, and it is counted",
    Reason.VALIDATOR_CRASHED: "the validator failed; another takes it, nothing to do",
    Reason.POLICY_MISSING: "the validator lacked the policy; another takes it, nothing to do",
    Reason.UNKNOWN_SETUP: "the validator lacks a calibration of the run's for its engine; another "
    "takes it, nothing to do",
    Reason.OUT_OF_RESOURCES: "the validator ran out of resources; another takes it",
}
"""One sentence per reason (see Reason.sentence)."""


PROOF_PASS = frozenset(
    {Reason.WRONG_PROOF_PASS, Reason.TAMPERED_LOGPROBS, Reason.UNPROVEN_MISMATCH}
)
"""Reasons that a repeated proof pass can give."""


class Law(Statement):
    """The rules under which an opinion was formed. Only its struct hash is part of a signed
    opinion; opinions count together only if it is equal. `verification_class` is the digest of the
    calibration, `verifier` keccak256 of the verifier's version, `draws` the digest of the lease's
    DrawList."""

    CONTRACT: ClassVar[ContractName] = "work"
    lease: DigestField
    run: DigestField
    verification_class: DigestField
    verifier: DigestField
    draws: DigestField


class Opinion(Statement):
    """One validator's opinion on one submission. `law` is the struct hash of a Law, `reason`
    keccak256 of the reason's name, `table` the SHA-256 of the VerdictTable object, `evidence` that
    of the Evidence object (zero unless rejected). `judged_at` is in Unix seconds."""

    CONTRACT: ClassVar[ContractName] = "work"
    pool: U256
    submission: DigestField
    law: DigestField
    outcome: U8
    reason: DigestField
    table: DigestField
    evidence: DigestField
    judged_at: U64


def reason_digest(reason: Reason) -> Digest:
    """keccak256 of the reason's name, as used in an opinion."""
    return encoding.keccak256(reason.name.encode())


_REASONS: dict[str, Reason] = {reason_digest(reason): reason for reason in Reason}


def reason_of(digest: Digest) -> Reason | None:
    """Inverse of `reason_digest`; None for an unknown digest."""
    return _REASONS.get(digest)


class SignedOpinion(Strict):
    """A published opinion, together with the law whose hash it contains."""

    opinion: Opinion
    law: Law
    validator: AddressField
    signature: SignatureField

    @property
    def outcome(self) -> Outcome:
        """Raises MalformedError if the outcome is unknown."""
        try:
            return Outcome(self.opinion.outcome)
        except ValueError as error:
            raise MalformedError("the opinion has an unknown outcome") from error

    @property
    def reason(self) -> Reason:
        """Raises MalformedError if the reason is unknown."""
        found = reason_of(self.opinion.reason)
        if found is None:
            raise MalformedError("the opinion names an unknown reason")
        return found

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def seal(self) -> Digest:
        """SHA-256 of the canonical bytes. It hides the opinion, because only the validator's key
        can produce the signature that they contain."""
        return encoding.sha256(self.canonical())

    def check(self, domain: Domain) -> None:
        """Raises UntrustedError unless `validator` signed the opinion under `domain`,
        MalformedError if its parts are inconsistent."""
        said = self.opinion
        if said.law != self.law.struct_hash():
            raise MalformedError("the opinion is bound to another law than it states")
        if said.outcome not in (Outcome.ACCEPTED, Outcome.REJECTED, Outcome.VOID):
            raise MalformedError("an opinion accepts, rejects or voids")
        if self.reason.outcome is not self.outcome:
            raise MalformedError("the opinion's reason belongs to another outcome")
        if self.reason in MANAGERS_OWN:
            raise MalformedError(f"only the manager gives the reason {self.reason.name}")
        if said.table == ZERO_DIGEST:
            raise MalformedError("an opinion names the table of what was replayed")
        if (said.evidence != ZERO_DIGEST) != (self.outcome is Outcome.REJECTED):
            raise MalformedError("evidence goes with rejection and with nothing else")
        if said.recover(domain, self.signature) != self.validator:
            raise UntrustedError("the opinion is not signed by the validator that it names")


class Verdict(Strict):
    """Object named by its SHA-256: all opinions on one submission at the time of the decision, in
    order of arrival. Table and evidence come from the first opinion with the decided outcome."""

    version: Literal[1] = 1
    outcome: int
    opinions: tuple[SignedOpinion, ...] = Field(min_length=1, max_length=64)

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    @property
    def deciding(self) -> SignedOpinion:
        """The opinion that supplies the verdict's table and evidence. Raises MalformedError if no
        opinion has the verdict's outcome."""
        for signed in self.opinions:
            if signed.opinion.outcome == self.outcome:
                return signed
        raise MalformedError("no opinion has the verdict's outcome")


MAX_PARTS = 12
"""Components of a row's reward that a table holds, at most."""
LONGEST_PART_NAME, LARGEST_PART = 32, 2**53 - 1
"""Bounds of their names' lengths and of their values."""
PartValue = Annotated[int, Field(ge=-LARGEST_PART, le=LARGEST_PART)]
PartName = Annotated[str, Field(min_length=1, max_length=LONGEST_PART_NAME)]


class VerdictRow(Strict):
    """One row as the validator recomputed it. The reward is in millionths, so that the object is
    exact."""

    problem_id: str = Field(max_length=256)
    group: int = Field(ge=0)
    sample: int = Field(ge=0)
    reward_micro: int
    prompt_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    observation_tokens: int = Field(default=0, ge=0, exclude_if=lambda count: count == 0)
    """Environment tokens in a conversation; not included in `output_tokens`."""
    ungraded: bool = Field(default=False, exclude_if=lambda raised: not raised)
    """The code of a plugin raised when it graded the row, which is paid and not trained on."""
    limited: bool = Field(default=False, exclude_if=lambda ended: not ended)
    """The row ended because a call reached a limit (`tool_limit`): paid and not trained on. This
    and `parts` are noted in runs with `detailed_tables`."""
    parts: dict[PartName, PartValue] = Field(
        default_factory=dict, max_length=MAX_PARTS, exclude_if=lambda parts: not parts
    )
    """Components of the reward, as the grader counts them. No verdict depends on them."""


MAX_TABLE_BYTES = 8 << 20
"""Largest VerdictTable that counts; one of the most rows and longest names is smaller."""
MAX_REWARD_MICRO = 10**15
"""Largest reward of a row, in millionths: the store sums those of MAX_ROWS rows in 64 bits."""


class VerdictTable(Strict):
    """Object named by its SHA-256: what one validator recomputed from one file. `rows` holds all
    rows of an accepted file, else none. `rows_drawn` are the replayed row numbers, selected by
    PRF(`draw_secret`, submission digest). Numbers are decimal text. `shares` are the file's
    statistics as fractions of their limits; `marks` identify its rows for duplicate detection
    (prime_verify.repeats)."""

    submission_digest: DigestField
    sha256: DigestField
    policy_version: int
    step: int
    rows: tuple[VerdictRow, ...]
    draw_secret: DigestField = ZERO_DIGEST
    rows_drawn: tuple[int, ...] = ()
    row_statistics: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    statistics: dict[str, str] = Field(default_factory=dict)
    shares: dict[str, str] = Field(default_factory=dict)
    setup: str = ""
    repeated_rows: int | None = None
    """Number of rows that also occur in other files; None if that was not checked."""
    marks: dict[str, bool] = Field(default_factory=dict)

    @property
    def units(self) -> int:
        """Total generated tokens of the rows."""
        return sum(row.output_tokens for row in self.rows)

    @property
    def prompt_units(self) -> int:
        """Tokens that the node only read: prompts once per problem, environment messages of every
        row."""
        prompts = {row.problem_id: row.prompt_tokens for row in self.rows}
        return sum(prompts.values()) + sum(row.observation_tokens for row in self.rows)

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def holds(self, found: tuple[VerdictRow, ...]) -> bool:
        """Whether the rows are `found`, but for their `parts`, which a grader may count in another
        way where it gives the same reward."""
        return [row.model_copy(update={"parts": {}}) for row in self.rows] == [
            row.model_copy(update={"parts": {}}) for row in found
        ]


class Evidence(Strict):
    """Object named by its SHA-256: everything an auditor needs to reach the same verdict.

    `statistics` maps names to decimal text (canonical JSON has no floats). `rows_drawn` are the
    replayed row numbers, selected by PRF(`draw_secret`, submission digest); prime_core.draws
    defines the draw secret.
    """

    schema_version: Literal[1] = 1
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
    """Digest of the `Calibration` object that the limits come from; zero if none was used."""
    row_statistics: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Statistic → its value in each of `rows_drawn`, in the same order."""
    chance: str = Field(
        default="",
        max_length=16,
        pattern=r"^(|0|1|0\.[0-9]{1,9}|[0-9](\.[0-9]{1,3})?e-[0-9]{2,3})$",
    )
    """Upper bound on the probability that an honest file looks like this; 0 where chance plays no
    part. Empty in evidence older than this field."""
