"""Accepts signed submissions: each becomes a row, a job and the manager's receipt.

All checks come first. One transaction then writes the submission, ends the lease and queues the
job. Finally the file is moved to permanent storage, which therefore contains only files that a
submission names. After a crash before the commit, the lease is open and the file is among the
uploads, so submitting again completes it. After the commit, submitting again returns the same
receipt, and the next sweep of the uploads moves the file.
"""

from __future__ import annotations

from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    PolicyError,
    UntrustedError,
)
from prime_core.ids import Digest
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import MAX_FILE_BYTES, Receipt, SignedSubmission
from prime_core.task import Lease
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import uploads
from prime_orchestrator.store import jobs, leases, nodes, submissions
from prime_orchestrator.store.leases import LeaseRow


def submit(backend: Backend, signed: SignedSubmission) -> ReceiptAnswer:
    """Accepts a submission; any account may deliver it.

    Raises UntrustedError (signature, or file and claim differ), MalformedError (rows, size),
    NotFoundError (no such lease or file), ConflictError (another file was submitted, lease ended),
    PolicyError (node may not submit).
    """
    if backend.signer_of(signed.submission, signed.signature) != signed.node:
        raise UntrustedError("the submission is not signed by the node that it names")
    digest = backend.digest(signed.submission)
    with backend.store.read() as connection:
        row = leases.get(connection, signed.submission.lease_digest)
        before = submissions.of_lease(connection, signed.submission.lease_digest)
        node = nodes.get(connection, signed.node)
    if row is None:
        raise NotFoundError("there is no lease of that digest")
    if before is not None:
        return _again(before.digest, digest, before.receipt_answer())
    check_claim(signed, row.signed().lease)
    _check_shape(backend, signed)
    if node is None or node.status in ("quarantined", "ejected", "left"):
        status = "unknown" if node is None else node.status
        raise PolicyError(f"the node is {status}; nothing is taken from it")
    _check_open(row, backend.now())
    if signed.submission.valid_until < backend.now():
        raise PolicyError("the submission's own validity has ended")
    _check_file(backend, signed, row.deadline)
    answer = _accept(backend, signed, digest)
    if not row.shadow:
        uploads.keep(backend.objects, row.deadline, signed.submission.sha256)
    return answer


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


def _check_open(row: LeaseRow, now: float) -> None:
    if row.status != "open" or now > row.deadline:
        ended = "past its deadline" if row.status in ("open", "expired") else row.status
        raise ConflictError(f"the lease is {ended}: the file came too late")


def _check_file(backend: Backend, signed: SignedSubmission, deadline: int) -> None:
    """Checks that the stored object is exactly the file the node signed."""
    claim = signed.submission
    stored = uploads.ask(deadline, claim.sha256, backend.objects.stat)
    if stored.size != claim.size:
        raise UntrustedError("the stored file has another size than the submission says")
    if stored.sha256 != claim.sha256:
        raise UntrustedError("the stored file has another SHA-256 than the submission says")


def _accept(backend: Backend, signed: SignedSubmission, digest: Digest) -> ReceiptAnswer:
    """Writes submission, lease and job in one transaction, and returns the receipt."""
    now = backend.now()
    receipt = Receipt(submission_digest=digest, received_at=int(now))
    answer = ReceiptAnswer(receipt=receipt, signature=backend.sign(receipt))
    lease_digest = signed.submission.lease_digest
    with backend.store.begin() as connection:
        row = leases.lock_row(connection, lease_digest)
        before = submissions.of_lease(connection, lease_digest)
        if before is not None:  # concurrent submission for the same lease
            return _again(before.digest, digest, before.receipt_answer())
        if row is None:
            raise NotFoundError("there is no lease of that digest")
        _check_open(row, now)
        after, _ = step_lease(LeaseState(row.status, row.deadline), "submitted", now)
        submissions.add(
            connection,
            digest,
            signed,
            policy_version=row.policy_version,
            receipt=answer,
            received_at=now,
            shadow=row.shadow,
        )
        leases.set_status(connection, lease_digest, after.status)
        jobs.add(connection, digest, now=now, shadow=row.shadow)
    return answer


def _again(known: Digest, given: Digest, receipt: ReceiptAnswer) -> ReceiptAnswer:
    if known != given:
        raise ConflictError("another file was handed in for this lease")
    return receipt
