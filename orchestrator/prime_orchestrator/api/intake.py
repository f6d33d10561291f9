"""Accepts signed submissions: each becomes a row, a job and the manager's receipt.

All checks come first. One transaction then writes the submissions that came together, ends their
leases and queues the jobs. Finally each file is moved to permanent storage, which therefore
contains only files that a submission names. After a crash before the commit, the lease is open and
the file is among the uploads, so submitting again completes it. After the commit, submitting again
returns the same receipt, and the next sweep of the uploads moves the file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prime_core import tracing
from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UntrustedError,
)
from prime_core.ids import Digest
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.logs import fields
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import MAX_FILE_BYTES, Receipt, SignedSubmission
from prime_core.storage.base import ObjectStat
from prime_core.task import Lease
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import uploads
from prime_orchestrator.store import archive, jobs, leases, nodes, submissions
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.nodes import NodeRow
from prime_orchestrator.store.submissions import SubmissionRow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """What the store holds of a submission's lease and node."""

    lease: LeaseRow | None
    before: SubmissionRow | None
    node: NodeRow | None


@dataclass(frozen=True)
class Checked:
    """A submission that passed all checks, its digest, and its file."""

    signed: SignedSubmission
    digest: Digest
    file: ObjectStat


def submit(backend: Backend, signed: SignedSubmission) -> ReceiptAnswer:
    """Accepts a submission; any account may deliver it.

    Raises UntrustedError (signature, or file and claim differ), MalformedError (rows, size),
    NotFoundError (no such lease or file), ConflictError (another file was submitted, lease ended),
    PolicyError (node may not submit).
    """
    (known,) = look_up(backend, [signed])
    if isinstance(known, UntrustedError):
        raise known
    checked = check(backend, signed, known)
    if isinstance(checked, ReceiptAnswer):
        return checked
    (answer,) = accept(backend, [checked])
    if isinstance(answer, PrimeError):
        raise answer
    keep(backend, checked, known)
    return answer


def look_up(backend: Backend, given: Sequence[SignedSubmission]) -> list[Known | UntrustedError]:
    """Returns what `check` needs to know of each submission, in one transaction. An entry is an
    UntrustedError if the node that it names has not signed it; the store is not asked for it."""
    found: list[UntrustedError | None] = [_forged(backend, signed) for signed in given]
    genuine = [signed for signed, error in zip(given, found, strict=True) if error is None]
    if not genuine:
        return [error for error in found if error is not None]
    digests = {signed.submission.lease_digest for signed in genuine}
    with backend.store.read() as connection:
        rows = leases.those(connection, digests)
        before = submissions.of_leases(connection, digests)
        for digest in digests - rows.keys():
            if kept := archive.of_lease(connection, backend.objects, digest):
                before[digest] = kept.submission
        seated = nodes.those(connection, {signed.node for signed in genuine})
    return [
        error or Known(rows.get(named), before.get(named), seated.get(signed.node))
        for signed, error in zip(given, found, strict=True)
        for named in (signed.submission.lease_digest,)
    ]


def _forged(backend: Backend, signed: SignedSubmission) -> UntrustedError | None:
    try:
        author = backend.signer_of(signed.submission, signed.signature)
    except UntrustedError as error:
        return error
    if author != signed.node:
        return UntrustedError("the submission is not signed by the node that it names")
    return None


def check(backend: Backend, signed: SignedSubmission, known: Known) -> Checked | ReceiptAnswer:
    """Makes the other checks of `submit`; returns the receipt if the same file was submitted
    before. Raises what `submit` raises."""
    digest, row, node = backend.digest(signed.submission), known.lease, known.node
    if known.before is not None:  # archived, if there is no lease
        return _again(known.before.digest, digest, known.before.receipt_answer())
    if row is None:
        raise NotFoundError("there is no lease of that digest")
    check_claim(signed, row.signed().lease)
    _check_shape(backend, signed)
    if node is None or node.status in ("quarantined", "ejected", "left"):
        status = "unknown" if node is None else node.status
        raise PolicyError(f"the node is {status}; nothing is taken from it")
    _check_open(row, signed, backend.now())
    return Checked(signed, digest, _check_file(backend, signed, row.deadline))


