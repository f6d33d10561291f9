"""The API for validators: files to judge, storage for their objects, and opinions.

    claim      files are assigned to live validators in an order drawn from the manager's second
               secret; the answer lists the caller's files and the opinions it must submit now
    seal       the hash of an opinion; once every needed opinion is sealed, each is due
    opinion    checks signature, appointment, seal and form, then stores it; nothing else happens
    release    ends a claim without an opinion: abstained (for good), or later (an outage)

The manager's loop turns opinions into verdicts (judging.py). Validators do not choose files: they
cannot request a specific one, and after abstaining never get it again. They do not learn how many
others judge a file before their own opinion is sealed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from prime_core.draws import DrawList, DrawReveal, file_secret, lot
from prime_core.errors import (
    ConflictError,
    FatalError,
    MalformedError,
    NotFoundError,
    PolicyError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import UploadAnswer
from prime_core.storage.base import digest_key
from prime_core.task import SignedLease
from prime_core.validator_messages import (
    ClaimAnswer,
    ClaimRequest,
    CommitRequest,
    Job,
    KeepRequest,
    ObjectRequest,
    OpinionList,
    ReleaseRequest,
    RowsAnswer,
    RowsRequest,
    SealAnswer,
    SealRequest,
)
from prime_core.verdict import PROOF_PASS, Opinion, Outcome, Reason, SignedOpinion
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import draws, history, revisions, uploads
from prime_orchestrator.manager.judging import check_law
from prime_orchestrator.store import (
    Connection,
    chain,
    exact_classes,
    jobs,
    leases,
    lock,
    opinions,
    row_marks,
    submissions,
)
from prime_orchestrator.store.draws import second_secret
from prime_orchestrator.store.jobs import AssignmentRow, JobRow
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.submissions import SubmissionRow

log = logging.getLogger(__name__)

CLAIM_SECONDS = 30.0
"""How long a claim remains valid without news from its validator."""
LIVE_SECONDS = 45.0
"""A validator counts as live, and is assigned files, if it asked for work within this time."""
SEEN_SECONDS = 5.0
"""How often polls of an idle validator are recorded."""
PATIENCE_SECONDS = 900.0
"""Time a live validator has to claim a file, or to submit the opinion it sealed."""
RETRY_MS = 300
LOST_SECONDS = 60.0
"""How long a file that is missing from the object store is postponed."""
ROOM = 8
"""Most files assigned to a validator at once."""
MAX_ATTEMPTS = 3
"""Claims on one file that may time out before its validator counts as having abstained."""
MAX_DELAYS = 20
"""Claims on one file that may be postponed before its validator counts as having abstained."""
AGAIN_ONE_IN = 16
"""One file in this many is judged by a second validator regardless of the first opinion."""
OUTSIDE_ONE_IN = 4
"""One file of an exact lease in this many goes to any validator, so that no node and no few
validators choose one another by announcing a class."""
LONE_SECONDS = 3600.0
"""After this long without another validator, one opinion decides where two were needed."""
MAX_OBJECT_BYTES = 32 << 20
UPLOAD_SECONDS = 600
MAX_REVEALS = 64
MAX_CLOCK_SKEW = 300


def require_appointed(backend: Backend, connection: Connection, account: Address) -> None:
    """Raises PolicyError unless the account is a validator of the pool on chain."""
    if account not in chain.appointed(connection, backend.context.pool):
        raise PolicyError(
            f"{account} is not appointed as a validator; the manager types: orchestrator pool "
            f"set-validator {account} --pool {backend.context.pool}"
        )


# ── draws ────────────────────────────────────────────────────────────────────────────────────────


def commit(backend: Backend, account: Address, request: CommitRequest) -> None:
    """Stores commitments to draw secrets (draws.commit)."""
    with backend.store.begin() as connection:
        require_appointed(backend, connection, account)
        draws.commit(connection, backend.context, account, request.commitments, backend.now())


def reveal_draw(backend: Backend, account: Address, shown: DrawReveal) -> None:
    """Publishes an epoch's secret (draws.reveal). A dismissed validator may still do this."""
    with backend.store.begin() as connection:
        draws.reveal(connection, backend.objects, backend.context, account, shown, backend.now())


