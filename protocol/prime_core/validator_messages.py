"""HTTP bodies between validator and orchestrator, signed by a session of scope "validator".

| method and path | body → answer |
|---|---|
| POST /v1/validators/commitments | CommitRequest → {} |
| POST /v1/validators/reveals | DrawReveal → {} |
| POST /v1/validators/claims | ClaimRequest → ClaimAnswer |
| POST /v1/validators/classes | ClassList → {} |
| POST /v1/validators/keep | KeepRequest → {} |
| POST /v1/validators/release | ReleaseRequest → {} |
| POST /v1/validators/rows | RowsRequest → RowsAnswer |
| POST /v1/validators/seals | SealRequest → SealAnswer |
| POST /v1/validators/objects | ObjectRequest → UploadAnswer |
| POST /v1/validators/opinions | SignedOpinion → {} |
| POST /v1/validators/together | TogetherRequest → TogetherAnswer |
| GET  /v1/submissions/{digest}/opinions | (anyone) → OpinionList |
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prime_core.draws import SignedDrawCommitment
from prime_core.messages import ClassFacts, Count, ReceiptAnswer
from prime_core.rollout import SignedSubmission
from prime_core.signing import Answer, DigestField, Strict
from prime_core.task import SignedLease, SubmissionStatus
from prime_core.verdict import SignedOpinion

MAX_JOBS = 64
Worker = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""Identifies one of the processes that share a validator's key."""


class CommitRequest(Strict):
    """Commitments to the draws of this epoch and future ones."""

    commitments: tuple[SignedDrawCommitment, ...] = Field(min_length=1, max_length=16)


class CommitAnswer(Answer):
    """`missing`: epochs of which the caller has not published a secret that is due, such as after a
    loss of the orchestrator's data."""

    missing: tuple[int, ...] = Field(default=(), exclude_if=lambda epochs: not epochs)


class ClaimRequest(Strict):
    """Requests files assigned to the caller, at most `most` files, all of one policy."""

    worker: Worker
    most: int = Field(default=1, ge=1, le=MAX_JOBS)


class ExactClass(Strict):
    """Facts of a machine and the fingerprint of a policy on it (prime_engine.exact)."""

    facts: ClassFacts
    fingerprint: DigestField


class ClassList(Strict):
    """The exact classes in which the caller can repeat proof passes of one policy. They take the
    place of those that it announced for that policy before."""

    policy_version: Count
    policy_digest: DigestField
    classes: tuple[ExactClass, ...] = Field(max_length=4)


class Job(Answer):
    """One file to judge. `file` is a signed URL of its bytes, `second` the manager's secret of the
    file (prime_core.draws), `rows` the minimum number of rows to replay. The claim expires at
    `until` (Unix seconds) unless it is renewed."""

    submission_digest: DigestField
    submission: SignedSubmission
    lease: SignedLease
    receipt: ReceiptAnswer
    file: str = Field(max_length=2048)
    second: DigestField
    rows: int = Field(ge=1)
    until: int


class ClaimAnswer(Answer):
    """`reveal`: sealed files whose opinions must be submitted now. `together`: most entries of a
    TogetherRequest; 0 if the orchestrator takes none."""

    jobs: tuple[Job, ...] = ()
    reveal: tuple[DigestField, ...] = ()
    retry_after_ms: int = Field(default=0, ge=0)
    together: int = Field(default=0, ge=0)


class KeepRequest(Strict):
    """Renews the claims on files that are still being judged."""

    worker: Worker
    submissions: tuple[DigestField, ...] = Field(min_length=1, max_length=MAX_JOBS)


class ReleaseRequest(Strict):
    """Ends a claim without an opinion. "abstain": the file goes to another validator and is not
    offered again. "later": an outage; the file is offered to the caller again after `seconds`."""

    worker: Worker
    submission: DigestField
    kind: Literal["abstain", "later"]
    reason: int
    detail: str = Field(max_length=2048)
    seconds: int = Field(default=15, ge=0, le=3600)


class RowsRequest(Strict):
    """Asks which of these row marks (prime_verify.repeats) occur in other files."""

    submission: DigestField
    marks: dict[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], bool]


class RowsAnswer(Answer):
    marks: tuple[str, ...]


class SealRequest(Strict):
    """`seal` is SignedOpinion.seal() of an opinion that the caller does not reveal yet."""

    worker: Worker
    submission: DigestField
    seal: DigestField


class SealAnswer(Answer):
    """Whether all required opinions are sealed, so that this one must be submitted."""

    reveal: bool


class ObjectRequest(Strict):
    """Requests a signed URL to upload a table or evidence for a file that the caller has sealed."""

    submission: DigestField
    sha256: DigestField
    size: int = Field(ge=1)


class GivenOpinion(Strict):
    """A sealed opinion that is due. `table`: the text of the table that it names, if that is not
    uploaded on its own."""

    signed: SignedOpinion
    table: str | None = None


class TogetherRequest(Strict):
    """Requests about several files. Each entry is done, or refused, as if it had come alone."""

    rows: tuple[RowsRequest, ...] = Field(default=(), max_length=MAX_JOBS)
    seals: tuple[SealRequest, ...] = Field(default=(), max_length=MAX_JOBS)
    opinions: tuple[GivenOpinion, ...] = Field(default=(), max_length=MAX_JOBS)


class EntryAnswer(Answer):
    """What became of one entry: `marks` of a RowsAnswer, `reveal` of a SealAnswer; or `problem`, an
    RFC 9457 document as text, with its HTTP `status`."""

    marks: tuple[str, ...] = ()
    reveal: bool = False
    status: int = 200
    problem: str = ""


class TogetherAnswer(Answer):
    """The answers to the entries, in their order."""

    rows: tuple[EntryAnswer, ...] = ()
    seals: tuple[EntryAnswer, ...] = ()
    opinions: tuple[EntryAnswer, ...] = ()


class OpinionList(Answer):
    """All opinions on a submission, once it has a verdict."""

    submission_digest: DigestField
    status: SubmissionStatus
    opinions: tuple[SignedOpinion, ...]
