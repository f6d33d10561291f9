"""HTTP bodies between validator and orchestrator; each is signed by a session of scope "validator".

| method and path | body → answer |
|---|---|
| POST /v1/validators/commitments | CommitRequest → {} |
| POST /v1/validators/reveals | DrawReveal → {} |
| POST /v1/validators/claims | ClaimRequest → ClaimAnswer |
| POST /v1/validators/keep | KeepRequest → {} |
| POST /v1/validators/release | ReleaseRequest → {} |
| POST /v1/validators/rows | RowsRequest → RowsAnswer |
| POST /v1/validators/seals | SealRequest → SealAnswer |
| POST /v1/validators/objects | ObjectRequest → UploadAnswer |
| POST /v1/validators/opinions | SignedOpinion → {} |
| GET  /v1/submissions/{digest}/opinions | (anyone) → OpinionList |
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prime_core.draws import SignedDrawCommitment
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import SignedSubmission
from prime_core.signing import Answer, DigestField, Strict
from prime_core.task import LeaseStatus, SignedLease
from prime_core.verdict import SignedOpinion

MAX_JOBS = 64
MAX_MARKS_BODY = 4 << 20
"""Bytes of a RowsRequest: a file may have very many rows."""
Worker = Annotated[str, Field(min_length=1, max_length=128)]
"""Names one process among those that share a validator's key."""


class CommitRequest(Strict):
    """Commitments to the draws of this epoch and of those to come."""

    commitments: tuple[SignedDrawCommitment, ...] = Field(min_length=1, max_length=16)


class ClaimRequest(Strict):
    """Asks for the files that were assigned to the caller, at most `most` of one policy."""

    worker: Worker
    most: int = Field(default=1, ge=1, le=MAX_JOBS)


class Job(Answer):
    """One file to judge. `file` is a signed URL of its bytes; `second` the manager's secret of the
    file (prime_core.draws); `rows` how many rows to replay at least; the claim ends at `until`
    unless it is kept (Unix seconds)."""

    submission_digest: DigestField
    submission: SignedSubmission
    lease: SignedLease
    receipt: ReceiptAnswer
    file: str = Field(max_length=2048)
    second: DigestField
    rows: int = Field(ge=1)
    until: int


class ClaimAnswer(Answer):
    """`reveal`: sealed files whose opinions are to be handed in now."""

    jobs: tuple[Job, ...] = ()
    reveal: tuple[DigestField, ...] = ()
    retry_after_ms: int = Field(default=0, ge=0)


class KeepRequest(Strict):
    """Keeps the claims on files that are still being judged."""

    worker: Worker
    submissions: tuple[DigestField, ...] = Field(min_length=1, max_length=MAX_JOBS)


class ReleaseRequest(Strict):
    """Ends a claim without an opinion. "abstain": the file goes to another validator and does not
    come back. "later": an outage; the file comes back to the caller after `seconds`."""

    worker: Worker
    submission: DigestField
    kind: Literal["abstain", "later"]
    reason: int
    detail: str = Field(max_length=2048)
    seconds: int = Field(default=15, ge=0, le=3600)


class RowsRequest(Strict):
    """Which of these row marks (prime_verify.repeats) do other files have?"""

    submission: DigestField
    marks: dict[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], bool]


class RowsAnswer(Answer):
    marks: tuple[str, ...]


class SealRequest(Strict):
    """`seal` is SignedOpinion.seal() of an opinion that the caller keeps for now."""

    worker: Worker
    submission: DigestField
    seal: DigestField


class SealAnswer(Answer):
    """Whether every opinion that is needed is sealed, so that this one is to be handed in."""

    reveal: bool


class ObjectRequest(Strict):
    """Asks for a signed URL to upload a table or evidence of a file that the caller has sealed."""

    submission: DigestField
    sha256: DigestField
    size: int = Field(ge=1)


class OpinionList(Answer):
    """Every opinion on a submission, once it has a verdict."""

    submission_digest: DigestField
    status: LeaseStatus
    opinions: tuple[SignedOpinion, ...]