# ── assignment and claims ────────────────────────────────────────────────────────────────────────


def claim(backend: Backend, account: Address, request: ClaimRequest) -> ClaimAnswer:
    """Returns the caller's next files, and the opinions that it must submit now.

    Raises PolicyError if the account is not appointed.
    """
    now = backend.now()
    with backend.store.read() as connection:
        require_appointed(backend, connection, account)
        quiet = (
            now - jobs.seen_at(connection, account) < SEEN_SECONDS
            and not jobs.short(connection, 1)
            and not jobs.waits_for(connection, account, now)
        )
        reveal = tuple(jobs.to_reveal(connection, account, MAX_REVEALS))
    found: list[Job] = []
    if not quiet:
        with backend.store.begin() as connection:
            lock(connection, "assignments")
            jobs.note_validator(connection, account, now)
            end_overdue(connection, now)
            assign_files(connection, backend, now)
            names = jobs.take(
                connection, account, request.worker, most=request.most, now=now,
                until=now + CLAIM_SECONDS,
            )  # fmt: skip
            for name in names:
                try:
                    found.append(_job(connection, backend, name, now))
                except NotFoundError as error:
                    log.error("submission %s cannot be judged: %s", name, error)
                    jobs.set_assignment(
                        connection, name, account, status="assigned", worker=None,
                        not_before=now + LOST_SECONDS, until=now + LOST_SECONDS, at=now,
                    )  # fmt: skip
    wait = 0 if found or reveal else RETRY_MS
    return ClaimAnswer(jobs=tuple(found), reveal=reveal, retry_after_ms=wait)


def end_overdue(connection: Connection, now: float) -> None:
    """Ends assignments whose validator is silent or has held them too long."""
    live = jobs.live(connection, now - LIVE_SECONDS)
    for row in jobs.overdue(connection, now):
        if row.status == "claimed" and row.attempts + 1 >= MAX_ATTEMPTS:
            log.error("%s fell silent %d times over %s", row.validator, MAX_ATTEMPTS,
                      row.submission_digest)  # fmt: skip
            _end(connection, row, "abstained", now)
        elif row.status == "sealed" and not _is_due_since(connection, row, now - PATIENCE_SECONDS):
            continue
        elif row.validator not in live or now - row.at > PATIENCE_SECONDS:
            _end(connection, row, "missed", now)


def _is_due_since(connection: Connection, row: AssignmentRow, since: float) -> bool:
    """Whether a sealed opinion could have been submitted since then."""
    if not _all_sealed(connection, row.submission_digest):
        return False
    return all(part.at <= since for part in jobs.assignments(connection, row.submission_digest))


def _end(connection: Connection, row: AssignmentRow, status: str, now: float) -> None:
    jobs.end_assignment(connection, row.submission_digest, row.validator, status, now=now)


def assign_files(connection: Connection, backend: Backend, now: float) -> None:
    """Assigns open files to live validators named by their leases, in the drawn order, as long as
    any of them has room."""
    able = jobs.live(connection, now - LIVE_SECONDS) & chain.appointed(
        connection, backend.context.pool
    )
    load = jobs.load_of(connection)
    short = jobs.short(connection, 4 * ROOM)
    if not short:
        return
    digests = [job.submission_digest for job in short]
    rows = submissions.those(connection, digests)
    promises = leases.those(connection, [row.lease_digest for row in rows.values()])
    known = jobs.assignments_among(connection, digests)
    named = {promise.signed().numeric_class() for promise in promises.values()}
    provers = exact_classes.members(connection, [one for one in named if one is not None])
    secrets: dict[Digest, Digest] = {}
    for job in short:
        if all(load.get(one, 0) >= ROOM for one in able):
            return
        row = rows.get(job.submission_digest)
        promise = promises.get(row.lease_digest) if row is not None else None
        if row is None or promise is None:
            raise FatalError(f"the store lacks submission {job.submission_digest} or its lease")
        listed = backend.draws.listed(backend.objects, promise.signed())
        if listed.second not in secrets:
            secrets[listed.second] = second_secret(connection, listed.second)
        secret, needed = secrets[listed.second], job.needed
        if needed is None:
            needed = first_needed(listed, secret, row.digest)
            jobs.change(connection, row.digest, needed=needed)
        parts = {one.validator: one for one in known.get(row.digest, ())}
        numeric = promise.signed().numeric_class()
        proving = frozenset[Address]()
        if numeric is not None and _inside(connection, secret, row.digest, parts):
            proving = provers[numeric]
        _assign(connection, job, needed, listed, secret, parts, able, proving, load, now)