def keep(backend: Backend, checked: Checked, known: Known) -> None:
    """Moves an accepted file to permanent storage."""
    row, claim = known.lease, checked.signed.submission
    if row is not None and not row.shadow:
        uploads.keep(backend.objects, row.deadline, claim.sha256, checked.file)


def check_claim(signed: SignedSubmission, lease: Lease) -> None:
    """Raises UntrustedError if a submission does not match its lease."""
    claim = signed.submission
    for name, said, due in (
        ("node", signed.node, lease.node),
        ("node", claim.node, lease.node),
        ("pool", claim.pool, lease.pool),
        ("step", claim.step, lease.step),
        ("policy", claim.policy_digest, lease.policy_digest),
    ):
        if said != due:
            raise UntrustedError(f"the submission's {name} is not its lease's")


def _check_shape(backend: Backend, signed: SignedSubmission) -> None:
    claim, rows = signed.submission, backend.context.run.rows_per_lease
    if claim.rows != rows:
        raise MalformedError(f"a file of this pool has {rows} rows, not {claim.rows}")
    if not 0 < claim.size <= MAX_FILE_BYTES:
        raise MalformedError(f"a rollout file has 1 to {MAX_FILE_BYTES} bytes")


def _check_open(row: LeaseRow, signed: SignedSubmission, now: float) -> None:
    if row.status != "open" or now > row.deadline:
        ended = "past its deadline" if row.status in ("open", "expired") else row.status
        raise ConflictError(f"the lease is {ended}: the file came too late")
    if signed.submission.valid_until < now:  # settlement relies on it (manager/settlement.py)
        raise PolicyError("the submission's own validity has ended")


def _check_file(backend: Backend, signed: SignedSubmission, deadline: int) -> ObjectStat:
    """Returns the stored object. Raises UntrustedError unless it is exactly the file the node
    signed."""
    claim = signed.submission
    stored = uploads.stat(backend.objects, deadline, claim.sha256)
    if stored.size != claim.size:
        raise UntrustedError("the stored file has another size than the submission says")
    if stored.sha256 != claim.sha256:
        raise UntrustedError("the stored file has another SHA-256 than the submission says")
    return stored


def accept(backend: Backend, given: Sequence[Checked]) -> list[ReceiptAnswer | PrimeError]:
    """Writes submissions, leases and jobs in one transaction, and returns the receipts. An entry is
    a NotFoundError or ConflictError if the lease has ended or has another file by now, or a
    PolicyError if the submission's validity has ended."""
    now = backend.now()
    answers: list[ReceiptAnswer | PrimeError] = []
    ended: list[LeaseRow] = []
    added: list[SubmissionRow] = []
    with backend.store.begin() as connection:
        digests = {one.signed.submission.lease_digest for one in given}
        rows = leases.lock_rows(connection, digests)
        known = submissions.of_leases(connection, digests)
        for one in given:
            named = one.signed.submission.lease_digest
            try:
                before = known.get(named)
                if before is not None:  # concurrent submission for the same lease
                    answers.append(_again(before.digest, one.digest, before.receipt_answer()))
                    continue
                row = rows.get(named)
                if row is None:
                    raise NotFoundError("there is no lease of that digest")
                _check_open(row, one.signed, now)
            except PrimeError as error:
                answers.append(error)
                continue
            after = step_lease(LeaseState(row.status, row.deadline), "submitted", now)
            ended.append(replace(row, status=after.status, excused=0))
            receipt = Receipt(submission_digest=one.digest, received_at=int(now))
            answer = ReceiptAnswer(receipt=receipt, signature=backend.sign(receipt))
            known[named] = submissions.new_row(
                one.digest,
                one.signed,
                policy_version=row.policy_version,
                receipt=answer,
                received_at=now,
                shadow=row.shadow,
            )
            added.append(known[named])
            answers.append(answer)
        submissions.add(connection, added)
        leases.set_statuses(connection, ended)
        jobs.add(connection, {row.digest: row.shadow for row in added}, now=now)
    for new in added:
        tracing.record(new.lease_digest, "submission", now, backend.now(), submission=new.digest)
        log.info("submission %s of %s is received", new.digest, new.node,
                 extra=fields(kind="file", status="received", **new.about()))  # fmt: skip
    return answers


def _again(known: Digest, given: Digest, receipt: ReceiptAnswer) -> ReceiptAnswer:
    if known != given:
        raise ConflictError("another file was handed in for this lease")
    return receipt