def _inside(
    connection: Connection, secret: Digest, digest: Digest, parts: dict[Address, AssignmentRow]
) -> bool:
    """Whether a file of an exact lease is judged by validators of its class while any is live: all
    but a drawn share, and those in which an opinion states a mismatch, which others cannot see."""
    if lot("outside", secret, digest) % OUTSIDE_ONE_IN:
        return True
    if not any(part.status == "given" for part in parts.values()):
        return False
    return any(one.reason in PROOF_PASS for one in opinions.of(connection, digest))


def first_needed(listed: DrawList, second: Digest, submission: Digest) -> int:
    """Returns how many opinions a file needs at first: two for a share of files, drawn from the
    manager's second secret, if the lease names at least two validators; else one."""
    if len(listed.commitments) < 2:
        return 1
    return 2 if lot("again", second, submission) % AGAIN_ONE_IN == 0 else 1


def _assign(
    connection: Connection,
    job: JobRow,
    needed: int,
    listed: DrawList,
    secret: Digest,
    parts: dict[Address, AssignmentRow],
    able: Collection[Address],
    proving: Collection[Address],
    load: dict[Address, int],
    now: float,
) -> None:
    """Fills the open places of one job; `parts` are its existing assignments. While validators of
    the file's exact class (`proving`) are live and did not miss it, it waits for them; then any may
    judge it, by statistics."""
    digest = job.submission_digest
    named = [signed.validator for signed in listed.commitments]
    fresh = {one for one in named if one in able and one in proving and one not in parts}
    able = fresh or able
    order = sorted(
        (one for one in named if one in able and load.get(one, 0) < ROOM),
        # validators that missed it before come last
        key=lambda one: (one in parts, lot("assign", secret, digest, one.encode())),
    )
    free = [one for one in order if one not in parts or parts[one].status == "missed"]
    active = sum(part.status in jobs.ACTIVE for part in parts.values())
    for validator in free[: max(0, needed - active)]:
        jobs.assign(connection, digest, validator, now=now)
        load[validator] = load.get(validator, 0) + 1
        active += 1
    if active >= needed:
        return
    if active == 0 and all(one in parts and parts[one].status == "abstained" for one in named):
        log.error("every validator abstained from %s: it is set aside", digest)
        jobs.change(connection, digest, status="quarantined")
        return
    sealed = [part.at for part in parts.values() if part.status == "sealed"]
    said = any(part.status == "given" for part in parts.values())
    if sealed and not said and len(sealed) == active and now - min(sealed) >= LONE_SECONDS:
        log.warning("no second validator came for %s: one opinion decides", digest)
        jobs.change(connection, digest, needed=active)


def _lease(connection: Connection, row: SubmissionRow) -> SignedLease:
    found = leases.get(connection, row.lease_digest)
    if found is None:
        raise FatalError(f"a submission names lease {row.lease_digest}, which is not here")
    return found.signed()


def _job(connection: Connection, backend: Backend, digest: Digest, now: float) -> Job:
    row, job = submissions.get(connection, digest), jobs.get(connection, digest)
    assert row is not None
    assert job is not None
    signed, lease = row.signed(), _lease(connection, row)
    listed = backend.draws.listed(backend.objects, lease)
    second = file_secret(second_secret(connection, listed.second), digest)
    run = revisions.history(connection, backend.context).of_lease(lease.lease)
    before = submissions.accepted_of(connection, row.node)
    whole = (
        job.whole
        or backend.drifting.drifts(connection, row.node, now)
        or history.mismatches_often(connection, Address(row.node))
    )
    rows = run.rows_per_lease if whole else history.draw_count(run, before, second)
    key = uploads.ask(lease.lease.deadline, row.sha256, lambda key: _present(backend, key))
    return Job(
        submission_digest=digest,
        submission=signed,
        lease=lease,
        receipt=row.receipt_answer(),
        file=backend.objects.signed_get(key, int(now) + UPLOAD_SECONDS),
        second=second,
        rows=rows,
        until=int(now + CLAIM_SECONDS),
    )


def _present(backend: Backend, key: str) -> str:
    backend.objects.size(key)  # raises NotFoundError
    return key


def keep(backend: Backend, account: Address, request: KeepRequest) -> None:
    """Extends claims while their files are being judged."""
    now = backend.now()
    with backend.store.begin() as connection:
        jobs.note_validator(connection, account, now)
        jobs.keep(
            connection, account, request.worker, request.submissions, until=now + CLAIM_SECONDS
        )


def release(backend: Backend, account: Address, request: ReleaseRequest) -> None:
    """Ends a claim without an opinion. Raises ConflictError if the caller has no claim,
    MalformedError if the reason is a judgement."""
    try:
        reason = Reason(request.reason)
    except ValueError as error:
        raise MalformedError("there is no such reason") from error
    if reason.outcome is not Outcome.ABSTAINED:
        raise MalformedError(f"{reason.name} is a judgement, not an abstention")
    now, digest = backend.now(), request.submission
    with backend.store.begin() as connection:
        row = _claimed(connection, digest, account, request.worker)
        log.warning(
            "%s: %s %s: %s: %s", account,
            "abstained from" if request.kind == "abstain" else "delays",
            digest, reason.name, request.detail,
        )  # fmt: skip
        if request.kind == "abstain" or row.delays + 1 >= MAX_DELAYS:
            jobs.end_assignment(connection, digest, account, "abstained", now=now)
        else:
            jobs.set_assignment(
                connection, digest, account, status="assigned", worker=None,
                not_before=now + request.seconds, until=now + request.seconds,
                delays=row.delays + 1, at=now,
            )  # fmt: skip


def rows_seen(backend: Backend, account: Address, request: RowsRequest) -> RowsAnswer:
    """Returns which rows of a file that the caller judges also occur in other files.

    Raises ConflictError if the caller has no claim on it.
    """
    with backend.store.read() as connection:
        _claimed(connection, request.submission, account, None)
        seen = row_marks.seen(connection, request.marks, but=request.submission)
    return RowsAnswer(marks=tuple(sorted(seen)))


def _claimed(
    connection: Connection, digest: Digest, account: Address, worker: str | None
) -> AssignmentRow:
    row = jobs.assignment(connection, digest, account)
    if row is None or row.status != "claimed" or worker not in (None, row.worker):
        raise ConflictError(f"the caller has no claim on {digest}")
    return row


# ── opinions ─────────────────────────────────────────────────────────────────────────────────────


def seal(backend: Backend, account: Address, request: SealRequest) -> SealAnswer:
    """Stores the hash of an opinion; the answer says whether the opinion is due.

    Raises ConflictError if the caller has no claim on the file or has sealed another opinion.
    """
    now, digest = backend.now(), request.submission
    with backend.store.begin() as connection:
        require_appointed(backend, connection, account)
        jobs.lock_row(connection, digest)
        row = jobs.assignment(connection, digest, account)
        if row is None or row.status not in jobs.SEALED or row.seal != request.seal:
            _claimed(connection, digest, account, request.worker)
            jobs.set_assignment(
                connection, digest, account, status="sealed", seal=request.seal,
                until=now + PATIENCE_SECONDS, at=now,
            )  # fmt: skip
        return SealAnswer(reveal=_all_sealed(connection, digest))


def _all_sealed(connection: Connection, digest: Digest) -> bool:
    job = jobs.get(connection, digest)
    sealed = sum(part.status in jobs.SEALED for part in jobs.assignments(connection, digest))
    return job is not None and job.needed is not None and sealed >= job.needed


def room_for(backend: Backend, account: Address, request: ObjectRequest) -> UploadAnswer:
    """Returns a signed URL for a table or evidence of a file on which the caller sealed an opinion.

    Raises PolicyError if it is too large, ConflictError if nothing is sealed.
    """
    if request.size > MAX_OBJECT_BYTES:
        raise PolicyError(f"an object has at most {MAX_OBJECT_BYTES} bytes")
    with backend.store.read() as connection:
        row = jobs.assignment(connection, request.submission, account)
    if row is None or row.status not in jobs.SEALED:
        raise ConflictError(f"the caller has sealed no opinion on {request.submission}")
    key, expiry = digest_key(request.sha256), int(backend.now()) + UPLOAD_SECONDS
    if backend.objects.exists(key):
        return UploadAnswer(url="", headers={}, expiry=expiry, exists=True)
    target = backend.objects.signed_put(key, request.size, request.sha256, expiry)
    return UploadAnswer(url=target.url, headers=target.headers, expiry=target.expires_at)


def give_opinion(backend: Backend, account: Address, signed: SignedOpinion) -> None:
    """Stores a sealed opinion once it is due. Repeating it is harmless.

    Raises UntrustedError or MalformedError if the signature or form is invalid, PolicyError if its
    author is not appointed, NotFoundError if there is no such submission or object, ConflictError
    if it was not sealed, is not due yet, or is for another file, pool or law.
    """
    now, said = backend.now(), signed.opinion
    signed.check(backend.context.domain(Opinion))
    if signed.validator != account:
        raise UntrustedError("the opinion is another validator's")
    with backend.store.begin() as connection:
        require_appointed(backend, connection, account)
        jobs.lock_row(connection, said.submission)
        row = submissions.get(connection, said.submission)
        if row is None:
            raise NotFoundError("there is no submission of that digest")
        check_law(signed, row, _lease(connection, row))
        part = jobs.assignment(connection, row.digest, account)
        if part is None or part.status not in jobs.SEALED or part.seal != signed.seal():
            raise ConflictError("the opinion is not the one that the caller sealed for this file")
        if part.status == "given":
            return
        if not _all_sealed(connection, row.digest):
            raise ConflictError("other opinions on the file are not sealed yet")
        if not row.received_at - MAX_CLOCK_SKEW <= said.judged_at <= now + MAX_CLOCK_SKEW:
            raise MalformedError("the opinion's time is wrong: check the machine's clock")
        for name in {said.table, said.evidence} - {ZERO_DIGEST}:
            if not backend.objects.exists(digest_key(Digest(name))):
                raise NotFoundError(f"the opinion names object {name}, which was not uploaded")
        opinions.add(
            connection,
            OpinionRow(row.digest, account, int(signed.reason), signed.model_dump_json(), now),
        )
        jobs.set_assignment(connection, row.digest, account, status="given", at=now)
        job = jobs.get(connection, row.digest)
        assert job is not None
        assert job.needed is not None
        if len(opinions.of(connection, row.digest)) >= job.needed:
            jobs.change(connection, row.digest, status="full")


def opinions_on(backend: Backend, digest: Digest) -> OpinionList:
    """Returns the opinions on a submission. The list is empty before its verdict, so that
    validators who are still judging do not see the others' opinions. Raises NotFoundError."""
    with backend.store.read() as connection:
        row = submissions.get(connection, digest)
        if row is None:
            raise NotFoundError("there is no submission of that digest")
        found = opinions.of(connection, digest) if row.verdict is not None else []
    return OpinionList(
        submission_digest=digest,
        status=row.status,
        opinions=tuple(opinion.signed() for opinion in found),
    )
